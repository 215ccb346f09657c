"""What a user can mend is one line and exit code 1, whichever room refuses it."""

import sys
import traceback
from pathlib import Path

import pytest

pytest.importorskip("rich", reason="needs the extra 'cli'")

import torch
from cli.terminal import irpe
from PIL import Image
from train.angles import AngleConfig, AngleTask
from train.little import CONFIG, write_run

import irpe.train as training
from irpe import RPEAttention, rpe_attention
from irpe.cli.main import understand
from irpe.errors import UserError

ROOT = Path(training.__file__).parents[1]
CASES = {  # the words of a command, and what its error names
    "core": ("show buckets product-contextual-z", "'z'"),
    "ops": ("train --config ops.json", "no tables"),
    "nn": ("train --config nn.json", "num_heads = 3"),
    "adapters": ("train laptop --encoding K --set builtin_bias=drop -o new", "'drop'"),
    "models": ("eval nowhere.pth --data embedded", "nowhere.pth"),
    "profile": ("gpu", "no GPU"),
    "train": ("train --resume nowhere", "nowhere"),
    "tasks": ("train laptop --data nowhere", "'nowhere'"),
    "viz": ("show buckets cross-bias-k --grid 3x5 --at 7,2", "(7, 2)"),
    "relative": (
        "make-relative run --images pictures --encoding rope-axial -o out",
        "'rope-axial@100'",
    ),
    "ablation": ("ablate --seeds 0", "seeds = 0"),
    "cli": ("eval nowhere", "nowhere"),
    "files": ("eval w.safetensors --model vit_tiny_patch16_224 --data embedded", "w.safetensors"),
    "extras": ("train laptop --log wandb", "irpe[wandb]"),
}


class Refusing(AngleTask):
    """A task of a user's, whose model is refused by the room that its configuration names."""

    def build(self, size=None):
        if self.config.optimizer == "nn":
            return RPEAttention(10, num_heads=3, spec="product-contextual-k")
        x = torch.zeros(1, 2, 9, 4)
        return rpe_attention(x, x, x, (), scale=1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run, pictures, and configurations of models that are refused."""
    folder = tmp_path_factory.mktemp("user")
    write_run(folder / "run", CONFIG.replace(encoding="none", absolute="keep"))
    (folder / "w.safetensors").write_text("nothing")
    (folder / "pictures").mkdir()
    for index in range(4):
        Image.new("L", (28, 28), index).save(folder / f"pictures/{index}.png")
    for room in ("nn", "ops"):
        config = AngleConfig(epochs=1, warmup_epochs=0, batch_size=4, optimizer=room)
        (folder / f"{room}.json").write_text(config.to_json())
    return folder


@pytest.fixture(autouse=True)
def _missing_and_refusing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr("train.angles.AngleTask", Refusing)


@pytest.mark.parametrize("room", CASES)
def test_one_line_and_exit_code_1(room, folder):
    words, said = CASES[room]
    done = irpe(*words.split(), cwd=folder)
    assert done.returncode == 1, done
    lines = [line for line in done.stderr.splitlines() if line.startswith("irpe: ")]
    assert done.stderr.splitlines()[-1:] == lines
    assert said in lines[0]


@pytest.mark.parametrize("room", CASES)
def test_the_room_refuses_it_itself(room, folder, monkeypatch):
    monkeypatch.chdir(folder)
    command, values = understand(CASES[room][0].split())
    with pytest.raises(UserError) as error:
        command(**values)
    files = [Path(frame.filename) for frame in traceback.extract_tb(error.tb)]
    inside = [file.relative_to(ROOT).parts[0] for file in files if file.is_relative_to(ROOT)]
    last = [name.removesuffix(".py") for name in inside if name != "errors.py"][-1]
    assert last == room


def test_there_is_a_case_for_every_room_that_refuses():
    refusing = {
        path.relative_to(ROOT).parts[0].removesuffix(".py")
        for path in ROOT.rglob("*.py")
        if "raise UserError" in path.read_text() or "raise missing(" in path.read_text()
    }
    assert refusing - {"errors", "lazy"} == CASES.keys()  # lazy names raise the error of extras
