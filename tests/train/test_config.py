import pytest

from irpe.train.config import TrainConfig

CONFIG = TrainConfig(model="deit_tiny_patch16_224", model_args={"depth": 2})


def test_text_round_trip():
    assert TrainConfig.from_json(CONFIG.to_json()) == CONFIG


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model": "x", "epochz": 3}', '{"model"'])
def test_damaged_text(text):
    with pytest.raises(ValueError, match="not the configuration of a run"):
        TrainConfig.from_json(text)


def test_a_misspelt_field_gets_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'epochs'"):
        CONFIG.replace(epoch=3)


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("epochs", 0, "epochs = 0 must be at least 1"),
        ("lr", 0.0, "lr = 0.0 must be greater than 0"),
        ("lr", float("nan"), "lr = nan"),
        ("weight_decay", -0.1, "weight_decay = -0.1"),
        ("mixup", float("nan"), "mixup = nan"),
        ("drop_path", 1.5, "drop_path = 1.5 must be between 0 and 1"),
        ("precision", "bf61", "did you mean 'bf16'"),
        ("absolute", "keeps", "did you mean 'keep'"),
        ("channels", 4, "channels 4 is not one of 1, 3"),
        ("warmup_epochs", 300, "must be less than epochs = 300"),
    ],
)
def test_bad_values(field, value, match):
    with pytest.raises(ValueError, match=match):
        CONFIG.replace(**{field: value})
