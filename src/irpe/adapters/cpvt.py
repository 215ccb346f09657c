"""CPVT between the blocks of a model: generators that work on the tokens which leave a block."""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor, nn

from irpe.adapters.plan import Change, GridSource, Site, Undo, choose_layers
from irpe.nn.generator import PositionGenerator

_FIRST_BLOCKS = 5  # the paper's CPVT (0-5): after blocks 0 to 4


class Generate:
    """A hook on a block that hands its output to the block's generator.

    Args:
        source: Where the grid of the input is.
    """

    def __init__(self, source: GridSource) -> None:
        self.source = source

    def __call__(self, block: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Returns the tokens with generated positions."""
        return generator_of(block)(output, self.source.current())


def choose_blocks(sites: Sequence[Site], layers: Sequence[int] | None) -> list[Site]:
    """Returns where generators go: after the first five blocks, or after those with the numbers.

    Raises an error if a block has a generator already, or if the model has no such blocks.
    """
    by_block: dict[int, Site] = {}  # a block may hold several attentions
    for site in sites:
        if site.block is None:
            raise ValueError(
                f"cpvt cannot follow {site.name}: it works between the blocks of a "
                "VisionTransformer of timm; choose an encoding of attentions instead, such as "
                "product-contextual-k"
            )
        by_block.setdefault(id(site.block), site)
    blocks = list(by_block.values())
    chosen = blocks[:_FIRST_BLOCKS] if layers is None else choose_layers(blocks, layers)
    equipped = [s.name for s in chosen if s.block is not None and has_generator(s.block)]
    if equipped:
        raise ValueError(
            f"already equipped: the blocks of {', '.join(equipped)} have cpvt; start from a plain "
            "model, or choose other layers"
        )
    return chosen


def insert(sites: Sequence[Site], changes: Sequence[Change]) -> ExitStack:
    """Puts a generator after each block and makes the changes; all of it or nothing.

    Returns:
        What undoes it all when it is closed.
    """
    with torch.inference_mode(False), ExitStack() as undo:
        for change in (*(partial(_insert_one, site) for site in sites), *changes):
            undo.callback(change())
        return undo.pop_all()


def has_generator(module: nn.Module) -> bool:
    """Tells whether a module is a block with a generator."""
    return isinstance(getattr(module, "peg", None), PositionGenerator)


def generator_of(block: nn.Module) -> PositionGenerator:
    """Returns the generator of a block."""
    generator = block.peg
    assert isinstance(generator, PositionGenerator)
    return generator


def grid_after(block: nn.Module) -> tuple[int, ...] | None:
    """Returns the grid that a block's generator last worked on, or will."""
    hooks = [hook for hook in block._forward_hooks.values() if isinstance(hook, Generate)]
    return hooks[0].source.grid


def _insert_one(site: Site) -> Undo:
    block = site.block
    assert block is not None
    like = next(block.parameters())
    generator = PositionGenerator(site.block_dim, site.num_prefix_tokens, like.device, like.dtype)
    block.peg = generator.train(block.training)
    handle = block.register_forward_hook(Generate(site.grid))

    def undo() -> None:
        handle.remove()
        del block.peg

    return undo
