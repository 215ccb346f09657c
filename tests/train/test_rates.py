"""Rates of tables and positions in a run, and whether the encoding does anything."""

import math

import pytest
import timm
import torch
from train.little import CONFIG, task, train, trainer
from train.streets import CONFIG as SEGMENTER

import irpe
from irpe.core.learning_rates import ABSOLUTE_LR, TABLE_LR
from irpe.profile.cost import COMPARED
from irpe.recipes import RECIPES
from irpe.tasks.classify.sources import EMBEDDED_CLASSES
from irpe.train import optim
from irpe.train.evaluation import measure_effect_of
from irpe.train.optim import build_optimizer, build_schedule, learns_tables, rate_fields
from irpe.train.overview import describe_run
from irpe.train.processes import make_accelerator
from irpe.train.run import read_metrics

BOTH = CONFIG.replace(absolute="keep", lr=1e-2, table_lr=7.0, absolute_lr=0.5, weight_decay=0.3)


def opened(config):
    """A task whose classes are known."""
    job = task(config)
    job.open("train", None)
    return job


def settings_by_name(config):
    model = opened(config).build()
    names = {id(p): name for name, p in model.named_parameters()}
    groups = build_optimizer(task(config).groups(model), config).param_groups
    return {names[id(p)]: (g["lr"], g["weight_decay"]) for g in groups for p in g["params"]}


def test_tables_and_the_absolute_encoding_have_rates_of_their_own():
    found = settings_by_name(BOTH)
    assert len(found) == len(list(opened(BOTH).build().parameters()))
    assert found["pos_embed"] == (5e-3, 0)
    tables = {name for name in found if ".rpe." in name}
    assert len(tables) == 6
    assert {found[name] for name in tables} == {(1e-2 * 7.0, 0)}
    assert found["blocks.0.attn.qkv.weight"] == (1e-2, 0.3)
    assert found["blocks.0.attn.qkv.bias"] == found["cls_token"] == (1e-2, 0)


def test_the_rate_that_is_logged_is_the_models(tmp_path):
    config = BOTH.replace(warmup_epochs=1, warmup_lr=0.0, min_lr=0.0)
    model = opened(config).build()
    optimizer = build_optimizer(task(config).groups(model), config)
    schedule = build_schedule(optimizer, config, 10)
    for step in (3, 10, 17):
        schedule.step_update(step)
        rates = sorted({group["lr"] for group in optimizer.param_groups})
        own = optimizer.param_groups[0]["lr"]
        assert rates == pytest.approx([0.5 * own, own, 7 * own])
    assert trainer(tmp_path, BOTH).lr == 1e-2


@pytest.mark.parametrize(
    ("config", "expected"),
    [  # the rates of the last steps of four epochs with two steps each
        (CONFIG.replace(epochs=4, low_lr_epochs=3), [1e-3, 1e-4, 1e-4, 1e-4]),
        (
            SEGMENTER.replace(epochs=4, poly_power=0.9, min_lr=0.0),
            [1e-3 * (1 - (2 * epoch - 1) / 8) ** 0.9 for epoch in range(1, 5)],
        ),
        (
            CONFIG.replace(epochs=4, warmup_epochs=1, warmup_lr=0.0, min_lr=0.0),
            [5e-4, *(1e-3 * (1 + math.cos(math.pi * step / 8)) / 2 for step in (3, 5, 7))],
        ),
    ],
    ids=["steps", "polynomial", "cosine"],
)
def test_schedules(config, expected):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    schedule, rates = build_schedule(optimizer, config, 2), []
    for step in range(8):
        schedule.step_update(step)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates[1::2] == pytest.approx(expected)


def test_recipes_of_the_paper_keep_the_papers_rates():
    small = {"laptop", "laptop_64", "detr_small", "seg_small"}
    for name, recipe in RECIPES.items():
        config = recipe()
        assert config.table_lr == (TABLE_LR if name in small else 1)
        assert getattr(config, "absolute_lr", 1) == (ABSOLUTE_LR if name in small else 1)


def test_an_optimizer_without_rates_for_groups_is_refused(monkeypatch):
    def ignores_rates(groups, opt, lr, **_):
        return torch.optim.SGD([p for group in groups for p in group["params"]], lr=lr)

    monkeypatch.setattr(optim, "create_optimizer_v2", ignores_rates)
    model = opened(BOTH).build()
    with pytest.raises(ValueError, match="'adamw' does not take a learning rate for each group"):
        build_optimizer(task(BOTH).groups(model), BOTH)


def test_the_effect_of_the_encoding_is_in_the_table_of_epochs(tmp_path):
    short = CONFIG.replace(epochs=1)
    slow = train(tmp_path / "slow", short.replace(table_lr=1e-3))
    fast = train(tmp_path / "fast", short.replace(table_lr=10.0))
    assert slow.effect < fast.effect / 100
    assert read_metrics(tmp_path / "fast")["effect"][-1] == fast.effect
    again = measure_effect_of(task(), fast.model, make_accelerator())
    assert again == fast.effect
    plain = train(tmp_path / "plain", short.replace(encoding="none", absolute="keep"))
    assert plain.effect is None
    assert "effect" not in read_metrics(tmp_path / "plain")


def test_a_run_is_described():
    images = [task(BOTH).open(split) for split in ("train", "val")]
    config = BOTH.replace(classes=EMBEDDED_CLASSES)
    facts = describe_run(config, *images, 1234, torch.device("cpu"))
    for fact, values in {
        "model": ("vit_tiny_patch16_224", "patch_size=7", "1,234"), "classes": ("10", "T-shirt"),
        "encoding": ("product-contextual-qkv",), "images": ("48", "20", "embedded"),
        "device": ("cpu",), "budget": ("2 epochs", "batch 8", "0.01", "7 times"),
    }.items():  # fmt: skip
        assert all(value in facts[fact] for value in values)
    plain = describe_run(config.replace(encoding="rope-axial"), *images, 1, torch.device("cpu"))
    assert "times" not in plain["budget"]


@pytest.mark.parametrize("encoding", [*COMPARED, "none", "rope-axial+alibi-2d"])
def test_which_encodings_have_a_rate_of_tables(encoding):
    with torch.device("meta"):
        model = timm.create_model("vit_tiny_patch16_224", depth=1)
        model = irpe.equip(model, encoding, absolute="none")
    assert learns_tables(encoding) == ("table_lr" in rate_fields(model).values())
