"""Attentions and models whose tables are known, or can be: the solution has a right answer."""

import timm
import torch
from torch import nn

from irpe import RelativePositionEncoding
from irpe.core.sinusoid import sinusoid
from irpe.relative.lockstep import AttentionInput
from irpe.relative.solve import Batch

GRID, PREFIX, HEADS, DIM = (3, 5), 2, 2, 6
TOKENS = PREFIX + GRID[0] * GRID[1]


def attention_input(q, k, v, scale=0.5, mask=None):
    return AttentionInput("built", q, k, v, (q, k), GRID, mask, scale, v.flatten(2), PREFIX)


def random_encoding(spec, seed=0, size=0.7):
    """An encoding with random tables."""
    encoding = RelativePositionEncoding(spec, HEADS, DIM, PREFIX, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for table in encoding.parameters():
            table.copy_(size * torch.randn(table.shape, generator=generator, dtype=table.dtype))
    return encoding


def built_batch(encoding, seed=1, images=24, shift=0.0, mask=None):
    """A model under conversion, and an original that has the scores which the tables would give it.

    Scores that no product of 6 dimensions has are put into it by one more dimension for each key.
    The same `shift` may be added to all scores of a row.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (3, images, HEADS, TOKENS, DIM)
    q, k, v = torch.randn(shape, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        added = encoding.scores(q, k, grid=GRID) + shift
        out = encoding(q, k, v, grid=GRID, scale=0.5, attn_mask=mask, impl="reference")
        eye = torch.eye(TOKENS, dtype=q.dtype).expand(images, HEADS, -1, -1)
        whole = torch.cat([q, added], -1), torch.cat([k, eye], -1)
        weights = torch.softmax(whole[0] @ whole[1].mT * 0.5 + (0 if mask is None else mask), -1)
        own = torch.linalg.lstsq(weights, out).solution  # values with which its output is that
    original = attention_input(*whole, own, mask=mask)
    return Batch(original, attention_input(q, k, v, mask=mask))


def make_positional_vit(**arguments):
    """A small vision transformer that attends by offset: tables can explain all of its attention.

    Half of the features of a token are its content, which is all that values read and all that
    blocks write; queries and keys read the other half, sinusoids in the absolute encoding. Queries
    have a constant besides, which meets no key, so that tables have something to meet. There are no
    layer norms, which would mix the halves.
    """
    sizes = {"img_size": (24, 40), "patch_size": 8, "embed_dim": 64, "num_heads": 2, "depth": 3}
    sizes["norm_layer"] = nn.Identity
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", **{**sizes, "num_classes": 5, **arguments})
    patches = sinusoid(model.patch_embed.grid_size, 16)
    with torch.no_grad():
        if model.pos_embed is not None:
            model.pos_embed.zero_()
            model.pos_embed[0, -len(patches) :, 48:] = patches
        model.patch_embed.proj.weight[32:], model.patch_embed.proj.bias[32:] = 0, 0
        model.patch_embed.proj.weight[:32].normal_(std=0.03)
        model.head.weight.normal_()
        for block in model.blocks:
            block.attn.qkv.weight.zero_()
            for head, factor in enumerate((0.8, 1.2)):
                turn = factor * torch.linalg.qr(torch.randn(16, 16))[0]
                for start in (32 * head, 64 + 32 * head):  # queries, keys
                    block.attn.qkv.weight[start : start + 16, 48:] = turn
                block.attn.qkv.bias[32 * head + 16 : 32 * head + 32] = 1.0
            block.attn.qkv.weight[128:, :32].normal_(std=0.3)
            block.attn.proj.weight.normal_(std=0.3)[32:] = 0
            block.mlp.fc1.weight[:, 32:] = 0
            block.mlp.fc2.weight.normal_(std=0.1)[32:] = 0
    return model.eval()


def some_images(count=12, height=24, width=40, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, height, width, generator=generator)
