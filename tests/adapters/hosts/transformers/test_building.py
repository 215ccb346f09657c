"""Equipped models of transformers and torchvision on disk, in their own way and in ours."""

import functools
import json
import os
import pickle

import pytest
import safetensors.torch
import torch
import transformers
from adapters.hosts.table import (
    equipped,
    make_detr,
    make_dinov2,
    make_segmenter,
    make_swin,
    make_torchvision_vit,
    make_vit,
    predict,
)
from adapters.small_models import images, state_of

import irpe
from irpe.adapters.equip import table_names


def make_bare_vit(**arguments):
    torch.manual_seed(0)
    return transformers.ViTModel(make_vit().config, **arguments).eval()


SPEC = "product-contextual-qkv"
MODELS = {
    "ViT": (make_vit, images(16, 40)),
    "bfloat16": (lambda: make_vit().bfloat16(), images(16, 40).bfloat16()),
    "swiglu": (functools.partial(make_dinov2, use_swiglu_ffn=True), images(16, 40)),
    "without a head": (make_bare_vit, images(16, 40)),
    "segmentation": (make_segmenter, images(96, 160)),
    "learned positions": (
        functools.partial(make_detr, position_embedding_type="learned"),
        images(96, 160),
    ),
}
CALLS = {
    "some layers": (make_vit, {"layers": (-1,)}, images(16, 40)),
    "sinusoid": (make_vit, {"absolute": "sinusoid"}, images(16, 40)),
    "told grid": (make_vit, {"grid": (2, 5), "num_prefix_tokens": 1}, images(16, 40)),
    "no positions": (make_detr, {"absolute": "none"}, images(96, 160)),
    "dropped bias": (make_swin, {"builtin_bias": "drop"}, images(32, 64)),
    "unshared bias": (make_detr, {"spec": "cross-bias-k+unshared"}, images(96, 160)),
}


def assert_restored(loaded, model, x):
    assert type(loaded) is type(model)
    assert not any(module.training for module in loaded.modules())
    assert torch.equal(predict(loaded, x), predict(model, x))
    assert str(irpe.summary(loaded)) == str(irpe.summary(model))
    state = model.state_dict()
    assert list(loaded.state_dict()) == list(state)
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, state[name]), name
        assert tensor.dtype == state[name].dtype


@pytest.mark.parametrize(("make", "x"), MODELS.values(), ids=MODELS)
def test_save_pretrained_round_trip(tmp_path, make, x):
    model = equipped(make)
    model.save_pretrained(tmp_path)
    loaded = irpe.load_equipped(tmp_path)
    assert_restored(loaded, model, x)
    assert loaded.config.irpe == model.config.irpe
    loaded.save_pretrained(tmp_path / "again")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / name).read_bytes()


@pytest.mark.parametrize(("make", "arguments", "x"), CALLS.values(), ids=CALLS)
def test_both_ways_keep_how_a_model_was_equipped(tmp_path, make, arguments, x):
    model = equipped(make, **arguments)
    model.save_pretrained(tmp_path / "theirs")
    irpe.save_equipped(model, tmp_path / "ours")
    for path in ("theirs", "ours"):
        assert_restored(irpe.load_equipped(tmp_path / path), model, x)


def test_two_encodings_and_several_files(tmp_path):
    model = irpe.equip(make_vit(), "cross-contextual-k", layers=[0])
    irpe.equip(model, "product-bias-k@clip3", layers=[1])
    for name in table_names(model):
        torch.nn.init.normal_(model.get_parameter(name))
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_restored(irpe.load_equipped(tmp_path), model, images(16, 40))
    calls = json.loads((tmp_path / "config.json").read_text())["irpe"]
    assert [call["spec"] for call in calls] == ["cross-contextual-k@20", "product-bias-k@clip3"]
    assert [call["layers"] for call in calls] == [[0], [1]]


