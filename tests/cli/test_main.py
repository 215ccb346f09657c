"""The program as a whole: help, version, errors."""

import dataclasses
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import warnings
from importlib import metadata
from signal import SIGTERM

import pytest
import torch
from cli.terminal import irpe
from train.processes import start

from irpe.cli.main import COMMANDS, FIGURES, main, understand
from irpe.errors import UserError
from irpe.extras import require
from irpe.recipes import RECIPES

pytest.importorskip("rich", reason="needs the extra 'cli'")

HAVE_NONE = ("encodings",)  # one form of the command alone
WORK = "irpe.profile.catalogue.catalogue"  # what `irpe encodings` calls

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
    version, modules = process.communicate()[0].splitlines()
    assert version.startswith(f"irpe {metadata.version('irpe')}, ")
    assert modules == "[]"
    assert process.returncode == 0


def test_the_program_leaves_its_process_group(tmp_path, monkeypatch):
    """A process that ends in a group may abort, one time in four."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(sys, "argv", ["irpe", "--version"])
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    main()
    assert not torch.distributed.is_initialized()


def test_no_arguments_show_the_help(tmp_path):
    lines = irpe(cwd=tmp_path).stdout.splitlines()
    assert lines[0].startswith("usage: irpe ")
    assert {*COMMANDS} <= {line.split()[0] for line in lines if line.startswith("  ")}
    assert irpe("--help", cwd=tmp_path).stdout.splitlines() == lines


def test_a_missing_package_is_asked_for_by_its_extra():
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'irpe\[viz\]'"):
        require("no_such_package_at_all", "viz")


@pytest.mark.parametrize(
    ("words", "code", "named"),
    [
        ("train no_such_recipe", 1, "'no_such_recipe'"),
        ("train laptop --set epochs=0", 1, "epochs = 0"),
        ("train laptop --set min_l=1", 1, "did you mean 'min_lr'"),
        ("train laptop --set min_lr=x", 1, "'x'"),
        ("train laptop --set min_lr", 1, "NAME=VALUE"),
        ("train laptop --epochs 2 --set epochs=2", 1, "epochs is given twice"),
        ("nonsense", 2, "'nonsense'"),
        ("show wieghts", 2, "'weights'"),
        ("train --no-such-option", 2, "--no-such-option"),
        ("train --epoch 3 laptop", 2, "'--epochs'"),
        ("train laptop --min-lr 1", 2, "--set min_lr="),
        ("train detr_small --image-size 9", 2, "--image-size"),
        ("train laptop laptop_64", 2, "'laptop_64'"),
        ("train laptop --epochs x", 2, "'x'"),
        ("train laptop --model-args {", 2, "'{'"),
        ("ablate --encoding shaw", 2, "--encoding"),
        ("ablate --set seed=3", 1, "'seed'"),
        ("ablate --row none", 1, "'none'"),
        ("eval", 2, "PATH"),
    ],
)
def test_wrong_words_are_one_line_that_names_them(tmp_path, words, code, named):
    done = irpe(*words.split(), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith("irpe")
    assert named in done.stderr
    assert "\n" not in done.stderr.rstrip("\n")


def user_errors(error=UserError):
    """The class and all below it."""
    return [error, *(each for below in error.__subclasses__() for each in user_errors(below))]


@pytest.mark.parametrize("error", user_errors())
def test_every_error_that_a_user_can_mend_is_one_line_and_1(tmp_path, monkeypatch, error):
    monkeypatch.setattr(WORK, failing(error("write\n 7")))
    done = irpe("encodings", "--json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "irpe: write 7")


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
    monkeypatch.setattr(WORK, bug)
    done = irpe("encodings", "--json", cwd=tmp_path)
    assert done.returncode == 70
    assert "internal error" in done.stderr
    assert "--debug" in done.stderr
    assert done.stderr.count("\n") == 1
    for arguments in (("--debug", "encodings", "--json"), ("encodings", "--json", "--debug")):
        shown = irpe(*arguments, cwd=tmp_path)
        assert shown.returncode == 70
        assert f"in {bug.__name__}" in shown.stderr


def test_a_value_error_of_another_library_is_a_defect(tmp_path, monkeypatch):
    monkeypatch.setattr(WORK, failing(ValueError("not checked by us")))
    assert irpe("encodings", "--json", cwd=tmp_path).returncode == 70


def test_no_memory_is_not_a_defect(tmp_path, monkeypatch):
    monkeypatch.setattr(WORK, failing(MemoryError()))
    done = irpe("encodings", "--json", cwd=tmp_path)
    assert (done.returncode, done.stderr[:19]) == (1, "irpe: out of memory")


def test_ctrl_c_is_130(tmp_path, monkeypatch):
    monkeypatch.setattr(WORK, failing(KeyboardInterrupt()))
    assert irpe("encodings", "--json", cwd=tmp_path).returncode == 130


def test_a_warning_is_one_line(tmp_path, monkeypatch):
    def warn():
        warnings.warn("the file\n has no checksum", stacklevel=2)
        return []

    monkeypatch.setattr(WORK, warn)
    before = warnings.showwarning
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        done = irpe("encodings", "--json", cwd=tmp_path)
        assert warnings.showwarning is before
    assert (done.returncode, done.stderr) == (0, "warning: the file has no checksum\n")


LOST = "[/build/gloo/transport/tcp/pair.cc:5] Connection reset by peer. GLHF!"


def test_a_lost_process_is_not_a_defect(tmp_path, monkeypatch):
    monkeypatch.setattr(WORK, failing(RuntimeError(LOST)))
    done = irpe("encodings", "--json", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("irpe: another process of this run ended, cannot be reached")
    assert "IRPE_TIMEOUT (Connection reset by peer): see" in done.stderr


def test_sigterm_is_143(tmp_path, monkeypatch):
    monkeypatch.setattr(WORK, lambda: os.kill(os.getpid(), SIGTERM) or [])
    before = signal.getsignal(SIGTERM)
    assert irpe("encodings", "--json", cwd=tmp_path).returncode == 143
    assert signal.getsignal(SIGTERM) is before


def test_sigterm_in_a_callback_that_loses_exceptions_is_143(tmp_path, monkeypatch):
    class Left:
        def __del__(self):
            os.kill(os.getpid(), SIGTERM)

    def leave():
        left = Left()
        del left
        time.sleep(60)

    monkeypatch.setattr(WORK, leave)
    before = sys.unraisablehook
    assert irpe("encodings", "--json", cwd=tmp_path).returncode == 143
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


@pytest.mark.parametrize(
    "arguments",
    ["--version", "ablate --help", "train laptop --help", "show weights -h", "nonsense"],
)
def test_answers_that_need_no_torch_do_not_load_it(arguments):
    script = (
        "import sys; from irpe.cli.main import main; sys.argv[0] = 'irpe'\n"
        "try: main()\nfinally: print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments.split()], capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1] == "False False", done.stderr


@pytest.mark.parametrize(
    "words",
    [*COMMANDS, *(f"show {figure}" for figure in FIGURES), *(f"train {r}" for r in RECIPES)],
)
def test_help_fits_the_terminal_and_has_examples_that_are_understood(tmp_path, words):
    done = irpe(*words.split(), "--help", cwd=tmp_path)
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (0, "")
    assert lines[0].startswith(f"usage: irpe {words.split()[0]}")
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 80
    examples = done.stdout.partition("examples:\n")[2].strip().splitlines()
    assert examples or words in HAVE_NONE or words.startswith("train ")
    for line in examples if words != "show" else []:
        _, _, command = line.partition("irpe ")
        understand(shlex.split(command.replace("*", ""), comments=True))


def test_the_help_of_a_recipe_has_its_own_values_and_of_each_setting_one_way(tmp_path):
    help_of = {name: irpe("train", name, "--help", cwd=tmp_path).stdout for name in RECIPES}
    for name, recipe in RECIPES.items():
        text = " ".join(help_of[name].split())
        assert f"[{recipe().epochs}]." in text
        assert f"[{recipe().lr}]." in text
        for field in dataclasses.fields(recipe()):
            flag = "--" + field.name.replace("_", "-") + " "
            listed = re.findall(r"\w+", text.partition("--set NAME=VALUE")[2])
            ways = (flag in text) + (field.name in listed)
            assert ways == bool(field.metadata), field.name
