"""Hosts of the user's own: attention classes that `register_host` makes known to `equip`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from irpe.adapters.answer import calls_attention, equipped_class, is_answered
from irpe.adapters.equipped import Equipment
from irpe.adapters.grids import SOURCE, MeasuredGrid, measured_map, told_grid
from irpe.adapters.host import Plan, Row, Site, refuse, site_of
from irpe.adapters.hosts import REGISTERED, full_name, rows_of
from irpe.adapters.swaps import set_attribute
from irpe.core.buckets import check_num_prefix_tokens
from irpe.core.positions import axes_of
from irpe.errors import UserError, UserTypeError

Model = Any  # a model of the user's own class
Describe = Callable[[Model], dict[str, Any]]
Build = Callable[[dict[str, Any]], nn.Module]


def register_host(
    attention: type[nn.Module],
    *,
    call: str | None = None,
    model: type[nn.Module] | None = None,
    convolution: str | None = None,
    num_prefix_tokens: int = 0,
    head_size: Callable[[Any], tuple[int, int]] | None = None,
    describe: Describe | None = None,
    build: Build | None = None,
) -> None:
    """Makes an attention class of your own known to `equip`, `save_equipped` and `load_equipped`.

    It is looked for before those of the libraries. Registering a class of the same name again
    replaces what was registered before. The forward of the class stays as it is: the encoding
    answers its one call of `torch.nn.functional.scaled_dot_product_attention`.

    Args:
        attention: The class of the attentions.
        call: The name of the function or method of (query, key, value, attn_mask), batch heads
            tokens dim, that its forward calls where it does not call that of torch.
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
        >>> import irpe, torch
        >>> class Squares(torch.nn.Module):
        ...     def forward(self, x):
        ...         return torch.nn.functional.scaled_dot_product_attention(x, x, x)
        >>> irpe.register_host(Squares, num_prefix_tokens=1)
        >>> irpe.register_host(  # doctest: +SKIP
        ...     MyAttention, model=MyModel, convolution="patches", num_prefix_tokens=1
        ... )
    """
    for name, kind in {"attention": attention, "model": model}.items():
        if kind is not None and not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise UserTypeError(
                f"{name} = {kind!r} is not a class of modules: pass the class itself"
            )
    row = Row(call=call)
    if not calls_attention(attention, row):
        wanted = "scaled_dot_product_attention" if call is None else call
        raise UserError(
            f"{attention.__qualname__}.forward does not call {wanted}: compute its softmax by "
            "torch.nn.functional.scaled_dot_product_attention, or in a function or method of "
            "(query, key, value, attn_mask) that call= names"
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
        attention, row, model, convolution, num_prefix_tokens, head_size, describe, build
    )
    REGISTERED[full_name(attention)] = host
    for cached in (rows_of, is_answered, equipped_class):
        cached.cache_clear()


@dataclass(frozen=True)
class _RegisteredHost:
    """A host in the sense of `irpe.adapters.hosts`; arguments as in `register_host`."""

    attention: type[nn.Module]
    row: Row
    model: type[nn.Module] | None
    convolution: str | None
    num_prefix_tokens: int
    head_size: Callable[[Any], tuple[int, int]] | None
    describe: Describe | None
    build: Build | None

    def find_row(self, kind: type) -> Row | None:
        """Returns what is known of a class of attentions."""
        return self.row if full_name(kind) == full_name(self.attention) else None

    def find_attentions(self, model: nn.Module, call: Equipment) -> Plan:
        """Returns the attentions of this class in a model."""
        found = Plan()
        owners = {"": model, **dict(model.named_modules())}
        sources: dict[str, MeasuredGrid] = {}
        names: dict[str, list[str]] = {}
        for name, attention in model.named_modules():
            if not isinstance(attention, self.attention):
                continue
            path = self._path_of_model(name, owners)
            if path not in sources:
                sources[path] = self._source(owners[path], call)
            names.setdefault(path, []).append(name)
            found.sites.append(self._site(name, attention, sources[path], call))
        for path, source in sources.items():
            if source.embedding:
                blocks = self._blocks_of(path, names[path], owners)
                found.changes += source.follow(owners[path], blocks)
        return found

    def _path_of_model(self, name: str, owners: dict[str, nn.Module]) -> str:
        """Returns the path of the innermost model of the registered class around an attention."""
        path = name
        while path and self.model is not None:
            path = path.rpartition(".")[0]
            if isinstance(owners[path], self.model):
                return path
        return ""

    def _source(self, model: nn.Module, call: Equipment) -> MeasuredGrid:
        if self.model is None or self.convolution is None or not isinstance(model, self.model):
            return told_grid(call.grid)
        count = self._count_prefix(call)
        return measured_map(model, self.convolution, count, None, call.grid)

    def _count_prefix(self, call: Equipment) -> int:
        own, asked = self.num_prefix_tokens, call.num_prefix_tokens
        return own if asked is None else asked

    def _blocks_of(
        self, path: str, names: list[str], owners: dict[str, nn.Module]
    ) -> list[nn.Module]:
        """Returns the modules that call the attentions, those around the convolution excepted."""
        image_path = f"{path}.{self.convolution}".lstrip(".")
        parents = dict.fromkeys(name.rpartition(".")[0] for name in names)
        is_inside = [parent for parent in parents if not image_path.startswith(f"{parent}.")]
        return [owners[parent] for parent in is_inside if parent]

    def _site(self, name: str, attention: Any, source: MeasuredGrid, call: Equipment) -> Site:
        return site_of(
            name or "the model itself",
            attention,
            self.row,
            call,
            *self._head_size(attention),
            self._count_prefix(call),
            2 if source.told is None else axes_of(source.told),
            changes=set_attribute(attention, SOURCE, source),
            check=partial(self._check, source, call),
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

    def _check(self, source: MeasuredGrid, call: Equipment) -> None:
        name = self.attention.__qualname__
        if not source.embedding and source.told is None:
            raise UserError(
                f"{name} does not know its grid: pass grid= to irpe.equip, or model= and "
                "convolution= to irpe.register_host, and equip such a model"
            )
        unknown = f"that of a model around {name} is not known, so remove it in the model"
        refuse(call, {"absolute": unknown})

    def describe_model(self, model: nn.Module) -> dict[str, Any] | None:
        """Returns what `build_model` needs, or `None` if the model cannot be built."""
        is_known = self.model is not None and type(model) is self.model
        return self.describe(model) if is_known and self.describe is not None else None

    def build_model(self, arguments: dict[str, Any]) -> nn.Module:
        """Returns the plain model of a description."""
        if self.build is None:
            raise UserError(f"{self.attention.__qualname__} was registered without build=")
        return self.build(arguments)
