"""A Lightning module with an equipped model: rates, checkpoints, resuming, saving."""

from functools import cache

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from adapters.small_models import images, make_vit
from finetuning.small import tables_of
from torch.utils.data import DataLoader, TensorDataset

import irpe
from irpe.core.learning_rates import TABLE_LR

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*(num_workers|pin_memory|isinstance|LeafSpec|treespec).*"),
    pytest.mark.filterwarnings("ignore:.*Checkpoint directory.*"),
]
LR = 1e-2


def lightning():
    """Imported where it is used: every process of a test run loads this file."""
    return pytest.importorskip("lightning", reason="needs Lightning: pip install lightning")


@cache
def classifier_type():
    class Classifier(lightning().LightningModule):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def training_step(self, batch, index):
            x, labels = batch
            return F.cross_entropy(self.model(x), labels)

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(irpe.parameter_groups(self.model, 0.05, lr=LR))
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
            step = {"scheduler": schedule, "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": step}

    return Classifier


def make_module():
    model = make_vit(dynamic_img_size=True)
    return classifier_type()(irpe.equip(model, "product-contextual-qkv")).train()


def fit(module, max_epochs, folder, **arguments):
    trainer = lightning().Trainer(
        max_epochs=max_epochs, default_root_dir=folder, accelerator="cpu", devices=1, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    data = TensorDataset(images(32, 48, batch=8), torch.arange(8) % 5)
    trainer.fit(module, DataLoader(data, batch_size=4), **arguments)
    return trainer


def test_training_resuming_and_saving(tmp_path):
    whole = make_module()
    trainer = fit(whole, 2, tmp_path)
    rates = [group["initial_lr"] for group in trainer.optimizers[0].param_groups]
    assert rates == [LR, LR, LR * TABLE_LR]
    assert all(table.any() for table in tables_of(whole).values())

    first = fit(make_module(), 1, tmp_path)
    first.save_checkpoint(tmp_path / "half.ckpt")
    resumed = make_module()
    fit(resumed, 2, tmp_path, ckpt_path=tmp_path / "half.ckpt", weights_only=False)
    torch.testing.assert_close(resumed.state_dict(), whole.state_dict(), rtol=0, atol=0)

    trainer.save_checkpoint(tmp_path / "whole.ckpt")
    plain = irpe.equip(make_vit(dynamic_img_size=True), "product-contextual-qkv")
    file = tmp_path / "whole.ckpt"
    loaded = classifier_type().load_from_checkpoint(file, model=plain, weights_only=False)
    irpe.save_equipped(whole.model, tmp_path / "model")
    x = images(32, 48)
    expected = whole.model.eval()(x)
    assert torch.equal(loaded.model.eval()(x), expected)
    assert torch.equal(irpe.load_equipped(tmp_path / "model")(x), expected)
