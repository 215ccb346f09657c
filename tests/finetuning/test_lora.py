"""PEFT's LoRA beside tables: reachable projections, trained or frozen tables, saving, merging."""

import copy

import pytest
import torch
from adapters.small_models import make_vit
from finetuning.small import SPEC, equipped, labelled, make_dinov2, tables_of
from torch import nn

import irpe
from irpe.core.learning_rates import TABLE_LR

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
]
TRAINED = {"modules_to_save": ["rpe"]}
# How a model is made, the names of its projections, and its output.
MODELS = {
    "transformers": (make_dinov2, ["q_proj", "k_proj", "v_proj"], lambda out: out.logits),
    "timm": (lambda: make_vit(dynamic_img_size=True), ["qkv"], lambda out: out),
}
every_model = pytest.mark.parametrize("name", MODELS)


def peft():
    """Imported where it is used: every process of a test run loads this file."""
    return pytest.importorskip("peft", reason="needs PEFT: pip install peft")


def pixels():
    return torch.stack([each["pixel_values"] for each in labelled(4)])


def with_lora(model, targets, **arguments):
    """Adapters that are not zero, the same for the same model."""
    config = peft().LoraConfig(r=2, target_modules=targets, init_lora_weights=False, **arguments)
    model = peft().get_peft_model(model, config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


@every_model
@pytest.mark.parametrize("arguments", [{}, TRAINED], ids=["frozen", "trained"])
def test_zero_tables_are_plain_lora(name, arguments):
    make, targets, output = MODELS[name]
    plain = with_lora(make(), targets)
    model = with_lora(equipped(make(), fill=False), targets, **arguments)
    expected, actual = output(plain(pixels())), output(model(pixels()))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert (expected - output(make().eval()(pixels()))).abs().max() > 0.01
    for logits in (expected, actual):
        logits.square().sum().backward()
    gradients = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    assert gradients
    for key, expected in gradients.items():
        actual = model.get_parameter(key).grad
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)


@every_model
def test_tables_train_if_they_are_saved_modules_and_are_frozen_otherwise(name):
    make, targets, output = MODELS[name]
    frozen = with_lora(equipped(make()), targets)
    assert not any(table.requires_grad for table in tables_of(frozen).values())
    model = with_lora(equipped(make()), targets, **TRAINED)
    groups = irpe.parameter_groups(model, weight_decay=0.05, lr=1e-3)
    tables = [p for p in tables_of(model).values() if p.requires_grad]
    assert len(tables) == 6
    assert {id(p) for p in groups[-1]["params"]} == {id(p) for p in tables}
    assert (groups[-1]["lr"], groups[-1]["weight_decay"]) == (1e-3 * TABLE_LR, 0)
    output(model(pixels())).square().sum().backward()
    assert all(table.grad.any() for table in tables)
    effects = [each.effect for each in irpe.summary(model, pixels()).attentions]
    assert len(effects) == 2
    assert min(effects) > 0.05


@every_model
def test_saving_and_loading(name, tmp_path):
    make, targets, output = MODELS[name]
    model = with_lora(equipped(make()), targets, **TRAINED)
    for table in tables_of(model).values():
        if table.requires_grad:
            nn.init.normal_(table)  # other tables than those of the base model
    model.save_pretrained(tmp_path / "adapter")
    base = equipped(make(), fill=False)
    loaded = peft().PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    expected = output(model(pixels()))
    assert torch.equal(output(loaded(pixels())), expected)
    with pytest.raises(ValueError, match=r"irpe\.save_equipped\(model\.merge_and_unload\(\)"):
        irpe.save_equipped(model, tmp_path / "merged")
    merged = model.merge_and_unload()
    irpe.save_equipped(merged, tmp_path / "merged")
    actual = output(irpe.load_equipped(tmp_path / "merged")(pixels()))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_a_plain_base_model_does_not_get_tables(tmp_path):
    """PEFT says nothing of saved modules that the base model does not have: summary does."""
    make, targets, _ = MODELS["transformers"]
    with_lora(equipped(make()), targets, **TRAINED).save_pretrained(tmp_path)
    loaded = peft().PeftModel.from_pretrained(make(), tmp_path)
    with pytest.raises(ValueError, match="the model has no encodings"):
        irpe.summary(loaded)


@every_model
def test_without_the_adapter_the_model_is_as_before(name):
    make, targets, output = MODELS[name]
    base = equipped(make()).eval()
    expected = output(copy.deepcopy(base)(pixels()))
    effects = [each.effect for each in irpe.summary(base, pixels()).attentions]
    model = with_lora(base, targets, **TRAINED)
    for table in tables_of(model).values():
        if table.requires_grad:
            nn.init.normal_(table)
    assert (output(model(pixels())) - expected).abs().max() > 0.01
    with model.disable_adapter():
        assert torch.equal(output(model(pixels())), expected)
        found = [each.effect for each in irpe.summary(model, pixels()).attentions]
    assert found == effects


def test_a_whole_attention_can_be_a_saved_module():
    """Its copy takes the grid from the model that it is in."""
    model = equipped(make_dinov2()).eval()
    expected = model(pixels()).logits
    wrapped = with_lora(model, ["fc1"], modules_to_save=["attention"])
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            nn.init.zeros_(parameter)
    assert torch.equal(wrapped(pixels()).logits, expected)


def test_wrong_orders_and_targets():
    make, targets, _ = MODELS["transformers"]
    with pytest.raises(ValueError, match=r"is an adapter of PEFT.*equip the model first"):
        irpe.equip(with_lora(make(), targets), SPEC)
    with pytest.raises(ValueError, match=r"is an adapter of PEFT.*equip the model first"):
        irpe.equip(with_lora(make(), ["fc1"]).get_base_model(), SPEC)  # beside the attentions
    with pytest.raises(ValueError, match=r"'qkv'.* not found in the base model"):
        with_lora(equipped(make()), ["qkv"])
    model = with_lora(equipped(make()), targets, **TRAINED)
    with pytest.raises(TypeError, match="Mixed batching is only supported"):
        model(pixel_values=pixels(), adapter_names=["default", "__base__"] * 2)


@every_model
def test_a_backbone_of_sixteen_bits_with_tables_of_thirty_two(name):
    make, targets, output = MODELS[name]
    model = with_lora(equipped(make()).bfloat16(), targets, **TRAINED)
    expected = output(model(pixels().bfloat16()))
    for table in tables_of(model).values():
        table.data = table.data.float()  # the same values, and finer steps from now on
    logits = output(model(pixels().bfloat16()))
    assert logits.dtype == torch.bfloat16
    assert torch.equal(logits, expected)
    logits.float().square().sum().backward()
    for table in tables_of(model).values():
        assert not table.requires_grad or table.grad.dtype == torch.float32


@every_model
def test_tables_alone_can_be_trained(name):
    make, _, output = MODELS[name]
    model = equipped(make()).eval()
    output(model(pixels())).square().sum().backward()
    expected = {key: table.grad.clone() for key, table in tables_of(model).items()}
    model.zero_grad()
    model.requires_grad_(False)
    for table in tables_of(model).values():
        table.requires_grad_()
    (group,) = irpe.parameter_groups(model, weight_decay=0.05, lr=1e-3)
    assert (group["lr"], len(group["params"])) == (1e-3 * TABLE_LR, len(expected))
    output(model(pixels())).square().sum().backward()
    torch.testing.assert_close({k: t.grad for k, t in tables_of(model).items()}, expected)
    assert all(p.grad is None for n, p in model.named_parameters() if n not in expected)
