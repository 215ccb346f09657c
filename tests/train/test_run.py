"""The table of a run, and what is wrong with it."""

import pytest

from irpe.train.run import read_metrics

HEADER = "epoch,lr,train_loss,val_loss,top1,top5,seconds\n"
LINES = "1,0.001,2.0,1.5,40.5,80,10\n2,0.0005,1.25,1.0,60,90,11\n"


def write(folder, text):
    folder.mkdir()
    (folder / "metrics.csv").write_text(text)
    return folder


def test_metrics_are_read_column_by_column(tmp_path):
    metrics = read_metrics(write(tmp_path / "run", HEADER + LINES))
    assert metrics["top1"] == [40.5, 60.0]
    assert metrics["train_loss"] == [2.0, 1.25]
    assert list(metrics) == HEADER.strip().split(",")


@pytest.mark.parametrize(
    "text",
    [
        "",
        HEADER,
        HEADER + "1,2\n",
        HEADER + "a,b,c,d,e,f,g\n",
        HEADER + ",0.1,2,1,1,1,1\n",
        HEADER + "1,0.1,,1,1,1,1\n",
        "\x00",
    ],
)
def test_damaged_metrics_are_an_error_that_names_the_file(tmp_path, text):
    with pytest.raises(ValueError, match=r"metrics\.csv is damaged or empty"):
        read_metrics(write(tmp_path / "run", text))


def test_a_missing_column_is_named(tmp_path):
    with pytest.raises(ValueError, match="has no column 'train_loss'"):
        read_metrics(write(tmp_path / "run", "epoch,top1\n1,3\n"))


def test_a_folder_without_metrics_is_not_a_run(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"is not a training run$"):
        read_metrics(tmp_path)
    write(tmp_path / "run", HEADER + LINES)
    with pytest.raises(
        FileNotFoundError, match=r"is not a training run; it contains runs, pass .*/\*"
    ):
        read_metrics(tmp_path)


def test_epochs_that_were_not_evaluated_have_no_score(tmp_path):
    metrics = read_metrics(
        write(tmp_path / "run", HEADER + "1,0.1,2.0,,,,9\n2,0.1,1,1.2,50,80,9\n")
    )
    assert metrics["train_loss"] == [2.0, 1.0]
    assert [value == value for value in metrics["top1"]] == [False, True]
