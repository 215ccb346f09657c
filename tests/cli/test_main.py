"""The program as a whole: help, version, errors."""

import os
import signal
import subprocess
import sys
import time
import warnings
from signal import SIGTERM

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


def test_what_a_user_can_mend_is_one_line_and_1(tmp_path):
    done = irpe("train", "no_such_recipe", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("irpe: recipe 'no_such_recipe'")
    assert "\n" not in done.stderr
    assert irpe("train", "--no-such-option", cwd=tmp_path).returncode == 2


def failing(error):
    def fail(*_, **__):
        raise error

    return fail


def a_bug():
    return {}["nothing"]


def a_bug_with_a_value_error():
    return int("nothing")


@pytest.mark.parametrize("bug", [a_bug, a_bug_with_a_value_error])
def test_a_defect_is_one_line_that_says_so_and_70(tmp_path, monkeypatch, bug):
    monkeypatch.setattr("irpe.cli.train._print_recipes", bug)
    done = irpe("train", "--list", cwd=tmp_path)
    assert done.returncode == 70
    assert "internal error" in done.stderr
    assert "--debug" in done.stderr
    assert done.stderr.count("\n") == 1
    for arguments in (("--debug", "train", "--list"), ("train", "--list", "--debug")):
        shown = irpe(*arguments, cwd=tmp_path)
        assert shown.returncode == 70
        assert f"in {bug.__name__}" in shown.stderr


def test_a_value_error_of_another_library_is_a_defect(tmp_path, monkeypatch):
    monkeypatch.setattr("irpe.cli.train._print_recipes", failing(ValueError("not checked by us")))
    assert irpe("train", "--list", cwd=tmp_path).returncode == 70


def test_no_memory_is_not_a_defect(tmp_path, monkeypatch):
    monkeypatch.setattr("irpe.cli.train._print_recipes", failing(MemoryError()))
    done = irpe("train", "--list", cwd=tmp_path)
    assert (done.returncode, done.stderr[:19]) == (1, "irpe: out of memory")


def test_ctrl_c_is_130(tmp_path, monkeypatch):
    monkeypatch.setattr("irpe.cli.train._print_recipes", failing(KeyboardInterrupt()))
    assert irpe("train", "--list", cwd=tmp_path).returncode == 130


def test_a_warning_is_one_line(tmp_path, monkeypatch):
    def warn():
        warnings.warn("the file\n has no checksum", stacklevel=2)

    monkeypatch.setattr("irpe.cli.train._print_recipes", warn)
    before = warnings.showwarning
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        done = irpe("train", "--list", cwd=tmp_path)
        assert warnings.showwarning is before
    assert (done.returncode, done.stderr) == (0, "warning: the file has no checksum\n")


LOST = "[/build/gloo/transport/tcp/pair.cc:5] Connection reset by peer. GLHF!"


def test_a_lost_process_is_not_a_defect(tmp_path, monkeypatch):
    monkeypatch.setattr("irpe.cli.train._print_recipes", failing(RuntimeError(LOST)))
    done = irpe("train", "--list", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("irpe: another process of this run ended, cannot be reached")
    assert "IRPE_TIMEOUT (Connection reset by peer): see" in done.stderr


def test_sigterm_is_143(tmp_path, monkeypatch):
    monkeypatch.setattr("irpe.cli.train._print_recipes", lambda: os.kill(os.getpid(), SIGTERM))
    before = signal.getsignal(SIGTERM)
    assert irpe("train", "--list", cwd=tmp_path).returncode == 143
    assert signal.getsignal(SIGTERM) is before


def test_sigterm_in_a_callback_that_loses_exceptions_is_143(tmp_path, monkeypatch):
    class Left:
        def __del__(self):
            os.kill(os.getpid(), SIGTERM)

    def leave():
        left = Left()
        del left
        time.sleep(60)

    monkeypatch.setattr("irpe.cli.train._print_recipes", leave)
    before = sys.unraisablehook
    assert irpe("train", "--list", cwd=tmp_path).returncode == 143
    assert sys.unraisablehook is before


def test_a_reader_that_leaves_is_not_an_error(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    process = start(
        "-m", "irpe", "--help", cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert (process.communicate()[1], process.returncode) == ("", 141)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_an_error(tmp_path):
    with open("/dev/full", "w") as full:
        process = start(
            "-m", "irpe", "--help", cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True
        )
        said = process.communicate()[1]
    assert process.returncode == 1
    assert said == "irpe: [Errno 28] No space left on device\n"


@pytest.mark.parametrize("arguments", ["--version", "ablate --help", "show weights -h", "nonsense"])
def test_answers_that_need_no_torch_do_not_load_it(arguments):
    script = (
        "import sys; from irpe.cli.main import main; sys.argv[0] = 'irpe'\n"
        "try: main()\nfinally: print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments.split()], capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1] == "False False", done.stderr
