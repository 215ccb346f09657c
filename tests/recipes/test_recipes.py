"""The paper's settings, and that every recipe builds what it says."""

import re
from pathlib import Path

import pytest
import torch

from irpe.recipes.classification import RECIPES
from irpe.recipes.detection import RECIPES as DETECTORS
from irpe.recipes.segmentation import RECIPES as SEGMENTERS
from irpe.tasks.classify.task import build_model
from irpe.tasks.segment.task import build_segmenter


@pytest.mark.parametrize("size", ["tiny", "small", "base"])
def test_deit_has_the_settings_of_the_paper(size):
    config = RECIPES[f"deit_{size}"]()
    assert config.model == f"deit_{size}_patch16_224"
    expected = {
        "optimizer": "adamw", "weight_decay": 0.05, "lr": 1e-3, "min_lr": 1e-5, "warmup_epochs": 5,
        "warmup_lr": 1e-6, "batch_size": 1024, "label_smoothing": 0.1, "drop_path": 0.1,
        "auto_augment": "rand-m9-mstd0.5-inc1", "mixup": 0.8, "cutmix": 1.0, "erasing": 0.25,
        "aug_repeats": 3, "epochs": 300, "image_size": 224,
    }  # fmt: skip
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_builds_its_model_and_tells_command_cost_and_score(name):
    config = RECIPES[name]()
    with torch.device("meta"):
        build_model(config, 10)
    for word in ("Command: ", f"irpe train {name} ", "Cost: ", "Score: "):
        assert word in RECIPES[name].__doc__


@pytest.mark.parametrize("name", SEGMENTERS)
def test_every_segmenter_can_be_built_and_tells_command_cost_and_score(name):
    config = SEGMENTERS[name]()
    with torch.device("meta"):
        build_segmenter(config.replace(initial=None, classes=("road", "sky")))
    for word in ("Command: ", f"irpe train {name} ", "Cost: ", "Score: "):
        assert word in SEGMENTERS[name].__doc__
    is_small = name == "seg_small"
    assert is_small or "not run here" in SEGMENTERS[name].__doc__


def test_the_detectors_of_the_paper_are_those_of_the_documentation():
    page = (Path(__file__).parents[2] / "docs/how-to/detect.md").read_text()
    lines = re.findall(
        r"^\| \d+ \| `(\w+)` \| (\w+) \| (\S+).* \| (\d+) \| ([\d.]+) \|", page, re.M
    )
    assert len(lines) == len(DETECTORS) - 1 == 9
    for name, absolute, encoding, epochs, ap in lines:
        config = DETECTORS[name]()
        assert config.absolute == {"sinusoid": "keep"}.get(absolute, absolute)
        assert config.encoding == encoding.strip("`")
        assert (config.epochs, config.low_lr_epochs) == (int(epochs), int(epochs) // 3)
        for text in (f"irpe train {name} --data COCO", f"Score: AP {ap} in the paper", "Cost: "):
            assert text in DETECTORS[name].__doc__
