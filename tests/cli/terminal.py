"""The program as a user calls it."""

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass

import pytest

from irpe.cli.main import main


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


def irpe(*arguments, cwd):
    """Runs the program in this process, which has loaded everything already."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(cwd)
        patch.setenv("COLUMNS", "80")
        patch.setattr(sys, "argv", ["irpe", *map(str, arguments)])
        code = None
        try:
            main()
        except SystemExit as end:
            code = end.code
    if isinstance(code, str):
        return Done(1, out.getvalue(), err.getvalue() + code)
    return Done(code or 0, out.getvalue(), err.getvalue())
