"""Where a folder in the layout of COCO or Pascal VOC has its annotations; torch is not needed."""

from pathlib import Path

from irpe.errors import MissingFileError, UserError
from irpe.train.image_lists import check_lists


def find_annotations(data: str, split: str, holdout: float = 0.0) -> tuple[Path, Path | None]:
    """Returns the annotation file of a split, and COCO's folder of images; Pascal VOC has none.

    Where images of Pascal VOC are held out it is the folder of all annotations.

    Args:
        data: A folder. COCO: annotations/instances_NAME.json, where NAME starts with the split, and
            images in NAME/, images/NAME/ or images/. Pascal VOC: ImageSets/Main/SPLIT.txt,
            Annotations/ and JPEGImages/.
        split: For example "train".
        holdout: The fraction that is held out as "val" in Pascal VOC's layout without lists.
    """
    folder = Path(data)
    if not folder.is_dir():
        raise MissingFileError(f"data {data!r} is not a folder")
    coco = {_coco_name(path): path for path in (folder / "annotations").glob("instances_*.json")}
    lists, annotations = folder / "ImageSets" / "Main", folder / "Annotations"
    voc = {path.stem: path for path in lists.glob("*.txt")}
    if annotations.is_dir() and not coco:
        check_lists([*voc], lists, holdout)
    elif holdout:
        raise UserError(
            f"--holdout is for Pascal VOC without lists of images: {data} has no Annotations/ or "
            "those of COCO, leave it out"
        )
    if holdout:
        return annotations, None
    if bool(coco) == bool(voc):
        has = "both" if coco else "neither"
        raise (UserError if coco else MissingFileError)(
            f"{data} has {has} annotations/instances_*.json (COCO) {'and' if coco else 'nor'} "
            "ImageSets/Main/*.txt (Pascal VOC); one of them is needed"
        )
    if coco:
        name = _choose(split, [name for name in coco if split and name.startswith(split)], coco)
        return coco[name], _coco_images(folder, name)
    return voc[_choose(split, [name for name in voc if name == split], voc)], None


def _coco_name(path: Path) -> str:
    return path.stem.removeprefix("instances_")


def _choose(split: str, fitting: list[str], paths: dict[str, Path]) -> str:
    if split in fitting or len(fitting) == 1:
        return split if split in fitting else fitting[0]
    folder = next(iter(paths.values())).parent
    if not fitting:
        names = ", ".join(sorted(paths))
        raise MissingFileError(f"{folder} has no split {split!r}; it has {names}")
    names = ", ".join(sorted(paths[name].name for name in fitting))
    raise UserError(f"{folder} has several files for the split {split!r}: {names}; keep one")


def _coco_images(folder: Path, name: str) -> Path:
    candidates = [folder / name, folder / "images" / name, folder / "images"]
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    looked_for = ", ".join(f"{candidate}/" for candidate in candidates)
    raise MissingFileError(f"there are no images of {name}: looked for {looked_for}")
