"""What a model costs with an encoding: parameters, MACs, time and memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from irpe.core.encodings import parse_encoding
from irpe.errors import UserError
from irpe.profile.count import count_macs, count_parameters
from irpe.profile.formulas import extra_macs, recorded_calls
from irpe.profile.measure import interleaved, peak_memory
from irpe.profile.models import create, input_size
from irpe.progress import Listener, silent, tracked

COMPARED = (
    "product-bias-k", "product-contextual-k", "product-contextual-qk", "product-contextual-qkv",
    "cross-contextual-k", "euclidean-contextual-k", "quantization-contextual-k", "shaw", "huang",
    "sasa", "transformer-xl", "axial-deeplab", "cpvt", "rope-axial", "rope-mixed", "decomposed",
    "bias-table", "log-cpb", "alibi-2d", "rope-axial+product-contextual-k",
)  # fmt: skip


@dataclass(frozen=True)
class Count:
    """What can be counted, for one image.

    Args:
        parameters: The number of learned parameters.
        macs: Its multiply-accumulates, counted on the operations of a forward pass.
        formula_macs: Those of the encoding alone, by the closed formulas.
    """

    parameters: int
    macs: int
    formula_macs: int


@dataclass(frozen=True)
class EncodingCost:
    """A model with an encoding, beside the same model without one.

    Args:
        model: The name of the model.
        encoding: The text of the encoding; "none" for the plain model.
        resolution: The height and width of the images.
        parameters: The number of learned parameters.
        extra_parameters: How many more than the plain model; fewer if negative.
        macs: Multiply-accumulates for one image, counted.
        extra_macs: How many more than the plain model.
        formula_macs: The same by the closed formulas.
        seconds: The shortest time of a forward pass over the batch, if measured.
        time_ratio: That time relative to the plain model's, both taken in turns.
        memory: The peak memory of a forward pass in bytes, if measured.
        extra_memory: How much more than the plain model.

    Examples:
        >>> import irpe.profile
        >>> (plain,) = irpe.profile.measure_costs("deit_tiny_patch16_224", [], rounds=0)
        >>> plain.parameters
        5717416
    """

    model: str
    encoding: str
    resolution: int
    parameters: int
    extra_parameters: int
    macs: int
    extra_macs: int
    formula_macs: int
    seconds: float | None = None
    time_ratio: float | None = None
    memory: int | None = None
    extra_memory: int | None = None


def count(model: str, encoding: str, resolution: int | None = None) -> Count:
    """Returns the parameters and MACs of a model, without computing anything.

    Args:
        model: Its name in timm or transformers.
        encoding: The text of the encoding, or "none".
        resolution: The height and width of the images; `None` takes the model's own.
    """
    made = create(model, encoding, resolution, "meta")
    channels, _, own = input_size(model)
    size = resolution or own
    images = torch.empty(1, channels, size, size, device="meta")
    with recorded_calls(made) as calls:
        try:
            macs = count_macs(made, images)
        except (AssertionError, RuntimeError, ValueError) as error:  # how libraries refuse an image
            raise UserError(f"{model} does not take images of {size} x {size}: {error}") from error
    return Count(count_parameters(made), macs, sum(map(extra_macs, calls)))


def measure_costs(
    model: str,
    encodings: Sequence[str],
    resolution: int | None = None,
    batch: int = 1,
    rounds: int = 10,
    listen: Listener = silent,
    refused: dict[str, str] | None = None,
) -> list[EncodingCost]:
    """Returns what a model costs without an encoding and with each of these.

    Everything is counted before anything is timed, so that errors come early.

    Args:
        model: Its name in timm or transformers.
        encodings: The texts of the encodings; the plain model, "none", comes first in any case.
        resolution: The height and width of the images; `None` takes the model's own.
        batch: How many images are timed at once.
        rounds: How often each model is timed; 0 counts only.
        listen: Is called with how the counting and then the timing goes.
        refused: Collects the encodings that the model cannot have, and why; `None` raises the
            error instead.

    Examples:
        >>> import irpe.profile
        >>> model = "deit_tiny_patch16_224"
        >>> plain, k = irpe.profile.measure_costs(model, ["product-contextual-k"], rounds=0)
        >>> k.extra_macs
        22694400
    """
    if batch < 1 or rounds < 0:
        raise UserError(f"batch = {batch}, rounds = {rounds}: at least 1 and 0 are needed")
    encodings = [encoding for encoding in encodings if encoding != "none"]
    for encoding in encodings:
        parse_encoding(encoding)  # typos are errors before anything is measured
    size = input_size(model)[-1] if resolution is None else resolution
    counted = count(model, "none", size)
    plain = EncodingCost(model, "none", size, counted.parameters, 0, counted.macs, 0, 0)
    costs: list[EncodingCost] = []
    for encoding in tracked(listen, encodings, len(encodings), "counting"):
        try:
            costs.append(_counted_cost(plain, encoding))
        except ValueError as error:
            if refused is None:
                raise
            refused[encoding] = str(error)
    return [plain, *costs] if not rounds else _timed(plain, costs, batch, rounds, listen)


def _timed(
    plain: EncodingCost, costs: list[EncodingCost], batch: int, rounds: int, listen: Listener
) -> list[EncodingCost]:
    measured = _Measured(plain, batch, rounds)
    timed = [measured.beside(cost) for cost in tracked(listen, costs, len(costs), "timing")]
    return [measured.plain_cost(), *timed]


def _counted_cost(plain: EncodingCost, encoding: str) -> EncodingCost:
    counted = count(plain.model, encoding, plain.resolution)
    return EncodingCost(
        model=plain.model,
        encoding=encoding,
        resolution=plain.resolution,
        parameters=counted.parameters,
        extra_parameters=counted.parameters - plain.parameters,
        macs=counted.macs,
        extra_macs=counted.macs - plain.macs,
        formula_macs=counted.formula_macs,
    )


class _Measured:
    """The plain model, against which others are measured.

    Args:
        plain: Its cost, as far as it was counted.
        batch: How many images are timed at once.
        rounds: How often each model is timed.
    """

    def __init__(self, plain: EncodingCost, batch: int, rounds: int) -> None:
        channels = input_size(plain.model)[0]
        shape = batch, channels, plain.resolution, plain.resolution
        self.images = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        self.cost, self.rounds = plain, rounds
        self.run = self._runner("none")
        self.run()
        self.memory = peak_memory(self.run)
        self.seconds = float("inf")

    def beside(self, cost: EncodingCost) -> EncodingCost:
        """Returns the cost with time and memory, both models taking turns."""
        run = self._runner(cost.encoding)
        best = interleaved({"plain": self.run, "encoded": run}, self.rounds)
        self.seconds = min(self.seconds, best["plain"])
        memory = peak_memory(run)
        return replace(
            cost,
            seconds=best["encoded"],
            time_ratio=best["encoded"] / best["plain"],
            memory=memory,
            extra_memory=memory - self.memory,
        )

    def plain_cost(self) -> EncodingCost:
        """Returns the cost of the plain model with its best time."""
        if self.seconds == float("inf"):
            self.seconds = interleaved({"plain": self.run}, self.rounds)["plain"]
        return replace(
            self.cost, seconds=self.seconds, time_ratio=1.0, memory=self.memory, extra_memory=0
        )

    def _runner(self, encoding: str) -> Callable[[], object]:
        model = create(self.cost.model, encoding, self.cost.resolution, "cpu")
        return torch.inference_mode()(partial(model, self.images))
