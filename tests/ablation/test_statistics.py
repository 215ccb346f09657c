"""Differences that the data supports, and words that claim no more."""

import json
import math
import re
import shlex

import pytest
import torch

from irpe.ablation.answer import answer, changed_settings, describe
from irpe.ablation.costs import RowCost
from irpe.ablation.report import legend, markdown_table, sentences
from irpe.ablation.results import ClassifierResult, SegmenterResult
from irpe.ablation.rows import AblationRow
from irpe.ablation.statistics import collect_rows, compare
from irpe.recipes import RECIPES
from irpe.tasks.segment.scores import ClassCounts

ENCODINGS = {
    "absolute": ("none", "keep"),
    "none": ("none", "none"),
    "rope": ("rope-axial", "none"),
    "alibi": ("alibi-2d", "none"),
    "rope + K": ("rope-axial+product-contextual-k", "none"),
}


def row(name, *counts, moved=None, step=1.0, effect=0.3):
    """A row of which each seed classifies the first `count` of 100 images correctly."""
    encoding, absolute = ENCODINGS.get(name, ("product-contextual-k", "none"))
    effect = None if encoding == "none" else effect
    results = [
        ClassifierResult(
            name, seed, tuple(map(first, (count, *([moved or count] * 2)))), 99.0, effect
        )
        for seed, count in enumerate(counts)
    ]
    what = AblationRow(name, encoding, absolute)
    return collect_rows([what], results, {name: RowCost(1, 1, step)})[0]


def first(count):
    return tuple(n < count for n in range(100))


def test_differences_inside_the_spread_are_ties():
    base = row("absolute", 60, 64)
    assert compare(row("x", 90, 94), base) == "better"
    assert compare(row("x", 30, 34), base) == "worse"
    assert compare(row("x", 63, 94), base) == "tie"  # the seeds overlap
    assert compare(row("x", 65, 65), row("y", 63, 64)) == "tie"  # within two standard errors
    assert compare(row("x", 90), base) == "unknown"


def test_one_seed_has_no_spread_but_an_error_over_the_images():
    one, two = row("x", 80), row("x", 78, 82)
    assert (one.spread(), two.spread()) == (None, 2.0)
    assert one.error() == pytest.approx(100 * math.sqrt(0.8 * 0.2 / 99))
    assert one.text() == "80.0 (4.0)"
    assert two.text() == "80.0±2.0 (3.9)"
    assert "±0.0" not in markdown_table([one])


def test_the_words_name_what_is_compared():
    text = sentences([row("absolute", 60, 64), row("K", 90, 94), row("V", 60, 64)])
    assert "100 test images, 2 seeds" in text[0]
    assert text[1] == (
        "Images as they are: better than absolute: K (+30.0 ± 8.8); tie with absolute: "
        "V (+0.0 ± 0.0)."
    )
    assert text[3].startswith("Images moved by 2 patches: ")


def test_one_seed_claims_nothing():
    rows = [row("absolute", 60), row("K", 90)]
    text = sentences(rows)
    assert len(text) == 2
    assert "no difference is claimed" in text[1]
    words = answer(rows, "laptop", "cats")
    assert words[0].startswith("One seed")
    assert words[-1] == "Next: the same command with --seeds 3"


def test_a_better_row_is_recommended_the_cheapest_of_equals():
    rows = [row("absolute", 60, 60), row("dear", 91, 93, step=3.0), row("cheap", 90, 92, step=1.5)]
    words = answer(rows, "laptop", "cats")
    assert words[0].startswith("Images as they are: use cheap, +31.0 ± ")
    assert words[0].endswith(" points over absolute, at 1.5x the time of a step.")
    assert words[-1] == (
        "Next: irpe train laptop --data cats --encoding product-contextual-k --absolute none"
    )


def test_one_row_is_no_comparison():
    words = answer([row("K", 90, 92)], "laptop", "cats")
    assert words[0] == "One row: there is nothing to compare it with."
    assert words[-1] == "Next: the same command with another row, as in --row absolute=none,keep"
    words = answer([row("absolute", 90, 92)], "laptop", "cats")
    assert words[-1].endswith("--row K=product-contextual-k")


