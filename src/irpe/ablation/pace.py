"""How long an ablation still takes: medians of whole steps of like cells."""

import statistics
from collections import defaultdict, deque
from collections.abc import Sequence

from irpe.ablation.cells import Cell
from irpe.ablation.results import MEASURES

_REMEMBERED = 400  # steps of a row


class Pace:
    """The pace of each row, and what is left.

    Args:
        cells: The cells that have not ended yet.
        jobs: How many run at a time.
    """

    def __init__(self, cells: Sequence[Cell], jobs: int) -> None:
        self.jobs = jobs
        self.left = {cell.name: cell for cell in cells}
        self.done = dict.fromkeys(self.left, 0)
        self.steps = 0
        self.seconds: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))
        self.evaluations: deque[float] = deque(maxlen=_REMEMBERED)

    def start(self, cell: Cell, steps: int, done: int) -> None:
        """A cell begins; every cell has the same number of steps."""
        self.steps, self.done[cell.name] = steps, done

    def step(self, cell: Cell, done: int, seconds: float) -> None:
        """A step of a cell is done."""
        self.done[cell.name] = done
        self.seconds[cell.row.name].append(seconds)

    def evaluate(self, seconds: float) -> None:
        """An epoch of a cell has been evaluated."""
        self.evaluations.append(seconds)

    def end(self, cell: Cell) -> None:
        """A cell has ended, well or not."""
        self.left.pop(cell.name, None)

    def fraction(self, cell: Cell) -> float:
        """Returns how much of a cell's training is done."""
        return self.done[cell.name] / max(self.steps, 1)

    def remaining(self) -> float | None:
        """Returns the seconds until all cells have ended; `None` before the first steps."""
        medians = {row: statistics.median(steps) for row, steps in self.seconds.items()}
        if not medians:
            return None
        usual = statistics.mean(medians.values())
        evaluation = statistics.median(self.evaluations) if self.evaluations else 0.0
        times = [
            (self.steps - self.done[name]) * medians.get(cell.row.name, usual)
            + (cell.config.epochs * (1 - self.fraction(cell)) + _num_shifts(cell)) * evaluation
            for name, cell in self.left.items()
        ]
        return max(sum(times) / self.jobs, max(times, default=0.0))


def _num_shifts(cell: Cell) -> int:
    """Returns how many more times the images of a cell are evaluated, shifted."""
    return len(MEASURES[cell.config.task].shifts) - 1
