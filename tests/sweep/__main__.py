"""Writes docs/reference/models-of-*.md: which models can be equipped, and why not others.

python -m tests.sweep
python -m tests.sweep --output FOLDER
"""

import argparse
from pathlib import Path

from tests.sweep import page, timm_models, transformers_models


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("docs/reference"))
    folder = parser.parse_args().output
    pages = {
        "models-of-timm.md": page.render_timm(timm_models.verdicts()),
        "models-of-transformers.md": page.render_transformers(transformers_models.verdicts()),
    }
    for name, text in pages.items():
        (folder / name).write_text(text)
        print(f"written to {folder / name}")


if __name__ == "__main__":
    main()
