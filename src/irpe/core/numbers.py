"""Numbers in the text of an encoding: plain decimals, without sign or exponent."""

import re
from decimal import Decimal

_NUMBER = re.compile(r"[0-9]+(\.[0-9]*)?|\.[0-9]+")


def number_text(value: float) -> str:
    """Returns the text that `parse_number` reads as the same number."""
    text = format(Decimal(repr(float(value))), "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def parse_number(text: str) -> float | None:
    """Returns the number of a text; `None` if it is not a plain decimal."""
    return float(text) if _NUMBER.fullmatch(text) else None
