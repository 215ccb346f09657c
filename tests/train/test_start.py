"""A run from Python."""

import torch
from train.little import CONFIG, little

import irpe.train


def test_a_run_from_python_is_trained_saved_and_goes_on(tmp_path, monkeypatch):
    open_images = "irpe.tasks.classify.task.open_images"
    monkeypatch.setattr(open_images, lambda *_: little())
    fitted = irpe.train.train(CONFIG.replace(epochs=1), tmp_path / "run")
    assert len(fitted.history) == 1
    again = irpe.train.train(CONFIG.replace(epochs=1), tmp_path / "run")  # nothing is left to do
    loaded = irpe.train.load_run(tmp_path / "run")
    for name, tensor in fitted.model.state_dict().items():
        assert torch.equal(tensor, again.model.state_dict()[name])
        assert torch.equal(tensor, loaded.state_dict()[name])
    assert irpe.train.read_metrics(tmp_path / "run")["epoch"] == [1.0]
