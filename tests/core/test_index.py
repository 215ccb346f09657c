import math

import oracles
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from irpe import Clip, Piecewise
from irpe.core.encodings import parse_encoding
from irpe.core.index import parse_index

numbers = st.floats(-500, 500, allow_nan=False)
ratios = st.floats(0.3, 40, allow_nan=False)


@given(numbers, ratios)
def test_piecewise_is_equation_18(x, ratio):
    index = Piecewise.from_ratio(ratio)
    expected = oracles.piecewise(x, ratio, 2 * ratio, 8 * ratio)
    assert index(torch.tensor([x], dtype=torch.float64)).item() == expected


@given(numbers, st.floats(0.5, 40))
def test_clip_is_equation_9(x, beta):
    expected = oracles.clip(x, beta)
    assert Clip(beta)(torch.tensor([x], dtype=torch.float64)).item() == expected


@pytest.mark.parametrize(
    "index",
    [Piecewise.from_ratio(1.9), Piecewise(1.5, 6.7, 9), Piecewise.from_ratio(20), Clip(3.9)],
)
def test_index_is_odd_monotone_and_bounded(index):
    x = torch.linspace(-300, 300, 60001, dtype=torch.float64)
    y = index(x)
    assert torch.equal(index(-x), -y)
    assert (y.diff() >= 0).all()
    assert y.max() == index.max_index == math.floor(index.beta)
    assert index(torch.tensor([index.saturation])).item() == index.max_index
    assert y.dtype == torch.int64


def test_halves_round_to_even_in_both_functions():
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5])
    expected = torch.tensor([0, 2, 2, 0, -2, -2])
    assert torch.equal(Piecewise.from_ratio(3)(x), expected)
    assert torch.equal(Clip(3)(x), expected)


def test_clamp_holds_in_the_linear_branch_too():
    # alpha 3.6 rounds to 4 within the linear branch, but beta 3.8 allows 3
    assert Piecewise(3.6, 3.8, 20)(torch.tensor([3.6])).item() == 3


def test_everything_is_computed_in_float64():
    index = Piecewise.from_ratio(1.9)
    just_above_a_half = torch.tensor([2.5 + 1e-9], dtype=torch.float64)  # 2.5 in float32
    assert index.from_ratio(3)(just_above_a_half).item() == 3
    assert Clip(3)(just_above_a_half).item() == 3
    x = torch.linspace(0, 40, 4001)
    assert torch.equal(index(x), index(x.double()))
    assert torch.equal(index(torch.arange(5, dtype=torch.int16)), index(torch.arange(5)))


def test_from_ratio_is_one_two_eight():
    assert Piecewise.from_ratio(1.9) == Piecewise(1.9, 3.8, 15.2)
    assert Piecewise(1, 2, 8) == Piecewise(1.0, 2.0, 8.0)


@pytest.mark.parametrize(
    "numbers",
    [(0, 1, 2), (-1, 2, 8), (2, 2, 8), (3, 2, 8), (1, 8, 8), (1, 9, 8)],
)
def test_piecewise_refuses_numbers_out_of_order(numbers):
    with pytest.raises(ValueError, match="0 < alpha < beta < gamma") as error:
        Piecewise(*numbers)
    assert str(float(numbers[0])) in str(error.value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_index_refuses_numbers_that_are_not_finite(value):
    with pytest.raises(ValueError, match="finite"):
        Piecewise(1, 2, value)
    with pytest.raises(ValueError, match="finite"):
        Clip(value)


@pytest.mark.parametrize("beta", [0, -1])
def test_clip_refuses_numbers_that_are_not_positive(beta):
    with pytest.raises(ValueError, match="greater than 0"):
        Clip(beta)


def test_index_refuses_distances_that_are_not_finite():
    with pytest.raises(ValueError, match="NaN"):
        Clip(3)(torch.tensor([1.0, math.nan]))
    with pytest.raises(ValueError, match="infinity"):
        Piecewise.from_ratio(2)(torch.tensor([math.inf]))


def test_index_is_a_value():
    with pytest.raises(AttributeError):
        Clip(3).beta = 4  # pyright: ignore
    assert len({Clip(3), Clip(3.0), Clip(4), Piecewise.from_ratio(3)}) == 3


@pytest.mark.parametrize("text", ["1,9", "0x10", "one", "", "1.9:", "clip"])
def test_texts_that_python_reads_as_numbers_and_nobody_else(text):
    with pytest.raises(ValueError, match="is not understood: write a ratio"):
        parse_index(text)
    with pytest.raises(ValueError, match="is not understood: write a ratio"):
        parse_encoding(f"product-contextual-k@{text}")
