"""Calls and planted candidates, for proofs without a GPU."""

import torch

from irpe import bucket_maps
from irpe.ops.proof.decide import Candidate, Prover
from irpe.ops.proof.problem import Sizes, random_problem
from irpe.ops.proof.signature import Signature

CPU = torch.device("cpu")

K = Signature(
    device="cpu", dtype="float32", dim=16, query="", key="shared", value="", bias="", maps="1",
    bits=6, mask="", dropout="", rotated="", shape="square", alignment="odd",
    layout="heads first", tf32=False, training=True,
)  # fmt: skip
CROSS = K._replace(maps="2 by axis")


def prover_of(*names, **arguments):
    """What proves some of the candidates in `planted`."""
    candidates = [Candidate(name, f"planted:{name}") for name in names]
    return Prover(candidates, Candidate("fast", "irpe.ops.impl.fast"), **arguments)


def call_of(grid=(7, 14), batch=1, **changed):
    """A random call on a grid, its signature changed."""
    tokens = grid[0] * grid[1]
    maps = bucket_maps("product-contextual-k", grid)
    return random_problem(K._replace(**changed), Sizes(batch, 2, tokens, tokens), maps, CPU).call()
