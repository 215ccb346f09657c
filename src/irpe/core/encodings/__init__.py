"""The encodings by name, and how any text becomes an encoding.

Some names stand for values of `RPESpec`; each other one is a class in a file here, an `Encoding`.
A rotation and an encoding with tables are joined by `+`.
"""

from irpe.core.encodings.joined import Joined
from irpe.core.encodings.model_only import CPVT, ModelEncoding
from irpe.core.encodings.named import NAMED, ROTARY_OPTION, AnyEncoding, parse_named
from irpe.core.encodings.protocol import Encoding
from irpe.core.encodings.spec import GRAMMAR, MODES, RPESpec
from irpe.core.methods import METHODS
from irpe.errors import UserError, did_you_mean

NAMES = tuple(NAMED)
SHORT_NAMES = {
    **{targets: f"product-contextual-{targets.lower()}" for targets in ("K", "QK", "QKV")},
    "product bias": "product-bias-k",
}  # as in the paper's tables
_TABLE_OPTIONS = ("tied", "unshared")  # of the part before them, as those of a rotation


def parse_encoding(value: AnyEncoding | str) -> AnyEncoding:
    """Returns the encoding that a text stands for; an encoding is returned as it is.

    Args:
        value: One of `NAMES`, a text that `RPESpec.parse` understands or a short name for one ("K",
            "QK", "QKV"), a rotation and one of these joined by "+", or an encoding.

    Examples:
        >>> import irpe
        >>> str(irpe.parse_encoding("shaw"))
        'product-contextual-k@clip3'
    """
    if isinstance(value, Encoding | ModelEncoding):
        return value
    if not isinstance(value, str):
        return RPESpec.parse(value)  # says what is wrong
    encodings = [_parse_part(part, value) for part in _split_parts(value)]
    return encodings[0] if len(encodings) == 1 else _join(value, encodings)


def attention_encoding(value: AnyEncoding | str) -> Encoding:
    """Returns the encoding that a text stands for, if an attention can have it."""
    encoding = parse_encoding(value)
    if isinstance(encoding, CPVT):
        raise UserError(
            "cpvt works between the blocks of a model, no attention can have it: use "
            "irpe.equip(model, 'cpvt') with a VisionTransformer of timm"
        )
    if not isinstance(encoding, Encoding):
        raise UserError(
            "encoding 'none' has no tables: use attention without an encoding, or "
            "irpe.equip(model, 'none', absolute=...) to change a model's absolute one alone"
        )
    return encoding


def spec_of(value: AnyEncoding | str) -> RPESpec:
    """Returns the encoding that a text stands for, if it is a method with an index function."""
    encoding = parse_encoding(value)
    if not isinstance(encoding, RPESpec):
        raise UserError(f"encoding {value!s} has no buckets to draw: write one as {GRAMMAR}")
    return encoding


def _split_parts(text: str) -> list[str]:
    """Returns the parts that are joined by "+", each with its options."""
    parts: list[str] = []
    for piece in map(str.strip, text.split("+")):
        if piece not in _TABLE_OPTIONS and not ROTARY_OPTION.fullmatch(piece):
            parts.append(piece)
        elif parts:
            parts[-1] += f"+{piece}"
        else:
            raise UserError(
                f"encoding {text!r} begins with the option {piece!r}: an option stands after the "
                f"part that it belongs to, for example 'product-contextual-k+unshared'"
            )
    return parts


def _parse_part(text: str, whole: str) -> AnyEncoding:
    name = text.partition("@")[0].partition("+")[0]
    option = next(filter(ROTARY_OPTION.fullmatch, text.split("+")[1:]), None)
    if name not in NAMED and option is not None:
        raise UserError(f"encoding {whole!r}: {name} has no option {option!r}; 'rope-axial' has")
    if name in SHORT_NAMES:
        return RPESpec.parse(SHORT_NAMES[name] + text.removeprefix(name))
    if name in NAMED:
        return parse_named(text)
    if len(name.split("-")) == 3 and not did_you_mean(name, NAMES, 0.8):
        return RPESpec.parse(text)
    known = [*NAMES, *(f"{method}-{mode}-k" for method in METHODS for mode in reversed(MODES))]
    rotary = "; rotary encodings are 'rope-axial' and 'rope-mixed'" if name == "rope" else ""
    raise UserError(
        f"encoding {text or whole!r} is not known: write one of {', '.join(NAMES)}, or "
        f"{GRAMMAR}{rotary or did_you_mean(name, known, 0.5)}"
    )


def _join(text: str, encodings: list[AnyEncoding]) -> Joined:
    """Returns a rotation and an encoding with tables as one; nothing else can be joined."""
    able = [part for part in encodings if isinstance(part, Encoding)]
    rotations = [part for part in able if part.mode == "rotation"]
    tables = [part for part in able if part.takes_rotation]
    alone = [part for part in encodings if part not in (*rotations, *tables)]
    if alone:
        raise UserError(f"encoding {text!r}: {alone[0]} cannot be joined with another encoding")
    if len(rotations) > 1:
        raise UserError(
            f"encoding {text!r} rotates {len(rotations)} times: write one of "
            f"{' and '.join(map(str, rotations))}"
        )
    if len(tables) > 1:
        raise UserError(
            f"encoding {text!r} joins {len(tables)} encodings with tables: join a rotation "
            "(rope-axial, rope-mixed) with one; several targets are one encoding, such as "
            "'product-contextual-qkv'"
        )
    return Joined(rotations[0], tables[0])
