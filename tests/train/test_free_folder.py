"""Where a new run goes, and what is said of a folder that is taken."""

from pathlib import Path

import pytest

pytest.importorskip("rich", reason="needs the extra 'cli'")

from irpe.recipes import RECIPES
from irpe.train.run import Run


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """A folder with a run on the data 'flowers'."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/laptop_64").mkdir(parents=True)
    config = RECIPES["laptop_64"]().replace(data="flowers").with_absolute_paths()
    (tmp_path / "runs/laptop_64/run.json").write_text(config.to_json())
    return tmp_path / "runs"


@pytest.mark.parametrize(
    ("changes", "said", "free"),
    [
        ({}, "holds a run: go on with that one, --resume", "laptop_64-2"),
        ({"data": "birds/"}, "holds a run with other settings (data): go on", "laptop_64-birds"),
        ({"encoding": "product-bias-k@clip3"}, "(encoding)", "laptop_64-product-bias-k-clip3"),
        ({"data": "x", "encoding": "shaw"}, "(data and encoding)", "laptop_64-x-shaw"),
    ],
)
def test_a_taken_folder_is_refused_with_a_free_name(runs, changes, said, free):
    config = RECIPES["laptop_64"]().replace(**{"data": "flowers", **changes})
    with pytest.raises(ValueError, match="-o ") as error:
        Run(runs / "laptop_64").check_free(config)
    assert said in str(error.value)
    assert str(error.value).endswith(f"-o {runs / free}")
    (runs / free).mkdir()
    with pytest.raises(ValueError, match="-o ") as error:
        Run(runs / "laptop_64").check_free(config)
    assert not str(error.value).endswith(f"-o {runs / free}")


def test_a_folder_of_others_is_refused_and_an_empty_one_is_not(runs, monkeypatch):
    (runs / "other").mkdir()
    Run(runs / "other").check_free(RECIPES["laptop"]())
    Run(runs / "new").check_free(RECIPES["laptop"]())
    (runs / "other/letter.txt").write_text("dear")
    with pytest.raises(ValueError, match=r"has files of others: choose a new folder, -o .*other-2"):
        Run(runs / "other").check_free(RECIPES["laptop"]())
    monkeypatch.setenv("RANK", "1")  # the first process alone looks, for it alone writes
    Run(runs / "other").check_free(RECIPES["laptop"]())


def test_the_folder_that_one_is_in(runs, monkeypatch):
    monkeypatch.chdir(runs / "laptop_64")
    config = RECIPES["laptop_64"]().replace(data="flowers", encoding="shaw")
    with pytest.raises(ValueError, match=r"-o .*runs/laptop_64-flowers-shaw$"):
        Run(Path(".")).check_free(config)
    Path("run.json").unlink()
    Path("photo.jpg").touch()
    with pytest.raises(ValueError, match=r"has files of others: .* -o .*runs/laptop_64-2$"):
        Run(Path(".")).check_free(config)
