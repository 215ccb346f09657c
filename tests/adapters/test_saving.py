import json
import os
import pickle
import random
import re
import stat
import threading
import warnings
from contextlib import contextmanager

import pytest
import safetensors.torch
import timm
import torch
from adapters.small_models import (
    images,
    make_encoder,
    make_swin,
    make_vit,
    perturb,
    state_of,
    tokens,
)
from torch import nn

import irpe
from irpe.adapters.equipped import equipment_of
from irpe.files import tensor_checksum, to_json, to_safetensors

SPEC = "product-contextual-k"
FILES = ["irpe.json", "model.safetensors"]


def make_attention():
    return nn.MultiheadAttention(16, 2, batch_first=True)


# How a plain model is made, how it is equipped, what it is called with.
TOLD = {
    "vit": (make_vit, {}, images()),
    "three encodings": (make_vit, {"spec": "cross-contextual-qkv+unshared"}, images()),
    "some layers": (make_vit, {"layers": (-1,), "spec": "euclidean-bias-k@3:5:9"}, images()),
    "told grid": (make_vit, {"grid": (4, 4), "num_prefix_tokens": 1}, images()),
    "sinusoid": (make_vit, {"absolute": "sinusoid"}, images()),
    "no absolute": (make_vit, {"absolute": "none"}, images()),
    "not square": (lambda: make_vit(img_size=(16, 40)), {}, images(16, 40)),
    "other sizes": (lambda: make_vit(dynamic_img_size=True), {}, images(16, 40)),
    "distilled": (lambda: make_vit("deit_tiny_distilled_patch16_224"), {}, images()),
    "registers": (lambda: make_vit("vit_small_patch14_reg4_dinov2"), {}, images()),
    "no head": (lambda: make_vit(num_classes=0, global_pool="avg"), {}, images()),
    "named layers": (lambda: make_vit(norm_layer="rmsnorm", act_layer="relu"), {}, images()),
    "grey images": (lambda: make_vit(in_chans=1), {}, images()[:, :1]),
    "features": (lambda: make_vit(features_only=True, out_indices=[1]), {}, images()),
    "swin with drop": (make_swin, {"builtin_bias": "drop"}, images()),
}
# Models that only their makers can make: they are passed when they are loaded.
UNTOLD = {
    "inside another": (lambda: nn.Sequential(make_vit(), nn.ReLU()), {}, images()),
    "torch.nn attention": (make_attention, {"grid": (2, 3)}, tokens()),
    "torch.nn encoder": (lambda: make_encoder(norm=True), {"grid": (6,)}, tokens()),
}
# Models with something that is easily left out of a description: if they can be built from what was
# saved, they must be the same.
SUBTLE = {
    "bfloat16": (lambda: make_vit().bfloat16(), {}, images().bfloat16()),
    "small swin": (make_swin, {}, images()),
    "other windows": (lambda: make_swin(window_size=4), {"builtin_bias": "drop"}, images()),
    "pool with prefix": (
        lambda: make_vit(global_pool="avg", pool_include_prefix=True),
        {},
        images(),
    ),
    "padded": (lambda: make_vit(dynamic_img_size=True, dynamic_img_pad=True), {}, images(13, 30)),
    "parallel attentions": (lambda: make_vit("vit_small_patch16_18x2_224"), {}, images()),
    "channels last": (lambda: make_vit().to(memory_format=torch.channels_last), {}, images()),
}


def equipped(make, arguments):
    return perturb(irpe.equip(make().eval(), **{"spec": SPEC, **arguments}))


def outputs(model, x):
    with torch.no_grad():
        out = model(x, x, x) if isinstance(model, nn.MultiheadAttention) else model(x)
    return list(out) if isinstance(out, tuple | list) else [out]


def assert_equal(model, expected, x):
    pairs = zip(outputs(model, x), outputs(expected, x), strict=True)
    assert all(torch.equal(a, e) for a, e in pairs)


@pytest.fixture
def saved(tmp_path):
    """A directory with a small model, and the model."""
    model = equipped(make_vit, {})
    irpe.save_equipped(model, tmp_path / "model")
    return tmp_path / "model", model


def change_description(path, **changes):
    description = json.loads((path / "irpe.json").read_text())
    del description["sha256"]
    (path / "irpe.json").write_text(to_json(description | changes))


