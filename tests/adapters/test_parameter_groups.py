"""How tables reach an optimizer: without decay, at a rate of their own that schedulers keep."""

import copy
import re

import pytest
import torch
from adapters.small_models import make_encoder, make_swin, make_vit
from timm.optim import create_optimizer_v2
from timm.scheduler.cosine_lr import CosineLRScheduler
from torch import nn

import irpe
from irpe.core.learning_rates import TABLE_LR

pytestmark = pytest.mark.filterwarnings("ignore:parameter_groups without lr")

SPEC = "product-contextual-qkv"
MODELS = {
    "vit": lambda: irpe.equip(make_vit(), "cross-bias-k+unshared"),
    "swin": lambda: irpe.equip(make_swin(), SPEC),
    "encoder": lambda: irpe.equip(make_encoder(), "product-bias-k+unshared", grid=(2, 3)),
    "attention": lambda: irpe.equip(nn.MultiheadAttention(16, 2), "cross-bias-k", grid=(2, 3)),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_parameter_groups_hold_each_parameter_once(make):
    model = make()
    frozen = next(iter(model.parameters())).requires_grad_(False)
    decayed, kept = irpe.parameter_groups(model, weight_decay=0.1)
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    by_id = {id(p): name for name, p in model.named_parameters() if p is not frozen}
    decayed, kept = ([by_id.pop(id(p)) for p in group["params"]] for group in (decayed, kept))
    assert not by_id
    pattern = r"(^|\.)rpe\.|bias|norm|pos_embed|cls_token"
    assert decayed
    assert not [name for name in decayed if re.search(pattern, name)]
    assert not [name for name in kept if not re.search(pattern, name)]
    torch.optim.AdamW(irpe.parameter_groups(model, weight_decay=0.1))


@pytest.mark.parametrize("make", [MODELS["vit"], MODELS["swin"]], ids=["vit", "swin"])
@pytest.mark.parametrize("twin", [lambda m: m, copy.deepcopy], ids=["itself", "copy"])
@pytest.mark.parametrize("arguments", [{}, {"layer_decay": 0.75}], ids=str)
def test_optimizers_of_timm_do_not_decay_tables(make, twin, arguments):
    plain, model = make_vit() if make is MODELS["vit"] else make_swin(), twin(make())
    tables = {name for name in model.state_dict() if ".rpe." in name}
    assert model.no_weight_decay() == tables | plain.no_weight_decay()
    optimizer = create_optimizer_v2(model, opt="adamw", weight_decay=0.1, **arguments)
    decay = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    for name, parameter in model.named_parameters():
        if name in tables:
            assert decay[id(parameter)] == 0
        if name.endswith("qkv.weight"):
            assert decay[id(parameter)] > 0


def test_a_plain_model_has_the_same_groups_but_for_the_tables():
    plain, settings = make_vit(), {"weight_decay": 0.1, "lr": 1e-3, "table_lr": 5.0}
    equipped = irpe.equip(copy.deepcopy(plain), SPEC)
    names = {id(p): name for model in (plain, equipped) for name, p in model.named_parameters()}
    *shared, tables = irpe.parameter_groups(equipped, **settings)
    found = irpe.parameter_groups(plain, **settings)
    for group in (*found, *shared):
        group["params"] = [names[id(p)] for p in group["params"]]
    assert found == shared
    assert tables["lr"] == 5e-3
    optimizer = create_optimizer_v2(plain, opt="adamw", lr=1e-3)
    before = [dict(group) for group in optimizer.param_groups]
    irpe.scale_table_rates(optimizer, plain)
    assert [dict(group) for group in optimizer.param_groups] == before


def test_no_weight_decay_of_a_copy_is_about_the_copy():
    model = irpe.equip(make_vit(), SPEC, layers=[0])
    twin = irpe.equip(copy.deepcopy(model), SPEC, layers=[1])
    assert len(twin.no_weight_decay()) == len(model.no_weight_decay()) + 3


def rates(groups):
    return [group.get("lr") for group in groups]


def test_tables_get_a_rate_of_their_own():
    model = irpe.equip(make_vit(), SPEC)
    tables = {id(p) for name, p in model.named_parameters() if ".rpe." in name}
    for arguments, factor in (({}, TABLE_LR), ({"table_lr": 7}, 7)):
        groups = irpe.parameter_groups(model, 0.1, lr=1e-2, **arguments)
        assert rates(groups) == [1e-2, 1e-2, 1e-2 * factor]
        assert [group["weight_decay"] for group in groups] == [0.1, 0, 0]
        assert {id(p) for p in groups[2]["params"]} == tables
    assert rates(irpe.parameter_groups(model, 0.1)) == [None, None]
    assert rates(irpe.parameter_groups(model, 0.1, lr=1e-2, table_lr=1)) == [1e-2, 1e-2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"table_lr": 3.0}, r"table_lr = 3\.0 is a multiple of lr, which is missing: pass lr="),
        ({"lr": 1e-3, "table_lr": 0}, "table_lr = 0 must be a finite number greater than 0"),
        ({"lr": 1e-3, "table_lr": -2.0}, r"table_lr = -2\.0 must be"),
        ({"lr": 1e-3, "table_lr": float("nan")}, "table_lr = nan must be"),
        ({"lr": float("inf")}, "lr = inf must be"),
    ],
)
def test_rates_that_are_not_positive_are_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        irpe.parameter_groups(irpe.equip(make_vit(), SPEC), 0.1, **arguments)


