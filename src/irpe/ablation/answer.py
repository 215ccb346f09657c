"""What to do on these images, as a value and in words: no more than the data supports."""

import dataclasses
import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean

from irpe.ablation.rows import AblationRow
from irpe.ablation.statistics import (
    RowResult,
    common_sizes,
    compare,
    find_probabilities,
    find_seeds,
    unmoved,
)
from irpe.ablation.tuning import FACTORS_TEXT
from irpe.ablation.verdicts import CONFIDENCE, MOST_SEEDS, SEEDS_FOR_HOLM, adjust
from irpe.core.encodings import Joined, parse_encoding
from irpe.core.encodings.model_only import CPVT, NoEncoding
from irpe.core.encodings.rope import RopeAxial, RopeMixed
from irpe.core.encodings.spec import RPESpec
from irpe.profile.catalogue import LINES
from irpe.recipes import RECIPES
from irpe.train.config import EMBEDDED, SETTINGS, RunConfig
from irpe.train.optim import learns_tables

_OF_ROWS = {"data", "encoding", "absolute", "seed"}  # named elsewhere
_RATES = {"table_lr", "absolute_lr"}  # of rows as well, where they were searched
_MEETS = {"k": "queries", "q": "keys", "v": "attention weights"}  # what the tables meet


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
    plain = [row for row in rows if _is_absolute(row.row)]
    active = [row for row in rows if not row.is_idle]
    return (plain or active or list(rows))[0]


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
    beside = (*_left_out(rows), *_warnings(rows), *_meanings(rows))
    if len(rows) == 1:
        headline = "One row: there is nothing to compare it with."
        other = "K=product-contextual-k" if _is_absolute(reference.row) else "absolute=none,keep"
        step = f"the same command with another row, as in --row {other}"
        return Answer(None, headline, beside, step)
    if reference.is_at_chance or not others:
        return _no_ground(rows, reference, beside)
    if min(len(row.results) for row in rows) < 2:
        headline = "One seed: how much seeds differ is not known, so nothing is recommended."
        return Answer(None, headline, beside, "the same command with --seeds 3")
    choice, headline = _as_they_are(reference, others)
    none = next((row for row in sound if _is_nothing(row.row)), None)
    if none and all(compare(row, none).verdict == "tie" for row in sound if row is not none):
        choice, headline = reference, (
            "Position does not matter on these images, as far as these seeds can tell: "
            f"{none.name} ties with every other row."
        )  # fmt: skip
    reasons = [
        *([_moved(reference, others)] if reference.shifts[1:] else []),
        *_at_sizes(reference, others),
        *_rotary_or_relative(others),
        *_chances(reference, others),
        _most_probable(sound),
        *(_ties(reference, others) if choice is reference else []),
    ]
    if not any(row.row.rates for row in rows) and any(learns_tables(r.row.encoding) for r in rows):
        reasons.append(
            "All rows had one learning rate for their tables; --tune (with another -o) gives each "
            "encoding its best one."
        )
    step = _next_command(choice, recipe, data, settings)
    return Answer(choice.name, headline, (*reasons, *beside), step)


def _is_absolute(row: AblationRow) -> bool:
    return (row.encoding, row.absolute) == ("none", "keep")


def _is_nothing(row: AblationRow) -> bool:
    return (row.encoding, row.absolute) == ("none", "none")


def _no_ground(rows: Sequence[RowResult], reference: RowResult, beside: tuple[str, ...]) -> Answer:
    """Returns the answer where there is nothing to compare, or nothing to compare with."""
    more = ""
    if reference.is_at_chance:
        stuck = [row.name for row in rows if row.is_at_chance]
        verb = "has" if len(stuck) == 1 else "have"
        headline = (
            f"{_listed(stuck)} {verb} not left chance ({_chance(reference)}): train longer before "
            "you compare."
        )
    else:
        headline = "Nothing here can be compared: see below."
        if any("--table-lr" in _remedy(row) for row in rows if row.is_idle):
            more = " or a higher --table-lr"
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
                f"{row.name} is not compared: it has not clearly left chance ({_chance(row)}) in "
                "every seed; train longer, or it cannot."
            )


def _remedy(row: RowResult) -> str:
    has_rate = not row.row.rates and learns_tables(row.row.encoding)
    return "train longer, or raise --table-lr" if has_rate else "train longer"


def _chance(row: RowResult) -> str:
    return f"{row.chance:.{row.digits}f}{' %' if row.measure.unit == '%' else ''}"


def _warnings(rows: Sequence[RowResult]) -> Iterator[str]:
    """Yields what weakens a comparison: several kinds of machines, a busy one, searched rates."""
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
        yield (
            "The machine was busy when steps were timed: those of "
            f"{_listed([row.name for row in noisy])} are off by up to "
            f"{max(row.cost.noise for row in noisy):.0%}."
        )
    if rates := [f"{row.name} {factor:g}" for row in rows for factor in row.row.rates.values()]:
        yield (
            f"Learning rates of tables (or of a learned absolute encoding): the best of "
            f"{FACTORS_TEXT} times the model's, searched on held-out training images: "
            f"{', '.join(rates)}."
        )


