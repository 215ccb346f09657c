"""torch.nn: MultiheadAttention, alone and in TransformerEncoderLayer and TransformerEncoder."""

from functools import partial
from types import NoneType
from typing import Any

import torch.nn.functional as F  # noqa: N812
from torch import nn

from irpe.adapters.changes import Undo
from irpe.adapters.grids import GridSource
from irpe.adapters.multihead import RPEMultiheadAttention, leave_fast_path
from irpe.adapters.plan import Plan, Request, Site


def find_attentions(model: nn.Module, request: Request) -> Plan:
    """Returns the self-attentions of a model that are made of torch.nn's."""
    found = Plan()
    source = GridSource(request.grid)
    in_decoders = {
        id(module)
        for decoder in model.modules()
        if isinstance(decoder, nn.TransformerDecoderLayer)
        for module in decoder.modules()
    }
    for name, attention in model.named_modules():
        if not isinstance(attention, nn.MultiheadAttention) or id(attention) in in_decoders:
            continue
        found.sites.append(
            Site(
                name=name or "the model itself",
                attention=attention,
                equipped_class=RPEMultiheadAttention,
                num_heads=attention.num_heads,
                head_dim=attention.head_dim,
                num_prefix_tokens=request.num_prefix_tokens or 0,
                grid=source,
                changes=[partial(leave_fast_path, attention)],
                check=partial(_check, attention, name, request),
            )
        )
    for encoder in model.modules():
        if isinstance(encoder, nn.TransformerEncoder):
            found.changes.append(partial(_keep_padding, encoder))
    return found


def _check(attention: nn.MultiheadAttention, name: str, request: Request) -> None:
    where = f"{name}: " if name else ""
    if request.grid is None:
        raise ValueError(
            f"{where}a torch.nn attention does not know its grid: pass grid=, for example "
            "grid=(14, 14), and num_prefix_tokens= if tokens stand before the patches"
        )
    if request.absolute != "keep":
        raise ValueError(
            f"absolute {request.absolute!r}: torch.nn's transformer has no absolute encoding to "
            "replace; use 'keep'"
        )
    if attention._parameters["in_proj_weight"] is None:
        raise ValueError(f"{where}kdim or vdim differ from embed_dim: this is cross-attention")
    if attention.bias_k is not None or attention.add_zero_attn:
        raise ValueError(
            f"{where}add_bias_kv and add_zero_attn append tokens that are not on the grid: "
            "create the attention without them"
        )


def _keep_padding(encoder: nn.TransformerEncoder) -> Undo:
    """Makes an encoder leave padded tokens where they are: without them there is no grid."""
    before = encoder.use_nested_tensor
    encoder.use_nested_tensor = False
    return partial(setattr, encoder, "use_nested_tensor", before)


def describe_model(model: nn.Module) -> dict[str, Any] | None:
    """Returns the arguments with which a module of torch.nn was made, if it is one."""
    if isinstance(model, nn.MultiheadAttention):
        return {
            "kind": "MultiheadAttention",
            "embed_dim": model.embed_dim,
            "num_heads": model.num_heads,
            "dropout": model.dropout,
            "bias": model._parameters["in_proj_bias"] is not None,
            "batch_first": model.batch_first,
        }
    if isinstance(model, nn.TransformerEncoderLayer):
        names: dict[Any, str] = {F.relu: "relu", F.gelu: "gelu"}
        if model.activation not in names:
            return None
        return {
            "kind": "TransformerEncoderLayer",
            "d_model": model.self_attn.embed_dim,
            "nhead": model.self_attn.num_heads,
            "dim_feedforward": model.linear1.out_features,
            "dropout": model.dropout.p,
            "activation": names[model.activation],
            "layer_norm_eps": model.norm1.eps,
            "batch_first": model.self_attn.batch_first,
            "norm_first": model.norm_first,
            "bias": model.linear1._parameters["bias"] is not None,
        }
    if isinstance(model, nn.TransformerEncoder) and isinstance(model.norm, nn.LayerNorm | NoneType):
        layers = [describe_model(layer) for layer in model.layers]
        if layers[0] is None or any(layer != layers[0] for layer in layers):
            return None
        return {
            "kind": "TransformerEncoder",
            "layer": layers[0],
            "num_layers": len(layers),
            "norm_eps": None if model.norm is None else model.norm.eps,
        }
    return None


def build_model(arguments: dict[str, Any]) -> nn.Module:
    """Returns the plain module of a description."""
    arguments = dict(arguments)
    kind = arguments.pop("kind")
    if kind != "TransformerEncoder":
        kinds = {"MultiheadAttention", "TransformerEncoderLayer"}
        if kind not in kinds:
            raise ValueError(f"kind {kind!r} is not one of {', '.join(sorted(kinds))}")
        return getattr(nn, kind)(**arguments)
    layer = build_model(arguments["layer"])
    assert isinstance(layer, nn.TransformerEncoderLayer)
    eps = arguments["norm_eps"]
    norm = None if eps is None else nn.LayerNorm(layer.self_attn.embed_dim, eps=eps)
    return nn.TransformerEncoder(
        layer, arguments["num_layers"], norm=norm, enable_nested_tensor=False
    )
