"""Pictures as the inputs of models."""

import runpy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from irpe.viz import default_image, image_input, read_image

timm = pytest.importorskip("timm", reason="needs the extra 'timm'")
pillow = pytest.importorskip("PIL.Image", reason="needs the extra 'viz'")

ROOT = Path(__file__).parents[2]


def vit(**arguments):
    sizes = {"depth": 1, "embed_dim": 16, "num_heads": 2, **arguments}
    return timm.create_model("vit_tiny_patch16_224", **sizes)


def test_grey_models_get_grey_pictures_of_their_size():
    x, seen = image_input(vit(img_size=28, patch_size=4, in_chans=1), default_image())
    assert (x.shape, seen.mode, seen.size) == ((1, 1, 28, 28), "L", (28, 28))


def test_sizes_are_height_and_width():
    x, seen = image_input(vit(img_size=(32, 64), patch_size=8), default_image())
    assert (x.shape, seen.size) == ((1, 3, 32, 64), (64, 32))


def test_pixels_are_normalised_channel_by_channel():
    model = vit(img_size=2, patch_size=1)
    model.pretrained_cfg = {"mean": (0.1, 0.2, 0.3), "std": (0.5, 0.25, 1.0)}
    image = pillow.new("RGB", (2, 2))
    image.putpixel((1, 0), (255, 51, 102))  # column 1, row 0
    x, _ = image_input(model, image)
    expected = torch.tensor([0.9 / 0.5, 0.0, 0.1])
    torch.testing.assert_close(x[0, :, 0, 1], expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(x[0, :, 1, 1], torch.tensor([-0.2, -0.8, -0.3]))


def test_a_model_for_any_size_gets_the_picture_as_it_is_in_its_own_dtype():
    model = nn.Sequential(nn.Conv2d(3, 4, 3)).double()
    x, seen = image_input(model, pillow.new("RGB", (5, 7), "white"))
    assert (x.shape, x.dtype, seen.size) == ((1, 3, 7, 5), torch.float64, (5, 7))
    torch.testing.assert_close(x, torch.ones_like(x))


def test_a_model_of_tokens_takes_no_picture():
    with pytest.raises(ValueError, match=r"call irpe\.viz\.capture"):
        image_input(nn.TransformerEncoderLayer(8, 2), default_image())


@pytest.mark.parametrize("content", [b"", b"no image at all", b"\x89PNG\r\n\x1a\n cut short"])
def test_files_that_are_no_images_are_errors(tmp_path, content):
    path = tmp_path / "image.png"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is not an image that can be read"):
        read_image(path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read_image(tmp_path / "other.png")


def test_the_picture_in_the_package_is_drawn_by_its_script(tmp_path, monkeypatch):
    path = tmp_path / "scene.png"
    monkeypatch.setattr(sys, "argv", ["draw_scene.py", str(path)])
    runpy.run_path(str(ROOT / "examples/draw_scene.py"), run_name="__main__")
    drawn, shipped = (list(image.tobytes()) for image in (read_image(path), default_image()))
    drawn, shipped = torch.tensor(drawn), torch.tensor(shipped)
    assert default_image().size == (224, 224)
    assert (drawn - shipped).abs().double().mean() < 1  # releases of Pillow differ at edges


@pytest.mark.parametrize("path", ["x.jpg", Path("x.jpg")])
def test_a_path_in_place_of_a_picture(path):
    with pytest.raises(TypeError, match=r"pass irpe\.viz\.read_image\('x\.jpg'\)"):
        image_input(vit(), path)
