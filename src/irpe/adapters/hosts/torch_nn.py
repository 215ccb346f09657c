"""torch.nn: MultiheadAttention, alone and in TransformerEncoderLayer and TransformerEncoder."""

from functools import partial

from torch import nn

from irpe.adapters.equipped import Equipment
from irpe.adapters.grids import SOURCE, told_grid
from irpe.adapters.host import Plan, refuse, site_of
from irpe.adapters.multihead import ROW, leave_fast_path
from irpe.adapters.multihead import find_row as find_row
from irpe.adapters.swaps import set_attribute
from irpe.core.positions import axes_of
from irpe.errors import UserError


def find_attentions(model: nn.Module, call: Equipment) -> Plan:
    """Returns the self-attentions of a model that are made of torch.nn's."""
    found = Plan()
    crossing = {
        id(module)
        for owner in model.modules()
        if isinstance(owner, nn.TransformerDecoderLayer) or _is_pooling(owner)
        for module in owner.modules()
    }
    for name, attention in model.named_modules():
        if not isinstance(attention, nn.MultiheadAttention) or id(attention) in crossing:
            continue
        site = site_of(
            name or "the model itself",
            attention,
            ROW,
            call,
            attention.num_heads,
            attention.head_dim,
            call.num_prefix_tokens or 0,
            2 if call.grid is None else axes_of(call.grid),
            changes=[
                *leave_fast_path(attention),
                *set_attribute(attention, SOURCE, told_grid(call.grid)),
            ],
            check=partial(_check, attention, name, call),
        )
        found.sites.append(site)
    for encoder in model.modules():
        if isinstance(encoder, nn.TransformerEncoder):  # leaves padded tokens: they are on the grid
            found.changes += set_attribute(encoder, "use_nested_tensor", False)
    return found


def _is_pooling(owner: nn.Module) -> bool:
    """Tells whether a module pools tokens by the attention of a learned query, as SigLIP's head."""
    return "Pool" in type(owner).__name__


def _check(attention: nn.MultiheadAttention, name: str, call: Equipment) -> None:
    where = f"{name}: " if name else ""
    if call.grid is None:
        raise UserError(
            f"{where}a torch.nn attention does not know its grid: pass grid=, for example "
            "grid=(14, 14), and num_prefix_tokens= if tokens stand before the patches"
        )
    refuse(call, {"absolute": "torch.nn's transformer has no absolute encoding to replace"})
    if attention._parameters["in_proj_weight"] is None:
        raise UserError(f"{where}kdim or vdim differ from embed_dim: this is cross-attention")
    if attention.bias_k is not None or attention.add_zero_attn:
        raise UserError(
            f"{where}add_bias_kv and add_zero_attn append tokens that are not on the grid: "
            "create the attention without them"
        )
