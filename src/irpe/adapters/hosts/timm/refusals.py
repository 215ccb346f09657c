"""timm's attentions that cannot have an encoding, with the reason: a clause about the class."""

_SUBSAMPLES_KEYS = "subsamples the tokens of its keys"
_NO_GRID = "passes its attention tokens without their grid, which differs from stage to stage"
_MIXES_HEADS = "mixes the scores of all heads before the softmax"
_OVER_CHANNELS = "attends over channels, not over tokens"
_NO_PAIRS = "weighs tokens one by one, so that there are no scores of pairs"
_LINEAR = "is linear: it has no scores of pairs of tokens"
_WIDE_VALUES = "has values of another dimension than its keys"
_DIFFERENCE = "subtracts two attention maps from each other"

REFUSED = {
    "timm.layers.attention2d.MultiQueryAttention2d": "has one head of keys and values for all "
    "queries, of a map that it may subsample",
    "timm.layers.bottleneck_attn.BottleneckAttn": "is a layer of a convolutional network with a "
    "relative encoding of its own",
    "timm.layers.diff_attention.DiffAttention": _DIFFERENCE,
    "timm.layers.halo_attn.HaloAttn": "has larger blocks of keys than of queries",
    "timm.layers.lambda_layer.LambdaLayer": _LINEAR,
    "timm.layers.non_local_attn.BilinearAttnTransform": "attends over pooled rows and columns",
    "timm.layers.selective_kernel.SelectiveKernelAttn": "weighs channels, not tokens",
    "timm.layers.split_attn.SplitAttn": "weighs channels, not tokens",
    "timm.models.cait.ClassAttn": "has one query, the class token",
    "timm.models.cait.TalkingHeadAttn": _MIXES_HEADS,
    "timm.models.coat.FactorAttnConvRelPosEnc": _LINEAR,
    "timm.models.convit.GPSA": "mixes attention by content and attention by position with a gate",
    "timm.models.cpubone.ConvAttention": "attends on a map that it makes smaller and larger again",
    "timm.models.crossvit.MultiScaleBlock": "passes its attentions tokens of two grids without "
    "telling which",
    "timm.models.csatv2.TransformerBlock": _NO_GRID,
    "timm.models.edgenext.CrossCovarianceAttn": _OVER_CHANNELS,
    "timm.models.efficientformer.Attention": _WIDE_VALUES,
    "timm.models.efficientformer_v2.Attention2d": _MIXES_HEADS,
    "timm.models.efficientvit_msra.CascadedGroupAttention": "runs its heads one after another, "
    "each on the output of the one before",
    "timm.models.gemma4_vit.Gemma4Attention": "rotates queries and keys in a way of its own",
    "timm.models.hiera.MaskUnitAttention": "orders tokens by mask units, of which a random part "
    "may be left, and pools its queries within them",
    "timm.models.hieradet_sam2.MultiScaleAttention": "may pool its queries, which then have "
    "another grid than the keys",
    "timm.models.levit.Attention": _WIDE_VALUES,
    "timm.models.levit.AttentionDownsample": "subsamples its queries",
    "timm.models.lowformer.ConvAttention": "attends on a map that it makes smaller and larger "
    "again",
    "timm.models.metaformer.Attention": "is given tokens without their grid, which differs from "
    "stage to stage",
    "timm.models.mobilevit.LinearSelfAttention": _NO_PAIRS,
    "timm.models.mobilevit.MobileVitBlock": _NO_GRID,
    "timm.models.mvitv2.MultiScaleAttentionPoolFirst": "multiplies queries with keys that it has "
    "not transposed, an error of timm's",
    "timm.models.nest.Attention": "is given blocks of an image without their grid",
    "timm.models.nextvit.EfficientAttention": _SUBSAMPLES_KEYS,
    "timm.models.pit.PoolingVisionTransformer": _NO_GRID,
    "timm.models.swiftformer.EfficientAdditiveAttention": _NO_PAIRS,
    "timm.models.tnt.Attention": "is given tokens of patches and of pixels without their grid",
    "timm.models.vision_transformer.DiffParallelScalingBlock": _DIFFERENCE,
    "timm.models.vision_transformer.ParallelScalingBlock": "computes attention inside the block, "
    "not in a module that could have an encoding",
    "timm.models.xcit.XCA": _OVER_CHANNELS,
}