def _meanings(rows: Sequence[RowResult]) -> Iterator[str]:
    """Yields what the encodings are, a line for each meaning."""
    names: dict[str, list[str]] = {}
    for row in rows:
        names.setdefault(describe(row.row), []).append(row.name)
    yield from (f"{', '.join(of)}: {meaning}." for meaning, of in names.items() if meaning)


def describe(row: AblationRow) -> str:
    """Returns what a relative encoding is, in a line; nothing for what needs no words."""
    if _is_nothing(row):
        return "no position at all (patches are a set)"
    encoding = parse_encoding(row.encoding)
    if isinstance(encoding, NoEncoding):
        return ""
    if isinstance(encoding, Joined):
        tables = describe(AblationRow(row.name, str(encoding.tables), row.absolute))
        return f"queries and keys are rotated ({encoding.rotation}); {tables}"
    if not isinstance(encoding, RPESpec):
        return LINES.get(row.encoding.partition("@")[0], f"the encoding {encoding}")
    beside = {"keep": ", beside the absolute encoding", "none": ""}
    tail = beside.get(row.absolute, f", beside a {row.absolute}")
    where = f"for each relative position ({encoding.method})"
    if encoding.mode == "bias":
        return f"a learned score {where}, added{tail}"
    names = [_MEETS[target] for target in encoding.targets]
    each = "a learned vector" if len(names) == 1 else f"{len(names)} learned vectors"
    return f"{each} {where}, multiplied with {_listed(names)}{tail}"


def _as_they_are(reference: RowResult, others: Sequence[RowResult]) -> tuple[RowResult, str]:
    """Returns the row to use on images as they are, and the sentence that says so."""
    where = unmoved(reference)
    better = [row for row in others if compare(row, reference).verdict == "better"]
    if better:
        best = max(better, key=RowResult.merit)
        equal = [row for row in better if row is best or compare(row, best).verdict == "tie"]
        choice = min(equal, key=lambda row: row.cost.step)
        gain = _gain(choice, reference)
        cost = _cost(choice, reference)
        return choice, f"{where}: use {choice.name}, {gain} over {reference.name}, at {cost}."
    best = max(others, key=RowResult.merit)
    found = {"tie": "is a tie", "worse": "is worse"}[compare(best, reference).verdict]
    words = (
        f"{where}: keep {reference.name}. The best of the others, {best.name}, {found} "
        f"({_gain(best, reference)}) at {_cost(best, reference)}"
    )
    noise = max(best.cost.noise, reference.cost.noise)
    is_dearer = best.cost.step > (1.05 + noise) * reference.cost.step
    return reference, words + (": not worth it here." if is_dearer else ".")


def _moved(reference: RowResult, others: Sequence[RowResult]) -> str:
    """Returns what to use if objects are not always where they were in training."""

    def overall(row: RowResult) -> float:
        return mean(row.merit(shift) for shift in row.shifts)

    def gains(row: RowResult) -> str:
        found = {s: compare(row, reference, s).text(row.digits) for s in row.shifts}
        each = [f"{text} moved by {shift}" for shift, text in found.items() if shift]
        moved = ", ".join([*each, f"as they are {found[0]}"])
        return f"use {row.name}, {moved}, at {_cost(row, reference)}"

    better: list[RowResult] = []
    for row in others:
        verdicts = {compare(row, reference, shift).verdict for shift in row.shifts[1:]}
        is_better = "better" in verdicts and "worse" not in verdicts
        better += [row] if is_better and overall(row) > overall(reference) else []
    if not better:
        return f"If objects move: nothing here is clearly better than {reference.name}."
    best = max(better, key=overall)
    equal = [row for row in better if compare(row, reference).verdict != "worse"]
    text = f"If objects move: {gains(best)}."
    if best in equal or not equal:
        return text
    return f"{text} Without a loss where they do not: {gains(max(equal, key=overall))}."


def _at_sizes(reference: RowResult, others: Sequence[RowResult]) -> Iterator[str]:
    """Yields what to use at each other size of the input."""
    for size in common_sizes([reference, *others]):
        best = max((reference, *others), key=lambda row: row.merit(size))
        found = {row.name: compare(row, reference, size) for row in others}
        text = f"At {size} pixels: {best.name} is best, {best.mean(size):.{best.digits}f}"
        if best is not reference:
            text += f", {found[best.name].text(best.digits)} over {reference.name}"
        losers = [name for name, each in found.items() if each.verdict == "worse"]
        yield f"{text}; worse than {reference.name}: {_listed(losers)}." if losers else f"{text}."