def change_tensors(path, change):
    """Changes the tensors of a saved model, with checksums that fit."""
    tensors = change(safetensors.torch.load((path / "model.safetensors").read_bytes()))
    (path / "model.safetensors").write_bytes(to_safetensors(tensors))
    change_description(path, tensors=tensor_checksum(tensors))


@pytest.mark.parametrize(("make", "arguments", "x"), TOLD.values(), ids=TOLD)
def test_round_trip(tmp_path, make, arguments, x):
    model = equipped(make, arguments)
    irpe.save_equipped(model.train(), tmp_path / "deep" / "model")
    assert sorted(os.listdir(tmp_path / "deep" / "model")) == FILES
    assert os.listdir(tmp_path / "deep") == ["model"]
    loaded = irpe.load_equipped(tmp_path / "deep" / "model")
    assert not any(module.training for module in loaded.modules())
    assert type(loaded) is type(model)
    assert_equal(loaded, model.eval(), x)
    assert str(irpe.summary(loaded)) == str(irpe.summary(model))
    assert list(loaded.state_dict()) == list(model.state_dict())
    irpe.save_equipped(loaded, tmp_path / "again")
    for name in FILES:
        again = (tmp_path / "again" / name).read_bytes()
        assert again == (tmp_path / "deep" / "model" / name).read_bytes()


@pytest.mark.parametrize(("make", "arguments", "x"), UNTOLD.values(), ids=UNTOLD)
def test_models_that_cannot_be_described_are_passed(tmp_path, make, arguments, x):
    model = equipped(make, arguments)
    irpe.save_equipped(model, tmp_path / "model")
    with pytest.raises(ValueError, match="model=plain"):
        irpe.load_equipped(tmp_path / "model")
    plain = perturb(make(), seed=9)
    assert irpe.load_equipped(tmp_path / "model", model=plain) is plain
    assert_equal(plain, model, x)


@pytest.mark.parametrize(("make", "arguments", "x"), SUBTLE.values(), ids=SUBTLE)
def test_what_is_loaded_is_the_same_or_refused(tmp_path, make, arguments, x):
    model = equipped(make, arguments)
    irpe.save_equipped(model, tmp_path / "model")
    plain = perturb(make(), seed=9)
    assert_equal(irpe.load_equipped(tmp_path / "model", model=plain), model, x)
    if json.loads((tmp_path / "model" / "irpe.json").read_text())["host"] is None:
        with pytest.raises(ValueError, match="model=plain"):
            irpe.load_equipped(tmp_path / "model")
    else:
        assert_equal(irpe.load_equipped(tmp_path / "model"), model, x)


def test_blocks_with_different_encodings(tmp_path):
    model = irpe.equip(make_vit(), SPEC, layers=[0])
    perturb(irpe.equip(model, "cross-bias-k+unshared", layers=[1]))
    irpe.save_equipped(model, tmp_path / "model")
    assert_equal(irpe.load_equipped(tmp_path / "model"), model, images())


def in_dtypes(backbone, tables):
    model = equipped(make_vit, {}).to(backbone)
    for block in model.blocks:
        block.attn.rpe.to(tables)
    return model


