"""The sweep on a part of the models; all of them are `python -m tests.sweep`."""

import pytest
import timm
from sweep import page, timm_models, transformers_models
from sweep.verdicts import Verdicts

EQUIPPED = ["test_vit", "vit_tiny_patch16_dinov3_qkvb", "test_maxvit", "twins_svt_small"]
REFUSED = ["convit_tiny", "vit_pwee_patch16_reg1_gap_256", "xcit_nano_12_p16_224"]


def test_rows_of_some_models():
    rows = timm_models.rows([*EQUIPPED[:2], REFUSED[0], "resnet18"], run=False)
    found = [(row.model, row.verdict, list(row.names)) for row in rows]
    assert found == [
        ("convit.ConVit", "refused", ["convit_tiny"]),
        ("eva.Eva", "equipped", ["vit_tiny_patch16_dinov3_qkvb"]),
        ("vision_transformer.VisionTransformer", "equipped", ["test_vit"]),
    ]
    assert "cannot be equipped: timm.models.convit.GPSA mixes attention" in rows[0].sentence
    assert rows[1].sentence == "EvaAttention"


def test_a_sweep_goes_on_where_it_was_interrupted(tmp_path, monkeypatch):
    names, file = EQUIPPED[:2], tmp_path / "known"
    first = timm_models.rows(names[:1], run=False, known=Verdicts(file))
    judged, judge = [], timm_models.judge
    monkeypatch.setattr(timm_models, "judge", lambda name: judged.append(name) or judge(name))
    rows = timm_models.rows(names, run=False, known=Verdicts(file))
    assert judged == names[1:]
    assert first[0] in rows
    assert len(file.read_text().splitlines()) == len(rows) == 2


REASON = "its attention is transformers.models.e.modeling_e.EAttention"
SENTENCE = f"E cannot be equipped: {REASON}. Supported are others. docs/how-to/equip.md"


def test_the_pages_count_models_and_classes():
    timm_rows = [
        ("a.A", "b.B", 3, "equipped", "96 x 32", "B"),
        ("a.C", "b.D", 2, "refused", "", "x | y"),
    ]
    text = page.render_timm(timm_rows)
    assert "Models with attention: 3 equipped, 2 refused." in text
    assert "Resized: 1 of 1 rows that ran." in text
    assert "| a.A | B | 3 | 96 x 32 | B |" in text
    assert "| a.C | D | 2 |  | x \\| y |" in text
    assert text.index("## Equipped") < text.index("| a.A |") < text.index("## Refused")
    text = page.render_transformers([(name, "e", "refused", "", SENTENCE) for name in "EF"])
    assert "Classes that take images: 2 refused." in text
    assert "| e | E, F |  | its attention is EAttention |" in text


@pytest.mark.slow
def test_a_part_of_timm():
    rows = timm_models.rows([*EQUIPPED, *REFUSED])
    assert {name for row in rows if row.verdict == "equipped" for name in row.names} == {*EQUIPPED}
    assert all(row.sentence.endswith(" run") for row in rows if row.verdict == "equipped")
    resized = {row.model.partition(".")[0]: row.resized for row in rows if row.resized}
    assert resized == {
        "vision_transformer": "224 x 160",
        "eva": "320 x 256",
        "maxxvit": "224 x 160",
        "twins": "288 x 224",
    }


@pytest.mark.slow
def test_every_stock_vit_and_swin_of_timm_is_equipped():
    names = timm.list_models(["vit_*", "deit*", "swin_*", "swinv2_*", "beit*", "eva*"])
    refused = [row for row in timm_models.rows(names, run=False) if row.verdict != "equipped"]
    known = ("ParallelScalingBlock", "DiffAttention")
    assert all(any(kind in row.sentence for kind in known) for row in refused), refused


@pytest.mark.slow
def test_a_part_of_transformers(monkeypatch):
    names = ["ViTModel", "CLIPVisionModel", "ResNetModel"]
    monkeypatch.setattr(transformers_models, "names_of_classes", lambda: names)
    found = {name: verdict for name, _, verdict, *_ in transformers_models.verdicts(Verdicts())}
    assert found == {
        "ViTModel": "equipped",
        "CLIPVisionModel": "equipped",
        "ResNetModel": "refused",
    }
