"""All rows of the paper's Table 4 can be built by name."""

import pytest
import torch

import irpe
from irpe.models.paper import TABLE_4, build_table4, find_row

SMALL = {"depth": 1, "embed_dim": 32, "num_heads": 2, "img_size": (32, 64), "num_classes": 3}
# The crosses and ticks of the table: learnable absolute encoding, then queries, keys, values.
TICKS = ["1000", "0000", "0100", "0010", "0001", "0110", "0111", "1100", "1010", "1001", "1110",
         "1111"]  # fmt: skip


def test_the_table_has_twelve_rows_with_different_names():
    assert [row.number for row in TABLE_4] == list(range(1, 13))
    assert len({row.name for row in TABLE_4}) == 12


@pytest.mark.parametrize(
    ("row", "ticks"), list(zip(TABLE_4, TICKS, strict=True)), ids=lambda x: getattr(x, "name", x)
)
def test_rows_are_built_by_name(row, ticks):
    pytest.importorskip("timm", reason="needs the extra 'timm'")
    model = build_table4(row.name, **SMALL)
    names = [name for name, _ in model.named_parameters()]
    parts = ["pos_embed", "query_tables", "key_tables", "value_tables"]
    found = ["1" if any(part in name for name in names) else "0" for part in parts]
    assert "".join(found) == ticks
    assert (model.pos_embed != 0).any() == (ticks[0] == "1")
    assert model(torch.randn(1, 3, 32, 64)).shape == (1, 3)
    assert find_row(row.name) is row
    for attention in irpe.summary(model).attentions:
        assert attention.spec.startswith("product-contextual-")
        assert attention.num_buckets == 50


def test_a_typo_gets_the_nearest_name():
    with pytest.raises(ValueError, match="did you mean 'learnable-qkv'"):
        build_table4("lernable-qkv")
