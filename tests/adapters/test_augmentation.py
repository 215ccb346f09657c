"""Positions augmented in training: one sample for a pass, the same in all layers."""

import copy
import pickle

import pytest
import timm
import torch
from adapters.small_models import images, make_encoder, make_swin, make_vit

import irpe
from irpe.adapters.equipped import equipped_attentions
from irpe.nn.tables import RelativePositionEncoding

AUGMENTED = "rope-axial+rescale2+shift1"


def make(spec=AUGMENTED, **arguments):
    return irpe.equip(make_vit(**arguments), spec).train()


def samples_of(model, x, monkeypatch):
    """The random numbers that each attention used, in the order of the attentions."""
    used = []
    own = RelativePositionEncoding._split_augmented

    def spy(self, grid):
        where, sample = own(self, grid)
        used.append(sample)
        return where, sample

    with monkeypatch.context() as patched:
        patched.setattr(RelativePositionEncoding, "_split_augmented", spy)
        out = model(x)
    return out, used


@pytest.mark.parametrize("spec", [AUGMENTED, "rope-mixed+jitter1.5+product-contextual-k"])
def test_layers_share_a_sample_and_passes_differ(spec, monkeypatch):
    model, x = make(spec, depth=3, dynamic_img_size=True), images(24, 40)
    first, used = samples_of(model, x, monkeypatch)
    assert len(used) == 3
    assert all(sample is used[0] for sample in used)
    assert used[0].shape == (5,)
    assert used[0].abs().max() <= 1
    second, others = samples_of(model, x, monkeypatch)
    assert not torch.equal(others[0], used[0])
    assert not torch.allclose(second, first)


def test_seeds_decide_and_eval_mode_changes_nothing():
    model, x = make(), images()
    torch.manual_seed(3)
    first = model(x)
    torch.manual_seed(3)
    assert torch.equal(model(x), first)
    plain = irpe.equip(make_vit(), "rope-axial")
    assert torch.equal(model.eval()(x), plain(x))


def test_checkpointed_blocks_are_repeated_on_the_same_positions():
    outputs, gradients = [], []
    for is_checkpointed in (False, True):
        model, x = make("rope-mixed+rescale2"), images()
        model.set_grad_checkpointing(is_checkpointed)
        torch.manual_seed(3)
        outputs.append(model(x))
        torch.manual_seed(4)  # nothing is made again in the backward pass
        outputs[-1].square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert torch.equal(*outputs)
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@pytest.mark.parametrize("drop", [pytest.param(0.0, marks=pytest.mark.slow), 0.5])
def test_a_compiled_model_makes_them_anew(drop):
    model, x = make(patch_drop_rate=drop), images()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    outputs = []
    for each in (compiled, model):
        torch.manual_seed(3)
        outputs.append(each(x))
    assert torch.equal(*outputs)
    assert not torch.allclose(compiled(x), outputs[0])


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_have_samples_of_their_own(again):
    model, x = make(), images()
    other = again(model)
    torch.manual_seed(3)
    expected = model(x)
    model.eval()
    torch.manual_seed(3)
    assert torch.equal(other(x), expected)


def test_unequip_takes_it_back():
    model, x = make(), images()
    irpe.unequip(model)
    assert torch.equal(model(x), model(x))
    assert torch.equal(model(x), make_vit().train()(x))


def test_layers_may_differ(monkeypatch):
    model = irpe.equip(make_vit(depth=3), "product-contextual-k", layers=[0])
    irpe.equip(model, "rope-axial+rescale2", layers=[1])
    irpe.equip(model, "rope-axial+shift1", layers=[2]).train()
    _, used = samples_of(model, images(), monkeypatch)
    assert used[0] is None
    assert used[1] is used[2] is not None


def test_models_of_transformers(monkeypatch):
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        image_size=32, patch_size=8,
    )  # fmt: skip
    model = irpe.equip(transformers.ViTModel(config), AUGMENTED).train()
    _, used = samples_of(model, images(), monkeypatch)
    assert used[0] is used[1] is not None


def test_where_no_grid_is_measured_it_is_refused():
    swin = make_swin()
    before = {name: type(module) for name, module in swin.named_modules()}
    with pytest.raises(irpe.UserError, match="SwinTransformer: a WindowAttention works on"):
        irpe.equip(swin, AUGMENTED)
    assert {name: type(module) for name, module in swin.named_modules()} == before
    with pytest.raises(irpe.UserError, match="leave grid= out, or the augmentation"):
        irpe.equip(make_encoder(), AUGMENTED, grid=(4, 4))


def test_a_block_alone_says_what_it_lacks():
    model = make()
    attention = next(iter(equipped_attentions(model).values()))
    with pytest.raises(irpe.UserError, match=r"AugmentedGrid\.of\(\(4, 4\)\)"):
        attention.rpe(*torch.randn(3, 1, 2, 17, 16), grid=(4, 4))


def test_a_trained_model_is_loaded_without_it_and_with_a_reference(tmp_path):
    trained, x = make("rope-mixed+rescale2").eval(), images()
    other = irpe.equip(make_vit(), "rope-mixed+ref4")
    other.load_state_dict(trained.state_dict())
    assert torch.allclose(other(x), trained(x), atol=1e-6)
    with pytest.raises(RuntimeError, match="state of encoding 'rope-mixed@10"):
        irpe.equip(make_vit(), "rope-mixed").load_state_dict(other.state_dict())
    irpe.save_equipped(trained, tmp_path / "model")
    assert torch.equal(irpe.load_equipped(tmp_path / "model")(x), trained(x))


def test_timm_is_the_same(monkeypatch):
    """timm's own rotation at one sample."""
    embedding = pytest.importorskip("timm.layers.pos_embed_sincos")
    if not hasattr(embedding, "_apply_coord_augs"):
        pytest.skip(f"timm {timm.__version__} has no augmentation of positions")
    augmentation = irpe.parse_encoding("rope-axial+shift.5+jitter1.3+rescale2").augmentation
    torch.manual_seed(3)
    sample = irpe.AugmentedGrid.of((3, 5)).sample
    coordinates = torch.randn(15, 2)
    unit = iter([sample[3:], sample[1:3], sample[:1]])
    monkeypatch.setattr(torch.Tensor, "uniform_", lambda x, least, most: next(unit) * most)
    theirs = embedding._apply_coord_augs(coordinates, 0.5, 1.3, 2.0)
    assert torch.allclose(augmentation.apply(coordinates, sample), theirs)