def _rotary_or_relative(rows: Sequence[RowResult]) -> Iterator[str]:
    """Yields whether rotary or relative encodings are better here, and what both together give.

    The best row of each kind speaks for it, among those without an absolute encoding.
    """
    kinds: dict[str, list[RowResult]] = {"rotary": [], "relative": [], "both": [], "neither": []}
    for row in rows:
        if row.row.absolute == "none":
            kinds[_kind_of(row)].append(row)
    best = {kind: max(of, key=RowResult.merit) for kind, of in kinds.items() if of}
    if not {"rotary", "relative"} <= best.keys():
        return

    def differences(row: RowResult, other: RowResult) -> str:
        found = {shift: compare(row, other, shift) for shift in row.shifts}
        moved = [f"moved by {s} {each} ({each.verdict})" for s, each in found.items() if s]
        return ", ".join([f"{found[0]} points", *moved])

    pair = sorted((best["relative"], best["rotary"]), key=lambda row: -row.merit())
    better, other = pair
    verdict = "a tie" if compare(better, other).verdict == "tie" else _kind_of(better)
    named = [f"{row.name} (best of {len(kinds[_kind_of(row)])} {_kind_of(row)})" for row in pair]
    text = (
        f"Rotary or relative? {unmoved(better)}: {verdict}. {' against '.join(named)}: "
        f"{differences(better, other)}, at {better.cost.step / other.cost.step:.1f}x the time of a "
        "step."
    )
    if both := best.get("both"):
        found = {"better": "better than", "tie": "a tie with", "worse": "worse than"}
        words = found[compare(both, better).verdict]
        text += f" Together, {both.name}: {words} {better.name}, {differences(both, better)}."
    yield text


def _kind_of(row: RowResult) -> str:
    match parse_encoding(row.row.encoding):
        case Joined():
            return "both"
        case RopeAxial() | RopeMixed():
            return "rotary"
        case CPVT() | NoEncoding():
            return "neither"
        case _:
            return "relative"


def _gain(row: RowResult, reference: RowResult) -> str:
    points = " points" if row.measure.unit == "%" else ""
    return f"{compare(row, reference).text(row.digits)}{points}"


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
    together = zip(found, adjust([each.p_value for each in found.values()]), strict=True)
    lost = [name for name, p_value in together if name in claimed and p_value > 1 - CONFIDENCE]
    if not claimed:
        yield f"{text}."
    elif min(len(row.results) for row in (reference, *others)) < SEEDS_FOR_HOLM:
        yield (
            f"{text}: with two seeds nothing more can be said of all of them together; "
            f"--seeds {SEEDS_FOR_HOLM} can."
        )
    elif lost:
        yield f"{text}; for all comparisons together (Holm) not certain: {_listed(lost)}."
    else:
        yield f"{text}; all {len(claimed)} differences hold for all comparisons together (Holm)."


def _most_probable(rows: Sequence[RowResult]) -> str:
    """Returns which rows may be the best one."""
    found = sorted(zip(find_probabilities(rows), (row.name for row in rows), strict=True))[::-1]
    likely = [f"{name} {probability:.0%}" for probability, name in found if probability >= 0.05]
    return f"Probability of being the best row on images as they are: {', '.join(likely)}."


def _ties(reference: RowResult, others: Sequence[RowResult]) -> Iterator[str]:
    """Yields what would settle the tie of the best other row, and what that costs."""
    ties = [row for row in others if compare(row, reference).verdict == "tie"]
    if not ties:
        return
    best = max(ties, key=RowResult.merit)
    seeds = find_seeds(best, reference)
    many, cost = f"not even {MOST_SEEDS}" if seeds is None else str(seeds), ""
    if seeds is not None and best.seconds is not None and reference.seconds is not None:
        more = [seeds - len(row.results) for row in (best, reference)]
        minutes = (more[0] * best.seconds + more[1] * reference.seconds) / 60
        cost = f", about {max(minutes, 1):.0f} minutes of one cell at a time"
    yield (
        f"{best.name} and {reference.name}: {many} seeds each would settle this tie, if means and "
        f"noise stay as they are{cost}."
    )


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
    own, elsewhere = RECIPES[recipe](), _OF_ROWS | _RATES if is_tuned else _OF_ROWS
    return "".join(
        _as_option(each.name, value)
        for each in dataclasses.fields(config)
        if each.metadata and each.name not in elsewhere
        and (value := getattr(config, each.name)) != getattr(own, each.name)
    )  # fmt: skip


def _as_option(name: str, value: object) -> str:
    """Returns a setting as it is written on the command line."""
    text = "none" if value is None else json.dumps(value) if not isinstance(value, str) else value
    if name in SETTINGS:
        return f" --{name.replace('_', '-')} {shlex.quote(text)}"
    return f" --set {shlex.quote(f'{name}={text}')}"


def _next_command(choice: RowResult, recipe: str, data: str, settings: str) -> str:
    if data == EMBEDDED:
        return "irpe ablate --data FOLDER (your images)"
    row = choice.row
    rates = "".join(_as_option(name, f"{factor:g}") for name, factor in row.rates.items())
    return (
        f"irpe train {recipe} --data {shlex.quote(data)}{settings} --encoding {row.encoding} "
        f"--absolute {row.absolute}{rates}"
    )
