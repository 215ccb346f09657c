"""What an ablation compares can be built, and is what the paper compares."""

import pytest
import torch

from irpe.ablation.rows import (
    AblationRow,
    default_rows,
    modern_rows,
    parse_row,
    table_rows,
)
from irpe.models.paper import TABLES
from irpe.recipes.classification import RECIPES
from irpe.tasks.classify.task import build_model

ALL = [default_rows(), table_rows("buckets"), modern_rows(7), *map(table_rows, map(str, TABLES))]


@pytest.mark.parametrize("rows", ALL, ids=["default", "buckets", "modern", *map(str, TABLES)])
def test_every_row_can_be_built(rows):
    base = RECIPES["laptop"]()
    for row in rows:
        with torch.device("meta"):
            build_model(base.replace(encoding=row.encoding, absolute=row.absolute), 10)
    assert len({row.name for row in rows}) == len(rows)


def test_the_tables_have_the_papers_numbers_of_rows():
    assert {table: len(table_rows(str(table))) for table in TABLES} == {1: 9, 2: 4, 3: 4, 4: 12}
    assert [row.name for row in table_rows("buckets")][:3] == [
        "10 buckets",
        "26 buckets",
        "50 buckets",
    ]


def test_rows_of_ones_own():
    assert parse_row("K=shaw") == AblationRow("K", "shaw", "none")
    assert parse_row("a b=shaw,keep") == AblationRow("a b", "shaw", "keep")
    for text in ("K", "K=", "=shaw"):
        with pytest.raises(ValueError, match="is not of the form NAME=ENCODING"):
            parse_row(text)


def test_today_s_encodings_are_compared_with_and_without_tables():
    names = [row.name for row in modern_rows(7)]
    assert len(names) == 10
    assert {"rope-axial", "rope-mixed", "decomposed", "log-cpb", "rope-axial + K"} < {*names}
    assert "decomposed@7" in [row.encoding for row in modern_rows(7)]
