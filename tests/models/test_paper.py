"""The paper's tables, as they are printed."""

import pytest
import torch

import irpe
from irpe.models.paper import COSTS, FIGURE_3, TABLE_4, TABLES

SMALL = {"depth": 1, "embed_dim": 32, "num_heads": 2, "img_size": (32, 64), "num_classes": 3}
# The crosses and ticks of the table: learnable absolute encoding, then queries, keys, values.
TICKS = ["1000", "0000", "0100", "0010", "0001", "0110", "0111", "1100", "1010", "1001", "1110",
         "1111"]  # fmt: skip


@pytest.mark.parametrize(
    ("row", "ticks"), list(zip(TABLE_4, TICKS, strict=True)), ids=lambda x: getattr(x, "name", x)
)
def test_table_4_has_the_encodings_that_are_ticked(row, ticks):
    timm = pytest.importorskip("timm", reason="needs the extra 'timm'")
    plain = timm.create_model("deit_small_patch16_224", **SMALL)
    model = irpe.equip(plain, row.encoding, absolute=row.absolute)
    names = [name for name, _ in model.named_parameters()]
    parts = ["pos_embed", "query_tables", "key_tables", "value_tables"]
    found = ["1" if any(part in name for name in names) else "0" for part in parts]
    assert "".join(found) == ticks
    assert (model.pos_embed != 0).any() == (ticks[0] == "1")
    assert model(torch.randn(1, 3, 32, 64)).shape == (1, 3)
    for attention in irpe.summary(model).attentions:
        assert attention.spec.startswith("product-contextual-")
        assert attention.num_buckets == 50


def test_rows_of_a_table_have_names_and_encodings_of_their_own():
    for rows in (*TABLES.values(), FIGURE_3):
        assert len({row.name for row in rows}) == len(rows)
        assert len({(row.encoding, row.absolute) for row in rows}) == len(rows)
    assert len({(cost.table, cost.label) for cost in COSTS}) == len(COSTS) == 4 + 15
