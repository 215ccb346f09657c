"""What torchvision has that other libraries have not: windows inside its attention, fixed sizes."""

import torch
from adapters.small_models import images
from torchvision.models import VisionTransformer
from torchvision.models.vision_transformer import ConvStemConfig

import irpe

SPEC = "product-contextual-qkv"


def test_a_convolutional_stem():
    torch.manual_seed(0)
    stem = [ConvStemConfig(8, 3, 2), ConvStemConfig(16, 3, 2), ConvStemConfig(16, 3, 2)]
    model = VisionTransformer(32, 8, 2, 2, 32, 48, num_classes=5, conv_stem_configs=stem).eval()
    torch.nn.init.normal_(model.heads.head.weight)
    expected = model(images())
    irpe.equip(model, SPEC)
    torch.testing.assert_close(model(images()), expected, rtol=1e-4, atol=1e-4)
    assert irpe.summary(model).attentions[0].grid == (4, 4)
