"""What the documentation shows is run."""

import argparse
import importlib.util
import re
import runpy
from pathlib import Path

import pytest

from irpe.adapters import hosts

ROOT = Path(__file__).parents[1]
SLOW_PAGES = ["docs/how-to/fine-tune.md", "docs/how-to/train-at-scale.md"]
DOCS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))
PAGES = ["README.md", *(page for page in DOCS if page not in SLOW_PAGES)]


REPLACED = {
    "pretrained=True": "pretrained=False",
    'create_model("deit_tiny_patch16_224"': 'create_model("deit_tiny_patch16_224", depth=2',
    'create_model("deit_small_patch16_224"': 'create_model("deit_small_patch16_224", depth=2',
    'create_model("samvit_base_patch16"': 'create_model("samvit_base_patch16", depth=1',
}


def run(code, page, names):
    """Runs what a page shows, with what it shows replaced by what runs quickly and offline."""
    for shown, replacement in REPLACED.items():
        code = code.replace(shown, replacement)
    exec(compile(code, page, "exec"), names)


def blocks(page):
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


PAGES_WITH_CODE = [page for page in PAGES if blocks(page)]
NOT_OURS = (
    "ignore:.*(pin_memory|num_workers|is_gradient_checkpointing|LeafSpec|eval mode|litlogger).*"
)


@pytest.mark.slow
@pytest.mark.filterwarnings(NOT_OURS)
@pytest.mark.parametrize("page", SLOW_PAGES)
def test_python_with_other_training_libraries_runs(page, tmp_path, monkeypatch, capsys):
    for library in ("lightning", "peft"):
        pytest.importorskip(library, reason=f"needs {library}")
    test_python_in_the_documentation_runs(page, tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize("page", PAGES_WITH_CODE)
def test_python_in_the_documentation_runs(page, tmp_path, monkeypatch, capsys):
    pytest.importorskip("timm", reason="needs the extra 'timm'")
    pytest.importorskip("transformers", reason="needs the extra 'transformers'")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for code in blocks(page):
        run(code, page, names)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])  # MkDocs checks the others
def test_links_in_the_documentation_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)]+)\)", (ROOT / page).read_text()):
        if "://" not in link:
            path, _, anchor = link.partition("#")
            path = ROOT / (path or page)
            assert path.exists(), link
            assert not anchor or anchor in anchors_of(path), link


def anchors_of(path):
    """The anchors of the headings of a page, as MkDocs makes them."""
    heads = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", head).strip().lower()) for head in heads}


@pytest.mark.parametrize("folder", ["src", "benchmarks", "tools", "examples", "tests"])
def test_pages_that_code_names_exist(folder):
    for file in (ROOT / folder).rglob("*.py"):
        for page in re.findall(r"\bdocs/[\w/-]+\.md", file.read_text()):
            assert (ROOT / page).exists(), f"{file} names {page}"


@pytest.mark.parametrize("page", [*PAGES, *SLOW_PAGES])
def test_names_in_the_documentation_exist(page):
    """`irpe.ops.gather` and `irpe.ops.gather.bucket_sum` alike."""
    names = re.findall(r"`(irpe(?:\.\w+)+)", (ROOT / page).read_text())
    for name in set(names) - {"irpe.json", "irpe.py"}:  # files
        module, rest = name, []
        while not _is_module(module):
            module, _, last = module.rpartition(".")
            rest.insert(0, last)
        found = importlib.import_module(module)
        for part in rest:
            found = getattr(found, part)


def _is_module(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def test_the_example_runs(tmp_path, monkeypatch, capsys):
    pytest.importorskip("timm", reason="needs the extra 'timm'")
    monkeypatch.chdir(tmp_path)
    run((ROOT / "examples/finetune.py").read_text(), "examples/finetune.py", {})
    assert "saved to ./finetuned" in capsys.readouterr().out


@pytest.mark.slow
def test_the_example_with_a_dinov3_runs(tmp_path, monkeypatch, capsys):
    pytest.importorskip("timm", reason="needs the extra 'timm'")
    pytest.importorskip("PIL", reason="needs the extra 'train'")
    monkeypatch.chdir(tmp_path)
    arguments = ["finetune_dinov3.py", "--images", "200", "--epochs", "1"]
    monkeypatch.setattr("sys.argv", arguments)
    runpy.run_path(str(ROOT / "examples/finetune_dinov3.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert "saved to ./finetuned-dinov3 and loaded again" in out


def test_the_example_with_points_runs():
    pytest.importorskip("accelerate", reason="needs the extra 'train'")
    example = runpy.run_path(str(ROOT / "examples/points.py"))
    sizes = {"data": example["EMBEDDED"], "images": 64, "test_images": 12, "epochs": 1}
    names = ("linear absolute", "euclidean")
    results = [example["run"](name, 0, argparse.Namespace(**sizes)) for name in names]
    as_they_are, rotated, shifted = (score.values for score in results[1].scores)
    assert as_they_are == rotated == shifted  # distances stay as they are
    assert results[1].effect > 0
    assert "euclidean against linear absolute" in example["report"](results)


FAMILIES = (  # as the page names them
    "ViT", "DeiT", "DINOv2", "registers", "DINOv3", "CLIP", "SigLIP", "BEiT", "ViTMSN", "YOLOS",
    "AST", "Swin", "Swin v2", "SAM", "ViTDet", "DETR", "Conditional DETR", "RT-DETR", "D-FINE",
    "SigLIP 2", "ViTMAE", "VideoMAE", "Vivit", "Segformer",
)  # fmt: skip


def test_the_page_of_supported_models_names_what_can_be_equipped_and_is_tested():
    page = (ROOT / "docs/reference/supported-models.md").read_text()
    classes = [text for library, text in hosts.SUPPORTED.items() if library != "transformers"]
    named = re.findall(r"[A-Z][a-z]+[A-Z]\w+", " ".join(classes))
    tests = "".join(path.read_text() for path in (ROOT / "tests/adapters").rglob("*.py"))
    for name in named:
        assert re.search(rf"\b{name}\b", page), name
        assert name.removesuffix("Transformer") in tests, name
    for family in FAMILIES:
        assert family in page, family
        assert family in hosts.SUPPORTED["transformers"], family
        assert family in tests, family


def test_sentences_of_troubleshooting_are_those_of_the_errors():
    text = (ROOT / "docs/how-to/troubleshooting.md").read_text()
    sources = "".join(file.read_text() for file in (ROOT / "src").rglob("*.py"))
    sources = re.sub(r"\"\s*f?\"", "", sources)  # sentences over several lines
    quoted = re.findall(r'^\*\*"([^"]+)"\*\*', text, re.MULTILINE)
    assert len(quoted) > 10
    assert [part for part in quoted if part not in sources] == []
