"""Costs of whole models: counted and timed."""

import pytest
import torch

pytest.importorskip("timm", reason="needs the extra 'timm'")

from irpe.profile.cost import (
    count,
    create,
    extra_macs_by_resolution,
    input_size,
    measure_costs,
)
from irpe.profile.count import count_macs, count_parameters
from irpe.profile.measure import interleaved, peak_memory

TINY = "deit_tiny_patch16_224"


def test_counting_without_computing_is_counting():
    model = create(TINY, "product-contextual-qkv", 64, "cpu")
    counted = count(TINY, "product-contextual-qkv", 64)
    assert counted.parameters == count_parameters(model)
    assert counted.macs == count_macs(model, torch.zeros(1, 3, 64, 64))
    tokens, width, layers = 17, 192, 12
    assert counted.formula_macs == layers * 3 * tokens * width * min(17, 50)


def test_a_model_beside_its_encodings():
    events = []
    plain, shaw, cpvt = measure_costs(TINY, ["shaw", "cpvt"], 64, rounds=1, listen=events.append)
    steps = [(event.work, event.done, event.total) for event in events]
    assert steps == [(work, done, 2) for work in ("counting", "timing") for done in range(3)]
    assert [plain.encoding, shaw.encoding, cpvt.encoding] == ["none", "shaw", "cpvt"]
    assert (plain.extra_macs, plain.time_ratio, plain.extra_memory) == (0, 1.0, 0)
    assert shaw.macs == plain.macs + shaw.extra_macs
    assert shaw.extra_parameters == 12 * 50 * 64
    assert cpvt.extra_parameters == 5 * 192 * 10 - 17 * 192  # generators for the absolute encoding
    for cost in (plain, shaw, cpvt):
        assert cost.extra_macs == cost.formula_macs
        assert cost.seconds > 0
        assert cost.memory == plain.memory + cost.extra_memory > 0


def test_counting_only_measures_nothing():
    plain, _ = measure_costs(TINY, ["shaw"], 32, rounds=0)
    assert (plain.seconds, plain.time_ratio, plain.memory, plain.extra_memory) == (None,) * 4


def test_swin_and_what_it_cannot_have():
    swin, refused = "swin_tiny_patch4_window7_224", {}
    costs = measure_costs(swin, ["huang", "cpvt"], rounds=0, refused=refused)
    assert [cost.encoding for cost in costs] == ["none", "huang"]
    assert costs[1].extra_macs == costs[1].formula_macs > 0
    assert "VisionTransformer" in refused["cpvt"]
    with pytest.raises(ValueError, match="VisionTransformer"):
        measure_costs(swin, ["huang", "cpvt"], rounds=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "deit_tini_patch16_224"}, "did you mean 'deit_tiny_patch16_224'"),
        ({"encodings": ["shaw", "huan"]}, "did you mean 'huang'"),
        ({"batch": 0}, "batch = 0"),
        ({"rounds": -1}, "rounds = -1"),
        ({"resolution": 8}, "deit_tiny_patch16_224 does not take images of 8 x 8"),
        ({"resolution": 0}, "resolution = 0"),
        ({"model": "resnet18"}, "cannot be equipped"),
        ({"encodings": ["sasa@2"], "resolution": 64}, "sasa@4"),
    ],
    ids=str,
)
def test_what_is_wrong_is_said_at_once(arguments, message):
    call = {"model": TINY, "encodings": ["shaw"], "rounds": 0, **arguments}
    with pytest.raises(ValueError, match=message):
        measure_costs(**call)


def test_a_model_without_attention_can_be_profiled_plain():
    (plain,) = measure_costs("resnet18", ["none"], 64, rounds=0)
    assert plain.parameters == 11689512
    assert input_size("resnet18") == (3, 224, 224)


def test_direct_and_efficient_form_by_resolution():
    rows = extra_macs_by_resolution(TINY, "product-contextual-qk", [64, 128])
    assert [row.tokens for row in rows] == [17, 65]
    for row in rows:
        assert row.direct == 12 * 2 * row.tokens**2 * 192
        assert row.efficient == 12 * 2 * row.tokens * 192 * min(row.tokens, 50)
        assert row.plain == count(TINY, "none", row.resolution).macs
    with pytest.raises(ValueError, match="no direct form"):
        extra_macs_by_resolution(TINY, "cpvt", [64])


def test_contestants_take_turns_after_one_that_does_not_count():
    turns = []
    seconds = interleaved({"a": lambda: turns.append("a"), "b": lambda: turns.append("b")}, 2)
    assert turns == ["a", "b"] * 3
    assert all(0 < value < 1 for value in seconds.values())


def test_peak_memory_counts_what_lives_at_once():
    x = torch.zeros(1000, 1000)  # exists before: not counted

    def run():
        a = x + 1
        b = a * 2
        del a
        return b + 1

    assert peak_memory(run) == pytest.approx(2 * x.nbytes, rel=0.001)
