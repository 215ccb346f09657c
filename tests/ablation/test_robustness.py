"""Runs on images of other sizes and on moved ones: the same weights, the same images."""

import json

import pytest
import torch
from train.little import CONFIG, little, write_run

from irpe.ablation.robustness import (
    EvaluatedRun,
    Point,
    check_conditions,
    collect,
    default_sizes,
    group_runs,
    label_encodings,
    measure,
    name_groups,
    read_classifier,
    resize,
)
from irpe.tasks.classify.model import build_model
from irpe.tasks.classify.scores import evaluate
from irpe.tasks.classify.transforms import eval_images
from irpe.tasks.detect.config import DetectorConfig
from irpe.train.processes import make_accelerator
from irpe.train.runs import load_run

ABSOLUTE = CONFIG.replace(encoding="none", absolute="keep")
BOTH = CONFIG.replace(encoding="product-contextual-k", absolute="keep")
VAL = little()[1]


def pixels(size, count=6):
    return torch.randn(count, 1, size, size, generator=torch.Generator().manual_seed(0))


def scores(path, sizes, moves):
    run = EvaluatedRun(path, read_classifier(path), VAL)
    points = list(measure([run], sizes, moves, make_accelerator()))
    return {(point.axis, point.at): point.top1 for point in points}


@pytest.mark.parametrize("config", [CONFIG, ABSOLUTE, BOTH])
def test_the_own_size_and_move_0_are_the_evaluation_of_the_run(tmp_path, config):
    path = write_run(tmp_path / "run", config)
    model = load_run(path)
    assert torch.equal(resize(model, config, 28)(pixels(28)), model(pixels(28)))
    expected = evaluate(model, eval_images(VAL, config), make_accelerator()).top1
    assert scores(path, [28], [0]) == {("size", 28): expected, ("move", 0): expected}


@pytest.mark.parametrize("absolute", ["none", "sinusoid"])
@pytest.mark.parametrize("size", [14, 42])
def test_without_a_learned_absolute_encoding_nothing_but_the_grid_changes(tmp_path, absolute, size):
    config = CONFIG.replace(absolute=absolute)
    path = write_run(tmp_path / "run", config)
    weights = load_run(path).state_dict()
    other = config.replace(image_size=size)
    expected = build_model(other, 10)
    expected.load_state_dict(weights)
    found = resize(load_run(path), config, size)
    assert torch.equal(found(pixels(size)), expected.eval()(pixels(size)))
    score = evaluate(expected, eval_images(VAL, other), make_accelerator())
    assert scores(path, [size], [])["size", size] == score.top1


def test_a_learned_absolute_encoding_is_resampled_as_timm_does(tmp_path):
    path = write_run(tmp_path / "run", ABSOLUTE)
    found = resize(load_run(path), ABSOLUTE, 35)
    expected = load_run(path)
    expected.set_input_size((35, 35))
    assert expected.pos_embed.shape == (1, 26, 16)
    assert torch.equal(found(pixels(35)), expected(pixels(35)))


def test_moved_images_equal_a_loop(tmp_path):
    path = write_run(tmp_path / "run")
    model, images = load_run(path), eval_images(VAL, CONFIG)
    tensors = torch.stack([images.transform(VAL.read(n)[0]) for n in range(len(VAL))])
    labels = torch.tensor([VAL.read(n)[1] for n in range(len(VAL))])
    found = scores(path, [28], [1, 3])
    for move in (1, 3):
        moved = torch.full_like(tensors, -1.0)  # black
        for number in range(len(VAL)):
            down, right = [(0, 1), (1, 0), (0, -1), (-1, 0)][number % 4]
            for row in range(28):
                for column in range(28):
                    y, x = row - 7 * move * down, column - 7 * move * right
                    if 0 <= y < 28 and 0 <= x < 28:
                        moved[number, :, row, column] = tensors[number, :, y, x]
        hits = int((model(moved).argmax(1) == labels).sum())
        assert found["move", move] == 100 * hits / len(VAL)


def test_runs_that_differ_in_the_seed_alone_are_a_group():
    configs = [ABSOLUTE, CONFIG, ABSOLUTE.replace(seed=1), CONFIG.replace(lr=0.5), CONFIG]
    assert group_runs(configs) == [0, 1, 0, 2, 1]


def test_scores_are_collected_by_group_and_condition():
    points = [Point(0, "size", 28, 1.0), Point(0, "move", 28, 9.0), Point(1, "size", 28, 2.0)]
    points += [Point(2, "size", 28, 3.0), Point(2, "size", 35, 4.0)]
    found = collect(points, "size", ["a", "b", "a"])
    assert found == {"a": {28: [1.0, 3.0], 35: [4.0]}, "b": {28: [2.0]}}
    assert collect(points, "move", ["a", "b", "a"]) == {"a": {28: [9.0]}, "b": {}}


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
    paths = [write_run(tmp_path / str(n), config) for n, config in enumerate(configs)]
    assert name_groups(paths, []) == ["absolute", "absolute + K", "absolute"]
    assert name_groups(paths, ["x", "y"]) == ["x", "y", "x"]
    with pytest.raises(ValueError, match=r"1 labels for 2 groups of runs.* in the order of .*0, "):
        name_groups(paths, ["x"])
    with pytest.raises(ValueError, match="two groups of runs are called 'x', and differ in enc"):
        name_groups(paths, ["x", "x"])
    paths.append(write_run(tmp_path / "3", ABSOLUTE.replace(lr=0.5, seed=4)))
    with pytest.raises(
        ValueError, match=r"called 'absolute', and differ in lr: give each of the 3"
    ):
        name_groups(paths, [])


@pytest.mark.parametrize(
    ("size", "patch", "expected"),
    [(64, 8, [48, 56, 64, 80, 96]), (28, 4, [20, 24, 28, 36, 40]), (7, 7, [7, 14])],
)
def test_default_sizes_are_whole_patches_around_the_own_size(size, patch, expected):
    arguments = {**CONFIG.model_args, "patch_size": patch}
    config = CONFIG.replace(image_size=size, model_args=arguments)
    assert default_sizes(config, build_model(config, 10)) == expected


@pytest.mark.parametrize(
    ("sizes", "moves", "message"),
    [
        ([28, 30], [0], "size 30 is not a multiple of 7, the side of a patch: choose 28 or 35"),
        ([0], [0], "size 0 is not a multiple of 7, the side of a patch: choose 7 or 14"),
        ([28], [0, 4], r"4 patches leaves nothing of an image of 28 pixels .* choose 0 to 3"),
        ([28], [-1], "choose 0 to 3"),
        ([28, 35], [0], r"run cannot be evaluated at size 35: grid 5x5 is larger than the tables"),
    ],
)
def test_conditions_that_a_run_cannot_meet_are_errors(tmp_path, sizes, moves, message):
    config = CONFIG.replace(encoding="sasa@4")
    path = write_run(tmp_path / "run", config)
    check_conditions(path, config, load_run(path), [7, 28], [0, 3])
    with pytest.raises(ValueError, match=message):
        check_conditions(path, config, load_run(path), sizes, moves)


def test_the_run_of_a_detector_is_an_error(tmp_path):
    (tmp_path / "run.json").write_text(DetectorConfig().to_json())
    with pytest.raises(ValueError, match="is the run of a detector: pass runs of classifiers"):
        read_classifier(tmp_path)
    content = json.loads(CONFIG.to_json())
    (tmp_path / "run.json").write_text(json.dumps({**content, "task": "poetry"}))
    with pytest.raises(ValueError, match=r"run\.json cannot be read"):
        read_classifier(tmp_path)
