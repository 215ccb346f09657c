"""Checkpoints in the layout of the paper's authors."""

import collections
import os
import pickle
import zipfile

import pytest
import timm
import torch
from adapters.small_models import images, make_vit, perturb, state_of
from models import authors
from torch import nn

import irpe
import irpe.models
from irpe.adapters.equipped import equipped_attentions
from irpe.models.deit import DEITS

TINY = "deit_tiny_patch16_224_ctx_product_50_shared_k"
SIZES = {"img_size": (16, 24), "embed_dim": 8, "depth": 2}
SPECS = {
    "product-contextual-qkv": {},
    "product-contextual-qk@1.2+unshared": {"name": "deit_tiny_distilled_patch16_224"},
    "product-contextual-q": {"class_token": False, "global_pool": "avg"},
    "cross-contextual-qkv@1.5": {},
    "cross-contextual-q+unshared": {"class_token": False, "global_pool": "avg"},
    "product-bias-k+unshared": {},
    "cross-bias-k": {"name": "deit_tiny_distilled_patch16_224"},
}


def authors_file(path, model):
    """Writes what the authors' code would have saved of a model of timm; returns it."""
    tensors = {name: x for name, x in model.state_dict().items() if ".rpe." not in name}
    for number, (name, attention) in enumerate(equipped_attentions(model).items()):
        encoding = attention.rpe
        tables = authors.random_tables(
            encoding.spec,
            attention.num_heads,
            attention.head_dim,
            encoding.num_prefix_tokens,
            number,
        )
        tensors |= {f"{name}.{table}": values for table, values in tables.items()}
    authors.write(path, tensors)
    return tensors


@pytest.mark.parametrize(("text", "arguments"), SPECS.items())
def test_attention_is_what_a_loop_over_their_convention_gives(tmp_path, text, arguments):
    spec = irpe.RPESpec.parse(text)
    model = irpe.equip(make_vit(**SIZES, **arguments), spec)
    tensors = authors_file(tmp_path / "x.pth", perturb(model, seed=5))
    empty = irpe.equip(make_vit(**SIZES, **arguments), spec)
    loaded = irpe.load_published(tmp_path / "x.pth", model=empty).double()
    assert loaded is empty
    for name, attention in equipped_attentions(loaded).items():
        x = torch.randn(2, 6 + loaded.num_prefix_tokens, 8, dtype=torch.float64)
        q, k, v = attention.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        prefix = f"{name}.rpe_"
        tables = {key[len(name) + 1 :]: t for key, t in tensors.items() if key.startswith(prefix)}
        assert tables
        z = authors.attend(q, k, v, tables, spec, (2, 3), loaded.num_prefix_tokens)
        torch.testing.assert_close(attention(x), attention.proj(z), rtol=1e-6, atol=1e-6)
    for name, values in tensors.items():
        if ".rpe_" not in name:
            assert torch.equal(loaded.get_parameter(name).float(), values)


@pytest.mark.parametrize("name", DEITS)
def test_their_names_are_models_of_timm(name):
    with torch.device("meta"):
        model = timm.create_model(name, num_classes=3)
    assert model.num_classes == 3
    attentions = irpe.summary(model).attentions
    assert len(attentions) == 12
    assert {a.num_buckets for a in attentions} == {a.num_used_buckets for a in attentions} == {50}
    targets = name.rpartition("_")[2]
    assert {a.spec for a in attentions} == {f"product-contextual-{targets}@1.9"}
    heads = {"tiny": 3, "small": 6, "base": 12}[name.split("_")[1]]
    assert model.blocks[0].attn.num_heads == heads
    assert model.blocks[0].attn.rpe.key_tables[0].shape == (1, 50, 64)
    assert name in timm.list_models("*ctx_product*")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A file of the authors' smallest model, and its tensors."""
    path = tmp_path_factory.mktemp("published") / f"{TINY}.pth"
    torch.manual_seed(0)
    return path, authors_file(path, timm.create_model(TINY))


def assert_holds(model, tensors):
    """The key tables are theirs, the class token's row last; the rest is theirs too."""
    assert not any(module.training for module in model.modules())
    for number in range(12):
        theirs = tensors[f"blocks.{number}.attn.rpe_k.lookup_table_weight"]
        ours = model.blocks[number].attn.rpe.key_tables[0]
        assert torch.equal(ours, theirs.transpose(1, 2))
    assert torch.equal(model.head.weight, tensors["head.weight"])


def test_the_model_is_inferred_from_the_name_of_the_file(tiny, tmp_path):
    path, tensors = tiny
    assert_holds(irpe.load_published(path), tensors)
    assert_holds(irpe.load_published(str(path)), tensors)
    other = tmp_path / "checkpoint.pth"
    os.link(path, other)
    assert_holds(irpe.load_published(other, model=TINY), tensors)
    with pytest.raises(ValueError, match=f"'checkpoint' is not a model.*{TINY}.*rpe-1.9-product"):
        irpe.load_published(other)
    with pytest.raises(ValueError, match="'deit' is not a model"):
        irpe.load_published(other, model="deit")
    with pytest.raises(ValueError, match=r"has no tensor blocks\.0\.attn\.rpe_q"):
        irpe.load_published(other, model="deit_small_patch16_224_ctx_product_50_shared_qk")
    with pytest.raises(ValueError, match=r"does not fit .*192,\), the model \(.*384,\)"):
        irpe.load_published(other, model="deit_small_patch16_224_ctx_product_50_shared_k")


