"""Writes docs/hosts.md: which models of timm and transformers can be equipped, and why not others.

python -m tests.sweep
python -m tests.sweep --output hosts.md
"""

import argparse
from pathlib import Path

from tests.sweep import page, timm_models, transformers_models


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("docs/hosts.md"))
    output = parser.parse_args().output
    output.write_text(page.render(timm_models.verdicts(), transformers_models.verdicts()))
    print(f"written to {output}")


if __name__ == "__main__":
    main()
