"""A run is logged to a service where that is asked for, and only then."""

import sys

import pytest
from train.little import CONFIG, task

from irpe.train.engine import Trainer
from irpe.train.processes import make_accelerator
from irpe.train.run import Run


def test_a_service_needs_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ModuleNotFoundError, match=r"wandb is not .*: pip install 'irpe\[wandb\]'"):
        make_accelerator(log="wandb")
    with pytest.raises(ValueError, match="--log 'wandbb' is not one of wandb; did you mean"):
        make_accelerator(log="wandbb")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of that package
def test_steps_and_epochs_are_logged_to_one_run_that_goes_on(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="needs the extra 'wandb'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for epochs in (2, 3):
        config = CONFIG.replace(epochs=epochs)
        Trainer(task(config), Run(tmp_path / "run"), make_accelerator(log="wandb")).fit()
        (tmp_path / "run/run.json").unlink()  # so that more epochs are accepted
    folder = tmp_path / "run/wandb"
    files = sorted(folder.glob("offline-run-*/*.wandb"))
    name = (folder / "id").read_text()
    assert [path.name for path in files] == [f"run-{name}.wandb"] * 2
    for key in (b"step/loss", b"epoch/top1", b"product-contextual-qkv"):
        assert all(key in path.read_bytes() for path in files)