def test_the_next_command_has_the_settings_of_the_ablation():
    own = RECIPES["laptop_64"]()
    faster = own.replace(data="x", seed=3, table_lr=2.0)
    assert changed_settings(faster, "laptop_64") == " --table-lr 2.0"
    assert changed_settings(faster, "laptop_64", is_tuned=True) == ""  # rows name their own
    random = RECIPES["seg_ade20k"]().replace(initial=None)
    assert changed_settings(random, "seg_ade20k") == " --initial none"
    changed = own.replace(
        holdout=0.2, epochs=1, warmup_epochs=0, compile=True, model_args={"patch_size": 16}
    )
    settings = changed_settings(changed, "laptop_64")
    rows = [row("absolute", 60, 60), row("K", 90, 92)]
    command = answer(rows, "laptop_64", "my cats", settings)[-1].removeprefix("Next: irpe train ")
    name, *options = shlex.split(command)
    given = dict(zip(options, [*options[1:], ""], strict=True))
    assert name == "laptop_64"
    assert given["--data"] == "my cats"
    assert (given["--holdout"], given["--epochs"], given["--warmup-epochs"]) == ("0.2", "1", "0")
    assert json.loads(given["--model-args"]) == {"patch_size": 16}
    assert "--compile" in options
    assert (given["--encoding"], given["--absolute"]) == ("product-contextual-k", "none")
    assert "--lr" not in options


def test_a_tie_that_costs_more_is_not_worth_it():
    rows = [row("absolute", 60, 64, moved=20), row("K", 61, 63, moved=50, step=2.0)]
    words = answer(rows, "laptop", "embedded")
    assert words[0] == (
        "Images as they are: keep absolute. The best of the others, K, is a tie (+0.0 ± 1.4) at "
        "2.0x the time of a step: not worth it here."
    )
    assert words[1].startswith("If objects move: use K, +30.0 ± ")
    assert words[2].startswith("K: a learned vector for each relative position")
    assert words[-1] == "Next: irpe ablate --data FOLDER (your images)"


def test_what_moves_best_at_a_loss_is_not_the_only_advice():
    rows = [row("absolute", 60, 64, moved=20), row("none", 50, 54, moved=80)]
    rows.append(row("K", 61, 63, moved=50))
    words = answer(rows, "laptop", "embedded")[1]
    assert words.startswith("If objects move: use none, +60.0 ± ")
    assert ". Without a loss where they do not: use K, +30.0 ± " in words


def test_what_does_not_help_is_said():
    words = answer([row("absolute", 60, 64), row("none", 30, 34)], "laptop", "embedded")
    assert "keep absolute. The best of the others, none, is worse (-30.0 ± " in words[0]
    assert words[1] == "If objects move: nothing here is clearly better than absolute."


def test_an_encoding_that_did_nothing_is_no_comparison():
    rows = [row("absolute", 60, 64), row("K", 90, 94, effect=0.0001)]
    words = answer(rows, "laptop", "embedded")
    assert words[0].startswith("K is no comparison: its encoding is next to nothing (without it")
    assert "the attention's output changes by 0.01%)" in words[0]
    assert not any("use K" in line for line in words)
    assert "0.0% (!)" in markdown_table(rows)


@pytest.mark.parametrize("names", [("K", "none"), ("K", "Q")])
def test_a_row_that_is_not_compared_gets_neither_a_verdict_nor_the_next_command(names):
    rows = [row(name, 60, 64, effect=0.0001) for name in names]
    words = answer(rows, "laptop_64", "cats")
    assert words[0].startswith("K is no comparison")
    assert not any("keep" in line or "tie" in line for line in words)
    assert words[-1] == (
        "Next: the same command with more --epochs or a higher --table-lr, and another -o"
    )
    assert len(sentences(rows)) == 1


@pytest.mark.parametrize(("name", "has_rate"), [("rope", False), ("alibi", False), ("K", True)])
def test_a_rate_of_tables_is_no_remedy_without_tables(name, has_rate):
    words = answer([row("none", 60, 64), row(name, 60, 64, effect=0.0)], "laptop", "cats")
    assert ("--table-lr" in words[0]) == has_rate
    assert ("--table-lr" in words[-1]) == has_rate


def test_others_are_compared_where_one_row_is_not():
    rows = [row("K", 60, 64, effect=0.0001), row("none", 20, 24), row("V", 90, 94)]
    words = answer(rows, "laptop_64", "cats")
    assert words[1].startswith("Images as they are: use V, ")
    assert " points over none, at" in words[1]
    assert "K (" not in " ".join(sentences(rows))


