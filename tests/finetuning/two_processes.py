"""What two processes of gloo compute, each on a half of the batch: run by test_distributed."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from adapters.small_models import images, make_vit
from finetuning.small import equipped, tables_of
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import irpe

BATCH = images(32, 48, batch=4)


def make():
    return equipped(make_vit(dynamic_img_size=True)).train()


def loss_of(model, x):
    return model(x).square().mean()


def shard(model, *parts):
    """Shards parts of each attention, then the blocks, then the rest."""
    for block in model.blocks:
        for part in parts:
            fully_shard(block.get_submodule(part))
        fully_shard(block)
    return fully_shard(model)


def checkpointed(model):
    model.set_grad_checkpointing()
    return model


WAYS = {
    "ddp": lambda: DistributedDataParallel(make()),
    "ddp, checkpointed": lambda: DistributedDataParallel(checkpointed(make())),
    "fsdp": lambda: shard(make()),
    "fsdp, checkpointed": lambda: shard(checkpointed(make())),
    "fsdp of encodings": lambda: shard(make(), "attn.rpe"),
    "fsdp of a projection": lambda: shard(make(), "attn.qkv"),
    "fsdp of attentions": lambda: shard(make(), "attn.rpe", "attn"),
}


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def check_gradients(way):
    model = make()
    loss_of(model, BATCH).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    assert len(tables_of(model)) == 6
    model = WAYS[way]()
    half = BATCH.chunk(2)[dist.get_rank()]
    loss_of(model, half).backward()
    for name, parameter in model.named_parameters():
        actual, key = whole(parameter.grad), name.removeprefix("module.")
        torch.testing.assert_close(actual, expected.pop(key), rtol=1e-4, atol=1e-5)
    assert not expected


def check_round_trip(folder):
    """A sharded checkpoint is read into sharded models and into whole ones."""
    model = shard(make())
    with torch.no_grad():
        for table in tables_of(model).values():
            table.add_(1.0)
    expected = model(BATCH).detach()
    dcp.save(get_model_state_dict(model), checkpoint_id=folder)
    for other in (shard(make()), make()):
        assert (other(BATCH) - expected).abs().max() > 0.01
        state = get_model_state_dict(other)
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(other, state)
        torch.testing.assert_close(other(BATCH).detach(), expected)


def check_that_gathered_models_are_saved(folder):
    """What the error of `save_equipped` asks for, step by step."""
    model = shard(make())
    with torch.no_grad():
        for table in tables_of(model).values():
            table.add_(1.0)
    expected = model(BATCH).detach()
    with pytest.raises(ValueError, match=r"sharded, .* is a DTensor: gather it in all processes"):
        irpe.save_equipped(model, folder)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        whole = make()
        whole.load_state_dict(state)
        irpe.save_equipped(whole, folder)
    dist.barrier()
    torch.testing.assert_close(irpe.load_equipped(folder)(BATCH).detach(), expected)


def check_parts_that_cannot_be_sharded():
    """The list of tables of one role is never called, so that it would stay sharded."""
    model = shard(make(), "attn.rpe.key_tables")
    with pytest.raises(TypeError, match=r"fully_shard\(attention\.rpe\)"):
        model(BATCH)


def main(folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for way in WAYS:
        check_gradients(way)
    check_round_trip(f"{folder}/checkpoint")
    check_that_gathered_models_are_saved(f"{folder}/gathered")
    check_parts_that_cannot_be_sharded()
    (Path(folder) / f"done{dist.get_rank()}").touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
