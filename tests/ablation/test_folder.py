"""The folder of an ablation is for one ablation."""

import pytest
from ablation.small import ROWS
from train.little import CONFIG, little

from irpe.ablation.folder import claim_folder, default_folder


def test_folders_are_named_after_data_and_rows():
    assert str(default_folder("embedded", "default")) == "runs/ablation-embedded-default"
    assert str(default_folder("/a/b/my cats", "table-4")) == "runs/ablation-my-cats-table-4"
    assert len(default_folder("x", "y" * 100).name) == 60


def test_another_ablation_in_the_folder_is_refused(tmp_path):
    folder, data = tmp_path / "new", little()
    claim_folder(folder, ROWS, CONFIG, data)
    claim_folder(folder, ROWS, CONFIG.replace(seed=3), data)  # more seeds of the same
    before = (folder / "ablation.json").read_text()
    for arguments, differs in (
        ((ROWS[:1], CONFIG, data), "rows"),
        ((ROWS, CONFIG.replace(epochs=9), data), "epochs"),
        ((ROWS, CONFIG, little(40)), "images"),
    ):
        with pytest.raises(ValueError, match=f"holds another ablation, which differs in {differs}"):
            claim_folder(folder, *arguments)
    assert (folder / "ablation.json").read_text() == before
    (folder / "ablation.json").write_text("[")
    with pytest.raises(ValueError, match=r"ablation\.json is damaged"):
        claim_folder(folder, ROWS, CONFIG, data)
