"""A whole model made relative: all or nothing, an ordinary equipped model, and what is reported."""

import copy
import json
import signal
import threading

import pytest
import timm
import torch
import transformers
from adapters.small_models import make_vit, state_of
from relative.built import make_positional_vit, some_images
from torchvision.models import VisionTransformer

import irpe
from irpe.adapters.equipped import equipped_attentions
from irpe.relative.conversion import Agreement
from irpe.relative.outputs import features_of


def make_transformers_vit():
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        image_size=32, patch_size=8, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=48, initializer_range=0.3,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config).eval()


def make_torchvision_vit():
    torch.manual_seed(0)
    model = VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=48
    )
    with torch.no_grad():
        model.heads.head.weight.normal_()
        model.encoder.pos_embedding.normal_()
    return model.eval()


MODELS = {
    "timm": (make_positional_vit, some_images()),
    "timm, no prefix": (
        lambda: make_positional_vit(class_token=False, global_pool="avg"),
        some_images(),
    ),
    "timm, registers": (lambda: make_positional_vit(reg_tokens=4), some_images()),
    "timm, other size": (
        lambda: make_positional_vit(dynamic_img_size=True),
        [some_images(), some_images(height=32, width=48)],
    ),
    "timm, rotary": (
        lambda: make_vit("eva02_tiny_patch14_224"),
        some_images(height=32, width=32),
    ),
    "timm, bfloat16": (lambda: make_positional_vit().bfloat16(), some_images().bfloat16()),
    "timm, float64": (lambda: make_positional_vit().double(), some_images().double()),
    "transformers": (make_transformers_vit, some_images(height=32, width=32)),
    "torchvision": (make_torchvision_vit, some_images(height=32, width=32)),
}


@pytest.mark.parametrize("name", MODELS)
def test_solved_tables_bring_attention_back(name):
    make, images = MODELS[name]
    model = make()
    names = {name for name, _ in model.named_modules()}
    conversion = irpe.make_relative(
        model, images, "product-contextual-kv@clip2+unshared", batch_size=4
    )
    attentions = equipped_attentions(model)
    assert [each.name for each in conversion.attentions] == list(attentions)
    for each in conversion.attentions:
        assert 0 <= each.divergence_after <= each.divergence_before
    first = conversion.attentions[0]
    assert first.explained > 0
    assert first.divergence_after < first.divergence_before
    assert names <= {name for name, _ in model.named_modules()}
    (call,) = model._irpe_equipment
    assert (call.absolute, str(call.spec)) == ("none", conversion.spec)


@pytest.mark.parametrize(
    "spec", ["product-bias-k@clip4+unshared", "product-contextual-k@clip4+unshared"]
)
def test_outputs_agree_better_than_without_positions(spec):
    images, new = some_images(24), some_images(8, seed=9)
    original, bare, model = (make_positional_vit() for _ in range(3))
    irpe.equip(bare, "none", absolute="none")
    conversion = irpe.make_relative(model, images, spec)
    with torch.no_grad():
        expected, without, found = original(new), bare(new), model(new)
    assert (found - expected).norm() < 0.02 * (without - expected).norm()
    assert conversion.after.r2 > conversion.before.r2
    assert conversion.after.cosine > conversion.before.cosine


def test_more_images_help():
    """Where tables cannot explain everything: a model with random weights and positions."""
    new, errors = some_images(16, 32, 32, seed=9), list[float]()
    for count in (2, 4, 64):
        model = make_vit()
        original = copy.deepcopy(model)
        conversion = irpe.make_relative(
            model, some_images(count, 32, 32), "product-contextual-k+unshared", seed=count
        )
        assert conversion.num_images == count
        with torch.no_grad():
            expected, found = original.forward_features(new), model.forward_features(new)
        errors.append(float((found - expected).norm()))
    assert errors[0] > errors[-1]
    assert errors[1] > errors[-1]


def test_chosen_layers_alone_have_tables():
    model = make_positional_vit()
    conversion = irpe.make_relative(model, some_images(), "product-bias-k", layers=[0, -1])
    assert [each.name for each in conversion.attentions] == ["blocks.0.attn", "blocks.2.attn"]
    assert list(equipped_attentions(model)) == ["blocks.0.attn", "blocks.2.attn"]
    assert not model.pos_embed.any()


def test_the_result_is_an_ordinary_equipped_model(tmp_path):
    model, images = make_vit(), some_images(height=32, width=32)
    with torch.no_grad():
        before = model(images)
    irpe.make_relative(model, images, "product-contextual-k")
    with torch.no_grad():
        expected = model(images)
        irpe.save_equipped(model, tmp_path / "model")
        loaded = irpe.load_equipped(tmp_path / "model").eval()
        torch.testing.assert_close(loaded(images), expected)
    with pytest.raises(irpe.UserError):
        irpe.unequip(loaded)
    tables = irpe.unequip(model)
    assert len(tables) == 2
    assert any(table.any() for table in tables.values())
    with torch.no_grad():
        torch.testing.assert_close(model(images), before)


def test_equal_seeds_give_equal_tables():
    tables = []
    for seed in (0, 0, 1):
        model = make_vit()
        irpe.make_relative(model, some_images(12, 32, 32), "product-bias-k", seed=seed)
        tables.append(torch.cat([table.flatten() for table in irpe.unequip(model).values()]))
    assert torch.equal(tables[0], tables[1])
    assert not torch.equal(tables[0], tables[2])


def interrupts_at(step):
    """A listener that ends the work after a step, as Ctrl-C does."""

    def listen(event):
        if event.done == step:
            raise KeyboardInterrupt

    return listen


