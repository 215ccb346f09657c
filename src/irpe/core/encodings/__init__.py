"""The encodings by name, and how any text becomes an encoding.

Shaw's and Huang's are values of `RPESpec`; each other one is a file here that answers for itself
(`encoding.AttentionEncoding`).
"""

from collections.abc import Callable

from irpe.core.choices import did_you_mean
from irpe.core.encodings.axial_deeplab import AxialDeepLab
from irpe.core.encodings.between_blocks import CPVT, NoEncoding
from irpe.core.encodings.sasa import Sasa
from irpe.core.encodings.spec import GRAMMAR, MODES, RPESpec
from irpe.core.encodings.transformer_xl import TransformerXL
from irpe.core.index import Clip
from irpe.core.methods import METHODS

Encoding = RPESpec | Sasa | AxialDeepLab | TransformerXL  # what an attention can have
AnyEncoding = Encoding | CPVT | NoEncoding

_NAMED: dict[str, tuple[AnyEncoding, Callable[[int], AnyEncoding] | None]] = {
    "shaw": (RPESpec("product", "contextual", "k", Clip(3)), None),
    "huang": (RPESpec("product", "contextual", "qk", Clip(3), tied=True), None),
    "sasa": (Sasa(), Sasa),
    "transformer-xl": (TransformerXL(), None),
    "axial-deeplab": (AxialDeepLab(), AxialDeepLab),
    "cpvt": (CPVT(), None),
    "none": (NoEncoding(), None),
}
NAMES = tuple(_NAMED)


def parse_encoding(value: AnyEncoding | str) -> AnyEncoding:
    """Returns the encoding that a text stands for; an encoding is returned as it is.

    Args:
        value: One of `NAMES`, a text that `RPESpec.parse` understands, or an encoding.
    """
    if isinstance(value, AnyEncoding):
        return value
    if not isinstance(value, str):
        return RPESpec.parse(value)  # says what is wrong
    name, at, number = value.partition("@")
    if name in _NAMED:
        return _parse_named(name, number) if at else _NAMED[name][0]
    if len(name.split("-")) == 3 and not did_you_mean(name, NAMES, 0.8):
        return RPESpec.parse(value)
    known = [*NAMES, *(f"{method}-{mode}-k" for method in METHODS for mode in reversed(MODES))]
    raise ValueError(
        f"encoding {value!r} is not known: write one of {', '.join(NAMES)}, or "
        f"{GRAMMAR}{did_you_mean(name, known, 0.5)}"
    )


def attention_encoding(value: AnyEncoding | str) -> Encoding:
    """Returns the encoding that a text stands for, if an attention can have it."""
    encoding = parse_encoding(value)
    if isinstance(encoding, CPVT):
        raise ValueError(
            "cpvt works between the blocks of a model, no attention can have it: use "
            "irpe.equip(model, 'cpvt') with a VisionTransformer of timm"
        )
    if isinstance(encoding, NoEncoding):
        raise ValueError(
            "encoding 'none' has no tables: use attention without an encoding, or "
            "irpe.equip(model, 'none', absolute=...) to change a model's absolute one alone"
        )
    return encoding


def _parse_named(name: str, number: str) -> AnyEncoding:
    make = _NAMED[name][1]
    if make is None:
        default = _NAMED[name][0]
        other = f": it is {default}, write that with another index" if str(default) != name else ""
        raise ValueError(f"encoding '{name}@{number}': {name} takes no number{other}")
    if not number.isdecimal():
        raise ValueError(f"encoding '{name}@{number}': {number!r} must be a whole number")
    return make(int(number))
