r"""Tables of one attention in closed form: what its scores lack, by weighted least squares.

Take one attention of a trained model and one query i of an image. The original has the scores

    S_ij = (q_i . k_j) / sqrt(d)                          and the attention a_i = softmax(S_i),

the model under conversion, whose tokens never saw an absolute encoding, has

    S~_ij + b_ij / sqrt(d),   S~_ij = (q~_i . k~_j) / sqrt(d),

b inside the scale (Eq. 13). Let D_i = S_i - S~_i be what its scores lack and x_i = b_i / sqrt(d)
what tables give. The divergence of the two attention rows is, to second order about S_i,

    KL(a_i || softmax(S~_i + x_i)) = 1/2 (D_i - x_i)^T W_i (D_i - x_i) + ...,
    W_i = diag(a_i) - a_i a_i^T,

for W_i is the Hessian of log sum exp at S_i, and value and gradient vanish at x_i = D_i. W_i
annihilates constants, so a shift of all scores of a row costs nothing and no intercept is needed.
All that tables give is linear in them: x = F t, with t the tables of one head (of all heads where
these share them) as one vector, and

    bias (Eq. 14)       (F t)_ij = t[I(i,j)] / sqrt(d)            rows unknowns
    key (Eq. 15)        (F t)_ij = q~_i . t[I(i,j)] / sqrt(d)     rows x d
    query (Eq. 16)      (F t)_ij = k~_j . t[I(i,j)] / sqrt(d)     rows x d

and sums of these over targets and maps. With a ridge the sum over all queries of all images,

    sum_i (D_i - F_i t)^T W_i (D_i - F_i t) + r |t|^2,

is least where its gradient vanishes, at the solution of the normal equations

    (A + r) t = c,    A = sum_i F_i^T W_i F_i,    c = sum_i F_i^T W_i D_i.

Where much is missing the second order is not enough. The divergence itself is convex in t, with

    gradient  -sum_i F_i^T (a_i - a~_i),    Hessian  sum_i F_i^T (diag(a~_i) - a~_i a~_i^T) F_i,

a~ = softmax(S~ + F t). So Newton steps follow from the solution above: the same equations with W of
a~ in the place of a, and a - a~ in the place of W D; a ridge is again chosen for each step.

Values (Eq. 17) follow once scores are solved, by least squares of the outputs: D_i is then the
output of the original less that of the model under conversion, F t the attended table rows
sum_j a~_ij t[I(i,j)], linear again, and W_i the identity.

A is never formed: with 50 rows of 64 dimensions it has 3,200^2 elements for a head, a gather and a
bucket sum over the pairs apply it. The Krylov space of (A, c) is built by Lanczos' method with full
orthogonalisation. Its projected system is small and the same for every ridge, so all ridges are
solved for at once and held-out images choose. Products of pairs are in the model's precision,
float32 at least, batch by batch: no more than the pairs of one batch are ever held. Inner products,
basis and projected systems are in float64.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from irpe.nn.tables import RelativePositionEncoding
from irpe.relative.lockstep import AttentionInput

Unknowns = Float[Tensor, "groups unknowns"]  # a group is a head, or all heads that share tables
Pairs = Float[Tensor, "batch heads query key"]


class Batch(NamedTuple):
    """Images at one attention, in the original and in the model under conversion."""

    original: AttentionInput
    converted: AttentionInput


@dataclass(frozen=True)
class Krylov:
    """A basis of the Krylov space of (A, c), what A makes of it, and c.

    Args:
        basis: V, orthonormal for each group; zero vectors where a group needs no more.
        images: A V.
        c: The right-hand side.
    """

    basis: Float[Tensor, "steps groups unknowns"]
    images: Float[Tensor, "steps groups unknowns"]
    c: Unknowns

    def solve(self, ridge: float) -> Unknowns:
        """Returns t in the space with V^T ((A + r) V y - c) = 0, t = V y.

        Args:
            ridge: r, relative to the largest eigenvalue of the projected A.
        """
        projected = torch.einsum("mgp,ngp->gmn", self.basis, self.images)
        projected = (projected + projected.mT) / 2
        values, vectors = torch.linalg.eigh(projected)
        r = ridge * values[:, -1:].clamp(min=torch.finfo(values.dtype).tiny)
        right = torch.einsum("mgp,gp->gm", self.basis, self.c)
        y = (vectors.mT @ right.unsqueeze(-1)).squeeze(-1) / (values.clamp(min=0) + r)
        return torch.einsum("mgp,gm->gp", self.basis, (vectors @ y.unsqueeze(-1)).squeeze(-1))


def krylov(
    apply: Callable[[Unknowns], Unknowns], c: Unknowns, steps: int, tolerance: float = 1e-7
) -> Krylov:
    """Returns the Krylov space of (A, c), each group its own.

    Args:
        apply: Multiplies a vector of each group by A.
        c: The right-hand side.
        steps: The most dimensions of the space; one product with A each.
        tolerance: A group is complete where what A adds is smaller than this, relative to A.
    """
    basis, images = [_normalized(c, c.new_zeros(len(c), 1))], list[Tensor]()
    largest = c.new_zeros(len(c), 1)
    for _ in range(min(steps, c.shape[1])):
        images.append(apply(basis[-1]))
        largest = torch.maximum(largest, images[-1].norm(dim=1, keepdim=True))
        known, rest = torch.stack(basis), images[-1]
        for _ in range(2):  # once leaves rounding errors behind
            rest = rest - torch.einsum("mgp,gm->gp", known, torch.einsum("mgp,gp->gm", known, rest))
        following = _normalized(rest, tolerance * largest)
        if not following.any():
            break
        basis.append(following)
    return Krylov(torch.stack(basis[: len(images)]), torch.stack(images), c)


def _normalized(vectors: Unknowns, smallest: Float[Tensor, "groups 1"]) -> Unknowns:
    """Returns unit vectors, zero where one is not longer than `smallest`."""
    norm = vectors.norm(dim=1, keepdim=True)
    return torch.where(norm > smallest, vectors / norm.clamp(min=1e-300), 0.0)


class Tables:
    """Tables of an encoding as one vector for each group.

    Args:
        encoding: The encoding.
        lists: The names of its lists of tables.
    """

    def __init__(self, encoding: RelativePositionEncoding, lists: Sequence[str]) -> None:
        self._encoding = encoding
        self._lists = {name: list(getattr(encoding, name)) for name in lists}
        self.parameters = [table for tables in self._lists.values() for table in tables]

    def zeros(self) -> Unknowns:
        """Returns the vector of tables that are zero."""
        like, size = self.parameters[0], sum(table[0].numel() for table in self.parameters)
        return torch.zeros(len(like), size, dtype=torch.float64, device=like.device)

    def views(self, t: Unknowns) -> list[tuple[str, int, Tensor]]:
        """Returns the tables in a vector, as views (groups, rows, dim) with list and index.

        Tied tables, which queries and keys meet, come twice.
        """
        flat = iter(t.split([table[0].numel() for table in self.parameters], dim=1))
        views = [
            (name, index, next(flat).view(*table.shape[:2], -1))
            for name, tables in self._lists.items()
            for index, table in enumerate(tables)
        ]
        if getattr(self._encoding.spec, "tied", False):
            views += [("query_tables", n, view) for name, n, view in views if name == "key_tables"]
        return views

    def rows_of_pairs(self, inputs: AttentionInput) -> list[Tensor]:
        """Returns the row of each pair (query, key), for each map."""
        maps = self._encoding.maps(inputs.grid, inputs.q.device)
        return [each.ids.long() for each in maps]

    def write(self, t: Unknowns) -> None:
        """Sets the tables."""
        flat = t.split([table[0].numel() for table in self.parameters], dim=1)
        with torch.no_grad():
            for table, values in zip(self.parameters, flat, strict=True):
                table.copy_(values.view(table.shape))


class ScoreSystem:
    """The normal equations of the tables that scores depend on, or those of a Newton step.

    Args:
        encoding: The encoding of the attention, an RPESpec.
        batches: The images.
        at: The tables that a Newton step starts from; `None` for the first solution.
    """

    LISTS = ("key_tables", "query_tables", "bias_tables")

    def __init__(
        self,
        encoding: RelativePositionEncoding,
        batches: Sequence[Batch],
        at: Unknowns | None = None,
    ) -> None:
        self._batches, self._at = batches, at
        self.tables = Tables(encoding, self.LISTS)

    def right_hand_side(self) -> Unknowns:
        """Returns c."""
        if self._at is not None:
            return self._sum(lambda batch: attention(batch.original) - self.weights(batch))
        return self._sum(lambda batch: weigh(self.weights(batch), missing_scores(batch)))

    def apply(self, t: Unknowns) -> Unknowns:
        """Returns A t."""
        return self._sum(lambda batch: weigh(self.weights(batch), self.scores(batch, t)))

    def weights(self, batch: Batch) -> Pairs:
        """Returns the attention rows that W is made of."""
        if self._at is None:
            return attention(batch.original)
        return attention(batch.converted, self.scores(batch, self._at))

    def scores(self, batch: Batch, t: Unknowns) -> Pairs:
        """Returns F t: what the tables add to the scores of the model under conversion."""
        inputs, ids = batch.converted, self.tables.rows_of_pairs(batch.converted)
        added = torch.zeros_like(plain_scores(inputs))
        for name, index, table in self.tables.views(t):
            if name == "query_tables":
                added += _gather(wide(inputs.k), table, ids[index].mT).mT
            else:
                added += _gather(_facing(name, inputs), table, ids[index])
        return added * inputs.scale

    def _sum(self, pairs: Callable[[Batch], Pairs]) -> Unknowns:
        """Returns the sum of F^T y over the batches; `pairs` gives y."""
        total = self.tables.zeros()
        for batch in self._batches:
            inputs, ids = batch.converted, self.tables.rows_of_pairs(batch.converted)
            y = pairs(batch) * inputs.scale
            for name, index, table in self.tables.views(total):
                if name == "query_tables":
                    part = _bucket_products(y.mT, wide(inputs.k), ids[index].mT, table)
                else:
                    part = _bucket_products(y, _facing(name, inputs), ids[index], table)
                table += part
        return total


class ValueSystem:
    """The normal equations of value tables, for scores that are solved.

    Args:
        encoding: The encoding, an RPESpec; its score tables are those of the solution.
        batches: The images.
    """

    LISTS = ("value_tables",)

    def __init__(self, encoding: RelativePositionEncoding, batches: Sequence[Batch]) -> None:
        self._encoding, self._batches = encoding, batches
        self.tables = Tables(encoding, self.LISTS)

    def right_hand_side(self) -> Unknowns:
        """Returns c."""
        return self._sum(lambda batch, a: missing_output(batch, a))

    def apply(self, t: Unknowns) -> Unknowns:
        """Returns A t."""
        return self._sum(lambda batch, a: self.output(batch, a, t))

    def output(self, batch: Batch, a: Pairs, t: Unknowns) -> Tensor:
        """Returns F t: what the tables add to the output of the model under conversion."""
        ids = self.tables.rows_of_pairs(batch.converted)
        added = torch.zeros_like(wide(batch.converted.v))
        for _, index, table in self.tables.views(t):
            sums = _bucket_sums(a, ids[index], table.shape[1])
            added += sums @ table.to(sums.dtype)
        return added

    def _sum(self, outputs: Callable[[Batch, Pairs], Tensor]) -> Unknowns:
        total = self.tables.zeros()
        for batch in self._batches:
            a, ids = converted_attention(self._encoding, batch), None
            ids, output = self.tables.rows_of_pairs(batch.converted), outputs(batch, a)
            for _, index, table in self.tables.views(total):
                table += _bucket_products(a, output, ids[index], table)
        return total


def solution_flops(
    encoding: RelativePositionEncoding, batches: Sequence[Batch], steps: int
) -> float:
    """Returns about how many floating-point operations a Krylov space of score tables takes.

    They are those of the products with q and k; memory is that of the pairs of one batch, and of
    `steps` times two vectors of unknowns in float64.
    """
    tables, total = Tables(encoding, ScoreSystem.LISTS), 0.0
    for batch in batches:
        images, heads, queries, dim = batch.original.q.shape
        pairs = images * heads * queries * batch.original.k.shape[2]
        total += 2 * pairs * dim  # the attention of the original
        for _, _, table in tables.views(tables.zeros()):
            total += 4 * images * heads * queries * table.shape[1] * table.shape[2]
    return steps * total


def plain_scores(inputs: AttentionInput) -> Pairs:
    """Returns the scaled scores of queries and keys, before masks and encodings."""
    q, k = map(wide, inputs.rotated)
    return q @ k.mT * inputs.scale


def missing_scores(batch: Batch) -> Pairs:
    """Returns D, what the scores of the model under conversion lack."""
    return plain_scores(batch.original) - plain_scores(batch.converted)


def attention(inputs: AttentionInput, added: Pairs | float = 0.0) -> Pairs:
    """Returns the attention rows, of scores that something is added to.

    A query that no key is left to has zeros.
    """
    scores, mask = plain_scores(inputs) + added, inputs.attn_mask
    if mask is not None:
        is_bool = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -torch.inf) if is_bool else scores + mask
    return scores.softmax(-1).nan_to_num(0.0)


def converted_attention(encoding: RelativePositionEncoding, batch: Batch) -> Pairs:
    """Returns the attention rows of the model under conversion, with the tables that it has."""
    system = ScoreSystem(encoding, [batch])
    if not system.tables.parameters:
        return attention(batch.converted)
    written = torch.cat([table.detach().flatten(1) for table in system.tables.parameters], dim=1)
    return attention(batch.converted, system.scores(batch, written.double()))


def missing_output(batch: Batch, a: Pairs) -> Tensor:
    """Returns the output of the original less that of attention rows on the converted values."""
    return attention(batch.original) @ wide(batch.original.v) - a @ wide(batch.converted.v)


def weigh(a: Pairs, scores: Pairs) -> Pairs:
    """Returns W y of each row y of scores: a y - a (a . y)."""
    weighted = a * scores
    return weighted - a * weighted.sum(-1, keepdim=True)


def divergence(a: Pairs, b: Pairs) -> Float[Tensor, "batch heads query"]:
    """Returns KL(a || b) of attention rows, in nats."""
    tiny = torch.finfo(a.dtype).tiny
    return (a * (a.clamp(min=tiny).log() - b.clamp(min=tiny).log())).sum(-1)


def wide(x: Tensor) -> Tensor:
    """Returns a tensor in float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _facing(name: str, inputs: AttentionInput) -> Tensor:
    """Returns the vectors that table rows are multiplied by: queries, or ones for a bias."""
    q = wide(inputs.q)
    return q if name == "key_tables" else q.new_ones(*q.shape[:-1], 1)


def _gather(x: Tensor, table: Tensor, ids: Tensor) -> Pairs:
    """Returns x_i . t[I(i,j)] of all pairs."""
    products = x @ table.to(x.dtype).mT
    return products.gather(-1, ids.expand(*products.shape[:2], -1, -1))


def _bucket_sums(pairs: Pairs, ids: Tensor, rows: int) -> Float[Tensor, "batch heads query rows"]:
    sums = pairs.new_zeros(*pairs.shape[:-1], rows)
    return sums.scatter_add_(-1, ids.expand(pairs.shape), pairs)


def _bucket_products(pairs: Pairs, x: Tensor, ids: Tensor, table: Tensor) -> Tensor:
    """Returns the sums of w_ij x_i over the pairs of each row, in the shape of a table."""
    products = _bucket_sums(pairs, ids, table.shape[1]).mT @ x
    return products.sum((0, 1) if len(table) == 1 else 0, dtype=torch.float64).view(table.shape)
