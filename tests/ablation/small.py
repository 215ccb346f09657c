"""A small ablation: a folder of images, and rows and a budget that train on it in a second."""

from train.little import CONFIG, little

from irpe.ablation.cells import CellResult, plan_cells
from irpe.ablation.rows import AblationRow
from irpe.train.task import Measure, Score

ROWS = [
    AblationRow("absolute", "none", "keep"),
    AblationRow("K", "product-contextual-k", "none"),
]
ENCODED = {"encoding": "none", "absolute": "keep"}


def write_images(folder, count=24):
    """Writes embedded images of two classes, and returns the folder's path as text."""
    for split, source in zip(("train", "val"), little(400), strict=True):
        for index in range(len(source) if split == "val" else count):
            image, label = source.read(index)
            path = folder / split / str(label % 2)
            path.mkdir(parents=True, exist_ok=True)
            image.save(path / f"{index}.png")
    return str(folder)


def small_cells(folder, data, seeds=2, rows=ROWS, **changes):
    """The cells of a small ablation in a folder."""
    return plan_cells(rows, CONFIG.replace(**ENCODED, data=data, **changes), seeds, folder)


TOP1 = (Measure("top1", "top-1", "%"), Measure("top5", "top-5", "%"))


def classified(values, chance=None):
    """The score of a classifier by whether each image was classified correctly."""
    values = tuple(100.0 * value for value in values)
    details = {"top1": sum(values) / len(values), "top5": 99.0}
    return Score(TOP1, details, values, chance=chance, num_images=len(values))


def cell_result(name, seed, *counts, images=100, chance=None, **fields):
    """The result of a cell that classifies the first `count` images correctly, for each shift."""
    scores = tuple(classified([n < count for n in range(images)], chance) for count in counts)
    return CellResult(name, seed, scores, tuple(range(len(counts))), **fields)
