"""The mean attended distance, against plain loops."""

import math

import pytest
import torch

import irpe
from irpe.viz import capture, measure_locality, plot_locality
from irpe.viz.locality import attended_distance


def plain_distance(weights, grid, prefix):
    total, count = 0.0, 0
    rows, columns = grid
    for head in weights:
        for i in range(rows * columns):
            far, sum_of_weights = 0.0, 0.0
            for j in range(rows * columns):
                a = float(head[prefix + i, prefix + j])
                down, across = i // columns - j // columns, i % columns - j % columns
                far += a * math.hypot(down, across)
                sum_of_weights += a
            total += far / sum_of_weights
            count += 1
    return total / count


@pytest.mark.parametrize("grid", [(3, 5), (1, 4), (4, 4)])
@pytest.mark.parametrize("prefix", [0, 1, 5])
def test_distance_is_that_of_plain_loops(grid, prefix):
    generator = torch.Generator().manual_seed(0)
    count = prefix + grid[0] * grid[1]
    weights = torch.rand(2, count, count, generator=generator).softmax(-1)
    expected = plain_distance(weights, grid, prefix)
    assert attended_distance(weights, irpe.Positions(grid), prefix) == pytest.approx(expected)


def test_distances_to_pooled_keys_are_those_to_their_centres():
    keys = irpe.PooledGrid((1, 2), 2)  # at (0.5, 0.5) and (0.5, 2.5)
    where = irpe.Positions((2, 4), keys)
    weights = torch.tensor([1.0, 0.0]).expand(1, 8, 2)
    expected = sum(math.hypot(r - 0.5, c - 0.5) for r in range(2) for c in range(4)) / 8
    assert attended_distance(weights, where, 0) == pytest.approx(expected)


def near_sighted_model():
    timm = pytest.importorskip("timm", reason="needs the extra 'timm'")
    torch.manual_seed(0)
    sizes = {"img_size": 48, "patch_size": 8, "embed_dim": 32, "num_heads": 2, "depth": 2}
    model = timm.create_model("vit_tiny_patch16_224", **sizes)
    irpe.equip(model, "euclidean-bias-k")
    table = model.blocks[0].attn.rpe.bias_tables[0]
    with torch.no_grad():  # the nearer, the more; the second block stays at zero
        table[0] = -4 * torch.arange(table.shape[1])
    return model


def test_tables_that_favour_neighbours_shorten_the_distance_in_their_block_alone():
    locality = measure_locality(capture(near_sighted_model(), torch.zeros(1, 3, 48, 48)))
    assert locality.names == ("blocks.0.attn", "blocks.1.attn")
    assert locality.with_encoding[0] < 0.6 * locality.without_encoding[0]
    assert locality.with_encoding[1] == pytest.approx(locality.without_encoding[1])
    uniform = plain_distance(torch.ones(1, 36, 36), (6, 6), 0)
    assert locality.uniform == pytest.approx((uniform, uniform))


def test_the_bars_are_the_changes_with_the_numbers_beside_them():
    pytest.importorskip("matplotlib", reason="needs the extra 'viz'")
    locality = measure_locality(capture(near_sighted_model(), torch.zeros(1, 3, 48, 48)))
    (axes,) = plot_locality(locality).axes
    pairs = list(zip(locality.with_encoding, locality.without_encoding, strict=True))
    changes = [with_it - without for with_it, without in pairs]
    assert [bar.get_width() for bar in axes.patches] == pytest.approx(changes)
    texts = [text.get_text() for text in axes.texts]
    assert texts == [f"{round(a - b, 2) + 0.0:+.2f}  ({b:.2f} → {a:.2f})" for a, b in pairs]
    low, high = axes.get_xlim()
    assert low < min(changes) < 0 < high
    assert -low == high


def test_nothing_captured_is_an_error():
    with pytest.raises(ValueError, match="no attention was captured"):
        measure_locality([])
