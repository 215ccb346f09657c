"""A program with the library's operators runs where nothing of the library but them is imported."""

import subprocess
import sys

import torch
from torch import nn

from irpe import RelativePositionEncoding

QKV = torch.randn(3, 1, 2, 65, 8)

SCRIPT = """
import sys, torch
import irpe.ops
assert "irpe.nn" not in sys.modules and "irpe.adapters" not in sys.modules
program, (inputs, expected) = torch.export.load(sys.argv[1]), torch.load(sys.argv[2])
torch.testing.assert_close(program.module()(*inputs), expected)
"""


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.rpe = RelativePositionEncoding("product-contextual-qkv", 2, 8, impl="fast")
        for table in self.rpe.parameters():
            nn.init.normal_(table)

    def forward(self, q, k, v):
        return self.rpe(q, k, v, grid=(5, 13))


def test_an_exported_program_needs_irpe_ops_alone(tmp_path):
    model, inputs = Model().eval(), tuple(QKV.unbind())
    program = torch.export.export(model, inputs)
    assert "irpe.fast" in program.graph_module.code
    torch.export.save(program, tmp_path / "model.pt2")
    torch.save((inputs, model(*inputs).detach()), tmp_path / "expected.pt")
    paths = [str(tmp_path / "model.pt2"), str(tmp_path / "expected.pt")]
    done = subprocess.run([sys.executable, "-c", SCRIPT, *paths], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_exported_program_has_the_gradients_of_the_module():
    model, inputs = Model().eval(), tuple(x.clone().requires_grad_() for x in QKV)
    program = torch.export.export(model, inputs).module()
    tables = [name for name, _ in model.named_parameters()]
    expected = torch.autograd.grad(model(*inputs).square().sum(), [*inputs, *model.parameters()])
    leaves = [*inputs, *(program.get_parameter(name) for name in tables)]
    actual = torch.autograd.grad(program(*inputs).square().sum(), leaves)
    for value, gradient in zip(actual, expected, strict=True):
        torch.testing.assert_close(value, gradient)