def test_rotary_or_relative_is_answered_where_there_are_both():
    rows = [row("absolute", 60, 64), row("rope", 50, 54), row("V", 20, 24), row("K", 70, 74)]
    text = answer(rows, "laptop", "cats")[2]
    assert text.startswith(
        "Rotary or relative? Images as they are: relative. K (best of 2 relative) against "
        "rope (best of 1 rotary): +20.0 ± "
    )
    assert ", moved by 2 +20.0 ± 7.5 (better), at 1.0x the time of a step." in text
    rows[3] = row("K", 50, 53, moved=20)
    text = answer([*rows, row("rope + K", 80, 84)], "laptop", "cats")[2]
    assert (
        "as they are: a tie. rope (best of 1 rotary) against K (best of 2 relative): +0.5" in text
    )
    assert re.search(r"moved by 1 \+32.0 ± \S+ \(better\)", text)
    assert "Together, rope + K: better than rope, +30.0 ± " in text
    assert not any("Rotary or" in line for line in answer(rows[:2], "laptop", "cats"))


@pytest.mark.parametrize(
    ("encoding", "absolute", "expected"),
    [
        ("none", "keep", ""),
        ("none", "none", "no position at all (patches are a set)"),
        ("product-bias-k", "none", "a learned score for each relative position (product), added"),
        (
            "cross-contextual-qkv",
            "keep",
            "3 learned vectors for each relative position (cross), multiplied with keys, queries "
            "and attention weights, beside the absolute encoding",
        ),
        ("transformer-xl", "none", "projected sines of the offset, any grid"),
    ],
)
def test_encodings_are_described_in_a_line(encoding, absolute, expected):
    assert describe(AblationRow("x", encoding, absolute)) == expected


def segmenter_row(name, *wrong, images=12):
    """A row of a segmenter of two classes that mistakes some of 10 pixels of each class."""
    encoding, absolute = ENCODINGS.get(name, ("product-contextual-k", "none"))
    results = []
    for seed, count in enumerate(wrong):
        lost = [count + (n + seed) % 2 for n in range(images)]
        counts = [ClassCounts((10 - k, 10), (10, 10), (10 - k, 10 + k)) for k in lost]
        results.append(SegmenterResult(name, seed, tuple(counts), None))
    what = AblationRow(name, encoding, absolute)
    return collect_rows([what], results, {name: RowCost(1, 1, 1.0)})[0]


def test_miou_and_its_values_for_each_image():
    (result,) = segmenter_row("absolute", 2).results
    correct, true, predicted = (torch.tensor(result.images).sum(0)[n] for n in range(3))
    expected = 100 * (correct / (true + predicted - correct)).mean()
    assert result.score() == pytest.approx(float(expected))
    assert result.second == pytest.approx(100 * 17.5 / 20)
    values = result.values()
    assert float(values.mean()) == pytest.approx(result.score())
    without = [
        SegmenterResult("", 0, result.images[:n] + result.images[n + 1 :]) for n in range(12)
    ]
    scores = torch.tensor([each.score() for each in without], dtype=torch.float64)
    jackknife = (11 / 12 * (scores - scores.mean()).square().sum()).sqrt()
    assert float(values.std() / math.sqrt(12)) == pytest.approx(float(jackknife))


def test_a_class_that_no_image_has_does_not_count():
    counts = ClassCounts((5, 0), (10, 0), (5, 0))
    assert SegmenterResult("x", 0, (counts, counts)).score() == pytest.approx(50)


def test_segmenters_are_compared_by_miou_and_are_not_moved():
    rows = [segmenter_row("absolute", 4, 4), segmenter_row("K", 1, 1)]
    assert compare(rows[1], rows[0]) == "better"
    words = answer(rows, "seg_small", "streets")
    assert words[0].startswith("By mIoU: use K, +")
    assert not any("move" in line for line in words)
    head = markdown_table(rows).splitlines()[0]
    assert head == "| | mIoU | pixel accuracy | effect | parameters | MACs (M) | step |"
    assert "moved" not in " ".join(sentences(rows))
    assert "jackknife" in legend(rows[0].measure)
