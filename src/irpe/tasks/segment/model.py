"""The segmenter of a configuration, by the library that its network comes from."""

from torch import nn

from irpe.extras import require
from irpe.tasks.segment.config import TRANSFORMERS_MODELS, SegmenterConfig


def build_segmenter(config: SegmenterConfig, is_filled: bool = True) -> nn.Module:
    """Returns the model to train; its random start follows from torch's random state.

    Args:
        config: The configuration, with the classes of the data.
        is_filled: Fill it with the initial weights; without, for those of a checkpoint.
    """
    if config.model in TRANSFORMERS_MODELS:
        require("transformers", "transformers")
        from irpe.tasks.segment.transformers_segmenter import build_transformers_segmenter

        return build_transformers_segmenter(config, is_filled)
    from irpe.tasks.segment.timm_segmenter import build_timm_segmenter

    return build_timm_segmenter(config, is_filled)
