"""What to do on these images, as a value and in words: no more than the data supports."""

import dataclasses
import json
import shlex
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from irpe.ablation.rotary import rotary_or_relative
from irpe.ablation.rows import AblationRow
from irpe.ablation.statistics import (
    RowResult,
    compare,
    digits_of,
    find_probabilities,
    find_seeds,
    unmoved,
)
from irpe.ablation.tuning import FACTORS_TEXT
from irpe.ablation.verdicts import CONFIDENCE, MOST_SEEDS, SEEDS_FOR_HOLM, adjust
from irpe.core.encodings import Joined, parse_encoding
from irpe.core.encodings.spec import RPESpec
from irpe.profile.catalogue import LINES
from irpe.recipes import RECIPES
from irpe.train.config import EMBEDDED, RunConfig
from irpe.train.optim import learns_tables

_OF_ROWS = {"data", "encoding", "absolute", "seed"}  # named elsewhere
_RATES = {"table_lr", "absolute_lr"}  # of rows as well, where they were searched


@dataclass(frozen=True)
class Answer:
    """What the results of an ablation support.

    Args:
        choice: The row to use on images as they are; `None` where nothing is recommended.
        headline: What to do, in a sentence.
        reasons: What else the results say, a sentence each.
        next_command: What to do next: a command, or how to change this one.

    Examples:
        >>> from irpe.ablation import Answer
        >>> Answer("K", "Use K.", (), "irpe train laptop --encoding K").lines()
        ['Use K.', 'Next: irpe train laptop --encoding K']
    """

    choice: str | None
    headline: str
    reasons: tuple[str, ...]
    next_command: str

    def lines(self) -> list[str]:
        """Returns all of it, the headline first."""
        return [self.headline, *self.reasons, f"Next: {self.next_command}"]


def find_reference(rows: Sequence[RowResult]) -> RowResult:
    """Returns the row that others are compared with: absolute, else the first with an effect."""
    plain = [row for row in rows if is_absolute(row.row)]
    active = [row for row in rows if not row.is_idle]
    return (plain or active or list(rows))[0]


def is_absolute(row: AblationRow) -> bool:
    """Returns whether a row is the model's own absolute encoding alone."""
    return (row.encoding, row.absolute) == ("none", "keep")


def comparable(rows: Sequence[RowResult]) -> list[RowResult]:
    """Returns the rows that a verdict may rest on: their encoding acts, they left chance."""
    return [row for row in rows if not (row.is_idle or row.is_at_chance)]


def answer(rows: Sequence[RowResult], recipe: str, data: str, settings: str = "") -> Answer:
    """Returns what to do, why, and the next command.

    Args:
        rows: The results.
        recipe: The recipe that every cell trained.
        data: The data, as in a configuration.
        settings: What else the cells had in place of the recipe's own, as options.
    """
    reference, sound = find_reference(rows), comparable(rows)
    others = [row for row in sound if row is not reference]
    beside = (*_left_out(rows), *_warnings(rows), *_rates(rows), *_meanings(rows))
    if len(rows) == 1:
        headline = "One row: there is nothing to compare it with."
        other = "K=product-contextual-k" if is_absolute(reference.row) else "absolute=none,keep"
        step = f"the same command with another row, as in --row {other}"
        return Answer(None, headline, beside, step)
    if reference.is_at_chance or not others:
        return _no_ground(rows, reference, beside)
    if min(len(row.results) for row in rows) < 2:
        headline = "One seed: how much seeds differ is not known, so nothing is recommended."
        return Answer(None, headline, beside, "the same command with --seeds 3")
    choice, headline = _as_they_are(reference, others)
    reasons = list[str]()
    if (none := _unneeded(sound)) is not None:
        headline = (
            "Position does not matter on these images, as far as these seeds can tell: "
            f"{none.name} ties with every other row."
        )
        choice = reference
    if reference.shifts[1:]:
        reasons.append(_moved(reference, others))
    reasons += rotary_or_relative(others)
    reasons += [
        *_chances(reference, others),
        *_most_probable(sound),
        *_ties(choice, reference, others),
    ]
    if not any(row.row.rates for row in rows) and any(learns_tables(r.row.encoding) for r in rows):
        reasons.append(
            "All rows had one learning rate for their tables; --tune (with another -o) gives each "
            "encoding its best one."
        )
    return Answer(
        choice.name, headline, (*reasons, *beside), _next_command(choice, recipe, data, settings)
    )


