"""How often the verdict of an ablation is wrong, and how often it finds a difference.

python -m benchmarks.verdicts [--draws 4000] [--stored] [-o FILE]

Draws ablations whose rows are equal, or differ by so many points from the first, with the noise of
seeds and images that docs/results/*.json has, and judges them by the rule of `irpe.ablation` and by
the rule that it replaces: every seed beats every seed, and the difference is more than twice its
standard error over the images. With `--stored`, judges the stored results again instead.
"""

import argparse
import json
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from irpe.ablation.verdicts import Verdict, adjust, judge
from irpe.files import write_text

RESULTS = Path(__file__).parents[1] / "docs" / "results"
STORED = ("embedded", "methods", "modern", "fashion-mnist", "natural", "segmentation")
SEEDS, ROWS, GAINS = (2, 3, 4, 5), (2, 3, 6, 10), (1.0, 2.0, 4.0)
BETWEEN = (  # comparisons of other rows: file, shift, rows, twice the error that was printed
    ("embedded", 0, "product bias", "none", 1.3),
    ("embedded", 0, "K", "none", 1.3),
    ("methods", 0, "cross", "euclidean", 1.1),
    ("methods", 0, "cross", "quantization", 1.1),
    ("modern", 0, "QKV", "rope-axial", 1.0),
    ("modern", 0, "K", "rope-axial", 1.0),
    ("modern", 0, "QKV", "K", 1.0),
    ("modern", 0, "rope-axial + K", "K", 1.0),
    ("modern", 0, "rope-axial + K", "rope-axial", 0.8),
    ("modern", 0, "decomposed", "K", 1.0),
    ("modern", 0, "log-cpb", "K", 1.0),
    ("modern", 0, "rope-axial", "rope-mixed", 1.0),
    ("modern", 1, "K", "rope-axial", 1.7),
    ("modern", 1, "K", "rope-mixed", 1.6),
    ("modern", 1, "rope-axial + K", "K", 1.6),
    ("modern", 1, "QKV", "rope-axial", 1.6),
    ("modern", 2, "K", "rope-axial", 1.6),
    ("modern", 2, "K", "rope-mixed", 1.6),
    ("modern", 2, "QKV", "rope-axial", 1.6),
    ("fashion-mnist", 0, "rope-axial", "QKV", 0.5),
    ("fashion-mnist", 0, "rope-axial + K", "rope-axial", 0.4),
    ("natural", 0, "rope-axial", "QKV", 1.2),
)
Scores = Sequence[float]
Rule = Callable[[Scores, Scores, float], Verdict]


@dataclass(frozen=True)
class Noise:
    """The noise of one table of results, in points.

    Args:
        name: The file and the shift of its test images.
        seeds: For each row, the standard deviation over its seeds.
        images: For each comparison, the standard error of the difference over the test images.
        count: The number of test images.
    """

    name: str
    seeds: tuple[float, ...]
    images: tuple[float, ...]
    count: int


@dataclass(frozen=True)
class Pair:
    """A stored comparison of a row with the reference.

    Args:
        where: The file and the shift of its test images.
        row: The row.
        reference: What it is compared with.
        own: The row's score for each seed.
        other: The reference's.
        image_error: The standard error of the difference over the test images, as printed.
        images: The number of test images.
    """

    where: str
    row: str
    reference: str
    own: Scores
    other: Scores
    image_error: float
    images: int


def stored_pairs(name: str) -> Iterator[Pair]:
    """Yields the comparisons of a file of results with its reference, with what it stores."""
    content: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    key = "mIoU" if "mIoU" in content["rows"][0] else "top1"
    rows = {row["row"]: [seed[key] for seed in row["seeds"]] for row in content["rows"]}
    first, *sentences = content["sentences"]
    count = int(first.split()[0].replace(",", ""))
    for shift, sentence in enumerate(sentences):
        reference = re.search(r"(?:than|with) ([^:]+):", sentence.split(": ", 1)[1])
        assert reference is not None, sentence
        verdicts = re.split(r"(?:better than|tie with|worse than) [^:]+: ", sentence)[1:]
        for text in verdicts:
            for row in rows:
                error = re.search(rf"(?:^|\), ){re.escape(row)} \([^)]* ± ([\d.]+)\)", text)
                if error is not None:
                    own, other = ([seed[shift] for seed in rows[r]] for r in (row, reference[1]))
                    where = f"{name}, moved by {shift}" if shift else name
                    image_error = max(float(error[1]), 0.05) / 2
                    yield Pair(where, row, reference[1], own, other, image_error, count)


def other_pairs(name: str) -> Iterator[Pair]:
    """Yields the comparisons of `BETWEEN` in a file of results."""
    content: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    count = int(content["sentences"][0].split()[0].replace(",", ""))
    for file, shift, *rows, twice in BETWEEN:
        if file == name:
            found = {row["row"]: row["seeds"] for row in content["rows"]}
            own, other = ([seed["top1"][shift] for seed in found[row]] for row in rows)
            where = f"{name}, moved by {shift}" if shift else name
            yield Pair(where, rows[0], rows[1], own, other, twice / 2, count)


