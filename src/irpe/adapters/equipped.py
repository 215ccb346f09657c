"""What an equipped model has: how it was equipped, its encodings and their parameters."""

from dataclasses import asdict, dataclass
from typing import Any, cast

from torch import nn

from irpe.core.encodings import AnyEncoding
from irpe.core.encodings.model_only import CPVT
from irpe.errors import UserError
from irpe.nn.generator import PositionGenerator
from irpe.nn.tables import RelativePositionEncoding

EQUIPMENT = "_irpe_equipment"  # the attribute of a model that holds how it was equipped


@dataclass(frozen=True)
class Equipment:
    """How a model was equipped: the arguments of `equip`, which can be called with them again."""

    spec: AnyEncoding
    grid: tuple[int, ...] | None
    num_prefix_tokens: int | None
    layers: tuple[int, ...] | None
    absolute: str
    builtin_bias: str
    impl: str = "auto"

    @property
    def requires_absolute(self) -> bool:
        """Whether a model without an absolute encoding is refused where that is to be replaced.

        Not so for cpvt, which takes its place whether there is one or not.
        """
        return not isinstance(self.spec, CPVT)

    def to_dict(self) -> dict[str, Any]:
        """Returns the arguments as json can hold them."""
        return {**asdict(self), "spec": str(self.spec)}


def equipment_of(model: nn.Module) -> tuple[Equipment, ...]:
    """Returns how a model was equipped, once for each call of `equip`."""
    return getattr(model, EQUIPMENT, ())


def is_equipped(module: nn.Module) -> bool:
    """Returns whether a module is an attention with an encoding."""
    encoding = module._modules.get("rpe")
    if isinstance(encoding, RelativePositionEncoding):
        return True
    return isinstance(getattr(encoding, "original_module", None), RelativePositionEncoding)


def encoding_of(attention: nn.Module) -> RelativePositionEncoding:
    """Returns the encoding of an equipped attention, to be called.

    PEFT's `modules_to_save` puts a wrapper around it that calls the one of the active adapter.
    """
    return cast(RelativePositionEncoding, attention.rpe)


def active_encoding(attention: nn.Module) -> RelativePositionEncoding:
    """Returns the encoding of an attention itself: that of PEFT's active adapter, if any."""
    encoding: Any = attention.rpe
    if not isinstance(encoding, RelativePositionEncoding):
        active = [] if encoding.disable_adapters else encoding.active_adapters
        saved = [encoding.modules_to_save[name] for name in active[:1]]
        encoding = saved[0] if saved else encoding.original_module
    assert isinstance(encoding, RelativePositionEncoding)
    return encoding


def has_generator(module: nn.Module) -> bool:
    """Returns whether a module is a block with a position generator (cpvt)."""
    return isinstance(getattr(module, "peg", None), PositionGenerator)


def generator_of(block: nn.Module) -> PositionGenerator:
    """Returns the position generator of a block."""
    generator = block.peg
    assert isinstance(generator, PositionGenerator)
    return generator


def equipped_attentions(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the attentions of a model that have an encoding, by name; there is at least one."""
    found = {name: module for name, module in model.named_modules() if is_equipped(module)}
    if not found:
        raise UserError(
            "the model has no encodings: call irpe.equip(model, spec) first, or train the run with "
            "--encoding"
        )
    return found


def attentions_if_any(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the equipped attentions; there may be none where `equip` changed something else."""
    has_encodings = any(map(is_equipped, model.modules()))
    was_equipped = equipment_of(model) or equipped_blocks(model)
    return {} if was_equipped and not has_encodings else equipped_attentions(model)


def equipped_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the blocks of a model that have a position generator, by name."""
    return {name: module for name, module in model.named_modules() if has_generator(module)}


def table_names(model: nn.Module) -> list[str]:
    """Returns the names of all tables in a model, and of other parameters of its encodings.

    A plain model has none.
    """
    generators = [f"{name}.peg.{p}" for name in equipped_blocks(model) for p in ("weight", "bias")]
    return generators + [
        f"{name}.rpe.{table}".lstrip(".")
        for name, attention in model.named_modules()
        if is_equipped(attention)
        for table, _ in encoding_of(attention).named_parameters()
    ]
