"""Hosts of the user's own: attention classes that `register_host` makes known to `equip`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from irpe.adapters.following import follow_grid, map_source
from irpe.adapters.grids import GridSource
from irpe.adapters.hosts import REGISTERED
from irpe.adapters.plan import Plan, Request, Site
from irpe.core.buckets import check_num_prefix_tokens
from irpe.errors import UserError, UserTypeError

Model = Any  # a model of the user's own class
Describe = Callable[[Model], dict[str, Any]]
Build = Callable[[dict[str, Any]], nn.Module]


def register_host(
    attention: type[nn.Module],
    equipped: type[nn.Module],
    *,
    model: type[nn.Module] | None = None,
    convolution: str | None = None,
    num_prefix_tokens: int = 0,
    head_size: Callable[[Any], tuple[int, int]] | None = None,
    describe: Describe | None = None,
    build: Build | None = None,
) -> None:
    """Makes an attention class of your own known to `equip`, `save_equipped` and `load_equipped`.

    It is looked for before those of the libraries. Registering a class of the same name again
    replaces what was registered before.

    Args:
        attention: The class of the attentions.
        equipped: A subclass of it whose forward calls `self.rpe(q, k, v, grid=...)` where the
            attention calls `scaled_dot_product_attention`; `self.rpe_grid.current()` is the grid.
            An equipped attention becomes an instance of it, with the parameters that it has.
        model: The class of the models whose attentions they are.
        convolution: The path in such a model to the convolution that makes the patches: the grid is
            taken from its output, input by input. Without it, `equip` must be given `grid=`.
        num_prefix_tokens: How many tokens stand before the patches; `equip` can be given another.
        head_size: Returns the number of heads and the dimension of one head, given an attention; by
            default its attributes `num_heads` and `head_dim`.
        describe: Returns arguments that json can hold, given a model, for `save_equipped`.
        build: Returns the plain model, given these arguments, for `load_equipped`. Without these
            two a plain model is passed to `load_equipped`.

    Examples:
        >>> import irpe
        >>> irpe.register_host(  # doctest: +SKIP
        ...     MyAttention, MyEquipped, model=MyModel, convolution="patches", num_prefix_tokens=1
        ... )
    """
    for name, kind in {"attention": attention, "equipped": equipped, "model": model}.items():
        if kind is not None and not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise UserTypeError(
                f"{name} = {kind!r} is not a class of modules: pass the class itself"
            )
    if equipped.__bases__[0] is not attention or equipped.forward is attention.forward:
        raise UserError(
            f"equipped = {equipped.__qualname__} must be a subclass of {attention.__qualname__} "
            "(its first base) with a forward of its own, which calls self.rpe"
        )
    if (model is None) != (convolution is None):
        raise UserError(
            f"model = {model}, convolution = {convolution!r}: a grid is taken from the convolution "
            "of a model, so pass both, or neither and grid= to irpe.equip"
        )
    if (describe is None) != (build is None):
        raise UserError("describe and build belong together: pass both or neither")
    if describe is not None and model is None:
        raise UserError("describe and build are about a model: pass its class as model=")
    check_num_prefix_tokens(num_prefix_tokens)
    host = _RegisteredHost(
        attention, equipped, model, convolution, num_prefix_tokens, head_size, describe, build
    )
    REGISTERED[f"{attention.__module__}.{attention.__qualname__}"] = host


@dataclass(frozen=True)
class _RegisteredHost:
    """A host in the sense of `irpe.adapters.hosts`; arguments as in `register_host`."""

    attention: type[nn.Module]
    equipped: type[nn.Module]
    model: type[nn.Module] | None
    convolution: str | None
    num_prefix_tokens: int
    head_size: Callable[[Any], tuple[int, int]] | None
    describe: Describe | None
    build: Build | None

    def find_attentions(self, model: nn.Module, request: Request) -> Plan:
        """Returns the attentions of this class in a model."""
        found = Plan()
        owners = {"": model, **dict(model.named_modules())}
        sources: dict[str, GridSource] = {}
        for name, attention in model.named_modules():
            if not isinstance(attention, self.attention):
                continue
            path = self._path_of_model(name, owners)
            if path not in sources:
                sources[path] = self._source(owners[path], request)
            found.sites.append(self._site(name, attention, sources[path], request))
        for path, source in sources.items():
            names = [s.name for s in found.sites if s.grid is source]
            blocks = self._blocks_of(path, names, owners)
            found.changes.append(partial(follow_grid, source, blocks))
        return found

    def _path_of_model(self, name: str, owners: dict[str, nn.Module]) -> str:
        """Returns the path of the innermost model of the registered class around an attention."""
        path = name
        while path and self.model is not None:
            path = path.rpartition(".")[0]
            if isinstance(owners[path], self.model):
                return path
        return ""

    def _source(self, model: nn.Module, request: Request) -> GridSource:
        if self.model is None or self.convolution is None or not isinstance(model, self.model):
            return GridSource(request.grid)
        return map_source(request.grid, None, model, self.convolution)

    def _blocks_of(
        self, path: str, names: list[str], owners: dict[str, nn.Module]
    ) -> list[nn.Module]:
        """Returns the modules that call the attentions, those around the convolution excepted."""
        image_path = f"{path}.{self.convolution}".lstrip(".")
        parents = dict.fromkeys(name.rpartition(".")[0] for name in names)
        is_inside = [parent for parent in parents if not image_path.startswith(f"{parent}.")]
        return [owners[parent] for parent in is_inside if parent]

    def _site(self, name: str, attention: Any, source: GridSource, request: Request) -> Site:
        num_heads, head_dim = self._head_size(attention)
        count = request.num_prefix_tokens
        return Site(
            name=name or "the model itself",
            attention=attention,
            equipped_class=self.equipped,
            num_heads=num_heads,
            head_dim=head_dim,
            num_prefix_tokens=self.num_prefix_tokens if count is None else count,
            grid=source,
            check=partial(self._check, source, request),
        )

    def _head_size(self, attention: Any) -> tuple[int, int]:
        if self.head_size is not None:
            return self.head_size(attention)
        try:
            return attention.num_heads, attention.head_dim
        except AttributeError as error:
            raise UserError(
                f"{error}: pass head_size= to irpe.register_host, a function that returns the "
                "number of heads and the dimension of one head of an attention"
            ) from error

    def _check(self, source: GridSource, request: Request) -> None:
        name = self.attention.__qualname__
        if type(source) is GridSource and source.grid is None:
            raise UserError(
                f"{name} does not know its grid: pass grid= to irpe.equip, or model= and "
                "convolution= to irpe.register_host, and equip such a model"
            )
        if request.absolute != "keep":
            raise UserError(
                f"absolute {request.absolute!r}: the absolute encoding of a model around {name} "
                "is not known; use 'keep', and remove it in the model"
            )

    def describe_model(self, model: nn.Module) -> dict[str, Any] | None:
        """Returns what `build_model` needs, or `None` if the model cannot be built."""
        is_known = self.model is not None and type(model) is self.model
        return self.describe(model) if is_known and self.describe is not None else None

    def build_model(self, arguments: dict[str, Any]) -> nn.Module:
        """Returns the plain model of a description."""
        if self.build is None:
            raise UserError(f"{self.attention.__qualname__} was registered without build=")
        return self.build(arguments)
