"""What a model costs with an encoding: parameters, MACs, time and memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from irpe.core.encodings import parse_encoding
from irpe.errors import UserError
from irpe.nn.tables import RelativePositionEncoding
from irpe.profile.count import (
    Call,
    count_macs,
    count_macs_in,
    count_parameters,
    extra_macs,
    recorded_calls,
)
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
    """What can be counted, for one image."""

    parameters: int
    macs: int  # counted on the operations of a forward pass
    formula_macs: int  # those of the encoding alone, by the closed formulas


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
    """Returns the parameters and MACs of a named model, without computing anything."""
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
            counted = count(model, encoding, size)
        except ValueError as error:
            if refused is None:
                raise
            refused[encoding] = str(error)
            continue
        more = counted.parameters - plain.parameters, counted.macs - plain.macs
        costs.append(EncodingCost(
            model, encoding, size, counted.parameters, more[0], counted.macs, more[1],
            counted.formula_macs,
        ))  # fmt: skip
    return [plain, *costs] if not rounds else _timed(plain, costs, batch, rounds, listen)


def _timed(
    plain: EncodingCost, costs: list[EncodingCost], batch: int, rounds: int, listen: Listener
) -> list[EncodingCost]:
    """Returns the costs with time and memory; each model takes turns with the plain one."""
    size = plain.resolution
    images = torch.randn(
        batch, input_size(plain.model)[0], size, size, generator=torch.Generator().manual_seed(0)
    )

    def runner(encoding: str) -> Callable[[], object]:
        return torch.inference_mode()(partial(create(plain.model, encoding, size, "cpu"), images))

    run_plain, timed = runner("none"), list[EncodingCost]()
    run_plain()
    memory, seconds = peak_memory(run_plain), list[float]()
    for cost in tracked(listen, costs, len(costs), "timing"):
        run = runner(cost.encoding)
        best = interleaved({"plain": run_plain, "encoded": run}, rounds)
        seconds.append(best["plain"])
        own, ratio = peak_memory(run), best["encoded"] / best["plain"]
        timed.append(replace(
            cost, seconds=best["encoded"], time_ratio=ratio, memory=own, extra_memory=own - memory,
        ))  # fmt: skip
    fastest = min(seconds) if seconds else interleaved({"plain": run_plain}, rounds)["plain"]
    measured = {"seconds": fastest, "time_ratio": 1.0, "memory": memory, "extra_memory": 0}
    return [replace(plain, **measured), *timed]


@dataclass(frozen=True)
class ExtraMacs:
    """What an encoding adds to a model for one image of a size (the paper's Fig. 4)."""

    model: str
    encoding: str
    resolution: int
    tokens: int  # of the first attention, prefix tokens included
    plain: int  # of the model without an encoding
    direct: int  # added if the row of every pair is multiplied (Eq. 26 and 17)
    efficient: int  # added in the form that the library runs


def extra_macs_by_resolution(
    model: str, encoding: str, resolutions: Sequence[int], listen: Listener = silent
) -> list[ExtraMacs]:
    """Returns the extra MACs of both forms at each resolution, counted and not computed."""
    rows: list[ExtraMacs] = []
    for resolution in tracked(listen, resolutions, len(resolutions), "counting"):
        plain = count(model, "none", resolution).macs
        efficient = count(model, encoding, resolution).macs - plain
        made = create(model, encoding, resolution, "meta")
        images = torch.empty(1, input_size(model)[0], resolution, resolution, device="meta")
        with recorded_calls(made) as calls, torch.no_grad():
            made(images)
        calls = [call for call in calls if isinstance(call.module, RelativePositionEncoding)]
        if not calls:
            raise UserError(
                f"encoding {encoding!r} has no direct form to compare with: it is not an "
                "encoding of attentions; use for example product-contextual-k"
            )
        direct, tokens = sum(map(_direct_macs, calls)), calls[0].shape[2]
        rows.append(ExtraMacs(model, encoding, resolution, tokens, plain, direct, efficient))
    return rows


def _direct_macs(call: Call) -> int:
    """Returns what the direct form of an encoding adds to plain attention, counted."""
    encoding: Any = call.module
    q = torch.empty(call.shape, device="meta")
    k = q.new_empty(*q.shape[:2], call.num_keys, q.shape[3])
    run = partial(encoding, q, k, k, grid=call.grid, impl="reference")
    return count_macs_in(encoding, run) - 2 * q.numel() * call.num_keys
