"""Differences that the data supports, and words that claim no more."""

from irpe.ablation.cells import CellResult, RowCost
from irpe.ablation.report import sentences
from irpe.ablation.statistics import collect_rows, compare


def row(name, *counts):
    """A row of which each seed classifies the first `count` of 100 images correctly."""
    results = [
        CellResult(name, seed, (tuple(n < count for n in range(100)),) * 3, 99.0)
        for seed, count in enumerate(counts)
    ]
    return collect_rows(results, {name: RowCost(1, 1, 1.0)})[0]


def test_differences_inside_the_spread_are_ties():
    base = row("absolute", 60, 64)
    assert compare(row("x", 90, 94), base) == "better"
    assert compare(row("x", 30, 34), base) == "worse"
    assert compare(row("x", 63, 94), base) == "tie"  # the seeds overlap
    assert compare(row("x", 65, 65), row("y", 63, 64)) == "tie"  # within two standard errors
    assert compare(row("x", 90), base) == "unknown"


def test_the_words_name_what_is_compared():
    text = sentences([row("absolute", 60, 64), row("K", 90, 94), row("V", 60, 64)])
    assert "100 test images, 2 seeds" in text[0]
    assert text[1] == (
        "Images as they are: better than absolute: K (+30.0); tie with absolute: V (+0.0)."
    )
    assert text[3].startswith("Images moved by 2 patches: ")


def test_one_seed_claims_nothing():
    text = sentences([row("absolute", 60), row("K", 90)])
    assert len(text) == 2
    assert "no difference is claimed" in text[1]
