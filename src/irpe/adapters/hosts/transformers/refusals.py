"""transformers' attentions that cannot have an encoding, with the reason: a clause about each."""

from torch import nn

from irpe.adapters.hosts import full_name
from irpe.adapters.refusals import refusal_of
from irpe.errors import UserError

_COARSE_KEYS = "may compare its queries with keys of a coarser grid"
_PACKED = "gets the patches of several images in one sequence, and rotates queries and keys"
_NO_PAIRS = "samples few positions of feature maps, so that there are no scores of all pairs"
_QUERIES = "has object queries among the patches in the last blocks"

REFUSED = {
    f"transformers.models.{name}": reason
    for name, reason in {
        "aria.modeling_aria.AriaCrossAttention": "compares learned queries with the patches",
        "cvt.modeling_cvt.CvtSelfAttention": _COARSE_KEYS,
        "deformable_detr.modeling_deformable_detr.DeformableDetrMultiscaleDeformableAttention": (
            _NO_PAIRS
        ),
        "eomt.modeling_eomt.EomtAttention": _QUERIES,
        "eomt_dinov3.modeling_eomt_dinov3.EomtDinov3Attention": _QUERIES,
        "glm4v.modeling_glm4v.Glm4vVisionAttention": _PACKED,
        "hiera.modeling_hiera.HieraMaskUnitAttention": "orders tokens by mask units and may pool "
        "its queries",
        "levit.modeling_levit.LevitAttention": "has values of another dimension than its keys",
        "mobilevit.modeling_mobilevit.MobileViTAttention": "gets one pixel of each patch, without "
        "the grid of the patches",
        "mobilevitv2.modeling_mobilevitv2.MobileViTV2LinearSelfAttention": "is linear: it has no "
        "scores of pairs of tokens",
        "perceiver.modeling_perceiver.PerceiverSelfAttention": "attends over learned latents, "
        "which are not on a grid",
        "pixtral.modeling_pixtral.PixtralAttention": _PACKED,
        "qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VLVisionAttention": _PACKED,
        "qwen2_vl.modeling_qwen2_vl.VisionAttention": _PACKED,
        "qwen3_vl.modeling_qwen3_vl.Qwen3VLVisionAttention": _PACKED,
        "sam2.modeling_sam2.Sam2MultiScaleAttention": "may pool its queries, which then have "
        "another grid than the keys",
        "swiftformer.modeling_swiftformer.SwiftFormerEfficientAdditiveAttention": "weighs tokens "
        "one by one, so that there are no scores of pairs",
        "timesformer.modeling_timesformer.TimesformerSelfAttention": "attends over frames and over "
        "patches in turn",
    }.items()
}


def refuse_cross_attention(model: nn.Module) -> None:
    """Raises an error if all attentions of torch.nn in a model are parts of refused ones.

    The host of torch.nn would take them for self-attentions.
    """
    refused = [path for path, m in model.named_modules() if full_name(type(m)) in REFUSED]
    inner = [path for path, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)]
    prefixes = tuple(f"{path}." for path in refused)
    if inner and all(path.startswith(prefixes) for path in inner):
        raise UserError(refusal_of(model))
