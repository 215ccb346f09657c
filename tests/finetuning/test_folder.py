"""The example that goes from a folder of class folders to a saved model."""

import runpy
from pathlib import Path

import pytest
import torch

import irpe

pytest.importorskip("PIL", reason="needs the extra 'train'")
EXAMPLE = str(Path(__file__).parents[2] / "examples" / "finetune_folder.py")


def write_images(folder, count=10):
    """Images of two classes: dark and light ones, which are not square."""
    from PIL import Image

    generator = torch.Generator().manual_seed(0)
    for name, offset in (("dark", 0), ("light", 128)):
        (folder / name).mkdir(parents=True)
        for index in range(count):
            pixels = offset + torch.randint(100, (40, 50, 3), generator=generator)
            Image.fromarray(pixels.byte().numpy()).save(folder / name / f"{index}.png")


def run(monkeypatch, folder, *arguments):
    small = ("--model", "vit_tiny_patch16_224", "--image-size", "32", "--weights", "random")
    command = [EXAMPLE, str(folder), *small, "--batch", "8", *arguments]
    monkeypatch.setattr("sys.argv", command)
    runpy.run_path(EXAMPLE, run_name="__main__")


@pytest.mark.slow
@pytest.mark.parametrize("splits", [("",), ("train", "val")], ids=["one folder", "train and val"])
def test_a_folder_becomes_a_model(tmp_path, monkeypatch, capsys, splits):
    for split in splits:
        write_images(tmp_path / "images" / split)
    rates, optimizer = [], torch.optim.AdamW

    def make_optimizer(groups):
        rates.extend(group["lr"] for group in groups)
        return optimizer(groups)

    monkeypatch.setattr("torch.optim.AdamW", make_optimizer)
    output = tmp_path / "model"
    arguments = ("--epochs", "4", "--lr", "1e-3", "--table-lr", "4", "--output", str(output))
    run(monkeypatch, tmp_path / "images", *arguments)
    out = capsys.readouterr().out
    assert rates == [1e-3, 1e-3, 4e-3]
    assert "random weights" in out
    assert "accuracy on the held-out images 100.0 %" in out
    assert "classes in order: dark, light" in out
    model = irpe.load_equipped(output)
    tables = [p for name, p in model.named_parameters() if ".rpe." in name]
    assert len(tables) == 12
    assert all(table.any() for table in tables)


def test_a_folder_without_classes_is_refused(tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match="has 0 folders: at least two classes are needed"):
        run(monkeypatch, tmp_path)
