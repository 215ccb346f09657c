"""`irpe eval` of classifiers of every library."""

import json

import numpy as np
import pytest
import timm
import torch
import transformers
from adapters.hosts.table import make_dinov2, make_swin, make_torchvision_vit, make_vit
from adapters.small_models import make_encoder
from cli.terminal import irpe as command
from PIL import Image
from safetensors.torch import save_file
from timm.data import create_transform, resolve_data_config
from timm.layers import resample_abs_pos_embed

import irpe

SPEC = "product-contextual-k"
HALF, IMAGENET = ([0.5] * 3, [0.5] * 3), ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
CLIP = ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])
VISION = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
    "patch_size": 8, "image_size": 32,
}  # fmt: skip


def make_with_text(name, vision=VISION):
    """Returns a classifier whose configuration has one for images and one for texts."""
    config = getattr(transformers, f"{name}Config")(vision_config=vision, num_labels=5)
    return getattr(transformers, f"{name}ForImageClassification")(config)


MODELS = {
    "CLIP of transformers": (lambda: make_with_text("CLIP"), CLIP),
    "SigLIP of transformers": (lambda: make_with_text("Siglip"), HALF),
    "ViT of transformers": (lambda: make_vit(image_size=32), HALF),
    "DINOv2 of transformers": (make_dinov2, IMAGENET),
    "Swin of transformers": (lambda: make_swin(image_size=32), IMAGENET),
    "ViT of torchvision": (make_torchvision_vit, IMAGENET),
}


def write_images(folder, size):
    """Writes ten images of five classes, and returns them."""
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (10, size, size, 3), dtype=np.uint8)
    for index, image in enumerate(pixels):
        path = folder / "val" / str(index // 2)
        path.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path / f"{index}.png")
    return pixels


def expected_top1(model, pixels, mean, std):
    x = torch.tensor(pixels).permute(0, 3, 1, 2) / 255
    x = (x - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    with torch.no_grad():
        out = model(x)
    found = getattr(out, "logits", out).argmax(1)
    return 100 * (found == torch.arange(10) // 2).float().mean().item()


@pytest.mark.parametrize(("make", "normalization"), MODELS.values(), ids=MODELS)
def test_equipped_classifiers_of_other_libraries(tmp_path, make, normalization, monkeypatch):
    monkeypatch.setattr("irpe.tasks.classify.others._CROP", 1.0)
    model = irpe.equip(make(), SPEC)
    irpe.save_equipped(model, tmp_path / "model")
    pixels = write_images(tmp_path / "data", 32)
    done = command("eval", "model", "--data", "data", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "images are prepared with 32 pixels, crop 1.0" in done.stderr
    found = json.loads(done.stdout)
    assert found["num_images"] == 10
    assert found["top1"] == pytest.approx(expected_top1(model.eval(), pixels, *normalization))


def test_the_preparation_of_an_image_processor_is_used(tmp_path):
    irpe.equip(make_vit(image_size=32), SPEC).save_pretrained(tmp_path / "model")
    write_images(tmp_path / "data", 32)
    processor = tmp_path / "model" / "preprocessor_config.json"
    processor.write_text(json.dumps({"image_mean": [0.1, 0.2, 0.3], "image_std": [1, 1, 1]}))
    done = command("eval", "model", "--data", "data", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "mean (0.1, 0.2, 0.3), std (1.0, 1.0, 1.0)" in done.stderr
    processor.write_text("{}")
    done = command("eval", "model", "--data", "data", cwd=tmp_path)
    assert done.returncode == 1
    assert "preprocessor_config.json is damaged" in done.stderr


@pytest.mark.filterwarnings("ignore:.*has no checksum")
def test_a_file_of_timm_at_another_size(tmp_path):
    name, pixels = "vit_tiny_patch16_224", write_images(tmp_path / "data", 64)
    torch.manual_seed(0)
    model = timm.create_model(name, img_size=64, num_classes=5).eval()
    with torch.no_grad():
        model.pos_embed.normal_()
        model.head.weight.normal_()
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    arguments = ("weights.safetensors", "--model", name, "--image-size", 48, "--data", "data")
    done = command("eval", *arguments, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    small = timm.create_model(name, img_size=48, num_classes=5).eval()
    resampled = resample_abs_pos_embed(model.pos_embed.detach(), [3, 3], num_prefix_tokens=1)
    small.load_state_dict({**model.state_dict(), "pos_embed": resampled})
    transform = create_transform(
        **{**resolve_data_config({}, model=small), "input_size": (3, 48, 48)}
    )
    with torch.no_grad():
        logits = small(torch.stack([transform(Image.fromarray(each)) for each in pixels]))
    loss = torch.nn.functional.cross_entropy(logits, torch.arange(10) // 2).item()
    assert json.loads(done.stdout)["loss"] == pytest.approx(loss, rel=1e-4)

    save_file(
        {key: value for key, value in model.state_dict().items() if "head" not in key},
        tmp_path / "backbone.safetensors",
    )
    for wrong in (
        ("backbone.safetensors", *arguments[1:]),
        ("weights.safetensors", "--data", "data"),
        ("weights.safetensors", "--image-size", 48, "--data", "data"),
        ("data", *arguments[1:]),
    ):
        done = command("eval", *wrong, cwd=tmp_path)
        assert done.returncode == 1
        assert done.stderr.rstrip().splitlines()[-1].startswith("irpe: ")


def test_images_that_are_not_square(tmp_path):
    irpe.save_equipped(irpe.equip(make_vit(), SPEC), tmp_path / "model")
    done = command("eval", "model", "--data", ".", cwd=tmp_path)
    assert done.returncode == 1
    assert "images of (16, 40) pixels; irpe eval crops squares" in done.stderr


def test_a_model_that_takes_patches(tmp_path):
    vision = {name: value for name, value in VISION.items() if name != "image_size"}
    model = irpe.equip(make_with_text("Siglip2", vision), SPEC)
    irpe.save_equipped(model, tmp_path / "model")
    done = command("eval", "model", "--data", ".", cwd=tmp_path)
    assert done.returncode == 1
    assert "Siglip2ForImageClassification, which has no image size" in done.stderr


def test_a_model_that_is_not_a_classifier(tmp_path):
    model = transformers.ViTModel(make_vit(image_size=32).config)
    irpe.save_equipped(irpe.equip(model, SPEC), tmp_path / "model")
    done = command("eval", "model", "--data", ".", cwd=tmp_path)
    assert done.returncode == 1
    assert "holds a ViTModel, which is not an image classifier" in done.stderr


def test_an_encoder_of_torch_nn(tmp_path):
    irpe.save_equipped(irpe.equip(make_encoder(), SPEC, grid=(2, 3)), tmp_path / "model")
    done = command("eval", "model", "--data", ".", cwd=tmp_path)
    assert done.returncode == 1
    assert "internal" not in done.stderr


def test_a_root_without_the_dataset_that_it_belongs_to(tmp_path):
    irpe.save_equipped(irpe.equip(make_dinov2(), SPEC), tmp_path / "model")
    write_images(tmp_path / "data", 32)
    done = command("eval", "model", "--root", "x", cwd=tmp_path)
    assert (done.returncode, "--root x: it belongs to --data NAME" in done.stderr) == (1, True)
    done = command("eval", "model", "--data", "data", "--root", "x", cwd=tmp_path)
    assert done.returncode == 1
    assert "root 'x' is for datasets with a name (torch/NAME, hfds/NAME)" in done.stderr
