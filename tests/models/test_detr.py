"""DETR by the names of its original release."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
import transformers
from adapters.small_models import images, perturb
from models import authors

import irpe
from irpe.adapters.equipped import equipped_attentions
from irpe.models.detr import parse_detr_name, rename_detr

SIZES = {
    "d_model": 16, "num_queries": 4, "num_labels": 3,
    "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 24,
    "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 24,
}  # fmt: skip


def make_detr(spec):
    """A small DETR with a ResNet of timm, whose names are those of the original release."""
    torch.manual_seed(0)
    config = transformers.DetrConfig(backbone="resnet10t", **SIZES)
    return irpe.equip(transformers.DetrForObjectDetection(config).eval(), spec)


def original_names(model):
    """The tensors of a DETR of transformers as its original release named them, by hand."""
    state, tensors = model.state_dict(), {}

    def copy(theirs, ours):
        for kind in ("weight", "bias"):
            if f"{ours}.{kind}" in state:
                tensors[f"{theirs}.{kind}"] = state[f"{ours}.{kind}"]

    def copy_attention(theirs, ours):
        copy(f"{theirs}.out_proj", f"{ours}.o_proj")
        for kind in ("weight", "bias"):
            parts = [state[f"{ours}.{letter}_proj.{kind}"] for letter in "qkv"]
            tensors[f"{theirs}.in_proj_{kind}"] = torch.cat(parts)

    for name, values in state.items():
        if name.startswith("model.backbone.model."):
            tensors[name.replace("model.backbone.model.", "backbone.0.body.")] = values
    copy("input_proj", "model.input_projection")
    copy("query_embed", "model.query_position_embeddings")
    copy("class_embed", "class_labels_classifier")
    copy("transformer.decoder.norm", "model.decoder.layernorm")
    for number in range(3):
        copy(f"bbox_embed.layers.{number}", f"bbox_predictor.layers.{number}")
    for number in range(model.config.encoder_layers):
        theirs, ours = (f"{head}.encoder.layers.{number}" for head in ("transformer", "model"))
        copy_attention(f"{theirs}.self_attn", f"{ours}.self_attn")
        copy(f"{theirs}.linear1", f"{ours}.mlp.fc1")
        copy(f"{theirs}.linear2", f"{ours}.mlp.fc2")
        copy(f"{theirs}.norm1", f"{ours}.self_attn_layer_norm")
        copy(f"{theirs}.norm2", f"{ours}.final_layer_norm")
    for number in range(model.config.decoder_layers):
        theirs, ours = (f"{head}.decoder.layers.{number}" for head in ("transformer", "model"))
        copy_attention(f"{theirs}.self_attn", f"{ours}.self_attn")
        copy_attention(f"{theirs}.multihead_attn", f"{ours}.encoder_attn")
        copy(f"{theirs}.linear1", f"{ours}.mlp.fc1")
        copy(f"{theirs}.linear2", f"{ours}.mlp.fc2")
        copy(f"{theirs}.norm1", f"{ours}.self_attn_layer_norm")
        copy(f"{theirs}.norm2", f"{ours}.encoder_attn_layer_norm")
        copy(f"{theirs}.norm3", f"{ours}.final_layer_norm")
    return tensors


def authors_file(path, model):
    """Writes what the authors' code would have saved of a DETR; returns the tables by layer."""
    tensors, tables = original_names(model), []
    for number, attention in enumerate(equipped_attentions(model).values()):
        heads = model.config.encoder_attention_heads
        tables.append(
            authors.random_tables(attention.rpe.spec, heads, attention.head_dim, 0, seed=number)
        )
        where = f"transformer.encoder.layers.{number}.self_attn."
        tensors |= {where + name: values for name, values in tables[-1].items()}
    authors.write(path, tensors)
    return tables


