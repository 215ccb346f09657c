"""Where a command computes: options for the device and the threads of a process."""

from typing import Annotated

import typer

from irpe.errors import UserError

RUN_PANEL = "Run"  # the heading of the help for how a command runs
Device = Annotated[
    str,
    typer.Option(
        help="auto, cpu, or the kind of accelerator: cuda, ...", rich_help_panel=RUN_PANEL
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(help="Threads of a process [as many as cores].", rich_help_panel=RUN_PANEL),
]


def use_threads(count: int | None) -> None:
    """Sets the threads of this process; `None` leaves them as they are."""
    if count is None:
        return
    if count < 1:
        raise UserError(f"--threads {count} must be at least 1")
    import torch

    torch.set_num_threads(count)