@pytest.mark.parametrize("step", [1, 2, 3])
def test_interruption_leaves_the_model_as_it_was(step):
    model, threads = make_positional_vit().train(), threading.active_count()
    before = state_of(model)
    with pytest.raises(KeyboardInterrupt):
        irpe.make_relative(model, some_images(), "product-bias-k", listen=interrupts_at(step))
    assert state_of(model) == before
    assert threading.active_count() == threads


def test_a_signal_while_a_pass_runs_leaves_the_model_as_it_was():
    model, threads, once = make_positional_vit(), threading.active_count(), [signal.SIGINT]

    def interrupt(*_):
        if once:
            signal.pthread_kill(threading.main_thread().ident, once.pop())

    model.blocks[1].mlp.register_forward_hook(interrupt)
    before = state_of(model)
    with pytest.raises(KeyboardInterrupt):
        irpe.make_relative(model, some_images(), "product-bias-k")
    assert state_of(model) == before
    assert threading.active_count() == threads


def _raises_in_block_1(model):
    def fail(*_):
        raise ArithmeticError("block 1")

    model.blocks[1].mlp.register_forward_pre_hook(fail)
    return model


SWIN = {"img_size": 32, "patch_size": 2, "window_size": 4, "depths": (1,), "num_heads": (2,)}
REFUSED = {
    "no absolute encoding": (lambda: make_positional_vit(pos_embed="none"), {}, irpe.UserError),
    "relative already": (
        lambda: timm.create_model("swin_tiny_patch4_window7_224", embed_dim=8, **SWIN),
        {"images": some_images(4, 32, 32)},
        irpe.UserError,
    ),
    "equipped": (
        lambda: irpe.equip(make_positional_vit(), "product-bias-k"),
        {},
        irpe.UserError,
    ),
    "not linear": (make_positional_vit, {"spec": "log-cpb"}, irpe.UserError),
    "no tables": (make_positional_vit, {"spec": "rope-axial"}, irpe.UserError),
    "none": (make_positional_vit, {"spec": "none"}, irpe.UserError),
    "no such layer": (make_positional_vit, {"layers": [7]}, irpe.UserError),
    "one image": (make_positional_vit, {"images": some_images(1)}, irpe.UserError),
    "no images": (make_positional_vit, {"images": []}, irpe.UserError),
    "names": (make_positional_vit, {"images": ["a.jpg"]}, TypeError),
    "holdout": (make_positional_vit, {"holdout": 1.0}, irpe.UserError),
    "labels": (make_positional_vit, {"labels": torch.zeros(3)}, irpe.UserError),
    "size": (make_positional_vit, {"images": some_images(4, 40, 40)}, AssertionError),
    "a failing block": (lambda: _raises_in_block_1(make_positional_vit()), {}, ArithmeticError),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_solved_for_is_refused_untouched(name):
    make, changed, error = REFUSED[name]
    model = make()
    before = state_of(model)
    arguments = {"images": some_images(), "spec": "product-bias-k", **changed}
    with pytest.raises(error):
        irpe.make_relative(model, **arguments)
    assert state_of(model) == before


def test_the_report_is_a_table_json_a_figure_and_a_sentence():
    model, labels = make_positional_vit(), torch.arange(12) % 5
    conversion = irpe.make_relative(model, some_images(), "product-bias-k", labels=labels)
    content = json.loads(conversion.to_json())
    assert len(content["attentions"]) == 3
    assert content["num_images"] == 12
    assert content["num_held_out"] == 3
    assert all(0 <= each <= 1 for each in content["accuracy"])
    for each in conversion.attentions:
        assert each.name in str(conversion)
    assert conversion.sentence() in str(conversion)
    assert len(conversion.figure().axes) == 2


def test_agreement_is_relative_to_the_variance_if_there_is_one():
    x, y = torch.tensor([[3.0, 4.0], [1.0, 4.0]]), torch.tensor([[3.0, 3.0], [1.0, 4.0]])
    assert Agreement.of([x], [y]).r2 == pytest.approx(1 - 1 / 2)
    assert Agreement.of([x[:1]], [y[:1]]).r2 == pytest.approx(1 - 1 / 25)
    assert Agreement.of([x[1:]], [y[1:]]).cosine == pytest.approx(1)


def test_threads_of_the_caller_do_not_stop():
    """A model under conversion in one thread does not hold up the same model in another."""
    model = make_positional_vit()
    outputs = []

    def call(event):
        with torch.no_grad():
            outputs.append(model(some_images(2)))

    irpe.make_relative(model, some_images(), "product-bias-k", listen=call)
    assert len(outputs) == 3 + 2


def test_positions_can_be_read_with_an_absolute_encoding_alone():
    model = make_positional_vit()
    before = irpe.position_probe(model, some_images(24))
    state = state_of(model)
    assert before.attentions[0].row > 0.99
    assert before.attentions[0].column > 0.99
    irpe.equip(model, "none", absolute="none")
    after = irpe.position_probe(model, some_images(24))
    assert after.attentions[0].row < 0.3
    assert after.attentions[0].column < 0.3
    assert len(after.figure().axes) == 1
    assert "blocks.2.attn" in str(after)
    irpe.unequip(model)
    assert state_of(model) == state


def test_outputs_of_all_kinds_are_read():
    x = torch.zeros(2, 3)
    output = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=x)
    for each in (x, (x, None), output):
        assert features_of(each) is x
    with pytest.raises(TypeError):
        features_of({"a": x})
