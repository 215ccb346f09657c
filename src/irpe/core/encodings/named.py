"""Encodings that have a name of their own, and the value after the `@` that some of them take."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from irpe.core.encodings.alibi import Alibi2D
from irpe.core.encodings.axial_deeplab import AxialDeepLab
from irpe.core.encodings.decomposed import Decomposed
from irpe.core.encodings.log_cpb import LogCPB
from irpe.core.encodings.model_only import CPVT, ModelEncoding, NoEncoding
from irpe.core.encodings.protocol import Encoding
from irpe.core.encodings.rope import RopeAxial, RopeMixed, Rotary
from irpe.core.encodings.sasa import Sasa
from irpe.core.encodings.spec import RPESpec
from irpe.core.encodings.transformer_xl import TransformerXL
from irpe.core.index import Clip
from irpe.core.numbers import parse_number
from irpe.errors import UserError

AnyEncoding = Encoding | ModelEncoding


ROTARY_OPTIONS = ("normalized", "ref", "shift", "jitter", "rescale")
ROTARY_OPTION = re.compile(rf"(?P<kind>{'|'.join(ROTARY_OPTIONS)})(?P<value>[0-9.x]*)")


class _Entry(NamedTuple):
    """What a name stands for.

    Args:
        default: The encoding without a value after the name.
        make: Makes it from the number after the `@`, if it takes one: of a rotation the base, a
            real number, of others a whole one.
    """

    default: AnyEncoding
    make: Callable[[Any], AnyEncoding] | None = None


def bias_table(size: int) -> RPESpec:
    """Returns a scalar for each offset and head, for axes of up to `size` positions.

    Swin's bias in windows of that size, and BEiT's.
    """
    return RPESpec("product", "bias", "k", Clip(max(1, size - 1)), shared_heads=False)


NAMED: dict[str, _Entry] = {
    "shaw": _Entry(RPESpec("product", "contextual", "k", Clip(3))),
    "huang": _Entry(RPESpec("product", "contextual", "qk", Clip(3), tied=True)),
    "sasa": _Entry(Sasa(), Sasa),
    "transformer-xl": _Entry(TransformerXL()),
    "axial-deeplab": _Entry(AxialDeepLab(), AxialDeepLab),
    "cpvt": _Entry(CPVT()),
    "rope-axial": _Entry(RopeAxial(), RopeAxial),
    "rope-mixed": _Entry(RopeMixed(), RopeMixed),
    "decomposed": _Entry(Decomposed(), Decomposed),
    "bias-table": _Entry(bias_table(14), bias_table),
    "log-cpb": _Entry(LogCPB(), LogCPB),
    "alibi-2d": _Entry(Alibi2D()),
    "none": _Entry(NoEncoding()),
}


def parse_named(text: str) -> AnyEncoding:
    """Returns the encoding of a name, with its value and options; the name is one of `NAMED`."""
    head, *options = text.split("+")
    name, at, value = head.partition("@")
    encoding = _with_value(name, value) if at else NAMED[name].default
    seen: set[str] = set()
    for option in options:
        match = ROTARY_OPTION.fullmatch(option)
        if match is None or not isinstance(encoding, Rotary):
            raise UserError(f"encoding {text!r}: {_why_not(name, option, encoding)}")
        kind = match["kind"]
        if kind in seen:
            raise UserError(f"encoding {text!r} has option {kind!r} twice: leave one of them out")
        seen.add(kind)
        encoding = _with_option(encoding, kind, match["value"], text)
    return encoding


def _with_option(encoding: Rotary, kind: str, value: str, text: str) -> Rotary:
    """Returns a rotary encoding with an option more; `text` is the whole, for errors."""
    if kind == "normalized":
        if not isinstance(encoding, RopeAxial) or value:
            raise UserError(f"encoding {text!r}: only 'rope-axial' has {kind!r}, without a value")
        return replace(encoding, normalized=True)
    if kind == "ref":
        sizes = value.split("x")
        if not all(map(str.isdecimal, sizes)):
            raise UserError(
                f"encoding {text!r}: 'ref' is followed by the size of a grid, as in 'ref14' or "
                "'ref14x20'"
            )
        return replace(encoding, reference=tuple(map(int, sizes)))
    number = parse_number(value)
    if number is None:
        raise UserError(f"encoding {text!r}: {kind!r} is followed by a number, as in '{kind}2'")
    return replace(encoding, augmentation=replace(encoding.augmentation, **{kind: number}))


def _why_not(name: str, option: str, encoding: AnyEncoding) -> str:
    if isinstance(encoding, Rotary):
        return f"{name} has no option {option!r}; it has {', '.join(ROTARY_OPTIONS)}"
    if ROTARY_OPTION.fullmatch(option):
        return f"{name} has no option {option!r}; 'rope-axial' has"
    written = f", write {encoding}+{option}" if isinstance(encoding, RPESpec) else ""
    return f"{name} has no option {option!r}, METHOD-MODE-TARGETS has{written}"


def _with_value(name: str, value: str) -> AnyEncoding:
    default, make = NAMED[name]
    if make is None:
        other = f": it is {default}, write that with another index"
        has_other = str(default) != name
        raise UserError(
            f"encoding '{name}@{value}': {name} takes no number{other if has_other else ''}"
        )
    if isinstance(default, Rotary):
        number, must = parse_number(value), "a number greater than 1, the base of the frequencies"
    else:
        number, must = int(value) if value.isdecimal() else None, "a whole number"
    if number is None:
        raise UserError(f"encoding '{name}@{value}': {value!r} must be {must}")
    return make(number)