def _no_ground(rows: Sequence[RowResult], reference: RowResult, beside: tuple[str, ...]) -> Answer:
    """Returns the answer where there is nothing to compare, or nothing to compare with."""
    stuck = [row for row in rows if row.is_at_chance]
    if stuck and reference.is_at_chance:
        names, verb = _listed([row.name for row in stuck]), "has" if len(stuck) == 1 else "have"
        chance = _score(reference, reference.chance or 0.0)
        headline = f"{names} {verb} not left chance ({chance}): train longer before you compare."
        return Answer(None, headline, beside, "the same command with more --epochs, and another -o")
    has_rate = any("--table-lr" in _remedy(row) for row in rows if row.is_idle)
    more = " or a higher --table-lr" if has_rate else ""
    headline = "Nothing here can be compared: see below."
    step = f"the same command with more --epochs{more}, and another -o"
    return Answer(None, headline, beside, step)


def _left_out(rows: Sequence[RowResult]) -> Iterator[str]:
    """Yields why rows are not compared."""
    for row in rows:
        if row.is_idle:
            yield (
                f"{row.name} is not compared: its encoding is next to nothing (without it the "
                f"attention's output changes by {row.effect:.2%}); {_remedy(row)}."
            )
        elif row.is_at_chance and row is not find_reference(rows):
            yield (
                f"{row.name} is not compared: it has not clearly left chance "
                f"({_score(row, row.chance or 0.0)}) in every seed; train longer, or it cannot."
            )


def _remedy(row: RowResult) -> str:
    has_rate = not row.row.rates and learns_tables(row.row.encoding)
    return "train longer, or raise --table-lr" if has_rate else "train longer"


def _warnings(rows: Sequence[RowResult]) -> Iterator[str]:
    """Yields what weakens a comparison: several kinds of machines, a busy machine."""
    machines = [result.machine for row in rows for result in row.results]
    for fact in dict.fromkeys(name for machine in machines for name in machine):
        found = dict.fromkeys(machine.get(fact, "unknown") for machine in machines)
        if len(found) > 1:
            yield (
                f"The cells ran with several {fact}s ({', '.join(found)}): small differences may "
                "be those of the machines."
            )
    noisy = [row for row in rows if row.cost.is_noisy]
    if noisy:
        names, most = _listed([row.name for row in noisy]), max(row.cost.noise for row in noisy)
        yield (
            f"The machine was busy when steps were timed: those of {names} are off by up to "
            f"{most:.0%}."
        )


def _rates(rows: Sequence[RowResult]) -> Iterator[str]:
    """Yields the rates that were searched, if they were."""
    found = [f"{row.name} {factor:g}" for row in rows for factor in row.row.rates.values()]
    if found:
        yield (
            f"Learning rates of tables (or of a learned absolute encoding): the best of "
            f"{FACTORS_TEXT} times the model's, searched on held-out training images: "
            f"{', '.join(found)}."
        )


def _meanings(rows: Sequence[RowResult]) -> Iterator[str]:
    """Yields what the encodings are, a line for each meaning."""
    names: dict[str, list[str]] = {}
    for row in rows:
        names.setdefault(describe(row.row), []).append(row.name)
    yield from (f"{', '.join(of)}: {meaning}." for meaning, of in names.items() if meaning)


def describe(row: AblationRow) -> str:
    """Returns what a relative encoding is, in a line; nothing for what needs no words."""
    if (row.encoding, row.absolute) == ("none", "none"):
        return "no position at all (patches are a set)"
    encoding = None if row.encoding == "none" else parse_encoding(row.encoding)
    if isinstance(encoding, Joined):
        tables = describe(AblationRow(row.name, str(encoding.tables), row.absolute))
        return f"queries and keys are rotated ({encoding.rotation}); {tables}"
    if not isinstance(encoding, RPESpec):
        name = row.encoding.partition("@")[0]
        return "" if encoding is None else LINES.get(name, f"the encoding {encoding}")
    beside = {"keep": ", beside the absolute encoding", "none": ""}
    tail = beside.get(row.absolute, f", beside a {row.absolute}")
    if encoding.mode == "bias":
        return f"a learned score for each relative position ({encoding.method}), added{tail}"
    meets = {"k": "queries", "q": "keys", "v": "attention weights"}
    names = [meets[target] for target in encoding.targets]
    joined = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    each = "a learned vector" if len(names) == 1 else f"{len(names)} learned vectors"
    return f"{each} for each relative position ({encoding.method}), multiplied with {joined}{tail}"


