"""Encodings that have a name of their own, and the value after the `@` that some of them take."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

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
        with_size: Makes it from a whole number after the `@`, if it takes one.
        with_base: Makes it from a real number after the `@`, if it takes one.
    """

    default: AnyEncoding
    with_size: Callable[[int], AnyEncoding] | None = None
    with_base: Callable[[float], AnyEncoding] | None = None


def bias_table(size: int) -> RPESpec:
    """Returns a scalar for each offset and head, for axes of up to `size` positions.

    Swin's bias in windows of that size, and BEiT's.
    """
    return RPESpec("product", "bias", "k", Clip(max(1, size - 1)), shared_heads=False)


NAMED: dict[str, _Entry] = {
    "shaw": _Entry(RPESpec("product", "contextual", "k", Clip(3))),
    "huang": _Entry(RPESpec("product", "contextual", "qk", Clip(3), tied=True)),
    "sasa": _Entry(Sasa(), with_size=Sasa),
    "transformer-xl": _Entry(TransformerXL()),
    "axial-deeplab": _Entry(AxialDeepLab(), with_size=AxialDeepLab),
    "cpvt": _Entry(CPVT()),
    "rope-axial": _Entry(RopeAxial(), with_base=RopeAxial),
    "rope-mixed": _Entry(RopeMixed(), with_base=RopeMixed),
    "decomposed": _Entry(Decomposed(), with_size=Decomposed),
    "bias-table": _Entry(bias_table(14), with_size=bias_table),
    "log-cpb": _Entry(LogCPB(), with_size=LogCPB),
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
    """Returns a rotary encoding with an option more.

    Args:
        encoding: The encoding.
        kind: The name of the option.
        value: What follows the name.
        text: The whole text, for errors.
    """
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
    entry = NAMED[name]
    if entry.with_size is not None:
        if not value.isdecimal():
            raise UserError(f"encoding '{name}@{value}': {value!r} must be a whole number")
        return entry.with_size(int(value))
    if entry.with_base is not None:
        return entry.with_base(_to_number(name, value))
    other = f": it is {entry.default}, write that with another index"
    has_other = str(entry.default) != name
    raise UserError(
        f"encoding '{name}@{value}': {name} takes no number{other if has_other else ''}"
    )


def _to_number(name: str, value: str) -> float:
    number = parse_number(value)
    if number is None:
        raise UserError(
            f"encoding '{name}@{value}': {value!r} must be a number greater than 1, the base of "
            "the frequencies"
        )
    return number
