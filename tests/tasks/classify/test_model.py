"""Weights to start from."""

import pytest
import torch
from train.little import CONFIG, train

from irpe.tasks.classify.task import build_model
from irpe.train.run import read_weights

ARGS = CONFIG.model_args


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "run"
    train(directory, CONFIG.replace(epochs=1, absolute="keep"))
    return directory


def test_a_model_starts_from_a_run(run):
    weights = read_weights(run)
    model = build_model(CONFIG.replace(absolute="keep", initial=str(run)), 10)
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())


def test_other_classes_get_a_fresh_head(run):
    weights = read_weights(run)
    own = build_model(CONFIG.replace(absolute="keep", initial=str(run)), 3).state_dict()
    assert own["head.weight"].shape == (3, 16)
    assert all(torch.equal(v, weights[k]) for k, v in own.items() if not k.startswith("head"))


def test_another_resolution_resamples_the_absolute_encoding_and_keeps_the_tables(run):
    weights = read_weights(run)
    config = CONFIG.replace(absolute="keep", image_size=56, initial=str(run))
    own = build_model(config, 10).state_dict()
    assert own["pos_embed"].shape == (1, 1 + 64, 16)
    tables = [name for name in own if ".rpe." in name]
    assert tables
    assert all(torch.equal(own[name], weights[name]) for name in tables)


def test_a_plain_start_leaves_the_tables_zero(run, tmp_path):
    plain = {k: v for k, v in read_weights(run).items() if ".rpe." not in k}
    torch.save({"model": plain}, tmp_path / "plain.pth")
    config = CONFIG.replace(absolute="none", initial=str(tmp_path / "plain.pth"))
    own = build_model(config, 10).state_dict()
    assert all(not v.any() for k, v in own.items() if ".rpe." in k)
    assert torch.equal(own["head.weight"], plain["head.weight"])


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"encoding": "none"}, r"does not fit .* blocks.0.attn.rpe"),
        ({"model_args": {**ARGS, "depth": 3}}, "the first is blocks.2"),
        ({"encoding": "product-contextual-qkv@3.5"}, r"rpe.query_tables.0"),
    ],
)
def test_weights_that_do_not_fit(run, changes, match):
    with pytest.raises(ValueError, match=match):
        build_model(CONFIG.replace(absolute="keep", initial=str(run), **changes), 10)


def test_a_start_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="is not a finished run"):
        build_model(CONFIG.replace(initial=str(tmp_path)), 10)
