"""timm's models whose tokens are not one whole grid: dropped patches, pooled queries and keys."""

import copy
import pickle
import threading
from functools import partial

import pytest
import timm
import torch
from adapters.hosts.by_hand import calls_of, stock_forward
from adapters.hosts.table import make_mvit, randomize
from adapters.small_models import gradients, images, make_vit, perturb, state_of
from timm.models import naflexvit

import irpe
from irpe import viz
from irpe.adapters.equipped import equipped_attentions

SPEC = "product-contextual-qkv"


def make_dropping(name="vit_tiny_patch16_224", **arguments):
    """A vision transformer on a 4x5 grid that drops half of its patches in training."""
    return make_vit(name, img_size=(32, 40), **{"patch_drop_rate": 0.5, **arguments}).train()


def make_pvt(**arguments):
    sizes = {"depths": (1, 1, 1, 1), "embed_dims": (16, 16, 40, 32), "num_classes": 5}
    torch.manual_seed(0)
    return perturb(timm.create_model("pvt_v2_b0", **sizes, **arguments).eval())


DROPPING = {
    "ViT": {},
    "registers": {"name": "vit_small_patch14_reg4_dinov2"},
    "a norm before the blocks": {"name": "vit_base_patch16_clip_224"},
    "DINOv3": {"name": "vit_small_patch16_dinov3"},
    "rope-mixed": {"name": "vit_small_patch16_rope_mixed_224"},
}


@pytest.mark.parametrize("arguments", DROPPING.values(), ids=DROPPING)
def test_kept_patches_attend_with_the_rows_of_their_offsets(arguments):
    model, x = make_dropping(**arguments), images(32, 40)
    torch.manual_seed(2)
    expected = model(x).detach()
    randomize(irpe.equip(model, SPEC))
    torch.manual_seed(2)
    calls = calls_of(model, partial(model, x))
    assert len(calls) == 2
    for attention, (tokens,), kwargs, actual, positions in calls:
        subset, _ = positions.sides
        assert subset.grid.shape == (4, 5)
        assert subset.tokens.shape == (2, 10)
        assert positions.prefixes[0] == model.num_prefix_tokens
        for image in range(2):  # one image with its kept tokens alone
            kept = irpe.Subset((4, 5), subset.tokens[image].tolist())
            own = {
                name: value[image : image + 1] if name == "rope" else value
                for name, value in kwargs.items()
            }
            alone = irpe.Positions(kept, None, positions.prefixes)
            by_hand = stock_forward(attention, (tokens[image : image + 1],), own, alone)
            torch.testing.assert_close(actual[image : image + 1], by_hand, rtol=1e-4, atol=1e-4)
    torch.manual_seed(2)
    assert (model(x) - expected).abs().max() > 1e-2
    for attention in equipped_attentions(model).values():
        attention.rpe.reset_parameters()
    torch.manual_seed(2)
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


def test_dropped_patches_leave_evaluation_as_it_is():
    model, plain = make_dropping().eval(), make_vit(img_size=(32, 40))
    x = images(32, 40)
    irpe.equip(model, SPEC)
    irpe.equip(plain, SPEC)
    randomize(model)
    randomize(plain)
    expected = plain(x)
    torch.testing.assert_close(model(x), expected)
    model.train()(x)
    torch.testing.assert_close(model.eval()(x), expected)


def test_kept_patches_travel_with_their_tokens():
    """Two inputs whose patches are chosen before the blocks of either ran, and repeated blocks."""
    model = randomize(irpe.equip(make_dropping("vit_base_patch16_clip_224"), SPEC))

    def embed(x, seed):
        torch.manual_seed(seed)
        return model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(x))))

    def finish(tokens):
        return model.blocks(tokens)

    first, second = images(32, 40, seed=1), images(32, 40, seed=2)
    apart = [finish(embed(first, 1)), finish(embed(second, 2))]
    together = [embed(first, 1), embed(second, 2)]
    for expected, tokens in zip(apart, together, strict=True):
        torch.testing.assert_close(finish(tokens), expected)
        torch.testing.assert_close(finish(tokens), expected)


def test_kept_patches_in_threads():
    model = randomize(irpe.equip(make_dropping(), SPEC))
    x = images(32, 40)
    chosen = [model.patch_drop(model._pos_embed(model.patch_embed(x))) for _ in range(4)]
    expected = [model.blocks(tokens) for tokens in chosen]
    found = [None] * 4

    def run(index):
        found[index] = model.blocks(chosen[index])

    threads = [threading.Thread(target=run, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, wanted)


def test_dropped_patches_with_gradient_checkpointing():
    model, x = randomize(irpe.equip(make_dropping(), SPEC)), images(32, 40)
    torch.manual_seed(0)
    expected = gradients(model, x)
    model.set_grad_checkpointing(True)
    torch.manual_seed(0)
    for name, value in gradients(model, x).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5, msg=name)