@pytest.mark.parametrize(
    "text", ["product-contextual-k@2", "product-contextual-qkv+unshared", "cross-bias-k@3"]
)
def test_a_file_of_the_original_layout_gives_the_same_model(tmp_path, text):
    spec = irpe.RPESpec.parse(text)
    model = perturb(make_detr(spec))
    tables = authors_file(tmp_path / "x.pth", model)
    loaded = irpe.load_published(tmp_path / "x.pth", model=make_detr(spec))
    names = [name for name in model.state_dict() if ".rpe." not in name]
    assert set(loaded.state_dict()) == set(model.state_dict())
    for name in names:
        assert torch.equal(loaded.state_dict()[name], model.state_dict()[name]), name
    loaded.double()
    grid = (2, 3)
    x, position = torch.randn(2, 1, 6, 16, dtype=torch.float64)
    for attention in equipped_attentions(loaded).values():
        attention.rpe_grid = replace(attention.rpe_grid, initial=grid)
    for attention, own in zip(equipped_attentions(loaded).values(), tables, strict=True):
        parts = attention.q_proj(x + position), attention.k_proj(x + position), attention.v_proj(x)
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in parts)
        z = attention.o_proj(authors.attend(q, k, v, own, spec, grid, 0))
        actual, _ = attention(x, position_embeddings=position)
        torch.testing.assert_close(actual, z, rtol=1e-6, atol=1e-6)


class Original:
    """The forward pass of the original DETR from its own tensors, in eval mode, batch of one."""

    def __init__(self, tensors, heads):
        self.tensors, self.heads = tensors, heads

    def linear(self, name, x):
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"])

    def norm(self, name, x):
        t = self.tensors
        return F.layer_norm(x, x.shape[-1:], t[f"{name}.weight"], t[f"{name}.bias"])

    def attend(self, name, q, k, v, mask=None):
        t, dim = self.tensors, q.shape[-1]
        weight, bias = t[f"{name}.in_proj_weight"], t[f"{name}.in_proj_bias"]
        out = t[f"{name}.out_proj.weight"], t[f"{name}.out_proj.bias"]
        return F.multi_head_attention_forward(
            q, k, v, dim, self.heads, weight, bias, None, None, False, 0.0, *out, training=False,
            attn_mask=mask,
        )[0]  # fmt: skip

    def feed_forward(self, name, x):
        return self.linear(f"{name}.linear2", self.linear(f"{name}.linear1", x).relu())

    def encode(self, x, position, masks):
        for number, mask in enumerate(masks):
            name = f"transformer.encoder.layers.{number}"
            q = x + position
            x = self.norm(f"{name}.norm1", x + self.attend(f"{name}.self_attn", q, q, x, mask))
            x = self.norm(f"{name}.norm2", x + self.feed_forward(name, x))
        return x

    def decode(self, memory, position, num_layers):
        queries = self.tensors["query_embed.weight"]
        x = torch.zeros_like(queries)
        for number in range(num_layers):
            name = f"transformer.decoder.layers.{number}"
            q = x + queries
            x = self.norm(f"{name}.norm1", x + self.attend(f"{name}.self_attn", q, q, x))
            q, k = x + queries, memory + position
            crossed = self.attend(f"{name}.multihead_attn", q, k, memory)
            x = self.norm(f"{name}.norm2", x + crossed)
            x = self.norm(f"{name}.norm3", x + self.feed_forward(name, x))
        return self.norm("transformer.decoder.norm", x)

    def predict(self, x):
        boxes = x
        for number in range(3):
            boxes = self.linear(f"bbox_embed.layers.{number}", boxes)
            boxes = boxes.relu() if number < 2 else boxes.sigmoid()
        return self.linear("class_embed", x), boxes


