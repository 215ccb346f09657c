"""`irpe explore`: the page to explore encodings and runs."""

import os
import sys
import webbrowser
from pathlib import Path
from typing import Annotated

from irpe.cli.commands.show_run import capture_run, choose
from irpe.cli.load import find_model
from irpe.errors import UserError
from irpe.files import write_text


def explore(
    run: Annotated[Path | None, "Show what this run, or saved model, has learned.", "RUN"] = None,
    *,
    image: Annotated[Path | None, "The picture for RUN [the one in the package].", "FILE"] = None,
    block: Annotated[list[int] | None, "An equipped attention; repeat it [all]."] = None,
    output: Annotated[Path, "The page, .html.", "FILE"] = Path("explorer.html"),
) -> None:
    """Open a page to explore encodings and runs: one file, no network.

    The page is written, its path printed, and opened in a browser where there is one.

    Examples:
        irpe explore
        irpe explore runs/laptop -o page.html
    """
    if run is None and (image is not None or block):
        raise UserError("--image and --block belong to a run: name one, irpe explore RUN")
    if run is not None:
        find_model(run)
    from irpe.train.run import Run
    from irpe.viz import explorer_page
    from irpe.viz.canvas import check_output

    check_output(output, (".html",))
    if run is None:
        page = explorer_page()
    else:
        calls, seen = capture_run(run, [image] if image else [])
        page = explorer_page(choose(calls, block) if block else calls, seen, Run(run).label)
    write_text(output, page)
    print(f"wrote {output}")
    if _has_screen():
        webbrowser.open(output.resolve().as_uri())


def _has_screen() -> bool:
    """Returns whether somebody sits before a screen on which a browser can open."""
    is_named = bool({"DISPLAY", "WAYLAND_DISPLAY"} & {*os.environ})
    return sys.stdout.isatty() and (is_named or sys.platform in ("darwin", "win32"))
