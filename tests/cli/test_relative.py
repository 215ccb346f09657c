"""`irpe make-relative` and `irpe show positions-in` on a folder of pictures."""

import json

import numpy as np
import pytest
import timm
import torch
from cli.terminal import irpe as command
from PIL import Image
from safetensors.torch import save_file

import irpe
from irpe.tasks.classify.config import ClassifierConfig
from irpe.tasks.classify.task import build_model

NAME = "vit_tiny_patch16_224"
pytestmark = pytest.mark.filterwarnings("ignore:.*has no checksum")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Pictures in folders of folders, and weights at another size, with a head of 3 classes."""
    folder = tmp_path_factory.mktemp("relative")
    values = np.random.default_rng(0)
    for index in range(9):
        path = folder / "photos" / str(index % 2) / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(values.integers(0, 255, (40, 50, 3), np.uint8)).save(path)
    (folder / "photos" / "notes.txt").write_text("not a picture")
    torch.manual_seed(0)
    model = timm.create_model(NAME, img_size=32, num_classes=3)
    with torch.no_grad():
        model.pos_embed.normal_()
    save_file(model.state_dict(), folder / "weights.safetensors")
    return folder


ARGUMENTS = (NAME, "--weights", "weights.safetensors", "--image-size", "64", "--images", "photos")


@pytest.mark.parametrize("extra", [(), ("--recalibrate", 1, "--layer", 0, "--layer", 2)])
def test_a_model_and_its_report_are_written(folder, extra, tmp_path):
    out = tmp_path / "out"
    spec = "product-bias-k+unshared"
    done = command("make-relative", *ARGUMENTS, "-o", out, "--encoding", spec, *extra, cwd=folder)
    assert done.returncode == 0, done.stderr
    report = json.loads((out / "conversion.json").read_text())
    names = [each["name"] for each in report["attentions"]]
    assert names == [f"blocks.{n}.attn" for n in ((0, 2) if extra else range(12))]
    assert report["num_images"] == 9
    assert all(name in done.stdout for name in names)
    assert (out / "conversion.png").stat().st_size > 1000
    model = irpe.load_equipped(out)
    assert model.num_classes == 3
    (table,) = model.blocks[0].attn.rpe.bias_tables
    assert table.any()
    if not extra:
        config = ClassifierConfig(
            model=NAME, image_size=64, encoding=spec, absolute="none", initial=str(out)
        )
        trained = build_model(config, 7)  # a start for training, with another head
        torch.testing.assert_close(trained.blocks[0].attn.rpe.bias_tables[0], table)


def test_json_is_the_report(folder, tmp_path):
    out = tmp_path / "out"
    done = command("make-relative", *ARGUMENTS, "-o", out, "--count", 4, "--json", cwd=folder)
    assert json.loads(done.stdout)["num_images"] == 4


def test_positions_are_shown(folder, tmp_path):
    picture = tmp_path / "p.png"
    done = command("show", "positions-in", *ARGUMENTS, "-o", picture, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "blocks.11.attn" in done.stdout
    assert picture.stat().st_size > 1000


@pytest.mark.parametrize(
    "changed",
    [
        ("vit_nowhere", "--images", "photos"),
        (NAME, "--weights", "nowhere.safetensors", "--images", "photos"),
        (NAME, "--weights", "weights.safetensors", "--images", "nowhere"),
        (*ARGUMENTS, "--count", 3),
        (*ARGUMENTS, "--encoding", "rope-axial"),
        (*ARGUMENTS, "--layer", 40),
        ("photos", "--images", "photos", "--weights", "weights.safetensors"),
    ],
)
def test_mistakes_are_one_line_and_nothing_is_written(folder, changed, tmp_path):
    done = command("make-relative", *changed, "-o", tmp_path / "out", cwd=folder)
    assert done.returncode == 1
    assert done.stderr.rstrip().splitlines()[-1].startswith("irpe: ")
    assert not (tmp_path / "out").exists()