@pytest.mark.parametrize(("make", "x"), [MODELS["ViT"], (make_detr, images(96, 160))])
def test_a_stock_model_starts_from_zero_tables(tmp_path, make, x):
    make().save_pretrained(tmp_path)
    model = type(make()).from_pretrained(tmp_path)
    irpe.equip(model, SPEC)
    assert [call["spec"] for call in model.config.irpe] == [f"{SPEC}@1.9"]
    tables = [model.get_parameter(name) for name in table_names(model)]
    assert tables
    assert not any(table.any() or table.is_meta for table in tables)
    torch.testing.assert_close(predict(model, x), predict(make(), x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("make", [make_vit, make_dinov2, make_detr, make_swin])
def test_stock_classes_refuse_a_saved_model(tmp_path, make):
    """They would drop the tables otherwise, in a process that never heard of this library."""
    model = equipped(make)
    kind, config = model.config.model_type, type(model.config)
    model.save_pretrained(tmp_path)
    assert (model.config.model_type, type(model.config)) == (kind, config)
    with pytest.raises(ValueError, match=f"model type `irpe_{kind}: .*irpe.load_equipped` but"):
        transformers.AutoModel.from_pretrained(tmp_path)
    with pytest.raises(AttributeError, match=r"irpe_float32: load it with irpe\.load_equipped"):
        type(model).from_pretrained(tmp_path)
    assert irpe.load_equipped(tmp_path).config.dtype == torch.float32
    irpe.unequip(model)
    model.save_pretrained(tmp_path / "plain")
    assert type(transformers.AutoModel.from_pretrained(tmp_path / "plain").config) is config


def test_tensors_may_have_the_names_of_earlier_releases(tmp_path):
    """So they were saved before, and so they are on request."""
    model = equipped(make_dinov2)
    model.save_pretrained(tmp_path, save_original_format=True)
    names = safetensors.torch.load_file(tmp_path / "model.safetensors").keys()
    assert set(names) != set(model.state_dict())
    assert_restored(irpe.load_equipped(tmp_path), model, images(16, 40))
    change_config(tmp_path, model_type="dinov2")
    assert_restored(irpe.load_equipped(tmp_path), model, images(16, 40))


def test_tables_do_not_come_from_uninitialised_memory(tmp_path):
    """Many times, after memory was filled with garbage and freed."""
    make_vit().save_pretrained(tmp_path)
    for _ in range(5):
        garbage = [torch.full((50, 16), float("nan")) for _ in range(200)]
        del garbage
        model = transformers.ViTForImageClassification.from_pretrained(tmp_path)
        irpe.equip(model, SPEC)
        assert all(not model.get_parameter(name).any() for name in table_names(model))


def test_failing_to_equip_leaves_the_configuration(tmp_path):
    model = make_detr()
    with pytest.raises(ValueError, match="sinusoid"):
        irpe.equip(model, SPEC, absolute="sinusoid")
    assert not hasattr(model.config, "irpe")
    irpe.equip(model, SPEC, layers=[0])
    before, state = list(model.config.irpe), state_of(model)
    with pytest.raises(ValueError, match="already equipped"):
        irpe.equip(model, SPEC)
    assert model.config.irpe == before
    assert state_of(model) == state


@pytest.fixture
def saved(tmp_path):
    """A directory that save_pretrained wrote."""
    equipped(make_vit).save_pretrained(tmp_path)
    return tmp_path


def change_config(path, **changes):
    config = json.loads((path / "config.json").read_text())
    config = {name: value for name, value in (config | changes).items() if value is not None}
    (path / "config.json").write_text(json.dumps(config))


def change_tensors(path, change):
    tensors = safetensors.torch.load_file(path / "model.safetensors")
    change(tensors)
    safetensors.torch.save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def drop_a_table(tensors):
    del tensors[next(name for name in tensors if ".rpe." in name)]


def shorten_a_table(tensors):
    name = next(name for name in tensors if ".rpe." in name)
    tensors[name] = tensors[name][:, 1:].clone()


def truncate(path):
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def only_a_pickle(path):
    (path / "model.safetensors").unlink()
    torch.save({}, path / "pytorch_model.bin")


WRONG = {
    "no encoding": (lambda path: change_config(path, irpe=None), "names no encoding"),
    "no class": (lambda path: change_config(path, architectures=None), "damaged"),
    "unknown class": (
        lambda path: change_config(path, architectures=["os"]),
        "'os' is not a model",
    ),
    "no model": (lambda path: change_config(path, architectures=["ViTConfig"]), "is not a model"),
    "other encoding": (
        lambda path: change_config(path, irpe=[{"spec": "cross-bias-k"}]),
        "does not fit|KeyError",
    ),
    "unknown argument": (lambda path: change_config(path, irpe=[{"trust": 1}]), "does not fit"),
    "other sizes": (lambda path: change_config(path, hidden_size=16), "does not fit"),
    "nonsense": (lambda path: change_config(path, hidden_size="x"), "not a configuration"),
    "fetched code": (
        lambda path: change_config(path, attn_implementation="someone/kernel"),
        "'someone/kernel' in a configuration may name code",
    ),
    "fetched code inside": (
        lambda path: change_config(path, more={"_attn_implementation": "someone/kernel"}),
        "may name code",
    ),
    "not json": (lambda path: (path / "config.json").write_text("{"), "damaged"),
    "truncated": (truncate, "cannot be read"),
    "missing table": (lambda path: change_tensors(path, drop_a_table), "missing keys.*rpe"),
    "fewer rows": (lambda path: change_tensors(path, shorten_a_table), "mismatched keys.*rpe"),
    "one tensor more": (
        lambda path: change_tensors(path, lambda tensors: tensors.update(more=torch.ones(1))),
        "unexpected keys more",
    ),
    "no tensors": (lambda path: (path / "model.safetensors").unlink(), "cannot be read"),
    "only a pickle": (only_a_pickle, "cannot be read"),
}


@pytest.mark.parametrize(("spoil", "message"), WRONG.values(), ids=WRONG)
def test_damaged_directories(saved, spoil, message):
    spoil(saved)
    with pytest.raises(ValueError, match=message):
        irpe.load_equipped(saved)


class Sub(transformers.ViTForImageClassification):
    """A class of a user, with something of its own."""

    def __init__(self, config, width=4):
        super().__init__(config)
        self.gate = torch.nn.Linear(config.num_labels, width)

    def forward(self, pixel_values):
        return self.gate(super().forward(pixel_values).logits)


def make_sub(seed=0, width=4):
    torch.manual_seed(seed)
    return Sub(make_vit().config, width).eval()


@pytest.mark.parametrize("width", [4, 3], ids=["configuration", "more arguments"])
def test_classes_of_a_user_are_passed(tmp_path, width):
    model, x = equipped(lambda: make_sub(width=width)), images(16, 40)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"'Sub' is not a model .*path, model=plain"):
        irpe.load_equipped(tmp_path)
    plain = make_sub(1, width)
    assert irpe.load_equipped(tmp_path, model=plain) is plain
    for name, tensor in model.state_dict().items():
        assert torch.equal(plain.state_dict()[name], tensor), name
    assert torch.equal(plain(x), model(x))
    assert not any(p.is_meta or not p.requires_grad for p in plain.parameters())
    plain.save_pretrained(tmp_path / "again")
    again = irpe.load_equipped(tmp_path / "again", model=make_sub(2, width))
    assert torch.equal(again(x), model(x))


@pytest.mark.parametrize(
    ("backbone", "tables"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)],
    ids=["wide tables", "narrow tables"],
)
@pytest.mark.parametrize("shards", [{}, {"max_shard_size": "5KB"}], ids=["whole", "shards"])
def test_tables_keep_a_dtype_of_their_own(tmp_path, backbone, tables, shards):
    model = equipped(make_dinov2).to(backbone)
    for name in table_names(model):
        parameter = model.get_parameter(name)
        parameter.data = parameter.data.to(tables).mul_(1 / 3)
    model.save_pretrained(tmp_path, **shards)
    assert len(list(tmp_path.glob("*.safetensors"))) > len(shards)
    state = irpe.load_equipped(tmp_path).state_dict()
    for name, tensor in model.state_dict().items():
        assert state[name].dtype == tensor.dtype, name
        assert torch.equal(state[name], tensor), name