def test_the_original_forward_pass_gives_the_same_outputs(tmp_path):
    spec = irpe.RPESpec.parse("product-bias-k+unshared")
    model = perturb(make_detr(spec))
    with torch.no_grad():  # the features of a random ResNet are large
        model.model.input_projection.weight.mul_(0.02)
    tables = authors_file(tmp_path / "x.pth", model)
    original = Original(torch.load(tmp_path / "x.pth", weights_only=False)["model"], heads=2)
    loaded = irpe.load_published(tmp_path / "x.pth", model=make_detr(spec))
    x, detr = images(64, 96, batch=1), loaded.model
    features = detr.backbone(x, torch.ones(1, 64, 96))[-1][0]
    (ids,) = irpe.bucket_maps(spec, features.shape[-2:])
    masks = [own["rpe_k.lookup_table_bias"][:, ids.ids.long()] for own in tables]
    weight, bias = (original.tensors[f"input_proj.{kind}"] for kind in ("weight", "bias"))
    tokens = F.conv2d(features, weight, bias)[0].flatten(1).T
    position = detr.position_embedding(
        shape=features.shape, device="cpu", dtype=torch.float32,
        mask=torch.ones(1, *features.shape[-2:], dtype=torch.bool),
    )[0].flatten(1).T  # fmt: skip
    memory = original.encode(tokens, position, masks)
    logits, boxes = original.predict(original.decode(memory, position, num_layers=2))
    out = loaded(x)
    torch.testing.assert_close(out.encoder_last_hidden_state[0], memory, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out.logits[0], logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out.pred_boxes[0], boxes, rtol=1e-4, atol=1e-4)


def test_the_parts_of_an_attention_are_told_apart():
    weight = torch.arange(9.0)[:, None].repeat(1, 3)
    renamed = rename_detr({"transformer.decoder.layers.3.multihead_attn.in_proj_weight": weight})
    for number, letter in enumerate("qkv"):
        part = renamed[f"model.decoder.layers.3.encoder_attn.{letter}_proj.weight"]
        assert torch.equal(part, weight[3 * number : 3 * number + 3])


@pytest.mark.parametrize("weight", [torch.ones(()), torch.ones(2, 16), torch.ones(50, 16)])
def test_attentions_that_cannot_be_parted_are_refused(tmp_path, weight):
    model = make_detr("product-contextual-k@2")
    authors_file(tmp_path / "x.pth", model)
    tensors = torch.load(tmp_path / "x.pth", weights_only=False)["model"]
    name = "transformer.encoder.layers.1.self_attn.in_proj_weight"
    authors.write(tmp_path / "x.pth", tensors | {name: weight})
    with pytest.raises(ValueError, match=r"in_proj_weight|q_proj\.weight"):
        irpe.load_published(tmp_path / "x.pth", model=model)


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("rpe-1.9-product-ctx-1-k", "product-contextual-k@1.9"),
        ("rpe-2.0-product-ctx-1-k", "product-contextual-k@2"),
        ("rpe-20-cross-bias-0-k", "cross-bias-k@20+unshared"),
        ("rpe-2.0-product-ctx-0-qkv", "product-contextual-qkv@2+unshared"),
    ],
)
def test_names_of_encodings(name, spec):
    assert str(parse_detr_name(name)) == spec


@pytest.mark.parametrize(
    "name", ["rpe-2.0-quant-ctx-1-k", "rpe-2.0-product-ctx-2-k", "rpe-product-ctx-1-k", "detr", ""]
)
def test_other_names_are_none(name):
    assert parse_detr_name(name) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rpe-1.9-product-ctx-1-k", "rpe-2.0-product-ctx-1-k"])
def test_the_published_detr(tmp_path, name):
    config = transformers.DetrConfig(num_labels=91)
    model = irpe.equip(transformers.DetrForObjectDetection(config).eval(), parse_detr_name(name))
    tables = authors_file(tmp_path / f"{name}.pth", model)
    loaded = irpe.load_published(tmp_path / f"{name}.pth")
    side = 7 if "1.9" in name else 9
    for attention, own in zip(equipped_attentions(loaded).values(), tables, strict=True):
        table = attention.rpe.key_tables[0]
        assert table.shape == (1, side**2, 32)
        assert torch.equal(table, own["rpe_k.lookup_table_weight"].transpose(1, 2))
    irpe.save_equipped(loaded, tmp_path / "ours")
    again = irpe.load_equipped(tmp_path / "ours")
    x = images(96, 160, batch=1)
    out = loaded(x)
    assert out.logits.shape == (1, 100, 92)
    assert torch.equal(again(x).logits, out.logits)
