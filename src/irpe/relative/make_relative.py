"""`make_relative`: gives a trained model tables in the place of its absolute encoding."""

import copy
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from irpe.adapters.equip import apply_equipment, equip, remember_changes
from irpe.adapters.equipped import Equipment, equipped_attentions
from irpe.adapters.swaps import undo_change
from irpe.core.encodings import parse_encoding
from irpe.core.encodings.spec import RPESpec
from irpe.errors import UserError
from irpe.nn.modes import eval_mode
from irpe.nn.tables import RelativePositionEncoding
from irpe.progress import Event, Listener, silent
from irpe.relative.conversion import Agreement, Conversion, SolvedAttention
from irpe.relative.images import batches_of
from irpe.relative.lockstep import Lockstep
from irpe.relative.outputs import accuracy, features_of
from irpe.relative.solve import (
    Batch,
    Krylov,
    ScoreSystem,
    Unknowns,
    ValueSystem,
    attention,
    converted_attention,
    divergence,
    krylov,
    missing_output,
    missing_scores,
    solution_flops,
    weigh,
)

RIDGES = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-8)  # relative to the largest eigenvalue of A
STEPS = 64  # dimensions of a Krylov space: more of them change no held-out divergence
NEWTON_STEPS = 2  # after the first solution
_NOTHING_TO_REPLACE = (
    "make_relative solves for what an absolute encoding gave; without one, irpe.equip(model, spec) "
    "adds tables beside what the model has"
)


def make_relative(
    model: nn.Module,
    images: Tensor | Iterable[Tensor],
    spec: RPESpec | str = "product-contextual-k",
    *,
    layers: Iterable[int] | None = None,
    labels: Tensor | None = None,
    holdout: float = 0.25,
    seed: int = 0,
    batch_size: int = 16,
    newton_steps: int = NEWTON_STEPS,
    listen: Listener = silent,
) -> Conversion:
    """Gives a trained model relative tables in the place of its absolute encoding, in place.

    The tables of each attention are solved for in closed form, from the input on, so that its
    attention rows on some unlabelled images are as close as they can be to those of the model
    before. Nothing is trained. The model is then an ordinary equipped one, as of
    `irpe.equip(model, spec, absolute="none")`, with tables that are not zero. If anything goes
    wrong, or the work is interrupted, the model is as it was.

    Args:
        model: A trained model that `irpe.equip` takes, with an absolute encoding.
        images: Some dozens of images as the model takes them; or several such tensors, for example
            one for each size.
        spec: METHOD-MODE-TARGETS, or its text.
        layers: The indices of the attentions that get tables; the others see no position. `None`
            takes all.
        labels: The classes of the images, to compare the accuracy of a classifier before and after.
        holdout: The fraction of images that the penalty is chosen on and the result measured on.
        seed: Chooses these images.
        batch_size: Images at a time.
        newton_steps: How often the solution, of second order in what is missing, is refined for
            the divergence itself; each costs as much as the first.
        listen: Is called with how the work goes.

    Returns:
        What is lost, attention by attention.

    Examples:
        >>> import irpe, timm, torch
        >>> model = timm.create_model("vit_tiny_patch16_224", depth=2)  # pretrained=True
        >>> conversion = irpe.make_relative(model, torch.randn(8, 3, 224, 224), "product-bias-k")
        >>> len(conversion.attentions)
        2
    """
    encoding = _check_spec(spec)
    solving, held_out, held_labels = batches_of(images, labels, holdout, seed, batch_size)
    indices = None if layers is None else tuple(layers)
    with ExitStack() as undo, eval_mode(model):
        original = copy.deepcopy(model)
        equip(original, encoding, layers=indices)
        call = Equipment(encoding, None, None, indices, "none", "keep")
        try:
            change = apply_equipment(model, call)
        except UserError as error:
            raise UserError(f"{error}. {_NOTHING_TO_REPLACE}") from error
        undo.callback(undo_change, change)
        conversion = _convert(
            model, original, encoding, solving, held_out, held_labels, newton_steps, listen
        )
        undo.pop_all()
    remember_changes(model, [change])
    return conversion


def _convert(
    model: nn.Module,
    original: nn.Module,
    spec: RPESpec,
    solving: Sequence[Tensor],
    held_out: Sequence[Tensor],
    labels: Tensor | None,
    newton_steps: int,
    listen: Listener,
) -> Conversion:
    attentions = equipped_attentions(model)
    with torch.no_grad():
        before = [features_of(model(images)) for images in held_out]
    solved: dict[str, SolvedAttention] = {}
    listen(Event("solving", 0, len(attentions)))
    with Lockstep([original, model], [*solving, *held_out]) as passes:
        while (reached := passes.advance()) is not None:
            batches = [Batch(*each) for each in zip(*reached, strict=True)]
            name = batches[0].original.name
            if not solved:
                _check_lacks(batches)
                rpe: Any = attentions[name].rpe
                flops = solution_flops(rpe, batches[: len(solving)], STEPS) * (newton_steps + 1)
                work = f"about {len(attentions) * flops / 1e9:,.0f} GFLOP in products of tables"
                listen(Event("solving", 0, len(attentions), result=work))
            if name in solved:
                raise UserError(
                    f"{name} is called more than once in a forward pass: its tables cannot be "
                    "solved for; leave it out with layers="
                )
            rpe = attentions[name].rpe
            train, test = batches[: len(solving)], batches[len(solving) :]
            solved[name] = solve_attention(rpe, train, test, newton_steps)
            values = {"divergence": solved[name].divergence_after}
            listen(Event("solving", len(solved), len(attentions), values))
        originals = [features_of(output) for output in passes.outputs(0)[len(solving) :]]
        after = [features_of(output) for output in passes.outputs(1)[len(solving) :]]
    if len(solved) < len(attentions):
        missing = sorted(set(attentions) - set(solved))
        raise UserError(f"{', '.join(missing)} took no part in a forward pass on these images")
    scores = None
    if labels is not None:
        scores = accuracy(originals, labels), accuracy(before, labels), accuracy(after, labels)
    return Conversion(
        spec=str(spec),
        num_images=sum(map(len, solving)) + sum(map(len, held_out)),
        num_held_out=sum(map(len, held_out)),
        attentions=tuple(solved.values()),
        before=Agreement.of(originals, before),
        after=Agreement.of(originals, after),
        accuracy=scores,
    )


