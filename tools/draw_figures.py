"""Draws the figures of docs/gallery.md again: python tools/draw_figures.py [WORD].

Every `irpe show ... -o docs/...` and every `chromium ...` there is run as printed, from the root of
the repository, those that contain WORD if one is given. The page says which runs they need.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMMAND = re.compile(r"`((?:irpe|chromium) [^`]*-(?:o |-screenshot=)(?:docs/|page)[^`]*)`")


def main() -> None:
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    text = (ROOT / "docs/gallery.md").read_text()
    failed: list[str] = []
    for command in dict.fromkeys(" ".join(found.split()) for found in COMMAND.findall(text)):
        if word in command:
            print(f"$ {command}", flush=True)
            if subprocess.run(["bash", "-c", command], cwd=ROOT).returncode:
                failed.append(command)
    sys.exit("\n".join(["failed:", *failed]) if failed else 0)


main()
