"""Attentions that cannot have an encoding, and why: one table for all libraries."""

from torch import nn

from irpe.adapters.hosts import full_name
from irpe.errors import UserError

_MOST_KINDS = 3  # named in one sentence

# Classes of attentions, or of modules around one, by the reason: a clause about each of them.
_CLASSES = {
    "attends over channels, not over tokens": (
        "timm.models.edgenext.CrossCovarianceAttn",
        "timm.models.xcit.XCA",
    ),
    "weighs channels or tokens one by one: it has no scores of pairs": (
        "timm.layers.selective_kernel.SelectiveKernelAttn",
        "timm.layers.split_attn.SplitAttn",
        "timm.models.mobilevit.LinearSelfAttention",
        "timm.models.swiftformer.EfficientAdditiveAttention",
        "transformers.models.swiftformer.modeling_swiftformer."
        "SwiftFormerEfficientAdditiveAttention",
    ),
    "is linear: it has no scores of pairs of tokens": (
        "timm.layers.lambda_layer.LambdaLayer",
        "timm.models.coat.FactorAttnConvRelPosEnc",
        "transformers.models.mobilevitv2.modeling_mobilevitv2.MobileViTV2LinearSelfAttention",
    ),
    "samples few positions of feature maps: it has no scores of all pairs": (
        "transformers.models.deformable_detr.modeling_deformable_detr."
        "DeformableDetrMultiscaleDeformableAttention",
    ),
    "passes its attention tokens without their grid, which differs from stage to stage": (
        "timm.models.csatv2.TransformerBlock",
        "timm.models.metaformer.Attention",
        "timm.models.mobilevit.MobileVitBlock",
        "timm.models.pit.PoolingVisionTransformer",
    ),
    "is given parts of an image without their grid": (
        "timm.models.crossvit.MultiScaleBlock",
        "timm.models.nest.Attention",
        "timm.models.tnt.Attention",
        "transformers.models.mobilevit.modeling_mobilevit.MobileViTAttention",
    ),
    "gets the patches of several images in one sequence": (
        "transformers.models.glm4v.modeling_glm4v.Glm4vVisionAttention",
        "transformers.models.pixtral.modeling_pixtral.PixtralAttention",
        "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VLVisionAttention",
        "transformers.models.qwen2_vl.modeling_qwen2_vl.VisionAttention",
        "transformers.models.qwen3_vl.modeling_qwen3_vl.Qwen3VLVisionAttention",
    ),
    "orders tokens by mask units, and may pool its queries": (
        "timm.models.hiera.MaskUnitAttention",
        "transformers.models.hiera.modeling_hiera.HieraMaskUnitAttention",
    ),
    "has queries and keys on different grids": (
        "timm.layers.attention2d.MultiQueryAttention2d",
        "timm.layers.halo_attn.HaloAttn",
        "timm.models.hieradet_sam2.MultiScaleAttention",
        "timm.models.levit.AttentionDownsample",
        "timm.models.nextvit.EfficientAttention",
        "transformers.models.cvt.modeling_cvt.CvtSelfAttention",
        "transformers.models.sam2.modeling_sam2.Sam2MultiScaleAttention",
    ),
    "attends on a map that it makes smaller and larger again": (
        "timm.models.cpubone.ConvAttention",
        "timm.models.lowformer.ConvAttention",
    ),
    "attends over pooled rows and columns": ("timm.layers.non_local_attn.BilinearAttnTransform",),
    "has values of another dimension than its keys": (
        "timm.models.efficientformer.Attention",
        "timm.models.levit.Attention",
        "transformers.models.levit.modeling_levit.LevitAttention",
    ),
    "mixes the scores of all heads before the softmax": (
        "timm.models.cait.TalkingHeadAttn",
        "timm.models.efficientformer_v2.Attention2d",
    ),
    "mixes attention by content and attention by position with a gate": (
        "timm.models.convit.GPSA",
    ),
    "subtracts two attention maps from each other": (
        "timm.layers.diff_attention.DiffAttention",
        "timm.models.vision_transformer.DiffParallelScalingBlock",
    ),
    "computes attention inside the block, not in a module that could have an encoding": (
        "timm.models.vision_transformer.ParallelScalingBlock",
    ),
    "runs its heads one after another, each on the output of the one before": (
        "timm.models.efficientvit_msra.CascadedGroupAttention",
    ),
    "is a layer of a convolutional network with a relative encoding of its own": (
        "timm.layers.bottleneck_attn.BottleneckAttn",
    ),
    "rotates queries and keys in a way of its own": ("timm.models.gemma4_vit.Gemma4Attention",),
    "multiplies queries with keys that it has not transposed, an error of timm's": (
        "timm.models.mvitv2.MultiScaleAttentionPoolFirst",
    ),
    "attends over frames and over patches in turn": (
        "transformers.models.timesformer.modeling_timesformer.TimesformerSelfAttention",
    ),
    "compares learned queries, which are not on a grid": (
        "timm.models.cait.ClassAttn",
        "transformers.models.aria.modeling_aria.AriaCrossAttention",
        "transformers.models.perceiver.modeling_perceiver.PerceiverSelfAttention",
    ),
    "has object queries among the patches in the last blocks": (
        "transformers.models.eomt.modeling_eomt.EomtAttention",
        "transformers.models.eomt_dinov3.modeling_eomt_dinov3.EomtDinov3Attention",
    ),
    "attends for queries that lie on no grid, and to another sequence": (
        "torch.nn.modules.transformer.TransformerDecoderLayer",
    ),
}
REFUSED = {name: reason for reason, names in _CLASSES.items() for name in names}


def refusal_of(model: nn.Module) -> str:
    """Returns the error for a model in which no host found an attention."""
    known: dict[str, str] = {}
    for module in model.modules():
        names = [full_name(kind) for kind in type(module).__mro__]
        known |= {name: REFUSED[name] for name in names[:-1] if name in REFUSED}
    kinds = {full_name(type(module)) for module in model.modules() if is_attention(module)}
    if known:
        found = "; ".join(f"{name} {reason}" for name, reason in sorted(known.items()))
    elif kinds:
        found = f"its attention is {_listed(sorted(kinds))}, which is not supported"
    else:
        found = "it has no self-attention"
    return (
        f"{type(model).__qualname__} cannot be equipped: {found}. Supported are the models that "
        "irpe models and docs/reference/supported-models.md list; docs/how-to/own-attention.md "
        "shows how to equip an attention of your own"
    )


def check_refused(model: nn.Module) -> None:
    """Raises an error if all attentions of torch.nn in a model are parts of refused classes.

    The host of torch.nn would take them for self-attentions.
    """
    paths = [path for path, m in model.named_modules() if full_name(type(m)) in REFUSED]
    inner = [path for path, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)]
    prefixes = tuple(f"{path}." for path in paths)
    if inner and all(path.startswith(prefixes) for path in inner):
        raise UserError(refusal_of(model))


def is_attention(module: nn.Module) -> bool:
    """Tells whether a module looks like a self-attention of another library's or the user's own."""
    name = type(module).__name__
    is_torch = type(module) is nn.MultiheadAttention  # one that no host offers is cross-attention
    return "Att" in name and "Pool" not in name and not is_torch


def _listed(kinds: list[str]) -> str:
    more = len(kinds) - _MOST_KINDS
    return ", ".join(kinds[:_MOST_KINDS]) + (f" and {more} more" if more > 0 else "")