def test_pretrained_needs_the_file(tiny, tmp_path, monkeypatch):
    path, tensors = tiny
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path))
    place = tmp_path / "checkpoints" / f"{TINY}.pth"
    with pytest.raises(FileNotFoundError) as caught:
        timm.create_model(TINY, pretrained=True)
    assert str(place) in str(caught.value)
    assert f"fetch https://github.com/wkcn/iRPE-model-zoo/releases/download/1.0/{TINY}.pth" in str(
        caught.value
    )
    place.parent.mkdir()
    os.link(path, place)
    assert_holds(timm.create_model(TINY, pretrained=True), tensors)
    assert_holds(timm.create_model(TINY, pretrained=True, cache_dir=path.parent), tensors)
    with pytest.raises(ValueError, match="head"):
        timm.create_model(TINY, pretrained=True, num_classes=3)


# Bad files.


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def small(tmp_path):
    """A small model, and a file of it."""
    model = irpe.equip(make_vit(**SIZES), "product-contextual-qk")
    return model, authors_file(tmp_path / "x.pth", model), tmp_path / "x.pth"


def check_refused(path, model, message):
    before = state_of(model)
    values = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        irpe.load_published(path, model=model)
    assert state_of(model) == before
    assert all(torch.equal(x, values[name]) for name, x in model.state_dict().items())


def without(tensors, name):
    return {key: value for key, value in tensors.items() if key != name}


QUERY = "blocks.1.attn.rpe_q.lookup_table_weight"
CHANGES = {
    "missing table": (lambda t: without(t, QUERY), rf"no tensor {QUERY}, which .*qk@1\.9 needs"),
    "missing weight": (lambda t: without(t, "norm.bias"), r"norm\.bias: the file has none"),
    "one row less": (lambda t: t | {QUERY: t[QUERY][..., 1:]}, r"\(1, 49, 4\), the model \(1, 50"),
    "two heads": (lambda t: t | {QUERY: t[QUERY].repeat(2, 1, 1)}, r"\(2, 50, 4\)"),
    "flat": (lambda t: t | {QUERY: t[QUERY].flatten()}, "not that of a table"),
    "one tensor more": (lambda t: t | {"more": torch.ones(2)}, r"more: the file has \(2,\)"),
    "a table more": (
        lambda t: t | {"blocks.0.attn.rpe_v.lookup_table_weight": torch.ones(1, 50, 4)},
        r"rpe_v.lookup_table_weight: the file has \(1, 50, 4\), the model none",
    ),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES)
def test_files_that_do_not_fit_are_refused(tmp_path, change, message):
    model, tensors, path = small(tmp_path)
    check_refused(authors.write(path, change(tensors)), model, message)


CONTENTS = {
    "no model": {"state_dict": {}},
    "empty": {"model": {}},
    "not tensors": {"model": {"a": 1}},
    "not names": {"model": {1: torch.ones(2)}},
    "a list": [1, 2],
    "a tensor": torch.ones(2),
    "nothing": None,
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_other_contents_are_refused(tmp_path, content):
    model, _, path = small(tmp_path)
    torch.save(content, path)
    check_refused(path, model, "not a checkpoint of the authors' code")


def test_truncated_files_are_refused(tmp_path):
    model, _, path = small(tmp_path)
    content = path.read_bytes()
    for size in (0, 1, 100, len(content) // 2, len(content) - 1000, len(content) - 1):
        path.write_bytes(content[:size])
        check_refused(path, model, "is damaged")


def test_malicious_pickles_run_nothing(tmp_path):
    model, tensors, path = small(tmp_path)
    evil, ran = Evil(tmp_path / "ran"), tmp_path / "ran"
    for content in ({"model": tensors, "args": evil}, {"model": tensors | {"x": evil}}, evil):
        torch.save(content, path)
        check_refused(path, model, "nothing in it was run")
        torch.save(content, path, _use_new_zipfile_serialization=False)
        check_refused(path, model, "nothing in it was run")
        path.write_bytes(pickle.dumps(content))
        check_refused(path, model, "is damaged")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(evil))
    check_refused(path, model, "is damaged")
    assert not ran.exists()
    torch.load(_saved(path, evil), weights_only=False)  # such a file would have run
    assert ran.exists()


def _saved(path, content):
    torch.save(content, path)
    return path


def test_no_type_but_a_namespace_is_allowed(tmp_path):
    model, tensors, path = small(tmp_path)
    torch.save({"model": collections.OrderedDict(tensors), "args": authors.ARGS}, path)
    irpe.load_published(path, model=model)
    torch.save({"model": tensors, "args": collections.deque([1])}, path)
    check_refused(path, model, "nothing in it was run")
    assert authors.ARGS.__class__ not in torch.serialization.get_safe_globals()


def test_the_function_is_public_and_nothing_else_is_made_up():
    assert "published" in irpe.load_published.__doc__
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = irpe.no_such_name


def test_a_missing_file():
    with pytest.raises(FileNotFoundError, match="iRPE-model-zoo"):
        irpe.load_published("no-such-file.pth")


def test_models_that_cannot_be_filled(tmp_path):
    _, _, path = small(tmp_path)
    with pytest.raises(ValueError, match="no encodings"):
        irpe.load_published(path, model=make_vit(**SIZES))
    with pytest.raises(ValueError, match="no encodings"):
        irpe.load_published(path, model=nn.Linear(2, 2))
    for method in ("euclidean", "quantization"):
        model = irpe.equip(make_vit(**SIZES), f"{method}-contextual-qk")
        check_refused(path, model, f"authors' {method} is not the paper's.*product, cross")


def test_a_loaded_model_can_be_saved_and_equals_the_file(tmp_path):
    model, _, path = small(tmp_path)
    irpe.load_published(path, model=model)
    irpe.save_equipped(model, tmp_path / "ours")
    x = images(16, 24)
    plain = irpe.equip(make_vit(**SIZES), "product-contextual-qk")
    irpe.load_published(path, model=plain)
    assert torch.equal(irpe.load_equipped(tmp_path / "ours")(x), plain(x))