def _check_lacks(batches: Sequence[Batch]) -> None:
    """Raises an error if the tokens that enter the first attention are those of the original."""
    if all(torch.equal(each.original.tokens, each.converted.tokens) for each in batches):
        raise UserError(f"the model has no absolute encoding. {_NOTHING_TO_REPLACE}")


def solve_attention(
    encoding: RelativePositionEncoding,
    solving: Sequence[Batch],
    held_out: Sequence[Batch],
    newton_steps: int = NEWTON_STEPS,
    steps: int = STEPS,
) -> SolvedAttention:
    """Sets the tables of one attention, all zero before, to the solution.

    Args:
        encoding: Its encoding.
        solving: The images to solve on.
        held_out: The images that choose the ridge.
        newton_steps: How often the solution is refined.
        steps: The most dimensions of a Krylov space.
    """
    scores = ScoreSystem(encoding, solving)
    before = _mean_divergence(encoding, held_out)
    ridges: list[float] = []
    if scores.tables.parameters:
        errors = partial(_row_divergences, scores, held_out)
        t = scores.tables.zeros()
        equations = scores
        for _ in range(newton_steps + 1):
            space = krylov(equations.apply, equations.right_hand_side(), steps)
            t, chosen = _choose(t, space, errors)
            ridges = ridges or chosen
            equations = ScoreSystem(encoding, solving, at=t)
        scores.tables.write(t)
        explained = _explained(scores, held_out, t)
    else:
        explained = 0.0
    values = ValueSystem(encoding, solving)
    if values.tables.parameters:
        space = krylov(values.apply, values.right_hand_side(), steps)
        t, chosen = _choose(
            values.tables.zeros(), space, partial(_output_errors, values, encoding, held_out)
        )
        values.tables.write(t)
        ridges += chosen
    pairs = [(batch.original.tokens, batch.converted.tokens) for batch in held_out]
    largest = max(float(table.detach().abs().max()) for table in encoding.parameters())
    return SolvedAttention(
        name=held_out[0].original.name,
        divergence_before=before,
        divergence_after=_mean_divergence(encoding, held_out),
        explained=explained,
        tokens=Agreement.of(*zip(*pairs, strict=True)),
        largest_element=largest,
        ridges=tuple(ridges),
    )


def _choose(start: Unknowns, space: Krylov, errors: Any) -> tuple[Unknowns, list[float]]:
    """Returns the tables, and for each group the ridge, that are best on held-out images.

    The tables that a step starts from, those of an infinite ridge, are among the candidates.
    """
    ridges = (float("inf"), *RIDGES)
    candidates = [start, *(start + space.solve(ridge) for ridge in RIDGES)]
    found = torch.stack([errors(t) for t in candidates])  # ridges, heads
    if len(space.c) == 1:
        found = found.sum(1, keepdim=True)
    best = found.argmin(0)
    t = torch.stack([candidates[index][group] for group, index in enumerate(best.tolist())])
    return t, [ridges[index] for index in best.tolist()]


def _row_divergences(system: ScoreSystem, batches: Sequence[Batch], t: Unknowns) -> Tensor:
    """Returns the sum of the divergences of attention rows, for each head."""
    return sum(
        divergence(attention(each.original), attention(each.converted, system.scores(each, t))).sum(
            (0, 2), dtype=torch.float64
        )
        for each in batches
    )  # type: ignore[return-value]


def _output_errors(
    system: ValueSystem, encoding: RelativePositionEncoding, batches: Sequence[Batch], t: Unknowns
) -> Tensor:
    """Returns the sum of the squared errors of the output, for each head."""
    total: Any = 0
    for each in batches:
        a = converted_attention(encoding, each)
        error = missing_output(each, a) - system.output(each, a, t)
        total = total + error.square().sum((0, 2, 3), dtype=torch.float64)
    return total


def _mean_divergence(encoding: RelativePositionEncoding, batches: Sequence[Batch]) -> float:
    rows = [
        divergence(attention(each.original), converted_attention(encoding, each)).flatten()
        for each in batches
    ]
    return float(torch.cat(rows).double().mean())


def _explained(system: ScoreSystem, batches: Sequence[Batch], t: Unknowns) -> float:
    """Returns how much of the weighted squares of the missing scores the tables explain."""
    left, whole = 0.0, 0.0
    for each in batches:
        a, missing = attention(each.original), missing_scores(each)
        rest = missing - system.scores(each, t)
        left += float((rest * weigh(a, rest)).sum(dtype=torch.float64))
        whole += float((missing * weigh(a, missing)).sum(dtype=torch.float64))
    return 1 - left / whole if whole else 0.0


def _check_spec(spec: RPESpec | str) -> RPESpec:
    encoding = parse_encoding(spec)
    if not isinstance(encoding, RPESpec):
        raise UserError(
            f"encoding '{encoding}' cannot be solved for: its scores are not linear in what it "
            "learns, or it learns nothing; use METHOD-MODE-TARGETS, such as product-contextual-k "
            "or product-bias-k+unshared"
        )
    return encoding
