"""Encodings that a model can have and a single attention cannot."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CPVT:
    """CPVT's encoding: a 3 x 3 convolution between blocks."""

    def __str__(self) -> str:
        return "cpvt"


@dataclass(frozen=True)
class NoEncoding:
    """No relative encoding: for models that differ in their absolute one alone."""

    def __str__(self) -> str:
        return "none"


ModelEncoding = CPVT | NoEncoding
