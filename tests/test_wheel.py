"""The wheel in empty environments outside the checkout: the core, and each extra alone."""

import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import torch

import irpe
from irpe.ops.impl.native import build

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow

EXTRAS = {
    "cli": """
import subprocess, sys
subprocess.run([sys.executable, "-m", "irpe", "train", "--help"], check=True)
""",
    "timm": """
import timm, torch, irpe
model = irpe.equip(timm.create_model("vit_tiny_patch16_224", depth=1), "product-contextual-k")
model(torch.randn(1, 3, 224, 224))
""",
    "transformers": """
import torch, transformers, irpe
config = transformers.ViTConfig(hidden_size=32, num_attention_heads=2, num_hidden_layers=1)
model = irpe.equip(transformers.ViTModel(config), "product-contextual-k")
model(torch.randn(1, 3, 224, 224))
""",
    "torchvision": """
import torch, irpe
from torchvision.models import VisionTransformer
model = irpe.equip(VisionTransformer(32, 8, 1, 2, 16, 32), "product-contextual-k")
model(torch.randn(1, 3, 32, 32))
""",
    "train": """
import irpe.recipes, irpe.train
config = irpe.recipes.RECIPES["laptop"]().replace(epochs=1, warmup_epochs=0)
assert irpe.train.train(config, "run").score.top1 > 20
""",
    "viz": """
import irpe.viz
irpe.viz.save_figure(irpe.viz.plot_buckets(["product-contextual-k"], grid=(7, 7)), "buckets.png")
""",
    "export": """
import torch, irpe
attention = irpe.RPEAttention(32, num_heads=2, spec="product-contextual-k").eval()
inputs = {"x": torch.randn(1, 15, 32), "grid": (3, 5)}
torch.onnx.export(attention, kwargs=inputs, dynamo=True).save("attention.onnx")
""",
}
IMPORTS = """
import time, torch
begin = time.process_time()
import irpe
irpe.RPEAttention(32, num_heads=2, spec="product-contextual-k")
assert time.process_time() - begin < 1, time.process_time() - begin
"""


ALONE = """
import sys, torch, irpe
attention = irpe.RPEAttention(32, num_heads=2, spec="product-contextual-qkv", num_prefix_tokens=1)
assert attention(torch.randn(2, 1 + 3 * 5, 32), grid=(3, 5)).shape == (2, 16, 32)
layer = torch.nn.TransformerEncoderLayer(32, 2, batch_first=True)
model = irpe.equip(torch.nn.TransformerEncoder(layer, 2), "cross-bias-k", grid=(3, 5))
assert model(torch.randn(2, 15, 32)).shape == (2, 15, 32)
assert len(irpe.summary(model).attentions) == 2
irpe.save_equipped(model, sys.argv[1])
from irpe.train.run import read_metrics
"""


def run(*command, cwd):
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def make_environment(directory, *requirements, base=None):
    """Returns the interpreter of a new environment, which sees the packages of another one."""
    venv.create(directory, with_pip=True)
    python = directory / "bin" / "python"
    if base is not None:
        folder = run(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=directory)
        there = run(base, "-c", "import site; print(site.getsitepackages()[0])", cwd=directory)
        (Path(folder.strip()) / "base.pth").write_text(there)
    run(python, "-m", "pip", "install", "--quiet", *requirements, cwd=directory)
    return python


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("build", reason="needs the extra 'dev'")
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(ROOT), cwd=folder)
    (found,) = folder.glob("irpe-*.whl")
    return found


@pytest.fixture(scope="module")
def core(wheel, tmp_path_factory):
    return make_environment(tmp_path_factory.mktemp("core"), str(wheel))


def test_the_core_alone_is_quickly_imported(core, tmp_path):
    run(core, "-c", IMPORTS, cwd=tmp_path)


def test_the_core_alone_works(core, tmp_path):
    """Nothing but what pyproject declares as needed is installed."""
    run(core, "-c", ALONE, str(tmp_path / "model"), cwd=tmp_path)


EXPLAIN = """
import torch, irpe
q = torch.randn(1, 2, 15, 8)
maps = irpe.bucket_maps("product-contextual-k", grid=(3, 5))
tables = [torch.zeros(1, maps[0].num_buckets, 8)]
print(irpe.explain(q, q, q, maps, key_tables=tables))
irpe.rpe_attention(q, q, q, maps, key_tables=tables)
"""


def test_a_wheel_with_kernels_is_for_linux_and_uses_them(wheel, core, tmp_path):
    if build.why_not() is not None:
        pytest.skip(f"native: {build.why_not()}")
    assert wheel.name.endswith("-py3-none-manylinux_2_17_x86_64.whl")
    said = run(core, "-c", EXPLAIN, cwd=tmp_path)
    if torch.backends.cpu.get_cpu_capability() in build.WIDTHS:
        assert said.startswith("native: ")


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_without_a_compiler_the_installation_is_pure_and_works(kind, core, tmp_path, monkeypatch):
    """The compiler is hidden from PATH; the editable installation is that of a copy."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CXX", raising=False)
    copy = tmp_path / "copy"
    for name in ("src", "pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        source = ROOT / name
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        _ = source.is_dir() and shutil.copytree(source, copy / name, ignore=ignored)
        _ = source.is_dir() or shutil.copy(source, copy / name)
    if kind == "wheel":
        builder = (sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(copy))
        run(*builder, cwd=tmp_path)
        (found,) = tmp_path.glob("irpe-*.whl")
        assert found.name.endswith("-py3-none-any.whl")
        wanted = [str(found)]
    else:
        wanted = ["-e", str(copy)]
    alone = ["--force-reinstall", "--no-deps"]  # beside what `core` has
    python = make_environment(tmp_path / "venv", *alone, *wanted, base=core)
    said = run(python, "-c", EXPLAIN, cwd=tmp_path)
    assert said.startswith("fast: ")
    assert "not native: this installation has no compiled kernels" in said


def test_the_description_of_a_release_has_no_relative_link(tmp_path, monkeypatch):
    monkeypatch.setenv("GITHUB_REPOSITORY", "owner/irpe")
    monkeypatch.setenv("IRPE_NATIVE", "0")
    run(
        sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(ROOT), cwd=tmp_path
    )
    (found,) = tmp_path.glob("irpe-*.whl")
    with zipfile.ZipFile(found) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        text = archive.read(name).decode()
    links = re.findall(r'(?:\]\(|src=")([^)"]+)', text)
    assert f"https://github.com/owner/irpe/blob/v{irpe.__version__}/CHANGELOG.md" in links
    assert [link for link in links if not link.startswith("https://")] == []


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_alone_does_what_it_says(extra, wheel, core, tmp_path):
    python = make_environment(tmp_path / "venv", f"{wheel}[{extra}]", base=core)
    run(python, "-c", EXTRAS[extra], cwd=tmp_path)
