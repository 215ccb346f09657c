"""A small ablation: a folder of images, and rows and a budget that train on it in a second."""

from train.little import CONFIG, little

from irpe.ablation.cells import plan_cells
from irpe.ablation.rows import AblationRow

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
