"""torch.nn: MultiheadAttention, alone and in TransformerEncoderLayer and TransformerEncoder."""

from functools import partial

from torch import nn

from irpe.adapters.changes import Undo
from irpe.adapters.grids import GridSource
from irpe.adapters.multihead import RPEMultiheadAttention, leave_fast_path
from irpe.adapters.plan import Plan, Request, Site
from irpe.errors import UserError

REFUSED = {
    "torch.nn.modules.transformer.TransformerDecoderLayer": "attends for queries that lie on no "
    "grid, and to another sequence",
}


def find_attentions(model: nn.Module, request: Request) -> Plan:
    """Returns the self-attentions of a model that are made of torch.nn's."""
    found = Plan()
    source = GridSource(request.grid)
    crossing = {
        id(module)
        for owner in model.modules()
        if isinstance(owner, nn.TransformerDecoderLayer) or _is_pooling(owner)
        for module in owner.modules()
    }
    for name, attention in model.named_modules():
        if not isinstance(attention, nn.MultiheadAttention) or id(attention) in crossing:
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


def _is_pooling(owner: nn.Module) -> bool:
    """Tells whether a module pools tokens by the attention of a learned query, as SigLIP's head."""
    return "Pool" in type(owner).__name__


def _check(attention: nn.MultiheadAttention, name: str, request: Request) -> None:
    where = f"{name}: " if name else ""
    if request.grid is None:
        raise UserError(
            f"{where}a torch.nn attention does not know its grid: pass grid=, for example "
            "grid=(14, 14), and num_prefix_tokens= if tokens stand before the patches"
        )
    if request.absolute != "keep":
        raise UserError(
            f"absolute {request.absolute!r}: torch.nn's transformer has no absolute encoding to "
            "replace; use 'keep'"
        )
    if attention._parameters["in_proj_weight"] is None:
        raise UserError(f"{where}kdim or vdim differ from embed_dim: this is cross-attention")
    if attention.bias_k is not None or attention.add_zero_attn:
        raise UserError(
            f"{where}add_bias_kv and add_zero_attn append tokens that are not on the grid: "
            "create the attention without them"
        )


def _keep_padding(encoder: nn.TransformerEncoder) -> Undo:
    """Makes an encoder leave padded tokens where they are: without them there is no grid."""
    before = encoder.use_nested_tensor
    encoder.use_nested_tensor = False
    return partial(setattr, encoder, "use_nested_tensor", before)
