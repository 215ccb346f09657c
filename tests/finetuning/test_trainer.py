"""transformers' Trainer with an equipped model: rates, saving, resuming, the best checkpoint."""

import copy
import functools
import logging

import pytest
import torch
from adapters.hosts.table import make_detr
from adapters.hosts.transformers.test_towers import make_siglip2
from finetuning.small import (
    equipped,
    labelled,
    make_dinov2,
    make_transformers_vit,
    tables_of,
)

import irpe
from irpe.core.learning_rates import TABLE_LR

transformers = pytest.importorskip("transformers", reason="needs the extra 'transformers'")
pytest.importorskip("accelerate", reason="Trainer needs accelerate")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]

LR = 1e-2


def make_trainer(model, folder, groups=None, **arguments):
    settings = {
        "max_steps": 4, "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2,
        "per_device_train_batch_size": 4, "learning_rate": LR, "report_to": "none",
        "use_cpu": True, "disable_tqdm": True, "logging_steps": 1,
    }  # fmt: skip
    groups = irpe.parameter_groups(model, weight_decay=0.05, lr=LR) if groups is None else groups
    return transformers.Trainer(
        model,
        transformers.TrainingArguments(str(folder), **{**settings, **arguments}),
        train_dataset=labelled(),
        eval_dataset=labelled(4),
        optimizers=(torch.optim.AdamW(groups, LR), None),
    )


def assert_same(model, other):
    state = model.state_dict()
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, state[name]), name


GRID_COLUMNS = {
    "DINOv2": (make_dinov2, {}, {"pixel_values"}),
    "DETR": (make_detr, {}, {"pixel_values", "pixel_mask"}),
    "SigLIP 2": (make_siglip2, {"grid": (2, 5)}, {"pixel_values", "spatial_shapes"}),
}


@pytest.mark.parametrize(("make", "arguments", "needed"), GRID_COLUMNS.values(), ids=GRID_COLUMNS)
def test_columns_stay_that_the_grid_needs(tmp_path, make, arguments, needed):
    """Trainer drops the columns of a dataset that the model's forward does not name."""
    settings = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    plain, model = make(), irpe.equip(make(), "product-contextual-k", **arguments)
    columns = []
    for made in (plain, model):
        trainer = transformers.Trainer(made, settings)
        trainer._set_signature_columns_if_needed()
        columns.append(set(trainer._signature_columns))
    assert columns[0] == columns[1] >= needed


def test_training_saving_and_resuming(tmp_path):
    model = equipped(make_dinov2(), fill=False)
    start = copy.deepcopy(model.state_dict())
    trainer = make_trainer(model, tmp_path / "whole")
    trainer.train()
    rates = [group["initial_lr"] for group in trainer.optimizer.param_groups]
    assert rates == [LR, LR, LR * TABLE_LR]
    assert all(table.any() for table in tables_of(model).values())

    loaded = irpe.load_equipped(tmp_path / "whole" / "checkpoint-4")
    pixels = labelled()[0]["pixel_values"][None]
    assert torch.equal(loaded(pixels).logits, model.eval()(pixels).logits)

    resumed = equipped(make_dinov2(), fill=False)
    resumed.load_state_dict(start)
    folder = str(tmp_path / "whole" / "checkpoint-2")
    make_trainer(resumed, tmp_path / "resumed").train(resume_from_checkpoint=folder)
    assert_same(resumed, model)


class OwnForImageClassification(transformers.Dinov2ForImageClassification):
    """A class of a user; transformers takes the loss from its name."""


def test_a_checkpoint_of_a_class_of_a_user_is_loaded_into_one(tmp_path):
    model = equipped(OwnForImageClassification(make_dinov2().config), fill=False)
    make_trainer(model, tmp_path).train()
    loaded = irpe.load_equipped(
        tmp_path / "checkpoint-4", model=OwnForImageClassification(make_dinov2().config)
    )
    assert_same(loaded, model)


MODELS = {"DINOv2": make_dinov2, "ViT": make_transformers_vit}
KINDS = ["equipped", "plain", "plain, by the names of the model"]


def make_kind(make, kind):
    model = make()
    if kind == "equipped":
        equipped(model, fill=False)
    elif kind != "plain":
        model.save_pretrained = functools.partial(model.save_pretrained, save_original_format=False)
    return model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_checkpoints_are_loaded_whole(tmp_path, make, kind, caplog, monkeypatch):
    """transformers saves plain ViT and DINOv2 by names of earlier releases, which Trainer skips."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    model = make_kind(make, kind)
    arguments = {"load_best_model_at_end": True, "metric_for_best_model": "loss"}
    trainer = make_trainer(model, tmp_path / "best", list(model.parameters()), **arguments)
    trainer.train()
    is_whole = "missing keys in the checkpoint" not in caplog.text
    assert is_whole == (kind != "plain")
    if kind == "equipped":
        assert_same(model, irpe.load_equipped(trainer.state.best_model_checkpoint))

    caplog.clear()
    whole, resumed = make_kind(make, kind), make_kind(make, kind)
    make_trainer(whole, tmp_path / "whole", list(whole.parameters())).train()
    trainer = make_trainer(resumed, tmp_path / "resumed", list(resumed.parameters()))
    trainer.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    is_whole = "missing keys in the checkpoint" not in caplog.text
    is_same = all(map(torch.equal, whole.state_dict().values(), resumed.state_dict().values()))
    assert is_whole == is_same == (kind != "plain")
