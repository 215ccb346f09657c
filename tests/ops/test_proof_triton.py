"""The proof of the Triton kernels, which the interpreter computes on the CPU."""

import shutil
import sys
from pathlib import Path

import pytest

from irpe.ops.impl import triton
from irpe.profile.gpu import INTERPRETED, prove_in_interpreter

pytestmark = pytest.mark.skipif(
    triton.importlib.util.find_spec("triton") is None, reason="needs triton, which PyTorch brings"
)


def errors(found):
    return {str(signature): answer.error for signature, answer in found.items() if answer.error}


def test_the_kernels_pass():
    found = prove_in_interpreter(INTERPRETED[:1])
    assert errors(found) == {}
    assert all(0.0 < answer.worst <= 2.0 for answer in found.values())


@pytest.mark.slow
def test_the_kernels_pass_for_all_signatures():
    assert len(INTERPRETED) >= 8
    assert errors(prove_in_interpreter(INTERPRETED)) == {}


FAULTS = {
    "backward.py": ("a * (da - change[:, None])", "a * (da + change[:, None])", "gradient"),
    "forward.py": ("z = z * before[:, None]", "z = z / before[:, None]", "output"),
}


@pytest.mark.parametrize("file", FAULTS)
def test_one_changed_sign_in_a_kernel_fails(file, tmp_path, monkeypatch):
    name = f"planted_kernels_{file.removesuffix('.py')}"
    folder = tmp_path / name
    shutil.copytree(Path(triton.__file__).parent, folder)
    for path in folder.rglob("*.py"):
        text = path.read_text().replace("irpe.ops.impl.triton", name)
        path.write_text(
            text.replace('"triton"', '"planted"') if path.name == "operator.py" else text
        )
    right, wrong, where = FAULTS[file]
    text = (folder / "kernels" / file).read_text()
    assert right in text
    (folder / "kernels" / file).write_text(text.replace(right, wrong))
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    ((answer),) = prove_in_interpreter(INTERPRETED[:1], name).values()
    assert answer.error.startswith(where), answer.error
    assert "times PyTorch's own error" in answer.error