OTHERS = {
    "another class": (make_dinov2, "does not fit the Dinov2ForImageClassification in model="),
    "another size": (lambda: make_vit(hidden_size=16), "does not fit"),
    "not of transformers": (make_torchvision_vit, "model= is of VisionTransformer"),
}


@pytest.mark.parametrize(("make", "message"), OTHERS.values(), ids=OTHERS)
def test_another_model_is_refused_and_stays_plain(saved, make, message):
    plain = make()
    before = state_of(plain)
    with pytest.raises(ValueError, match=message):
        irpe.load_equipped(saved, model=plain)
    assert state_of(plain) == before


def test_a_malicious_pickle_in_the_directory_is_not_opened(saved):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(saved / "ran"),)

    for name in ("pytorch_model.bin", "model.bin", "training_args.bin"):
        (saved / name).write_bytes(pickle.dumps(Evil()))
    irpe.load_equipped(saved)
    (saved / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="cannot be read"):
        irpe.load_equipped(saved)
    assert not (saved / "ran").exists()


def test_models_made_with_more_than_a_configuration_are_passed(tmp_path):
    make = functools.partial(make_bare_vit, add_pooling_layer=False)
    model, x = equipped(make), images(16, 40)
    model.save_pretrained(tmp_path / "theirs")
    with pytest.raises(ValueError, match="missing keys pooler"):
        irpe.load_equipped(tmp_path / "theirs")
    loaded = irpe.load_equipped(tmp_path / "theirs", model=make())
    assert torch.equal(loaded(x).last_hidden_state, model(x).last_hidden_state)
    irpe.save_equipped(model, tmp_path / "ours")
    with pytest.raises(ValueError, match="model=plain"):
        irpe.load_equipped(tmp_path / "ours")
    loaded = irpe.load_equipped(tmp_path / "ours", model=make())
    assert torch.equal(loaded(x).last_hidden_state, model(x).last_hidden_state)


def test_descriptions_of_other_things_are_refused(tmp_path):
    for make, change in (
        (make_vit, {"class": "ViTConfig"}),
        (make_vit, {"class": "AutoModel"}),
        (make_torchvision_vit, {"kind": "resnet50"}),
        (make_torchvision_vit, {"num_layers": -1}),
    ):
        path = tmp_path / "model"
        irpe.save_equipped(equipped(make), path)
        description = json.loads((path / "irpe.json").read_text())
        description["host"]["arguments"] |= change
        (path / "irpe.json").write_text(json.dumps(description))
        with pytest.raises(ValueError, match=r"irpe\.json"):
            irpe.load_equipped(path)
