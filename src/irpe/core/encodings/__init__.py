"""The encodings by name, and how any text becomes an encoding.

Some names stand for values of `RPESpec`; each other one is a file here that answers for itself
(`encoding.AttentionEncoding`). A rotation and an encoding with tables are joined by `+`.
"""

from irpe.core.encodings.joined import Joined as Joined
from irpe.core.encodings.joined import Rotary as Rotary
from irpe.core.encodings.joined import WithTables
from irpe.core.encodings.joined import augmentation_of as augmentation_of
from irpe.core.encodings.joined import is_trained_as as is_trained_as
from irpe.core.encodings.model_only import CPVT, NoEncoding
from irpe.core.encodings.named import NAMED, ROTARY_OPTION, parse_named
from irpe.core.encodings.spec import GRAMMAR, MODES, RPESpec
from irpe.core.encodings.transformer_xl import TransformerXL
from irpe.core.methods import METHODS
from irpe.errors import UserError, did_you_mean

Encoding = WithTables | TransformerXL | Rotary | Joined  # what an attention can have
AnyEncoding = Encoding | CPVT | NoEncoding
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
    if isinstance(value, AnyEncoding):
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
    if isinstance(encoding, NoEncoding):
        raise UserError(
            "encoding 'none' has no tables: use attention without an encoding, or "
            "irpe.equip(model, 'none', absolute=...) to change a model's absolute one alone"
        )
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
    rotations = [part for part in encodings if isinstance(part, Rotary)]
    tables = [part for part in encodings if isinstance(part, WithTables)]
    alone = [part for part in encodings if not isinstance(part, Rotary | WithTables)]
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
