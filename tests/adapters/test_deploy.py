"""Equipped models leave PyTorch's eager mode: ONNX Runtime, Inductor."""

import functools

import pytest
import torch

import irpe
from irpe.adapters.equip import table_names

timm = pytest.importorskip("timm", reason="needs the extra 'timm'")


def small_model(*specs):
    """A model with a block for each encoding."""
    torch.manual_seed(0)
    sizes = {"img_size": (32, 48), "embed_dim": 32, "num_heads": 2, "mlp_ratio": 1}
    model = timm.create_model("deit_tiny_patch16_224", depth=len(specs), **sizes).eval()
    for layer, spec in enumerate(specs):
        irpe.equip(model, spec, layers=[layer])
    for name in table_names(model):
        torch.nn.init.normal_(model.get_parameter(name))
    return model


SPECS = [
    "product-contextual-qkv",
    "cross-contextual-qk",
    "quantization-bias-k+unshared",
    "sasa",
    "transformer-xl",
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the exporter warns of its own deprecations
def test_onnx_runtime_agrees_and_the_graph_has_no_operator_of_ours(tmp_path):
    onnx = pytest.importorskip("onnx", reason="needs the extra 'export'")
    runtime = pytest.importorskip("onnxruntime", reason="needs the extra 'export'")
    pytest.importorskip("onnxscript", reason="needs the extra 'export'")
    model, path = small_model(*SPECS), tmp_path / "model.onnx"
    images = torch.randn(2, 3, 32, 48)
    torch.onnx.export(
        model, (images,), path, dynamo=True, dynamic_shapes=({0: torch.export.Dim("batch")},)
    )
    domains = {node.domain for node in onnx.load(path).graph.node}
    assert not any("irpe" in domain for domain in domains)
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for batch in (1, 5):
        images = torch.randn(batch, 3, 32, 48)
        (actual,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(actual), model(images), rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Inductor warns of the machine it finds
@pytest.mark.parametrize("part", ["blocks.0.attn", ""])
def test_inductor_compiles_without_a_graph_break(part):
    model = small_model("product-contextual-qkv").train()
    images = torch.randn(2, 3, 32, 48)
    expected = torch.autograd.grad(model(images).sum(), list(model.parameters()))
    model.get_submodule(part).compile(fullgraph=True)
    actual = torch.autograd.grad(model(images).sum(), list(model.parameters()))
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-3, atol=1e-4)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")  # of the former exporter
def test_the_former_onnx_exporter_is_refused_with_the_remedy(tmp_path):
    model, x = small_model("product-contextual-qkv"), torch.randn(1, 3, 32, 48)
    with pytest.raises(RuntimeError, match=r"dynamo=False.*pass dynamo=True"):
        torch.onnx.export(model, (x,), tmp_path / "model.onnx", dynamo=False)


def dynamic_model():
    """A model for images of several sizes, and where their sides are dynamic."""
    torch.manual_seed(0)
    sizes = {"depth": 1, "embed_dim": 32, "num_heads": 2, "img_size": 32, "patch_size": 8}
    model = timm.create_model("vit_tiny_patch16_224", dynamic_img_size=True, **sizes).eval()
    rows, columns = (torch.export.Dim(name, min=2, max=9) for name in ("rows", "columns"))
    return irpe.equip(model, "product-contextual-k"), ({2: 8 * rows, 3: 8 * columns},)


@pytest.mark.filterwarnings("ignore")  # the exporters warn of their own deprecations
@pytest.mark.parametrize(
    "exporter", ["torch.export", pytest.param("torch.onnx", marks=pytest.mark.slow)]
)
def test_a_program_for_images_of_any_sides_is_refused_and_one_of_each_is_right(exporter, tmp_path):
    model, dynamic = dynamic_model()
    landscape = torch.randn(1, 3, 32, 48)
    if exporter == "torch.export":
        export = torch.export.export
    else:
        pytest.importorskip("onnxscript", reason="needs the extra 'export'")
        export = functools.partial(torch.onnx.export, f=tmp_path / "model.onnx", dynamo=True)
    with pytest.raises(Exception, match="export one program for each size"):  # of the exporters
        export(model, (landscape,), dynamic_shapes=dynamic)
    for images in (landscape, landscape.mT.contiguous()):
        program = torch.export.export(model, (images,)).module()
        torch.testing.assert_close(program(images), model(images))
    compiled = torch.compile(model, dynamic=True, backend="eager")  # one program for each grid
    for images in (landscape, landscape.mT.contiguous()):
        torch.testing.assert_close(compiled(images), model(images))
    torch._dynamo.reset()