def test_dropped_patches_in_files_and_copies(tmp_path):
    model, x = randomize(irpe.equip(make_dropping(), SPEC)), images(32, 40)
    irpe.save_equipped(model, tmp_path / "model")
    loaded = irpe.load_equipped(tmp_path / "model").train()
    for other in (loaded, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        outputs = []
        for each in (model, other):
            torch.manual_seed(3)
            outputs.append(each(x))
        assert torch.equal(*outputs)


def test_unequip_gives_the_patch_dropout_back():
    model = make_dropping("vit_base_patch16_clip_224")
    before = state_of(model)
    irpe.equip(model, SPEC, layers=[0])
    irpe.equip(model, SPEC, layers=[1])
    model(images(32, 40))
    irpe.unequip(model)
    assert state_of(model) == before


@pytest.mark.parametrize("spec", ["quantization-bias-k", "rope-axial"])
def test_an_encoding_without_rows_for_pooled_keys_says_so(spec):
    model = irpe.equip(make_pvt(), spec)
    with pytest.raises(ValueError, match=f"encoding '{spec}.*16x24 / 2x3 at stride 8"):
        model(images(64, 96))


def test_pooled_keys_are_where_their_cells_are():
    model = irpe.equip(make_pvt(), SPEC)
    model(images(64, 96))
    summary = irpe.summary(model)
    queries, keys = summary.attentions[0].grid.places()
    assert queries.tolist()[:2] == [[0, 0], [0, 1]]
    assert keys.tolist() == [[3.5 + 8 * row, 3.5 + 8 * column] for row in range(2)
                             for column in range(3)]  # fmt: skip
    assert "16x24 / 2x3 at stride 8x8" in str(summary)


def test_pooled_queries_are_where_their_windows_are():
    """Windows of 3 with a padding of 1 are centred on every second token: 2 i, as MViTv2 has it."""
    model = irpe.equip(make_mvit(), SPEC)
    model(images(64, 64))
    found = [each.grid for each in irpe.summary(model).attentions]
    assert [str(positions) for positions in found] == [
        "16x16 / 4x4 at stride 4x4",
        "8x8",
        "8x8 / 4x4 at stride 2x2",
        "4x4 at stride 2x2 / 8x8",
    ]
    queries, keys = found[3].places()
    assert queries[:3].tolist() == [[0, 0], [0, 2], [0, 4]]
    assert keys[:3].tolist() == [[0, 0], [0, 1], [0, 2]]


SHAPES = torch.tensor([[3, 4], [2, 5]])
NAFLEX = {
    "learned": {},
    "rotating": {"rope_type": "axial"},
    "a norm before the blocks": {"pre_norm": True},
    "dropped patches": {"patch_drop_rate": 0.5},
}


def make_naflex(**arguments):
    sizes = {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "reg_tokens": 2}
    config = naflexvit.NaFlexVitCfg(**sizes, global_pool="avg", **arguments)
    torch.manual_seed(0)
    return perturb(naflexvit.NaFlexVit(config, num_classes=5).eval())


def patches_of_several_shapes():
    points = irpe.Points.of_grids(SHAPES, 12)
    patches = torch.randn(2, 12, 192, generator=torch.Generator().manual_seed(0))
    coordinates, is_token = points.coordinates, points.is_token
    return {"patches": patches, "patch_coord": coordinates, "patch_valid": is_token}


@pytest.mark.parametrize("arguments", NAFLEX.values(), ids=NAFLEX)
def test_images_of_several_shapes_in_one_batch(arguments):
    model, x = make_naflex(**arguments).train("patch_drop_rate" in arguments), images(24, 40)
    inputs = patches_of_several_shapes()

    def outputs():
        torch.manual_seed(1)
        return model(inputs).detach(), model(x).detach()

    expected = outputs()
    irpe.equip(model, SPEC)
    for actual, plain in zip(outputs(), expected, strict=True):
        torch.testing.assert_close(actual, plain, rtol=1e-4, atol=1e-5)
    randomize(model)
    for actual, plain in zip(outputs(), expected, strict=True):
        assert (actual - plain).abs().max() > 1e-2
    if model.training:
        calls = calls_of(model, partial(model, inputs))
        for *_, positions in calls:
            for kept, all_of_image in zip(positions.queries.coordinates, inputs["patch_coord"],
                                          strict=True):  # fmt: skip
                assert len(kept) == 6
                assert {*map(tuple, kept.tolist())} <= {*map(tuple, all_of_image.tolist())}
        return
    for image, (rows, columns) in enumerate(SHAPES.tolist()):  # each as on its own grid
        count = rows * columns
        alone = {name: value[image : image + 1, :count] for name, value in inputs.items()}
        torch.testing.assert_close(
            model(alone), model(inputs)[image : image + 1], rtol=1e-4, atol=1e-4
        )
    first, second = calls_of(model, partial(model, x))
    assert first[-1] == second[-1] == (3, 5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "size"), [(make_pvt, (64, 96)), (make_mvit, (64, 64)), (make_dropping, (32, 40))]
)
def test_compiled_models(make, size):
    model, x = randomize(irpe.equip(make(), SPEC)), images(*size)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.manual_seed(0)
    expected = model(x)
    torch.manual_seed(0)
    torch.testing.assert_close(compiled(x), expected)


def test_pictures_of_pooled_keys_have_two_grids():
    model, x = irpe.equip(make_pvt(), SPEC), images(64, 96)
    first, *_, last = viz.capture(model, x)
    assert last.grid.shape == (2, 3)
    assert first.attention().shape == (1, 16 * 24, 6)
    assert [grid.shape for grid in first.grids] == [(16, 24), (2, 3)]
    with pytest.raises(ValueError, match=r"tokens on 16x24 / 2x3 at stride 8x8.*plot_positions"):
        _ = first.grid
