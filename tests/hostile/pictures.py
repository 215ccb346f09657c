"""Images in every mode that Pillow stores: their shades as they are meant, or refused by name."""

from functools import partial

import numpy as np
from hostile.cases import Case
from PIL import Image

from irpe.tasks.classify.sources import FolderSource
from irpe.train.images import BrokenImageError, convert_mode

# By name: what the elements 0 to 255 of a picture become, and Pillow's mode of the file.
GREY = {
    "8 bits": (lambda x: x.astype(np.uint8), "L"),
    "16 bits": (lambda x: x.astype(np.uint16) * 256 + 255, "I;16"),
    "32 bits": (lambda x: x.astype(np.int32), "I"),
    "16 bits in 32": (lambda x: x.astype(np.int32) * 256 + 17, "I"),
    "fractions": (lambda x: x.astype(np.float32) / 255, "F"),
    "floats of 8 bits": (lambda x: x.astype(np.float32), "F"),
    "floats of 16 bits": (lambda x: x.astype(np.float32) * 256 + 17, "F"),
}
COLOURS = ["RGB", "RGBA", "P", "LA", "1", "CMYK", "YCbCr", "LAB"]
WRONG = [-1.0, 1e6, np.nan, np.inf, -np.inf]


def _pixels(random):
    """Grey elements, of which one is as light as can be."""
    pixels = random.integers(0, 256, tuple(random.integers(1, 20, 2)))
    pixels[0, 0] = 255
    return pixels


def check_grey(folder, name, seed):
    """A grey picture as a TIFF file in a class folder, read in grey and in colour."""
    random = np.random.default_rng(seed)
    pixels = _pixels(random)
    make, mode = GREY[name]
    path = folder / f"{name}-{seed}" / "class" / "image.tiff"
    path.parent.mkdir(parents=True)
    Image.fromarray(make(pixels)).save(path)
    image, _ = FolderSource(path.parents[1]).read(0)
    if image.mode != mode:
        return f"mode {image.mode}"
    grey, colour = (np.asarray(convert_mode(image, wanted)) for wanted in ("L", "RGB"))
    is_equal = np.array_equal(grey, pixels) and np.array_equal(colour, pixels[..., None] + [0] * 3)
    return "equal" if is_equal else "other shades"


def check_colours(folder, mode, seed):
    """A picture of one colour: as Pillow converts it, from a file that keeps its mode."""
    random = np.random.default_rng(seed)
    plain = Image.new("RGB", (7, 5), tuple(random.integers(0, 256, 3).tolist()))
    image = plain if mode == "LAB" else plain.convert(mode)
    if mode == "LAB":
        image = Image.new("LAB", (7, 5), (int(random.integers(0, 256)), 128, 128))
    path = folder / f"{mode}-{seed}.tiff"
    image.save(path)
    with Image.open(path) as read:
        found = {wanted: convert_mode(read, wanted) for wanted in ("L", "RGB")}
    wrong = [wanted for wanted, each in found.items() if each.mode != wanted]
    expected = image.convert("RGB")
    is_equal = np.array_equal(np.asarray(found["RGB"]), np.asarray(expected))
    return "equal" if is_equal and not wrong else f"other colours {wrong}"


def check_wrong(folder, seed):
    """An element that no shade has: the image counts as broken, and the error says why."""
    random = np.random.default_rng(seed)
    pixels = _pixels(random).astype(np.float32)
    pixels[-1, -1] = value = random.choice(WRONG)
    if np.isfinite(value) and random.integers(2):
        pixels = pixels.astype(np.int32)
    path = folder / f"wrong-{seed}.tiff"
    Image.fromarray(pixels).save(path)
    with Image.open(path) as image:
        try:
            convert_mode(image, "L")
        except BrokenImageError as error:
            return "refused" if f"mode {image.mode} has elements from" in str(error) else str(error)
    return "taken"


def cases(seed, count, folder):
    """Yields `count` pictures of every kind."""
    for number in range(seed, seed + count):
        for name in GREY:
            yield Case(f"{name} {number}", partial(check_grey, folder, name, number))
        for mode in COLOURS:
            yield Case(f"{mode} {number}", partial(check_colours, folder, mode, number))
        yield Case(f"wrong {number}", partial(check_wrong, folder, number))
