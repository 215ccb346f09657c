"""What to do on these images, in words: cost beside gain, and no more than the data supports."""

import dataclasses
import json
import shlex
import statistics
from collections.abc import Sequence

from irpe.ablation.rotary import rotary_or_relative
from irpe.ablation.rows import AblationRow
from irpe.ablation.statistics import RowResult, compare, difference
from irpe.ablation.tuning import FACTORS_TEXT
from irpe.core.encodings import Joined, parse_encoding
from irpe.core.encodings.spec import RPESpec
from irpe.profile.catalogue import LINES
from irpe.recipes import RECIPES
from irpe.train.config import EMBEDDED, RunConfig
from irpe.train.optim import learns_tables

_OF_ROWS = {"data", "encoding", "absolute", "seed"}  # named elsewhere
_RATES = {"table_lr", "absolute_lr"}  # of rows as well, where they were searched


def find_reference(rows: Sequence[RowResult]) -> RowResult:
    """Returns the row that others are compared with: absolute, else the first with an effect."""
    plain = [row for row in rows if (row.row.encoding, row.row.absolute) == ("none", "keep")]
    active = [row for row in rows if not row.is_idle]
    return (plain or active or list(rows))[0]


def answer(rows: Sequence[RowResult], recipe: str, data: str, settings: str = "") -> list[str]:
    """Returns what to do, what the encodings are, and the next command.

    Args:
        rows: The results.
        recipe: The recipe that every cell trained.
        data: The data, as in a configuration.
        settings: What else the cells had in place of the recipe's own, as options.
    """
    reference = find_reference(rows)
    idle = [row for row in rows if row.is_idle]
    others = [row for row in rows if row is not reference and not row.is_idle]
    text = [
        f"{row.name} is no comparison: its encoding is next to nothing (without it the attention's "
        f"output changes by {row.effect:.2%}); {_remedy(row)}."
        for row in idle
    ]
    choice = reference
    if min(len(row.results) for row in rows) < 2:
        text.append("One seed: how much seeds differ is not known, so nothing is recommended.")
    elif others:
        choice, words = _as_they_are(reference, others)
        text.append(words)
        if _moves(reference):
            text.append(_moved(reference, others))
        text += rotary_or_relative(others)
    text += [*_rates(rows), *_meanings(rows)]
    if idle and not others:
        has_rate = any("--table-lr" in _remedy(row) for row in idle)
        more = " or a higher --table-lr" if has_rate else ""
        return [*text, f"Next: the same command with more --epochs{more}, and another -o"]
    if len(rows) == 1:
        return ["One row: there is nothing to compare it with.", *text, _another_row(reference.row)]
    return [*text, f"Next: {_next_command(choice, recipe, data, settings)}"]


def _another_row(row: AblationRow) -> str:
    is_absolute = (row.encoding, row.absolute) == ("none", "keep")
    other = "K=product-contextual-k" if is_absolute else "absolute=none,keep"
    return f"Next: the same command with another row, as in --row {other}"


def _remedy(row: RowResult) -> str:
    has_rate = not row.row.rates and learns_tables(row.row.encoding)
    return "train longer, or raise --table-lr" if has_rate else "train longer"


def _rates(rows: Sequence[RowResult]) -> list[str]:
    """Returns the rates that were searched, if they were."""
    found = [f"{row.name} {factor:g}" for row in rows for factor in row.row.rates.values()]
    if not found:
        return []
    return [
        f"Learning rates of tables (or of a learned absolute encoding): the best of {FACTORS_TEXT} "
        f"times the model's, searched on held-out training images: {', '.join(found)}."
    ]


def _meanings(rows: Sequence[RowResult]) -> list[str]:
    """Returns what the encodings are, a line for each meaning."""
    names: dict[str, list[str]] = {}
    for row in rows:
        names.setdefault(describe(row.row), []).append(row.name)
    return [f"{', '.join(of)}: {meaning}." for meaning, of in names.items() if meaning]


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


def _moves(row: RowResult) -> tuple[int, ...]:
    return row.measure.shifts[1:]


def _as_they_are(reference: RowResult, others: Sequence[RowResult]) -> tuple[RowResult, str]:
    better = [row for row in others if compare(row, reference) == "better"]
    if better:
        best = max(better, key=lambda row: row.mean())
        equal = [row for row in better if row is best or compare(row, best) == "tie"]
        choice = min(equal, key=lambda row: row.cost.step)
        where = reference.measure.unmoved
        words = f"{where}: use {choice.name}, {difference(choice, reference)} points"
        return choice, f"{words} over {reference.name}, at {_cost(choice, reference)}."
    best = max(others, key=lambda row: row.mean())
    found = {"tie": "is a tie", "worse": "is worse"}[compare(best, reference)]
    where = reference.measure.unmoved
    words = (
        f"{where}: keep {reference.name}. The best of the others, {best.name}, {found} "
        f"({difference(best, reference)}) at {_cost(best, reference)}"
    )
    is_dearer = best.cost.step > 1.05 * reference.cost.step
    return reference, words + (": not worth it here." if is_dearer else ".")


def _moved(reference: RowResult, others: Sequence[RowResult]) -> str:
    """Returns what to use if objects are not always where they were in training."""
    better = [row for row in others if _keeps_more(row, reference)]
    if not better:
        return f"If objects move: nothing here is clearly better than {reference.name}."
    best = max(better, key=_overall)
    text = f"If objects move: {_gains(best, reference)}"
    equal = [row for row in better if compare(row, reference) != "worse"]
    if best in equal or not equal:
        return f"{text}."
    second = max(equal, key=_overall)
    return f"{text}. Without a loss where they do not: {_gains(second, reference)}."


def _keeps_more(row: RowResult, reference: RowResult) -> bool:
    """Returns whether a row is better than another on moved images, and not only there."""
    verdicts = [compare(row, reference, shift) for shift in _moves(row)]
    is_better = "better" in verdicts and "worse" not in verdicts
    return is_better and _overall(row) > _overall(reference)


def _overall(row: RowResult) -> float:
    return statistics.mean(row.mean(shift) for shift in row.measure.shifts)


def _gains(row: RowResult, reference: RowResult) -> str:
    gains = [f"{difference(row, reference, shift)} moved by {shift}" for shift in _moves(row)]
    as_they_are = f"as they are {difference(row, reference)}"
    return f"use {row.name}, {', '.join([*gains, as_they_are])}, at {_cost(row, reference)}"


def _cost(row: RowResult, reference: RowResult) -> str:
    return f"{row.cost.step / reference.cost.step:.1f}x the time of a step"


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
    if len(choice.results) < 2:
        return "the same command with --seeds 3"
    if data == EMBEDDED:
        return "irpe ablate --data FOLDER (your images)"
    row = choice.row
    options = f"--data {shlex.quote(data)}{settings} --encoding {row.encoding}"
    options += f" --absolute {row.absolute}"
    for name, factor in row.rates.items():
        options += f" --{name.replace('_', '-')} {factor:g}"
    return f"irpe train {recipe} {options}"
