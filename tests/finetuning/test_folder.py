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


@pytest.mark.slow
def test_tables_can_be_solved_for_first(tmp_path, monkeypatch, capsys):
    write_images(tmp_path / "images")
    arguments = ("--epochs", "1", "--absolute", "solve", "--output", str(tmp_path / "model"))
    run(monkeypatch, tmp_path / "images", *arguments)
    assert "held-out images: cosine" in capsys.readouterr().out
    (call,) = irpe.load_equipped(tmp_path / "model")._irpe_equipment
    assert call.absolute == "none"


def test_irpe_eval_prepares_images_as_the_example_does(tmp_path):
    import timm

    from irpe.tasks.classify.others import as_classifier
    from irpe.tasks.classify.sources import open_split
    from irpe.tasks.classify.transforms import eval_images
    from irpe.train.processes import Sample

    write_images(tmp_path / "train", 1)
    write_images(tmp_path / "val", 3)
    example = runpy.run_path(EXAMPLE)
    for name in ("deit_tiny_patch16_224", "vit_tiny_patch16_224", "deit3_small_patch16_224"):
        model = timm.create_model(name, depth=1, img_size=32)  # with crops of 0.9 and 1.0
        _, expected = example["make_datasets"](tmp_path, model)
        classifier = as_classifier(model, tmp_path)
        assert classifier.note is None
        source = open_split(str(tmp_path), "val")
        images = eval_images(source, classifier.config, classifier.preparation)
        assert len(source) == len(expected) == 6
        found = {source.filename(i): images[Sample(0, i, i)][0] for i in range(6)}
        for index, (path, _) in enumerate(expected.samples):
            assert torch.equal(found[path], expected[index][0]), (name, path)


def test_without_a_network_the_example_does_not_wait(monkeypatch, capsys):
    """The hub retries for a minute; a connection that fails tells as much."""
    from argparse import Namespace

    def refuse(*_):
        raise OSError("no network")

    monkeypatch.setattr("irpe.hub.getproxies", dict)
    monkeypatch.setattr("socket.create_connection", refuse)
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail(f"waits for {seconds} s"))
    make_model = runpy.run_path(EXAMPLE)["make_model"]
    model = make_model(
        Namespace(model="vit_pe_core_tiny_patch16_384", image_size=32, weights="pretrained")
    )
    out = capsys.readouterr().out
    assert "the weights of vit_pe_core_tiny_patch16_384 are not available" in out
    assert "random weights" in out
    assert model.patch_embed.img_size == (32, 32)


def test_a_folder_without_classes_is_refused(tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match="has 0 folders: at least two classes are needed"):
        run(monkeypatch, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--encoding", "product-contextal-k"), "error: mode 'contextal' is not one of"),
        (("--model", "deit_tny"), "error: --model 'deit_tny' is not a model of timm"),
        (("--output", "full"), "error: --output full has files in it: choose a new folder"),
    ],
)
def test_what_would_fail_late_is_refused_at_once(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/letter.txt").write_text("dear")
    with pytest.raises(SystemExit, match=message):
        run(monkeypatch, tmp_path / "missing", *arguments)
