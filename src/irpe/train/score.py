"""Scores that name themselves: what tables, curves, bars and ablations print, whatever the task."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import isnan
from typing import Any, Self


@dataclass(frozen=True)
class Measure:
    """What a number of a score means.

    Args:
        key: Its name in files and in `--json`.
        name: What to call it.
        unit: "%", or nothing for a fraction or a loss.
        higher_is_better: Whether more of it is better.
        digits: How many digits after the point are shown.
        brief: Show it in the one line of an epoch, too.

    Examples:
        >>> import irpe.train
        >>> irpe.train.Measure("top1", "top-1", "%").text(75.3)
        'top-1 75.30'
    """

    key: str
    name: str
    unit: str = ""
    higher_is_better: bool = True
    digits: int = 2
    brief: bool = True

    def text(self, value: float) -> str:
        """Returns a value with its name, such as "top-1 75.30"."""
        return f"{self.name} {value:.{self.digits}f}"


@dataclass(frozen=True)
class Score:
    """What an evaluation found.

    Args:
        measures: What its numbers mean; the first is the one that is compared.
        details: The numbers, by the key of their measure; NaN where there is none.
        values: A number for each readable image, in the order of the images, whose mean is the
            compared one; empty where it is not such a mean.
        classes: The compared number of each class, where it has one.
        chance: The compared number of the best answer that does not look at the image.
        num_images: The images that count.
        num_broken: The images that could not be read.
        files: What `irpe eval` stores beside the score, by the name of the file.

    Examples:
        >>> from irpe.train.score import Measure, Score
        >>> top1, loss = Measure("top1", "top-1", "%"), Measure("val_loss", "loss", digits=4)
        >>> score = Score((top1, loss), {"top1": 75.0, "val_loss": 0.7}, num_images=4)
        >>> score.line()
        'top-1 75.00  loss 0.7000'
    """

    measures: tuple[Measure, ...]
    details: Mapping[str, float]
    values: tuple[float, ...] = ()
    classes: Mapping[str, float] = field(default_factory=dict[str, float])
    chance: float | None = None
    num_images: int = 0
    num_broken: int = 0
    files: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def measure(self) -> Measure:
        """What is compared."""
        return self.measures[0]

    @property
    def value(self) -> float:
        """The number that is compared."""
        return self.details[self.measure.key]

    def line(self, brief: bool = False) -> str:
        """Returns the score in words.

        Args:
            brief: Only the numbers that matter most.
        """
        shown = [measure for measure in self.measures if measure.brief or not brief]
        known = ((m, self.details[m.key]) for m in shown)
        return "  ".join(m.text(value) for m, value in known if not isnan(value))

    def row(self) -> dict[str, float]:
        """Returns the columns of the run's table."""
        return {**self.details, "val_broken": self.num_broken}

    def report(self) -> dict[str, Any]:
        """Returns what scores.json and `irpe eval --json` hold of it; null where there is none."""
        numbers = {key.removeprefix("val_"): _or_none(v) for key, v in self.details.items()}
        classes = {name: _or_none(value) for name, value in self.classes.items()}
        counts = {"num_images": self.num_images, "num_broken": self.num_broken}
        return {**numbers, **({"classes": classes} if classes else {}), **counts}

    def to_json(self) -> dict[str, Any]:
        """Returns all but the files, as `from_json` takes it."""
        content = {**asdict(self), "values": list(self.values)}
        content["measures"] = [asdict(measure) for measure in self.measures]
        del content["files"]
        return content

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Returns the score that `to_json` described."""
        measures = tuple(Measure(**measure) for measure in content["measures"])
        fields: dict[str, Any] = {**content, "values": tuple(content["values"])}
        fields["measures"] = measures
        return cls(**fields)


def _or_none(value: float) -> float | None:
    return None if isnan(value) else value
