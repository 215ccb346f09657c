import dataclasses
import json

import pytest

from irpe.errors import UserError
from irpe.tasks.classify.config import ClassifierConfig
from irpe.tasks.detect.config import DetectorConfig
from irpe.train.config import parse_config

CONFIG = ClassifierConfig(model="deit_tiny_patch16_224", model_args={"depth": 2})


DETECTOR = DetectorConfig(classes=("a", "b"))


@pytest.mark.parametrize("config", [CONFIG, DETECTOR])
def test_text_round_trip(config):
    assert parse_config(config.to_json()) == config


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"task": []}',
        '{"task"',
    ],
)
def test_damaged_text(text):
    with pytest.raises(ValueError, match="not the configuration of a run"):
        parse_config(text)


@pytest.mark.parametrize("config", [CONFIG, DETECTOR])
def test_settings_of_a_later_release_are_refused_and_those_of_an_earlier_one_read(config):
    content = json.loads(config.to_json())
    with pytest.raises(ValueError, match=r"of another release .*views.*train again"):
        parse_config(json.dumps({**content, "views": 2}))
    del content["sha256"]
    for name in ("seed", "max_broken"):  # which may have come later
        del content[name]
    with pytest.warns(UserWarning, match="no checksum"):
        assert parse_config(json.dumps(content)) == config


def test_what_is_not_a_task_or_lacks_what_has_no_default_is_refused():
    with pytest.raises(ValueError, match="of the task 'sleep', not one of classification"):
        parse_config('{"task": "sleep"}')
    with pytest.raises(ValueError, match=r"lacks a setting: .*model"):
        parse_config('{"task": "classification"}')


@pytest.mark.parametrize(
    ("classes", "match"),
    [
        (["a", "c"], r"class 1 is 'c', in the run 'b' \(2 and 2 classes\)"),
        (["b", "a"], "class 0 is 'b', in the run 'a'"),
        (["a"], r"class 1 is None, in the run 'b' \(1 and 2 classes\)"),
        (["a", "b", "c"], "class 2 is 'c', in the run None"),
    ],
)
def test_the_first_class_that_differs_is_named(classes, match):
    config = CONFIG.replace(classes=["a", "b"])
    config.check_classes(["a", "b"])
    CONFIG.check_classes(classes)  # a run that has not begun
    with pytest.raises(ValueError, match=match):
        config.check_classes(classes)


def test_labels_without_names_fit_any_names_of_as_many_classes():
    CONFIG.replace(classes=["bag", "boot"]).check_classes(["0", "1"])
    CONFIG.replace(classes=["0", "1"]).check_classes(["bag", "boot"])
    for wrong in (["0", "1", "2"], ["1", "0"]):
        with pytest.raises(ValueError, match="other classes than the run"):
            CONFIG.replace(classes=["bag", "boot"]).check_classes(wrong)


def test_paths_are_absolute_and_names_are_not_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for config in (CONFIG, DETECTOR):
        assert config.replace(data="a/b").with_absolute_paths().data == str(tmp_path / "a/b")
        assert config.replace(data="/a/b").with_absolute_paths().data == "/a/b"
        assert config.with_absolute_paths() == config
    by_name = CONFIG.replace(data="torch/cifar10", root="store").with_absolute_paths()
    assert (by_name.data, by_name.root) == ("torch/cifar10", str(tmp_path / "store"))


WRONG = {
    "a number": [True, "1", None, [], {}, float("inf"), float("nan"), 10**400],
    "a whole number": [True, "1", None, [], {}, 1.5, 2**64],
    "text": [3, True, [], {}, "a\0b"],
    "true or false": [1, 0.0, "true", None, []],
    "an object": [3, "{}", None, [], {1: 2}],
    "a list of texts": [3, "abc", None, {}, [1], [None]],
}
KINDS = {
    "model": "text", "data": "text", "initial": "text", "root": "text", "optimizer": "text",
    "encoding": "text", "auto_augment": "text", "lr": "a number", "crop": "a number",
    "mixup": "a number", "epochs": "a whole number", "image_size": "a whole number",
    "seed": "a whole number", "compile": "true or false", "model_args": "an object",
    "classes": "a list of texts",
}  # fmt: skip


@pytest.mark.parametrize("field", KINDS)
def test_fields_of_a_wrong_type_are_refused(field):
    for value in WRONG[KINDS[field]]:
        with pytest.raises(ValueError, match=rf"{field} = .* must be "):
            CONFIG.replace(**{field: value})
        if value != {1: 2}:  # not in JSON
            content = json.loads(CONFIG.to_json()) | {field: value}
            with pytest.raises(ValueError, match=rf"{field} = .* must be "):
                parse_config(json.dumps(content))


def test_every_field_of_every_configuration_has_a_type():
    for config in (CONFIG, DETECTOR):
        for field in dataclasses.fields(config):
            with pytest.raises(ValueError, match=rf"{field.name} = .* must be "):
                config.replace(**{field.name: object()})


def test_json_nested_too_deep():
    with pytest.raises(ValueError, match="not the configuration of a run"):
        parse_config("[" * 100_000)


@pytest.mark.parametrize("config", [CONFIG, DETECTOR])
def test_a_changed_text_is_refused_and_one_without_checksum_read(config):
    text = config.to_json().replace('"epochs": 300', '"epochs": 301')
    with pytest.raises(ValueError, match=r"run\.json is not as it was written: restore it"):
        parse_config(text)
    content = json.loads(text)
    del content["sha256"]
    with pytest.warns(UserWarning, match=r"run\.json has no checksum"):
        assert parse_config(json.dumps(content)) == config.replace(epochs=301)


def test_a_misspelt_field_gets_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'epochs'"):
        CONFIG.replace(epoch=3)


BAD = {
    "low_lr_epochs": 300, "epochs": 0, "lr": 0.0, "weight_decay": -0.1, "mixup": float("nan"),
    "drop_path": 1.5, "precision": "bf61", "absolute": "keeps", "crop": 1e-9, "channels": 4,
    "warmup_epochs": 300, "ema_decay": 1.0, "flip": -0.1, "workers": -1, "builtin_bias": "no",
}  # fmt: skip


@pytest.mark.parametrize(("field", "value"), BAD.items())
def test_bad_values(field, value):
    with pytest.raises(UserError, match=rf"{field} (= )?{value!r} "):
        CONFIG.replace(**{field: value})


def test_colour_jitter_beside_a_policy_that_replaces_it():
    policy = CONFIG.replace(auto_augment="rand-m9-mstd0.5-inc1")
    with pytest.raises(ValueError, match=r"color_jitter = 0.4 does nothing beside auto_augment"):
        policy.replace(color_jitter=0.4)
    CONFIG.replace(auto_augment="3a", color_jitter=0.4)  # DeiT III has both
    CONFIG.replace(color_jitter=0.4)


@pytest.mark.parametrize(
    ("field", "value"),
    [("short_side", 400), ("long_side", 700), ("flip", 2), ("cached_versions", -1)],
)
def test_bad_values_of_a_detector(field, value):
    with pytest.raises(UserError, match=f"{field} = {value}"):
        DETECTOR.replace(**{field: value})