def _as_they_are(reference: RowResult, others: Sequence[RowResult]) -> tuple[RowResult, str]:
    """Returns the row to use on images as they are, and the sentence that says so."""
    where = unmoved(reference)
    better = [row for row in others if compare(row, reference).verdict == "better"]
    if better:
        best = max(better, key=lambda row: row.merit())
        equal = [row for row in better if row is best or compare(row, best).verdict == "tie"]
        choice = min(equal, key=lambda row: row.cost.step)
        gain = _gain(choice, reference)
        return choice, (
            f"{where}: use {choice.name}, {gain} over {reference.name}, at "
            f"{_cost(choice, reference)}."
        )
    best = max(others, key=lambda row: row.merit())
    found = {"tie": "is a tie", "worse": "is worse"}[compare(best, reference).verdict]
    words = (
        f"{where}: keep {reference.name}. The best of the others, {best.name}, {found} "
        f"({_gain(best, reference)}) at {_cost(best, reference)}"
    )
    noise = max(best.cost.noise, reference.cost.noise)
    is_dearer = best.cost.step > (1.05 + noise) * reference.cost.step
    return reference, words + (": not worth it here." if is_dearer else ".")


def _unneeded(rows: Sequence[RowResult]) -> RowResult | None:
    """Returns the row without any position if it ties with every other row."""
    without = [row for row in rows if (row.row.encoding, row.row.absolute) == ("none", "none")]
    others = [row for row in rows if row not in without]
    if not (without and others):
        return None
    is_tied = all(compare(row, without[0]).verdict == "tie" for row in others)
    return without[0] if is_tied else None


def _moved(reference: RowResult, others: Sequence[RowResult]) -> str:
    """Returns what to use if objects are not always where they were in training."""
    better = [row for row in others if _keeps_more(row, reference)]
    if not better:
        return f"If objects move: nothing here is clearly better than {reference.name}."
    best = max(better, key=_overall)
    text = f"If objects move: {_gains(best, reference)}"
    equal = [row for row in better if compare(row, reference).verdict != "worse"]
    if best in equal or not equal:
        return f"{text}."
    second = max(equal, key=_overall)
    return f"{text}. Without a loss where they do not: {_gains(second, reference)}."


def _keeps_more(row: RowResult, reference: RowResult) -> bool:
    """Returns whether a row is better than another on moved images, and not only there."""
    verdicts = [compare(row, reference, shift).verdict for shift in row.shifts[1:]]
    is_better = "better" in verdicts and "worse" not in verdicts
    return is_better and _overall(row) > _overall(reference)


def _overall(row: RowResult) -> float:
    return statistics.mean(row.merit(shift) for shift in row.shifts)


def _gains(row: RowResult, reference: RowResult) -> str:
    digits = digits_of(row.measure)
    gains = [
        f"{compare(row, reference, shift).text(digits)} moved by {shift}"
        for shift in row.shifts[1:]
    ]
    as_they_are = f"as they are {compare(row, reference).text(digits)}"
    return f"use {row.name}, {', '.join([*gains, as_they_are])}, at {_cost(row, reference)}"


def _gain(row: RowResult, reference: RowResult) -> str:
    points = " points" if row.measure.unit == "%" else ""
    return f"{compare(row, reference).text(digits_of(row.measure))}{points}"


def _score(row: RowResult, value: float) -> str:
    unit = " %" if row.measure.unit == "%" else ""
    return f"{value:.{digits_of(row.measure)}f}{unit}"


def _cost(row: RowResult, reference: RowResult) -> str:
    noise = max(row.cost.noise, reference.cost.noise)
    busy = f" (± {noise:.0%}, busy machine)" if row.cost.is_noisy or reference.cost.is_noisy else ""
    return f"{row.cost.step / reference.cost.step:.1f}x the time of a step{busy}"