@pytest.mark.parametrize("value", ["5", torch.tensor(5.0), True, [5.0]], ids=str)
def test_settings_that_are_not_numbers_are_errors(value):
    model = irpe.equip(make_vit(), SPEC)
    for name in ("weight_decay", "lr", "table_lr"):
        with pytest.raises(TypeError, match=rf"^{name} = .* is not a number: pass a float"):
            irpe.parameter_groups(model, **{"weight_decay": 0.1, "lr": 1e-3, name: value})
    with pytest.raises(TypeError, match=r"^table_lr = .* is not a number"):
        irpe.scale_table_rates(make_optimizer(model), model, table_lr=value)
    with pytest.raises(TypeError, match="weight_decay = None is not a number"):
        irpe.parameter_groups(model, None)


@pytest.mark.parametrize("value", [-1, -0.1, float("nan"), float("inf")])
def test_weight_decays_that_are_negative_or_infinite_are_errors(value):
    model = irpe.equip(make_vit(), SPEC)
    with pytest.raises(ValueError, match=f"weight_decay = {value} must be a finite number of at"):
        irpe.parameter_groups(model, value)
    assert len(irpe.parameter_groups(model, 0)) == 1


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning")
def test_schedulers_of_torch_and_timm_keep_the_proportion():
    groups = irpe.parameter_groups(irpe.equip(make_vit(), SPEC), 0.1, lr=1e-2, table_lr=5)
    of_torch = torch.optim.AdamW(copy.deepcopy(groups))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(of_torch, 10)
    of_timm = create_optimizer_v2(copy.deepcopy(groups), opt="adamw", lr=1e-2)
    timm_schedule = CosineLRScheduler(of_timm, t_initial=10, warmup_t=3, warmup_lr_init=0)
    for step in range(1, 9):
        schedule.step()
        timm_schedule.step(step)
        for optimizer in (of_torch, of_timm):
            plain, _, tables = rates(optimizer.param_groups)
            assert tables == pytest.approx(5 * plain)


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning")
@pytest.mark.parametrize("make", [MODELS["vit"], MODELS["swin"]], ids=["vit", "swin"])
@pytest.mark.parametrize("arguments", [{}, {"layer_decay": 0.75}], ids=str)
def test_optimizers_of_timm_get_the_rate_of_tables(make, arguments):
    model = make()
    settings = {"opt": "adamw", "lr": 1e-2, "weight_decay": 0.1, **arguments}
    plain, optimizer = (create_optimizer_v2(model, **settings) for _ in range(2))
    irpe.scale_table_rates(optimizer, model, table_lr=7)
    schedules = [
        CosineLRScheduler(each, t_initial=10, warmup_t=3, warmup_lr_init=1e-4)
        for each in (plain, optimizer)
    ]
    tables = {id(p) for name, p in model.named_parameters() if ".rpe." in name}
    for step in range(1, 9):
        for schedule in schedules:
            schedule.step(step)
        expected, actual = (
            {id(p): (g["lr"], g["weight_decay"]) for g in each.param_groups for p in g["params"]}
            for each in (plain, optimizer)
        )
        assert expected.keys() == actual.keys()
        for key, (rate, decay) in expected.items():
            factor = 7 if key in tables else 1
            assert actual[key] == (pytest.approx(factor * rate), decay)
            assert decay == 0 or key not in tables
    if arguments:
        assert len({rate for key, (rate, _) in actual.items() if key in tables}) > 1


def test_tables_that_are_alone_in_a_group_stay_there():
    model = irpe.equip(make_vit(), SPEC)
    tables = [p for name, p in model.named_parameters() if ".rpe." in name]
    optimizer = torch.optim.AdamW(tables, 1e-2)
    irpe.scale_table_rates(optimizer, model, table_lr=7)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["lr_scale"], len(group["params"])) == (1e-2, 7, len(tables))
    with pytest.raises(ValueError, match="table_lr = 0 must be"):
        irpe.scale_table_rates(optimizer, model, table_lr=0)


def make_optimizer(model):
    return create_optimizer_v2(model, opt="adamw", lr=1e-2, weight_decay=0.1)


def layout(optimizer):
    return [
        {**group, "params": [id(p) for p in group["params"]]} for group in optimizer.param_groups
    ]


def scaled(model):
    optimizer = make_optimizer(model)
    irpe.scale_table_rates(optimizer, model)
    return optimizer


def scheduled(model):
    optimizer = make_optimizer(model)
    CosineLRScheduler(optimizer, t_initial=10)
    return optimizer


