"""Writes docs/reference/models-of-*.md: which models can be equipped, and why not others.

python -m tests.sweep
python -m tests.sweep --output FOLDER
python -m tests.sweep --known FILE  # goes on where a sweep with this file was interrupted
"""

import argparse
from pathlib import Path

from tests.sweep import page, timm_models, transformers_models
from tests.sweep.verdicts import Verdicts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("docs/reference"))
    parser.add_argument("--known", type=Path, help="what was found, a line for each model")
    arguments = parser.parse_args()
    folder, known = arguments.output, Verdicts(arguments.known)
    pages = {
        "models-of-timm.md": page.render_timm(timm_models.verdicts(known)),
        "models-of-transformers.md": page.render_transformers(transformers_models.verdicts(known)),
    }
    for name, text in pages.items():
        (folder / name).write_text(text)
        print(f"written to {folder / name}")


if __name__ == "__main__":
    main()