def _chances(reference: RowResult, others: Sequence[RowResult]) -> Iterator[str]:
    """Yields what many comparisons do to chance."""
    if len(others) < 2:
        return
    found = {row.name: compare(row, reference) for row in others}
    claimed = [name for name, each in found.items() if each.verdict != "tie"]
    text = (
        f"{len(others)} rows are compared with {reference.name}, each with a chance of at most 5 % "
        "to be called better by mistake"
    )
    if not claimed:
        yield f"{text}."
        return
    if min(len(row.results) for row in (reference, *others)) < SEEDS_FOR_HOLM:
        yield (
            f"{text}: with two seeds nothing more can be said of all of them together; "
            f"--seeds {SEEDS_FOR_HOLM} can."
        )
        return
    together = zip(found, adjust([each.p_value for each in found.values()]), strict=True)
    lost = [name for name, p_value in together if name in claimed and p_value > 1 - CONFIDENCE]
    if lost:
        yield f"{text}; for all comparisons together (Holm) not certain: {_listed(lost)}."
    else:
        yield f"{text}; all {len(claimed)} differences hold for all comparisons together (Holm)."


def _most_probable(rows: Sequence[RowResult]) -> Iterator[str]:
    """Yields which rows may be the best one."""
    found = sorted(zip(find_probabilities(rows), (row.name for row in rows), strict=True))[::-1]
    likely = [f"{name} {probability:.0%}" for probability, name in found if probability >= 0.05]
    yield f"Probability of being the best row on images as they are: {', '.join(likely)}."


def _ties(choice: RowResult, reference: RowResult, others: Sequence[RowResult]) -> Iterator[str]:
    """Yields what would settle the tie of the best other row, and what that costs."""
    ties = [row for row in others if compare(row, reference).verdict == "tie"]
    if choice is not reference or not ties:
        return
    best = max(ties, key=lambda row: row.merit())
    seeds = find_seeds(best, reference)
    if seeds is None:
        yield (
            f"{best.name} and {reference.name}: not even {MOST_SEEDS} seeds each would settle this "
            "tie, if means and noise stay as they are."
        )
        return
    more = [seeds - len(row.results) for row in (best, reference)]
    text = (
        f"{best.name} and {reference.name}: {seeds} seeds each would settle this tie, if means and "
        "noise stay as they are"
    )
    known = [row.seconds for row in (best, reference)]
    if None not in known:
        minutes = sum(n * (t or 0.0) for n, t in zip(more, known, strict=True)) / 60
        text += f", about {max(minutes, 1):.0f} minutes of one cell at a time"
    yield f"{text}."


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def changed_settings(config: RunConfig, recipe: str, is_tuned: bool = False) -> str:
    """Returns what a configuration has in place of a recipe's own settings, as options.

    Args:
        config: The budget of every cell, without what its row decides.
        recipe: The recipe.
        is_tuned: Whether rates were searched for each row, which then names its own.
    """
    if recipe not in RECIPES:
        return ""
    own, text = RECIPES[recipe](), ""
    elsewhere = _OF_ROWS | _RATES if is_tuned else _OF_ROWS
    for each in dataclasses.fields(config):
        value, is_option = getattr(config, each.name), bool(each.metadata)
        if is_option and each.name not in elsewhere and value != getattr(own, each.name):
            name = each.name.replace("_", "-")
            if isinstance(value, bool):
                text += f" --{name}" if value else f" --no-{name}"
            else:
                text_of = json.dumps if isinstance(value, dict) else str
                written = "none" if value is None else text_of(value)
                text += f" --{name} {shlex.quote(written)}"
    return text


def _next_command(choice: RowResult, recipe: str, data: str, settings: str) -> str:
    if data == EMBEDDED:
        return "irpe ablate --data FOLDER (your images)"
    row = choice.row
    options = f"--data {shlex.quote(data)}{settings} --encoding {row.encoding}"
    options += f" --absolute {row.absolute}"
    for name, factor in row.rates.items():
        options += f" --{name.replace('_', '-')} {factor:g}"
    return f"irpe train {recipe} {options}"
