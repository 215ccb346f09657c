"""What is shown of rotary encodings, and of models that rotate by themselves."""

import pytest
import torch

pytest.importorskip("matplotlib", reason="needs the extra 'viz'")
pytest.importorskip("timm", reason="needs the extra 'timm'")

import timm

import irpe
from irpe.viz import capture, explorer_page, measure_locality, plot_tables

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
JOINED = "rope-axial+product-contextual-k"


def make(encoding, name="vit_tiny_patch16_224", **arguments):
    model = timm.create_model(name, **{**SMALL, **arguments})
    irpe.equip(model, encoding)
    for table in model.parameters():
        torch.nn.init.normal_(table, std=0.3)
    return model.eval()


@pytest.mark.parametrize("encoding", ["rope-axial", "rope-mixed", "alibi-2d", "log-cpb", JOINED])
def test_weights_are_those_of_the_attention(encoding):
    model = make(encoding)
    first = model.blocks[0].attn
    inputs = []
    first.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    call = capture(model, torch.randn(1, 3, 32, 32))[0]
    x = inputs[0]
    q, k, v = first.qkv(x).view(1, 17, 3, 2, 16).permute(2, 0, 3, 1, 4)
    torch.testing.assert_close(call.q, q)
    with torch.no_grad():
        out = first.rpe(q, k, v, grid=(4, 4))
    torch.testing.assert_close(call.attention() @ v[0], out[0])
    plain = (q @ k.mT / 4).softmax(-1)[0]
    torch.testing.assert_close(call.attention_without(), plain)
    both = ((q @ k.mT)[0] + call.extra_weights()) / 4
    torch.testing.assert_close(both.softmax(-1), call.attention())
    assert len(measure_locality([call]).names) == 1


@pytest.mark.parametrize("name", ["eva02_tiny_patch14_224", "swinv2_tiny_window8_256"])
def test_models_that_rotate_or_have_a_temperature(name):
    sizes = {"img_size": 32, "depths": (1, 1), "num_heads": (2, 2)} if "swin" in name else SMALL
    sizes = {"embed_dim": 32, "window_size": 4, **sizes} if "swin" in name else sizes
    model = timm.create_model(name, **sizes)
    irpe.equip(model, "product-contextual-k")
    for table in irpe.adapters.equip.table_names(model):
        torch.nn.init.normal_(model.get_parameter(table))
    outputs = []
    encoding = next(m for m in model.modules() if isinstance(m, irpe.RelativePositionEncoding))
    encoding.register_forward_hook(
        lambda module, args, out: outputs.append((args[2], out)),
    )
    given = []
    encoding.register_forward_pre_hook(
        lambda module, args, kwargs: given.append((*args, kwargs)), with_kwargs=True
    )
    call = capture(model.eval(), torch.randn(1, 3, 32, 32))[0]
    v, out = outputs[0]
    assert call.rotated is not None or call.temperature is not None
    if call.temperature is None:  # else a bias of the model's own is in the mask
        torch.testing.assert_close(call.attention() @ v[0], out[0].detach())
    assert not torch.allclose(call.attention(), call.attention_without())
    q, k, _, named = given[0]
    temperature, mask = named.get("temperature"), named.get("attn_mask")
    scale = named.get("scale") or q.shape[-1] ** -0.5
    scores = q @ k.mT * (scale if temperature is None else temperature)
    scores = scores if mask is None else scores + mask
    torch.testing.assert_close(call.attention_without(), scores.softmax(-1).mean(0).detach())


def test_what_has_no_tables_to_draw():
    with pytest.raises(ValueError, match=r"rope-axial@100 has no learned tables .* rotates"):
        plot_tables(make("rope-axial"))
    with pytest.raises(ValueError, match=r"log-cpb has no learned tables .* are computed"):
        plot_tables(make("log-cpb"))
    plot_tables(make(JOINED))


def test_the_page_says_what_it_cannot_draw():
    calls = capture(make(JOINED), torch.randn(1, 3, 32, 32))
    with pytest.raises(ValueError, match="METHOD-MODE-TARGETS, not rope-axial@100"):
        explorer_page(calls, torch.zeros(32, 32, 3).numpy())
