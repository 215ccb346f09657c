"""Runs that are compared: groups of seeds, and their names."""

import pytest
from train.little import CONFIG, write_run

from irpe.ablation.robustness import group_runs, label_encodings, name_groups
from irpe.tasks.classify.task import build_model
from irpe.train.run import Run

ABSOLUTE = CONFIG.replace(encoding="none", absolute="keep")
BOTH = CONFIG.replace(encoding="product-contextual-k", absolute="keep")


def test_runs_that_differ_in_the_seed_alone_are_a_group():
    configs = [ABSOLUTE, CONFIG, ABSOLUTE.replace(seed=1), CONFIG.replace(lr=0.5), CONFIG]
    assert group_runs(configs) == [0, 1, 0, 2, 1]


@pytest.mark.parametrize(
    ("encoding", "absolute", "expected"),
    [
        ("none", "keep", "absolute"),
        ("none", "none", "none"),
        ("none", "sinusoid", "sinusoid"),
        ("product-contextual-k", "none", "K"),
        ("product-contextual-qk", "sinusoid", "sinusoid + QK"),
        ("product-contextual-qkv", "keep", "absolute + QKV"),
        ("product-bias-k", "none", "product-bias-k"),
        ("product-contextual-k@1.9", "keep", "absolute + product-contextual-k@1.9"),
    ],
)
def test_labels_tell_the_encodings(encoding, absolute, expected):
    config = CONFIG.replace(encoding=encoding, absolute=absolute)
    assert label_encodings(config, build_model(config, 10)) == expected


@pytest.mark.parametrize(("bias", "expected"), [("keep", "built-in bias + K"), ("drop", "K")])
def test_a_swin_has_no_absolute_encoding_to_tell_of(bias, expected):
    config = CONFIG.replace(
        model="swin_tiny_patch4_window7_224",
        model_args={"embed_dim": 12, "depths": (1, 1), "num_heads": (1, 2)},
        encoding="product-contextual-k",
        absolute="keep",
        builtin_bias=bias,
    )
    assert label_encodings(config, build_model(config, 10)) == expected


def test_groups_have_the_names_that_are_given_or_made(tmp_path):
    configs = [ABSOLUTE, BOTH, ABSOLUTE.replace(seed=1)]
    paths = [Run(write_run(tmp_path / str(n), config)) for n, config in enumerate(configs)]
    assert name_groups(paths, []) == ["absolute", "absolute + K", "absolute"]
    assert name_groups(paths, ["x", "y"]) == ["x", "y", "x"]
    with pytest.raises(ValueError, match=r"1 labels for 2 groups of runs.* in the order of .*0, "):
        name_groups(paths, ["x"])
    with pytest.raises(ValueError, match="two groups of runs are called 'x', and differ in enc"):
        name_groups(paths, ["x", "x"])
    paths.append(Run(write_run(tmp_path / "3", ABSOLUTE.replace(lr=0.5, seed=4))))
    with pytest.raises(
        ValueError, match=r"called 'absolute', and differ in lr: give each of the 3"
    ):
        name_groups(paths, [])
