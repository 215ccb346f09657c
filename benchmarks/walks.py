"""How many files of training and the commands a command walks through, on 16 images.

A file counts if one of its functions is entered after the modules are loaded; `sys.setprofile`
notes them, in one process. Run it from the root of the repository:

    python -m benchmarks.walks
"""

import io
import sys
import tempfile
from collections.abc import Callable
from contextlib import chdir, redirect_stderr, redirect_stdout, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

from PIL import Image

import irpe
from irpe.cli.main import main

ROOT = Path(irpe.__file__).parent
HALF = ("ablation", "cli", "profile", "recipes", "tasks", "train", "viz")
_SKIPPED = ("<module>", "<listcomp>", "<genexpr>", "<lambda>", "<dictcomp>", "<setcomp>")


def walk(run: Callable[[], object]) -> list[tuple[str, str]]:
    """Returns the files and names of the functions that were entered, in order."""
    calls: list[tuple[str, str]] = []

    def note(frame: Any, event: str, _: object) -> None:
        name, path = frame.f_code.co_name, Path(frame.f_code.co_filename)
        if event == "call" and name not in _SKIPPED and path.is_relative_to(ROOT):
            file = path.relative_to(ROOT)
            if file.parts[0] in HALF:
                calls.append((str(file), name))

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


def call(*words: str) -> None:
    """Calls the program, and discards what it prints."""
    sys.argv = ["irpe", *words]
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        main()


def begin_ablation(*words: str) -> None:
    """Calls `irpe ablate` until its first cell would run."""
    stop = patch("irpe.ablation.comparison.run_cells", side_effect=KeyboardInterrupt)
    with stop, suppress(SystemExit):
        call("ablate", *words)


def write_images(folder: Path) -> None:
    """Writes 16 images of two classes for each split."""
    for split in ("train", "val"):
        for index in range(16):
            path = folder / split / "ab"[index % 2] / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (28, 28), 8 * index).save(path)


def show(title: str, calls: list[tuple[str, str]]) -> None:
    """Prints what a walk went through; with -v its functions too."""
    files = sorted({file for file, _ in calls})
    changes = sum(one[0] != other[0] for one, other in pairwise(calls))
    print(f"{title}: {len(set(calls))} functions in {len(files)} files, {changes} changes of file")
    if "-v" in sys.argv:
        for file in files:
            print(f"    {file}: {', '.join(sorted({name for f, name in calls if f == file}))}")


if __name__ == "__main__":
    train = ("train", "laptop", "--data", "images", "--epochs", "1", "--batch-size", "8")
    ablate = (*train[2:], "--set", "warmup_epochs=0", "--row", "K=K")
    verbose = [word for word in sys.argv[1:] if word == "-v"]
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        write_images(Path("images"))
        options = ("--encoding", "K", "--set", "warmup_epochs=0")
        call(*train, *options, "-o", "before")  # which loads all modules
        call("eval", "before")
        begin_ablation(*ablate, "-o", "a")
        walks = {
            "irpe train laptop": walk(lambda: call(*train, *options, "-o", "run")),
            "irpe eval": walk(lambda: call("eval", "run")),
            "irpe ablate, before a cell trains": walk(lambda: begin_ablation(*ablate, "-o", "b")),
        }
    sys.argv += verbose
    for title, calls in walks.items():
        show(title, calls)
