"""Norms of the tables, laid out as the positions that their rows stand for."""

import math

import pytest
import torch

import irpe
from irpe.viz import plot_tables
from irpe.viz.table_maps import _ranges, table_norms

pytest.importorskip("timm", reason="needs the extra 'timm'")

from adapters.small_models import make_vit, perturb


def encoding(spec, **arguments):
    made = irpe.RelativePositionEncoding(spec, num_heads=2, head_dim=8, **arguments)
    for table in made.parameters():
        table.requires_grad_(False)
        torch.nn.init.normal_(table, generator=torch.Generator().manual_seed(0))
    return made


@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize("method", ["product", "cross", "euclidean", "quantization"])
def test_a_bucket_lies_where_its_keys_are(method, prefix):
    made = encoding(f"{method}-contextual-k@1.2+unshared", num_prefix_tokens=prefix)
    grid, centre = irpe.Grid((9, 9)), 4 * 9 + 4
    for axis, (item, table, norms) in enumerate(
        zip(made.maps(grid), made.key_tables, table_norms(made).values(), strict=True)
    ):
        seen = {}
        for key, (row, column) in enumerate((grid.coordinates() - 4).tolist()):
            bucket = int(item.ids[prefix + centre, prefix + key])
            at = (row, column) if method == "product" else (row, column)[axis : axis + 1]
            at = (math.hypot(row, column),) if method in ("euclidean", "quantization") else at
            seen.setdefault(bucket, []).append(at)
        for bucket, members in seen.items():
            nearest = min(members, key=lambda at: sum(map(abs, at)))
            place = tuple(norms.positions.index(pytest.approx(x)) for x in nearest)
            assert float(norms.values[place]) == pytest.approx(
                float(table[:, bucket].norm(dim=-1).mean())
            )
        assert norms.prefix == (
            pytest.approx(float(table[:, -1].norm(dim=-1).mean())) if prefix else None
        )


def test_a_bias_of_all_heads_keeps_its_sign():
    (norms,) = table_norms(encoding("product-bias-k")).values()
    assert norms.is_signed
    table = encoding("product-bias-k").bias_tables[0][0]
    torch.testing.assert_close(norms.values.flip(0, 1).flatten(), table.detach())
    (norms,) = table_norms(encoding("product-bias-k+unshared")).values()
    assert not norms.is_signed
    assert bool((norms.values > 0).all())


@pytest.mark.parametrize("name", ["shaw", "huang", "sasa", "axial-deeplab"])
def test_other_encodings_have_their_tables_too(name):
    norms = table_norms(encoding(name, num_prefix_tokens=1))
    for table in norms.values():
        middle = len(table.positions) // 2
        assert table.positions[middle - 1 : middle + 2] == (-1, 0, 1)
        assert set(table.values.shape) == {len(table.positions)}


def test_what_has_no_tables_is_an_error():
    with pytest.raises(ValueError, match="transformer-xl has no learned tables"):
        table_norms(encoding("transformer-xl"))
    with pytest.raises(ValueError, match="the tables are for 3 axes"):
        table_norms(encoding("product-bias-k@1", ndim=3))


def test_ranges_name_what_a_bucket_stands_for():
    assert _ranges((-5, -2, -1, 0, 1, 2, 5)) == ["≤-5", "-4…-2", "-1", "0", "1", "2…4", "≥5"]
    assert _ranges((0,)) == ["0"]
    assert _ranges((math.nan, -1, 0, 1, math.nan)) == ["", "≤-1", "0", "≥1", ""]


def test_panels_show_the_norms_of_each_role_and_block():
    pytest.importorskip("matplotlib", reason="needs the extra 'viz'")
    model = perturb(irpe.equip(make_vit(), "product-contextual-kv"))
    figure = plot_tables(model)
    maps = [axes for axes in figure.axes if axes.images and axes.get_xlabel()]
    expected = [
        table_norms(block.attn.rpe)[role].values
        for role in ("key", "value")
        for block in model.blocks
    ]
    assert len(maps) == len(expected)
    for axes, values in zip(maps, expected, strict=True):
        torch.testing.assert_close(torch.tensor(axes.images[0].get_array()), values)
    limits = [axes.images[0].get_clim() for axes in maps]
    assert limits[0] == limits[1] == (0, float(max(v.max() for v in expected[:2])))
    model = perturb(irpe.equip(make_vit(), "cross-bias-k"))
    first = plot_tables(model, [1]).axes[0]
    norms = table_norms(model.blocks[1].attn.rpe)
    drawn = {line.get_label(): line.get_ydata().tolist() for line in first.lines}
    for axis in ("rows", "columns"):
        table = norms[f"bias, {axis}"]
        known = [not math.isnan(x) for x in table.positions]
        assert drawn[axis] == table.values[known].tolist()
