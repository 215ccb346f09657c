"""The report of a GPU: the same lines on the CPU, with planted candidates."""

import json

import pytest
import torch
from signatures import prover_of

import irpe.profile.gpu as profile_gpu
from irpe import UserError
from irpe.ops.proof.judge import Answer
from irpe.profile.gpu import INTERPRETED, AttentionSize, GpuReport, measure_gpu

SIZES = {"small": AttentionSize(1, 2, 16, (3, 5), 1)}
ENCODINGS = {"K": "product-contextual-k", "cross": "cross-contextual-k"}


@pytest.fixture
def report(monkeypatch, tmp_path):
    monkeypatch.setenv("IRPE_CACHE", str(tmp_path))
    monkeypatch.delenv("IRPE_PROOF", raising=False)
    prover = prover_of("Right", "Slow")
    return measure_gpu(SIZES, ENCODINGS, prover=prover, device="cpu", dtype=torch.float32, images=0)


def test_each_attention_is_proved_and_timed(report):
    rows = [(row.model, row.encoding, row.training) for row in report.attentions]
    assert rows == [("small", e, training) for training in (True, False) for e in ENCODINGS]
    for row in report.attentions:
        assert row.chosen in ("Right", "fast")
        assert row.ms.keys() == {"Right", "Slow", "fast"}
        assert row.ms["Slow"] > 50.0
        assert row.ratio == row.ms[row.chosen] / row.without_ms
        assert row.known["Slow"].startswith("proved on cpu, ")
    words = report.in_words()
    assert [text.partition(":")[0] for text in words] == [
        "K, training", "cross, training", "K, inference", "cross, inference",
    ]  # fmt: skip
    assert all(
        f" for small ({row.ratio:.2f} x)" in text
        for row, text in zip(report.attentions, words, strict=True)
    )


def test_the_report_is_drawn(report, tmp_path):
    viz = pytest.importorskip("irpe.viz")
    figure = viz.plot_gpu_times(report)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [
        "small, K", "small, cross",
    ]  # fmt: skip
    with pytest.raises(UserError):
        viz.plot_gpu_times(GpuReport("a GPU", {}, []))


def run(monkeypatch, capsys, *arguments):
    from irpe.cli.main import main

    monkeypatch.setattr("sys.argv", ["irpe", *arguments])
    try:
        main()
    except SystemExit as end:
        return capsys.readouterr().out, end.code
    return capsys.readouterr().out, None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_command_says_so_in_one_line(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    out, code = run(monkeypatch, capsys, "gpu")
    assert out == ""
    assert "there is no GPU here" in code
    assert "irpe gpu --interpret" in code
    assert not list(tmp_path.iterdir())


def test_the_command_prints_writes_and_draws(report, monkeypatch, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(profile_gpu, "measure_gpu", lambda **_: report)
    output = tmp_path / "report.json"
    out, code = run(monkeypatch, capsys, "gpu", "-o", str(output), "--images", "0")
    assert code is None
    assert out.splitlines()[-1] == f"written: {output}, {output.with_suffix('.png')}"
    assert all(text in out.replace("\n", " ") for text in report.in_words()[:1])
    assert json.loads(output.read_text())["attentions"][0]["chosen"] == report.attentions[0].chosen
    assert output.with_suffix(".png").stat().st_size > 1000


@pytest.mark.parametrize("error", ["", "gradient of k has 9 times PyTorch's own error"])
def test_what_the_interpreter_finds_is_printed(error, monkeypatch, capsys):
    answers = {INTERPRETED[0]: Answer(error, worst=0.5)}
    monkeypatch.setattr(profile_gpu, "prove_in_interpreter", lambda **_: answers)
    out, code = run(monkeypatch, capsys, "gpu", "--interpret")
    assert (error or "0.50") in out
    assert (code is None) == (not error)
