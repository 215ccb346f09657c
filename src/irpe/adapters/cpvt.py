"""CPVT between the blocks of a model: position generators that work on the output of a block."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from irpe.adapters.equipped import generator_of, has_generator
from irpe.adapters.grids import SOURCE, grid_after, mark
from irpe.adapters.host import Site, choose_layers
from irpe.adapters.swaps import Swap, add_hook, put_module
from irpe.errors import UserError
from irpe.nn.generator import PositionGenerator

_FIRST_BLOCKS = 5  # the paper's CPVT (0-5): after blocks 0 to 4


def choose_blocks(sites: Sequence[Site], layers: Sequence[int] | None) -> list[Site]:
    """Returns where generators go: after the first five blocks, or after those with the indices.

    Raises an error if a block has a generator already, or if the model has no such blocks.
    """
    by_block: dict[int, Site] = {}  # a block may hold several attentions
    for site in sites:
        if site.block is None:
            raise UserError(
                f"cpvt cannot follow {site.name}: it works between the blocks of a "
                "VisionTransformer of timm; choose an encoding of attentions instead, such as "
                "product-contextual-k"
            )
        if site.drops_tokens:
            raise UserError(
                f"cpvt cannot follow {site.name}: it convolves the whole grid, and patch_drop "
                "leaves a part of it; create the model with patch_drop_rate=0, or choose an "
                "encoding of attentions, such as product-contextual-k"
            )
        by_block.setdefault(id(site.block), site)
    blocks = list(by_block.values())
    chosen = blocks[:_FIRST_BLOCKS] if layers is None else choose_layers(blocks, layers)
    equipped = [s.name for s in chosen if s.block is not None and has_generator(s.block)]
    if equipped:
        raise UserError(
            f"already equipped: the blocks of {', '.join(equipped)} have cpvt; start from a plain "
            "model, or choose other layers"
        )
    return chosen


def insert_generator(site: Site) -> list[Swap]:
    """Returns what puts a generator after the block of an attention."""
    block = site.block
    assert block is not None
    like = next(block.parameters())
    generator = PositionGenerator(site.block_dim, site.num_prefix_tokens, like.device, like.dtype)
    generator.train(block.training)
    grid = [replace(swap, owner=block) for swap in site.changes if swap.key == SOURCE]
    return [*put_module(block, "peg", generator), *grid, *add_hook(block, _generate_positions)]


def _generate_positions(block: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """A hook on a block: returns its output with generated positions."""
    grid = grid_after(block, output)
    tokens = generator_of(block)(output, grid)
    if not torch.compiler.is_compiling():
        mark(tokens, grid)
    return tokens