def noise_of(name: str) -> list[Noise]:
    """Returns the noise of a file of results, for each shift of its test images."""
    pairs = list(stored_pairs(name))
    found: list[Noise] = []
    for where in dict.fromkeys(pair.where for pair in pairs):
        of_shift = [pair for pair in pairs if pair.where == where]
        rows = [of_shift[0].other, *(pair.own for pair in of_shift)]
        seeds = tuple(statistics.stdev(scores) for scores in rows)
        errors = tuple(pair.image_error for pair in of_shift)
        found.append(Noise(where, seeds, errors, of_shift[0].images))
    return found


def old_rule(own: Scores, other: Scores, image_error: float) -> Verdict:
    """The rule that was replaced."""
    if abs(statistics.fmean(own) - statistics.fmean(other)) <= 2 * image_error:
        return "tie"
    if min(own) > max(other):
        return "better"
    return "worse" if max(own) < min(other) else "tie"


def draw_ablation(
    noise: Noise, rows: int, seeds: int, gain: float, random: np.random.Generator
) -> tuple[np.ndarray, float]:
    """Returns scores (row, seed), the first row's being the reference's, and their image error.

    Args:
        noise: The noise of seeds and images: of each row any of the measured ones.
        rows: How many rows.
        seeds: The seeds of each.
        gain: How much better than the first all others are.
        random: The source of randomness.
    """
    deviations = random.choice(noise.seeds, size=(rows, 1))
    image_error = float(random.choice(noise.images))
    of_images = random.normal(0, image_error / np.sqrt(2), size=(rows, 1))
    scores = 60 + of_images + deviations * random.normal(size=(rows, seeds))
    scores[1:] += gain
    return scores, image_error


def measure(noise: Noise, seeds: int, draws: int) -> dict[str, Any]:
    """Returns in percent how often rows are called better, by rule, number of rows and gain."""
    random = np.random.default_rng(0)
    found: dict[str, Any] = {"noise": noise.name, "seeds": seeds}
    for rows in ROWS:
        counts = np.zeros(4)
        for _ in range(draws):
            scores, error = draw_ablation(noise, rows, seeds, 0.0, random)
            judged = [judge(row, scores[0], error, noise.count) for row in scores[1:]]
            wrong = [each.verdict == "better" for each in judged]
            old = [old_rule(row, scores[0], error) == "better" for row in scores[1:]]
            together = adjust([each.p_value for each in judged])
            holm = any(w and p < 0.05 for w, p in zip(wrong, together, strict=True))
            counts += (np.mean(wrong), any(wrong), holm, np.mean(old))
        names = ("each", "any", "any after Holm", "each, old rule")
        found |= _in_percent([f"wrong, {rows} rows, {name}" for name in names], counts / draws)
    for gain in GAINS:
        hits = np.zeros(2)
        for _ in range(draws):
            scores, error = draw_ablation(noise, 2, seeds, gain, random)
            hits += (
                judge(scores[1], scores[0], error, noise.count).verdict == "better",
                old_rule(scores[1], scores[0], error) == "better",
            )
        found |= _in_percent(
            [f"found, {gain:g} points", f"found, {gain:g} points, old rule"], hits / draws
        )
    return found


def _in_percent(names: Sequence[str], fractions: np.ndarray) -> dict[str, float]:
    return dict(zip(names, (100 * fractions).round(1).tolist(), strict=True))


def summarize(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yields a table in Markdown: mean and maximum over the noises, by the number of seeds."""
    columns = [name for name in found[0] if name not in {"noise", "seeds"}]
    yield f"| mean (most) over {len(found) // len(SEEDS)} noises, % | 2 | 3 | 4 | 5 seeds |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for column in columns:
        values = [[each[column] for each in found if each["seeds"] == seeds] for seeds in SEEDS]
        cells = (f"{statistics.fmean(of):.1f} ({max(of):.1f})" for of in values)
        yield f"| {column} | {' | '.join(cells)} |"


def judge_stored() -> Iterator[str]:
    """Yields each stored comparison, judged by both rules."""
    for name in STORED:
        for pair in (*stored_pairs(name), *other_pairs(name)):
            new = judge(pair.own, pair.other, pair.image_error, pair.images)
            old = old_rule(pair.own, pair.other, pair.image_error)
            changed = "" if new.verdict == old else f"   (was {old})"
            words = f"{pair.row} against {pair.reference}: {new} {new.verdict}{changed}"
            yield f"{pair.where}: {words}"


def main() -> None:
    """Prints, and writes where `-o` says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=4000)
    parser.add_argument("--stored", action="store_true")
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    if given.stored:
        print(*judge_stored(), sep="\n")
        return
    found: list[dict[str, Any]] = []
    for noise in (noise for name in STORED for noise in noise_of(name)):
        found += [measure(noise, seeds, given.draws) for seeds in SEEDS]
        print(noise.name, flush=True)
    print(*summarize(found), sep="\n")
    if given.output:
        write_text(given.output, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