@pytest.mark.parametrize(
    ("backbone", "tables"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float64, torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize("plain", [None, torch.float32, torch.bfloat16], ids=str)
def test_every_tensor_keeps_its_dtype(tmp_path, backbone, tables, plain):
    model = in_dtypes(backbone, tables)
    irpe.save_equipped(model, tmp_path / "model")
    passed = None if plain is None else make_vit().to(plain)
    state = irpe.load_equipped(tmp_path / "model", model=passed).state_dict()
    for name, tensor in model.state_dict().items():
        assert state[name].dtype == tensor.dtype == (tables if ".rpe." in name else backbone)
        assert torch.equal(state[name], tensor), name


def test_the_implementation_is_kept(tmp_path):
    model = irpe.equip(make_vit(), SPEC, impl="reference")
    irpe.save_equipped(model, tmp_path / "model")
    loaded = irpe.load_equipped(tmp_path / "model")
    for each in (model, loaded):
        assert [block.attn.rpe.impl for block in each.blocks] == ["reference"] * 2
    assert equipment_of(loaded) == equipment_of(model)


def test_a_file_that_names_no_implementation_leaves_the_choice(saved):
    path, model = saved
    (call,) = json.loads((path / "irpe.json").read_text())["equipment"]
    assert call.pop("impl") == "auto"
    change_description(path, equipment=[call])
    assert equipment_of(irpe.load_equipped(path)) == equipment_of(model)


def test_a_loaded_model_can_be_trained(saved):
    path, _ = saved
    model = irpe.load_equipped(path).train()
    model(images()).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert any(".rpe." in name for name in model.no_weight_decay())


def test_a_text_is_a_path(tmp_path):
    model = equipped(make_vit, {})
    irpe.save_equipped(model, str(tmp_path / "model"))
    assert_equal(irpe.load_equipped(str(tmp_path / "model")), model, images())


def test_an_older_save_is_replaced(saved):
    path, old = saved
    new = equipped(make_vit, {"spec": "cross-bias-k", "absolute": "none"})
    irpe.save_equipped(new, path)
    loaded = irpe.load_equipped(path)
    assert_equal(loaded, new, images())
    assert not torch.equal(outputs(loaded, images())[0], outputs(old, images())[0])
    assert os.listdir(path.parent) == ["model"]


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_what_is_not_ours_is_not_overwritten(tmp_path, kind):
    path = tmp_path / "thesis"
    kept = path
    if kind == "directory":
        path.mkdir()
        kept = path / "chapter"
    kept.write_text("all of it")
    with pytest.raises(FileExistsError, match="thesis exists and is not an equipped model"):
        irpe.save_equipped(equipped(make_vit, {}), path)
    assert kept.read_text() == "all of it"
    assert os.listdir(tmp_path) == ["thesis"]


def test_other_files_in_the_directory_of_an_older_save_stay(saved):
    path, _ = saved
    (path / "notes.txt").write_text("mine")
    (path / "more").mkdir()
    (path / "more" / "data").write_text("mine too")
    new = equipped(make_vit, {"spec": "cross-bias-k"})
    irpe.save_equipped(new, path)
    assert (path / "notes.txt").read_text() == "mine"
    assert (path / "more" / "data").read_text() == "mine too"
    assert sorted(os.listdir(path)) == sorted([*FILES, "more", "notes.txt"])
    assert_equal(irpe.load_equipped(path), new, images())


@pytest.mark.parametrize("left", [None, ".model.safetensors.a1b2", "model.safetensors"])
def test_what_a_killed_save_left_is_completed(tmp_path, left):
    (tmp_path / "model").mkdir()
    if left is not None:
        is_whole = not left.startswith(".")
        content = to_safetensors({"old": torch.ones(2)}) if is_whole else b"half"
        (tmp_path / "model" / left).write_bytes(content)
    model = equipped(make_vit, {})
    irpe.save_equipped(model, tmp_path / "model")
    assert_equal(irpe.load_equipped(tmp_path / "model"), model, images())


FOREIGN = {
    "safetensors": safetensors.torch.save({"theirs": torch.ones(2)}),
    "with metadata": safetensors.torch.save({"theirs": torch.ones(2)}, {"format": "pt"}),
    "something else": b"half",
}


BESIDE = {
    "nothing": None,
    "an empty object": "{}",
    "of another program": '{"architectures": ["ViTModel"]}',
    "ours": ...,
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
@pytest.mark.parametrize("beside", BESIDE.values(), ids=BESIDE)
def test_tensors_of_another_program_are_not_overwritten(saved, content, beside):
    path, model = saved
    (path / "model.safetensors").write_bytes(content)
    if beside is None:
        (path / "irpe.json").unlink()
    elif beside is not ...:
        (path / "irpe.json").write_text(beside)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with pytest.raises(FileExistsError, match="model exists and is not an equipped model"):
        irpe.save_equipped(model, path)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


def test_a_folder_with_names_like_ours_is_not_overwritten(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(FileExistsError):
        irpe.save_equipped(equipped(make_vit, {}), tmp_path)


@pytest.mark.parametrize("name", ["../model.safetensors", "a" * 63, 5, ["a"], ""], ids=str)
def test_a_checksum_is_one_or_the_description_is_damaged(saved, name):
    path, _ = saved
    change_description(path, tensors=name)
    with pytest.raises(ValueError, match=r"irpe\.json is damaged"):
        irpe.load_equipped(path)


@pytest.mark.parametrize("is_there", [True, False], ids=["there", "dangling"])
def test_symbolic_links_are_followed(tmp_path, is_there):
    model, target = equipped(make_vit, {}), tmp_path / "target"
    if is_there:
        irpe.save_equipped(equipped(make_vit, {"spec": "cross-bias-k"}), target)
        (target / "irpe.json").rename(tmp_path / "description")
        (target / "irpe.json").symlink_to("../description")
    (tmp_path / "link").symlink_to("target")
    irpe.save_equipped(model, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (target / "irpe.json").is_symlink() == is_there
    assert_equal(irpe.load_equipped(target), model, images())


@pytest.mark.parametrize("is_new", [True, False], ids=["new place", "old save"])
@pytest.mark.parametrize("step", ["tensors", "description", "first rename"])
def test_a_failing_write_leaves_what_was_there(tmp_path, saved, monkeypatch, step, is_new):
    path, old = saved
    target = path.with_name("new") if is_new else path
    fail_at(monkeypatch, step)
    new = equipped(make_vit, {"spec": "cross-bias-k"})
    with pytest.raises(OSError, match="disk is full"):
        irpe.save_equipped(new, target)
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["model"]
    assert_equal(irpe.load_equipped(path), old, images())


@pytest.mark.parametrize("step", ["tensors", "first rename"])
def test_a_failing_write_leaves_no_new_folder(tmp_path, monkeypatch, step):
    (tmp_path / "a").mkdir()
    fail_at(monkeypatch, step)
    with pytest.raises(OSError, match="disk is full"):
        irpe.save_equipped(equipped(make_vit, {}), tmp_path / "a" / "b" / "c" / "d")
    assert os.listdir(tmp_path) == ["a"]
    assert os.listdir(tmp_path / "a") == []


def test_folders_that_cannot_be_made_leave_none(tmp_path, monkeypatch):
    make_folder = os.mkdir

    def fail(path, *arguments):
        if os.path.basename(path) == "c" and os.path.isdir(os.path.dirname(path)):
            raise PermissionError("read-only")
        make_folder(path, *arguments)

    monkeypatch.setattr(os, "mkdir", fail)
    with pytest.raises(PermissionError, match="read-only"):
        irpe.save_equipped(equipped(make_vit, {}), tmp_path / "a" / "b" / "c")
    assert os.listdir(tmp_path) == []


def fail_at(monkeypatch, step):
    """Makes one of the steps of a save fail half-way."""

    def fail(*arguments, **options):
        raise OSError("the disk is full")

    name = {"tensors": "write_bytes", "description": "write_text", "first rename": "move"}[step]
    monkeypatch.setattr(f"irpe.{'files' if name == 'move' else 'adapters.saving'}.{name}", fail)


def other():
    return equipped(make_vit, {"spec": "cross-bias-k"})


def interrupt_at(monkeypatch, number, when, die=False):
    """Interrupts, or kills, the process before or after the replacement of that number."""
    replace, done = os.replace, []

    def stop(moment):
        if (len(done), moment) == (number, when):
            if die:
                os._exit(7)
            raise KeyboardInterrupt

    def interrupted(*paths):
        done.append(paths)
        stop("before")
        replace(*paths)
        stop("after")

    monkeypatch.setattr(os, "replace", interrupted)
    return done


@contextmanager
def interrupted(number, when):
    """What is run in it is interrupted."""
    with pytest.MonkeyPatch.context() as patch:
        interrupt_at(patch, number, when)
        with pytest.raises(KeyboardInterrupt):
            yield


def test_a_save_makes_three_replacements(saved, monkeypatch):
    done = interrupt_at(monkeypatch, None, None)
    irpe.save_equipped(other(), saved[0])
    assert len(done) == 3


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_an_interrupted_save_leaves_the_old_model_or_the_new_one(saved, number, when):
    path, old = saved
    with interrupted(number, when):
        irpe.save_equipped(other(), path)
    is_new = number == 3 or (number, when) == (2, "after")
    assert_equal(irpe.load_equipped(path), other() if is_new else old, images())
    assert len(os.listdir(path)) == 2 + ((number, when) in [(2, "after"), (3, "before")])
    irpe.save_equipped(third := equipped(make_vit, {"absolute": "none"}), path)
    assert sorted(os.listdir(path)) == FILES
    assert_equal(irpe.load_equipped(path), third, images())


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_an_interrupted_first_save_leaves_nothing_or_the_model(tmp_path, number, when):
    with interrupted(number, when):
        irpe.save_equipped(other(), tmp_path / "model")
    if number == 3 or (number, when) == (2, "after"):
        assert_equal(irpe.load_equipped(tmp_path / "model"), other(), images())
    else:
        assert os.listdir(tmp_path) == []
    irpe.save_equipped(other(), tmp_path / "model")
    assert sorted(os.listdir(tmp_path / "model")) == FILES


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_save_over_an_interrupted_one_may_be_interrupted(saved, number):
    path, _ = saved
    for count in (3, number):  # the first leaves its tensors in the hidden file
        with interrupted(count, "before"):
            irpe.save_equipped(other(), path)
        assert_equal(irpe.load_equipped(path), other(), images())


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_killed_save_leaves_a_model_and_the_next_one_tidies_up(saved, monkeypatch, number):
    path, old = saved
    child = os.fork()
    if child == 0:  # its end is sudden: no handler runs, no file is removed
        try:
            interrupt_at(monkeypatch, number, "before", die=True)
            irpe.save_equipped(other(), path)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert len(os.listdir(path)) > 2
    assert_equal(irpe.load_equipped(path), other() if number == 3 else old, images())
    irpe.save_equipped(other(), path)
    assert sorted(os.listdir(path)) == FILES


def test_tensors_that_are_hidden_are_found_through_a_link(saved, tmp_path):
    path, _ = saved
    (tmp_path / "elsewhere").mkdir()
    (path / "model.safetensors").rename(tmp_path / "elsewhere/tensors")
    (path / "model.safetensors").symlink_to("../elsewhere/tensors")
    with interrupted(3, "before"):
        irpe.save_equipped(other(), path)
    assert_equal(irpe.load_equipped(path), other(), images())
    irpe.save_equipped(other(), path)
    assert os.listdir(tmp_path / "elsewhere") == ["tensors"]
    assert_equal(irpe.load_equipped(path), other(), images())


def test_a_model_that_is_replaced_can_be_loaded_at_any_moment(saved, monkeypatch):
    path, old = saved
    replace, loaded = os.replace, []

    def load_then_replace(*paths):
        loaded.append(irpe.load_equipped(path))
        replace(*paths)

    monkeypatch.setattr(os, "replace", load_then_replace)
    irpe.save_equipped(other(), path)
    for model, expected in zip(loaded, [old, old, other()], strict=True):
        assert_equal(model, expected, images())


def test_a_model_that_is_replaced_while_it_is_loaded_is_read_again(saved, monkeypatch):
    path, _ = saved
    read = irpe.adapters.saving._read_tensors

    def save_then_read(*arguments):
        monkeypatch.undo()
        irpe.save_equipped(other(), path)
        return read(*arguments)

    monkeypatch.setattr("irpe.adapters.saving._read_tensors", save_then_read)
    assert_equal(irpe.load_equipped(path), other(), images())


def test_a_model_that_is_replaced_twice_while_it_is_loaded_is_read_again(saved, monkeypatch):
    """Tensors of the one that was there in between, and the description is the first one again."""
    path, old = saved
    read = irpe.adapters.saving._read_tensors

    def save_then_read(*arguments):
        monkeypatch.undo()
        irpe.save_equipped(other(), path)
        tensors = read(*arguments)
        irpe.save_equipped(old, path)
        return tensors

    monkeypatch.setattr("irpe.adapters.saving._read_tensors", save_then_read)
    assert_equal(irpe.load_equipped(path), old, images())


def test_of_two_writers_at_one_moment_the_second_waits(saved, monkeypatch):
    """The one that began first stops between its replacements until the other has begun."""
    path, _ = saved
    replace, first, errors = os.replace, threading.get_ident(), []

    def save():
        try:
            irpe.save_equipped(equipped(make_vit, {"absolute": "none"}), path)
        except Exception as error:
            errors.append(error)

    second = threading.Thread(target=save)

    def replace_slowly(source, target):
        replace(source, target)
        if threading.get_ident() == first and os.path.basename(target) == "irpe.json":
            second.start()
            second.join(timeout=1)
            assert second.is_alive()

    monkeypatch.setattr(os, "replace", replace_slowly)
    irpe.save_equipped(other(), path)
    second.join()
    assert not errors
    assert sorted(os.listdir(path)) == FILES
    assert_equal(irpe.load_equipped(path), equipped(make_vit, {"absolute": "none"}), images())


MODES = [0o600, 0o640, 0o666]


@pytest.mark.parametrize("mode", MODES, ids=oct)
@pytest.mark.parametrize("missing", [None, *FILES])
def test_files_take_the_mode_of_the_old_save(saved, mode, missing):
    path, _ = saved
    for name in FILES:
        (path / name).chmod(mode)
    if missing is not None:
        (path / missing).unlink()
    irpe.save_equipped(other(), path)
    assert {stat.S_IMODE((path / name).stat().st_mode) for name in FILES} == {mode}


def test_hidden_tensors_have_the_mode_of_the_old_save(saved):
    path, _ = saved
    (path / "model.safetensors").chmod(0o600)
    with interrupted(3, "before"):
        irpe.save_equipped(other(), path)
    (hidden,) = {*os.listdir(path)} - {*FILES}
    assert stat.S_IMODE((path / hidden).stat().st_mode) == 0o600


def test_a_plain_model_is_not_saved(tmp_path):
    with pytest.raises(ValueError, match=r"call irpe\.equip"):
        irpe.save_equipped(make_vit(), tmp_path / "model")
    assert os.listdir(tmp_path) == []


COMPILED = {
    "equipped first": lambda: torch.compile(equipped(make_vit, {})),
    "compiled first": lambda: perturb(irpe.equip(torch.compile(make_vit()), SPEC)),
}


@pytest.mark.parametrize("make", COMPILED.values(), ids=COMPILED)
def test_of_a_compiled_model_the_model_inside_is_saved(tmp_path, make):
    irpe.save_equipped(make(), tmp_path / "model")
    assert_equal(irpe.load_equipped(tmp_path / "model"), equipped(make_vit, {}), images())
    plain = irpe.load_equipped(tmp_path / "model", model=make_vit())
    assert_equal(plain, equipped(make_vit, {}), images())


WRAPPERS = {
    "data parallel": (nn.DataParallel, "DataParallel .*model.module, path"),
    "averaged": (torch.optim.swa_utils.AveragedModel, "AveragedModel .*model.module, path"),
    "an attribute": (lambda model: nn.ModuleDict({"net": model}), "ModuleDict .*model.net, path"),
    "compiled": (lambda model: torch.compile(nn.DataParallel(model)), "model._orig_mod.module, "),
}


@pytest.mark.parametrize(("wrap", "message"), WRAPPERS.values(), ids=WRAPPERS)
def test_of_a_wrapper_the_error_says_which_module_to_save(tmp_path, wrap, message):
    with pytest.raises(ValueError, match=message):
        irpe.save_equipped(wrap(equipped(make_vit, {})), tmp_path / "model")
    assert os.listdir(tmp_path) == []


def test_models_without_values_are_neither_filled_nor_saved(saved):
    path, model = saved
    with torch.device("meta"):
        plain = timm.create_model("vit_tiny_patch16_224", depth=2)
    before = state_of(plain)
    with pytest.raises(ValueError, match=r"cls_token of the model is on the meta device.* CPU"):
        irpe.load_equipped(path, model=plain)
    assert state_of(plain) == before
    with pytest.raises(ValueError, match="cls_token of the model is on the meta device"):
        irpe.save_equipped(irpe.equip(plain, SPEC), path)
    assert_equal(irpe.load_equipped(path), model, images())


BAD_DESCRIPTIONS = {
    "empty": "",
    "cut off": '{"format": 1, "equip',
    "not text": b"\xff\xfe\x00",
    "of another program": '{"architectures": ["ViTModel"], "model_type": "vit"}',
    "a list": "[1, 2]",
    "a number": "3",
    "null": "null",
    "of a later release": '{"format": 2, "equipment": [], "host": null}',
    "without equipment": '{"format": 1, "host": null}',
}


@pytest.mark.parametrize("content", BAD_DESCRIPTIONS.values(), ids=BAD_DESCRIPTIONS)
def test_damaged_and_foreign_descriptions(saved, content):
    path, _ = saved
    data = content if isinstance(content, bytes) else content.encode()
    (path / "irpe.json").write_bytes(data)
    with pytest.raises(ValueError, match=r"irpe\.json is damaged or of another program"):
        irpe.load_equipped(path)


CALL = {
    "spec": SPEC,
    "grid": None,
    "num_prefix_tokens": None,
    "layers": None,
    "absolute": "keep",
    "builtin_bias": "keep",
}
BAD_EQUIPMENT = {
    "nothing": [],
    "null": None,
    "a number": 3,
    "a list of numbers": [3],
    "a wrong spec": [{**CALL, "spec": "produkt-contextual-k"}],
    "a missing field": [{"spec": SPEC}],
    "an unknown field": [{**CALL, "colour": "blue"}],
    "a wrong choice": [{**CALL, "absolute": "learned"}],
    "a wrong layer": [{**CALL, "layers": [7]}],
    "a grid that is none": [{**CALL, "grid": 5}],
    "a grid of text": [{**CALL, "grid": ["2", "2"]}],
    "a huge grid": [{**CALL, "grid": [10**30, 1]}],
    "a negative prefix": [{**CALL, "num_prefix_tokens": -1}],
    "a fraction of a prefix": [{**CALL, "num_prefix_tokens": 1.5}],
    "a true prefix": [{**CALL, "num_prefix_tokens": True}],
    "an absurd prefix": [{**CALL, "num_prefix_tokens": 10**30}],
    "a prefix of text": [{**CALL, "num_prefix_tokens": "1"}],
    "a layer that is none": [{**CALL, "layers": [0.5]}],
    "an encoding that is none": [{**CALL, "spec": 5}],
    "an unknown implementation": [{**CALL, "impl": "fastest"}],
    "an implementation that is none": [{**CALL, "impl": 5}],
}


@pytest.mark.parametrize("equipment", BAD_EQUIPMENT.values(), ids=BAD_EQUIPMENT)
def test_damaged_equipment(saved, equipment):
    path, _ = saved
    change_description(path, equipment=equipment)
    plain = make_vit()
    before = state_of(plain)
    for arguments in ({}, {"model": plain}):
        with pytest.raises(ValueError, match=re.escape(str(path))):
            irpe.load_equipped(path, **arguments)
    assert state_of(plain) == before


VIT = {"model_name": "vit_tiny_patch16_224"}
BAD_HOSTS = {
    "a text": "timm",
    "a list": [],
    "an unknown library": {"library": "os", "arguments": {}},
    "no text": {"library": ["timm"], "arguments": {}},
    "no arguments": {"library": "timm"},
    "arguments null": {"library": "timm", "arguments": None},
    "an unknown model": {"library": "timm", "arguments": {"model_name": "vit_nano"}},
    "an unknown argument": {"library": "timm", "arguments": VIT | {"colour": "blue"}},
    "a module of torch.nn": {"library": "torch", "arguments": {"kind": "MultiheadAttention"}},
    "no heads": {"library": "timm", "arguments": VIT | {"num_heads": 0}},
    "no patch": {"library": "timm", "arguments": VIT | {"patch_size": 0}},
    "an image below a patch": {"library": "timm", "arguments": VIT | {"img_size": 1}},
    "no patch of torchvision": {
        "library": "torchvision",
        "arguments": {
            "kind": "VisionTransformer",
            "image_size": 32,
            "patch_size": 0,
            "num_layers": 1,
            "num_heads": 2,
            "hidden_dim": 16,
            "mlp_dim": 16,
        },
    },
    "a model of the hub": {"library": "timm", "arguments": {"model_name": "hf-hub:a/b"}},
    "a model elsewhere": {"library": "timm", "arguments": {"model_name": "local-dir:/etc"}},
    "weights elsewhere": {"library": "timm", "arguments": VIT | {"checkpoint_path": "a.pth"}},
    "weights of the web": {"library": "timm", "arguments": VIT | {"pretrained": True}},
}


@pytest.mark.parametrize("host", BAD_HOSTS.values(), ids=BAD_HOSTS)
def test_damaged_hosts(saved, monkeypatch, host):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    path, _ = saved
    change_description(path, host=host)
    with pytest.raises(ValueError, match=re.escape(str(path))):
        irpe.load_equipped(path)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"num_heads": 5}, r"embed_dim = 192 of .* num_heads = 5: choose num_heads from 1, 2, 3, "),
        ({"embed_dim": 25}, "embed_dim = 25 .* num_heads = 3: .*multiple of 3"),
    ],
)
def test_heads_that_do_not_divide_the_dimension(saved, argument, message):
    path, _ = saved
    change_description(path, host={"library": "timm", "arguments": VIT | argument})
    with pytest.raises(ValueError, match=message):
        irpe.load_equipped(path)


class Trap:
    """Runs code where it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (os.fspath(self.marker),)


@pytest.mark.parametrize("writer", [pickle.dump, torch.save])
def test_a_pickle_with_our_name_runs_nothing(saved, tmp_path, writer):
    path, _ = saved
    with open(path / "model.safetensors", "wb") as file:
        writer(Trap(tmp_path / "marker"), file)
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged or not a safetensors"):
        irpe.load_equipped(path)
    assert os.listdir(tmp_path) == ["model"]
    with open(path / "model.safetensors", "rb") as file:  # the trap works
        torch.load(file, weights_only=False) if writer is torch.save else pickle.load(file)
    assert (tmp_path / "marker").exists()


def test_a_pickle_named_in_the_description_runs_nothing(saved, tmp_path):
    path, _ = saved
    torch.save(Trap(tmp_path / "marker"), path / "evil.pth")
    arguments = VIT | {"checkpoint_path": os.fspath(path / "evil.pth")}
    change_description(path, host={"library": "timm", "arguments": arguments})
    with pytest.raises(ValueError, match=r"irpe\.json"):
        irpe.load_equipped(path)
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("size", [0, 4, 100, -1])
def test_truncated_tensors(saved, size):
    path, _ = saved
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[:size])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        irpe.load_equipped(path)


@pytest.mark.parametrize("name", FILES)
def test_missing_files(saved, name):
    path, _ = saved
    (path / name).unlink()
    with pytest.raises(FileNotFoundError, match=name):
        irpe.load_equipped(path)


def test_missing_directory(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"not a directory that irpe\.save_equipped wrote"):
        irpe.load_equipped(tmp_path / "nowhere")


TABLE = "blocks.0.attn.rpe.key_tables.0"
TAMPERED = {
    "wrong shape": lambda tensors: {**tensors, TABLE: tensors[TABLE][:, 1:].contiguous()},
    "missing": lambda tensors: {n: t for n, t in tensors.items() if n != TABLE},
    "bytes": lambda tensors: {**tensors, TABLE: tensors[TABLE].byte()},
    "integers": lambda tensors: {**tensors, TABLE: tensors[TABLE].long()},
    "booleans": lambda tensors: {**tensors, TABLE: tensors[TABLE].bool()},
    "complex": lambda tensors: {**tensors, TABLE: tensors[TABLE].cfloat()},
    "left over": lambda tensors: {**tensors, TABLE + "0": tensors[TABLE].clone()},
}


@pytest.mark.parametrize("tamper", TAMPERED.values(), ids=TAMPERED)
def test_tensors_that_do_not_fit(saved, tamper):
    path, _ = saved
    change_tensors(path, tamper)
    plain = make_vit()
    before = state_of(plain)
    for arguments in ({}, {"model": plain}):
        with pytest.raises(ValueError, match=rf"does not fit .* in 1 tensors.*{TABLE}"):
            irpe.load_equipped(path, **arguments)
    assert state_of(plain) == before


def test_another_model_does_not_fit_and_stays_plain(saved):
    path, _ = saved
    other = make_vit(embed_dim=64)
    before = state_of(other)
    with pytest.raises(ValueError, match="does not fit the model"):
        irpe.load_equipped(path, model=other)
    assert state_of(other) == before


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_an_error_or_changes_nothing(saved, name):
    path, model = saved
    whole = (path / name).read_bytes()
    draw, refused = random.Random(0), []
    for _ in range(60):
        flipped = bytearray(whole)
        flipped[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        (path / name).write_bytes(flipped)
        try:
            with warnings.catch_warnings(action="ignore"):
                loaded = irpe.load_equipped(path)
        except ValueError as error:
            refused.append(str(error))
        else:
            assert_equal(loaded, model, images())
    assert len(refused) > 30
    assert all(name in message for message in refused)


def test_files_of_two_saves_are_not_mixed(saved, tmp_path):
    path, _ = saved
    irpe.save_equipped(equipped(make_vit, {"spec": f"{SPEC}@2.5"}), tmp_path / "other")
    (tmp_path / "other/irpe.json").replace(path / "irpe.json")
    with pytest.raises(ValueError, match=r"irpe\.json and model\.safetensors are not of one save"):
        irpe.load_equipped(path)


def test_files_without_a_checksum_are_read_with_a_warning(saved):
    path, model = saved
    tensors = safetensors.torch.load_file(path / "model.safetensors")
    safetensors.torch.save_file(tensors, path / "model.safetensors")
    with pytest.warns(UserWarning, match=r"model\.safetensors has no checksum"):
        loaded = irpe.load_equipped(path)
    assert_equal(loaded, model, images())
    description = json.loads((path / "irpe.json").read_text())
    irpe.save_equipped(model, path)
    del description["sha256"], description["tensors"]
    (path / "irpe.json").write_text(json.dumps(description))
    with pytest.warns(UserWarning, match=r"irpe\.json has no checksum"):
        assert_equal(irpe.load_equipped(path), model, images())
