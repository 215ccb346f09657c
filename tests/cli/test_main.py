"""The program as a whole: help, version, errors."""

import subprocess
import sys

import pytest
import torch
from cli.terminal import irpe
from train.processes import start

from irpe.cli.main import main
from irpe.extras import require

pytest.importorskip("typer", reason="needs the extra 'cli'")


VERSION = """
import runpy, sys
sys.argv = ["irpe", "--version"]
try:
    runpy.run_module("irpe", run_name="__main__")
finally:
    print([name for name in ("timm", "accelerate") if name in sys.modules])
"""


def test_the_module_is_the_program_and_loads_no_library_of_models_for_nothing(tmp_path):
    process = start("-c", VERSION, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert process.communicate()[0] == "irpe 0.1.0\n[]\n"
    assert process.returncode == 0


def test_the_program_leaves_its_process_group(tmp_path, monkeypatch):
    """A process that ends in a group may abort, one time in four."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(sys, "argv", ["irpe", "--version"])
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    with pytest.raises(SystemExit):
        main()
    assert not torch.distributed.is_initialized()


def test_no_arguments_show_the_help(tmp_path):
    assert "Usage: irpe" in irpe(cwd=tmp_path).stdout


def test_a_missing_package_is_asked_for_by_its_extra():
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'irpe\[viz\]'"):
        require("no_such_package_at_all", "viz")