TOO_LATE = {
    "scaled": (scaled, r"have 5\.0 times the rate .* already.* call one of them, once"),
    "grouped": (
        lambda model: torch.optim.AdamW(irpe.parameter_groups(model, 0.1, lr=1e-2, table_lr=3)),
        "have 3 times the rate .* already",
    ),
    "scheduled": (scheduled, r"scheduler .* already .*call irpe\.scale_table_rates first, then"),
    "of a copy": (
        lambda model: make_optimizer(copy.deepcopy(model)),
        "does not have 6 of 6 tables .* make the optimizer after",
    ),
}


@pytest.mark.parametrize(("make", "message"), TOO_LATE.values(), ids=TOO_LATE)
def test_tables_do_not_get_their_rate_twice_or_too_late(make, message):
    model = irpe.equip(make_vit(), SPEC)
    optimizer = make(model)
    before = layout(optimizer)
    with pytest.raises(ValueError, match=message):
        irpe.scale_table_rates(optimizer, model)
    assert layout(optimizer) == before


def test_an_optimizer_from_before_equipping_is_refused():
    model = make_vit()
    optimizer = make_optimizer(model)
    irpe.equip(model, SPEC)
    message = r"blocks\.0\.attn\.rpe\.\w+\.0: make the optimizer after irpe\.equip"
    with pytest.raises(ValueError, match=message):
        irpe.scale_table_rates(optimizer, model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = ".rpe." not in name
    irpe.scale_table_rates(optimizer, model)  # frozen tables need no rate


def test_groups_with_names_keep_the_names_of_their_parameters():
    model = irpe.equip(make_vit(), SPEC)
    optimizer = torch.optim.AdamW(model.named_parameters(), 1e-2)
    irpe.scale_table_rates(optimizer, model)
    names = {id(p): name for name, p in model.named_parameters()}
    plain, tables = optimizer.param_groups
    for group in (plain, tables):
        assert group["param_names"] == [names[id(p)] for p in group["params"]]
    assert set(tables["param_names"]) == {name for name in names.values() if ".rpe." in name}
    optimizer.load_state_dict(optimizer.state_dict())


class Attribute(nn.Module):
    """A wrapper with a name of its own, as a LightningModule has."""

    def __init__(self, model):
        super().__init__()
        self.net = model


class Forwarding(Attribute):
    """A wrapper that has the attributes of the model in it, as that of torch.compile."""

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("net"), name)


WRAPPERS = {
    "attribute": Attribute,
    "forwarding": Forwarding,
    "compiled": torch.compile,
    "data parallel": nn.DataParallel,
    "averaged": torch.optim.swa_utils.AveragedModel,
    "twice": lambda model: nn.DataParallel(torch.compile(model)),
}


def decayed_names(model, prefix=""):
    groups = irpe.parameter_groups(model, 0.1, lr=1e-2)
    names = {id(p): name.removeprefix(prefix) for name, p in model.named_parameters()}
    return [names[id(p)] for group in groups if group["weight_decay"] for p in group["params"]]


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("make", [MODELS["vit"], MODELS["swin"]], ids=["vit", "swin"])
def test_wrappers_decay_what_the_model_in_them_decays(make, wrap):
    model = make()
    expected = decayed_names(model)
    wrapper = wrap(model)
    first, _ = next(model.named_parameters())
    prefix = next(name for name, _ in wrapper.named_parameters()).removesuffix(first)
    assert decayed_names(wrapper, prefix) == expected


@pytest.mark.parametrize("twin", [lambda m: m, copy.deepcopy], ids=["itself", "copy"])
def test_a_no_weight_decay_that_a_model_was_given_is_kept(twin):
    model = make_vit()
    model.no_weight_decay = lambda: {"head.weight"}
    given = model.no_weight_decay
    irpe.equip(irpe.equip(model, SPEC, layers=[0]), SPEC, layers=[1])
    tables = {name for name in model.state_dict() if ".rpe." in name}
    assert twin(model).no_weight_decay() == {"head.weight"} | tables
    assert "pos_embed" in decayed_names(model)
    assert "head.weight" not in decayed_names(model)
    irpe.unequip(model)
    assert model.no_weight_decay is given


@pytest.mark.parametrize("wrap", [Forwarding, torch.compile], ids=["forwarding", "compiled"])
def test_wrappers_that_forward_attributes_can_be_equipped(wrap):
    wrapper = irpe.equip(wrap(make_vit()), SPEC)
    tables = {name for name, _ in wrapper.named_parameters() if ".rpe." in name}
    assert wrapper.no_weight_decay() == make_vit().no_weight_decay() | tables
    assert not tables & set(decayed_names(wrapper))
    assert not [name for name in decayed_names(wrapper) if name.endswith("pos_embed")]


def test_tables_without_a_rate_are_named_in_a_warning():
    with pytest.warns(UserWarning, match="pass lr="):
        irpe.parameter_groups(irpe.equip(make_vit(), "product-contextual-k"), 0.05)
    irpe.parameter_groups(make_vit(), 0.05)  # a plain model has no tables
