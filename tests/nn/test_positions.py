import oracles
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from cases import CPU_IMPLEMENTATIONS
from nn.random_encodings import HEADS, make, nested

from irpe import (
    Grid,
    Points,
    PooledGrid,
    Positions,
    RelativePositionEncoding,
    RPEAttention,
    RPECrossAttention,
    Subset,
    bucket_maps,
)

DIM = 4
UNEQUAL = {
    "pooled": Positions((4, 4), PooledGrid((2, 2), 2), (0, 1)),
    "subset": Positions(Subset((3, 4), [7, 0, 11]), (3, 4), 1),
    "points": Positions(
        Points(torch.tensor([[0.2, 1.7], [3.1, 0.4]])), Points(torch.rand(5, 2) * 4)
    ),
    "images": Positions(
        Points(torch.rand(2, 6, 2) * 5), Points.of_grids(torch.tensor([[2, 3], [1, 2]]), 6), (1, 0)
    ),
}


def make_unequal(spec, positions, dtype=torch.float64):
    """An encoding with random tables, and tokens at the positions."""
    generator = torch.Generator().manual_seed(0)
    encoding = RelativePositionEncoding(
        spec, HEADS, DIM, max(positions.prefixes), positions.ndim, dtype=dtype
    )
    for table in encoding.parameters():
        table.data = torch.randn(table.shape, generator=generator, dtype=dtype)
    queries, keys = positions.num_tokens
    q, k, v = (
        torch.randn(2, HEADS, count, DIM, generator=generator, dtype=dtype, requires_grad=True)
        for count in (queries, keys, keys)
    )
    return encoding, q, k, v


def ids_of_image(spec, positions, image):
    """The bucket ids as lists, of the keys that are no padding, and which keys these are."""
    mask = positions.mask_padding(None)
    is_key = torch.ones(positions.num_tokens[1]).bool() if mask is None else mask[image, 0, 0]
    ids = [m.ids if m.ids.ndim == 2 else m.ids[image] for m in bucket_maps(spec, positions)]
    return [table[:, is_key].tolist() for table in ids], is_key


@pytest.mark.parametrize("kind", UNEQUAL)
@pytest.mark.parametrize("spec", ["product-contextual-qkv", "cross-bias-k"])
def test_attention_at_positions_equals_the_loops(kind, spec):
    positions = UNEQUAL[kind]
    encoding, q, k, v = make_unequal(spec, positions)
    out = encoding(q, k, v, grid=positions)
    tables = {name.removesuffix("_tables"): table for name, table in nested(encoding).items()}
    weights = encoding.weights(q, k, grid=positions)
    for image in range(2):
        ids, is_key = ids_of_image(spec, positions, image)
        for head in range(HEADS):
            lists = [x[image, head].tolist() for x in (q, k[:, :, is_key], v[:, :, is_key])]
            expected, a, _ = oracles.attention(*lists, ids, tables, DIM**-0.5)
            torch.testing.assert_close(out[image, head], torch.tensor(expected).double())
            found = weights[image, head][:, is_key]
            torch.testing.assert_close(found, torch.tensor(a).double())


MANY = Positions((10, 9), PooledGrid((9, 6), 1), 1)  # pairs of a head are looked up by axis


@pytest.mark.parametrize(
    ("positions", "spec"),
    [*((each, "euclidean-contextual-qkv@1.1") for each in UNEQUAL.values()),
     (MANY, "cross-contextual-qkv@1.1")],
    ids=[*UNEQUAL, "many"],
)  # fmt: skip
@pytest.mark.parametrize("impl", [name for name in CPU_IMPLEMENTATIONS if name != "reference"])
def test_implementations_agree_at_positions(positions, spec, impl):
    encoding, q, k, v = make_unequal(spec, positions)
    leaves = [q, k, v, *encoding.parameters()]

    def compute(name):
        out = encoding(q, k, v, grid=positions, impl=name)
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    for found, expected in zip(compute(impl), compute("reference"), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "name",
    ["product-contextual-qkv", "sasa@5", "transformer-xl", "rope-axial", "rope-mixed", "alibi-2d",
     "decomposed@3", "log-cpb", "axial-deeplab", "rope-axial+cross-contextual-k"],
)  # fmt: skip
@pytest.mark.parametrize("is_per_image", [False, True])
def test_kept_tokens_attend_as_on_the_whole_grid_with_the_others_masked(name, is_per_image):
    encoding, qkv = make(name, (3, 4), 2)
    kept = [[5, 1, 11, 0], [5, 1, 11, 0]] if not is_per_image else [[5, 1, 11, 0], [2, 3, 7, 10]]
    tokens = torch.tensor(kept)
    subset = Subset((3, 4), tokens if is_per_image else kept[0])
    index = torch.cat([torch.arange(2).expand(2, -1), tokens + 2], dim=1)
    chosen = [x.take_along_dim(index[:, None, :, None], 2) for x in qkv]
    out = encoding(*chosen, grid=Positions(subset, None, 2))
    is_kept = torch.zeros(2, 14).bool().scatter(1, index, True)
    whole = encoding(*qkv, grid=(3, 4), attn_mask=is_kept[:, None, None])
    torch.testing.assert_close(out, whole.take_along_dim(index[:, None, :, None], 2))


def test_self_attention_takes_positions():
    torch.manual_seed(0)
    attention = RPEAttention(8, 2, "product-contextual-k", num_prefix_tokens=1)
    torch.nn.init.normal_(attention.rpe.key_tables[0])
    x = torch.randn(2, 13, 8)
    kept = [3, 8, 0]
    positions = Positions(Subset((3, 4), kept), None, 1)
    index = [0, *(1 + token for token in kept)]
    mask = torch.zeros(13).bool()
    mask[index] = True
    expected = attention(x, (3, 4), attn_mask=mask)[:, index]
    torch.testing.assert_close(attention(x[:, index], positions), expected)


def make_cross(spec="product-contextual-qkv", **arguments):
    torch.manual_seed(0)
    return RPECrossAttention(8, 2, spec, context_dim=6, num_prefix_tokens=(1, 0), **arguments)


def test_cross_attention_with_zero_tables_is_plain():
    attention = make_cross()
    x, context = torch.randn(2, 5, 8), torch.randn(2, 9, 6)
    positions = Positions((2, 2), (3, 3), (1, 0))
    q = attention.q(x).view(2, 5, 2, 4).transpose(1, 2)
    k, v = attention.kv(context).view(2, 9, 2, 2, 4).permute(2, 0, 3, 1, 4)
    plain = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 5, 8)
    torch.testing.assert_close(attention(x, context, positions), attention.proj(plain))


def test_cross_attention_uses_positions_of_both_sides():
    attention = make_cross().double()
    for table in attention.rpe.parameters():
        torch.nn.init.normal_(table)
    x, context = torch.randn(2, 5, 8).double(), torch.randn(2, 9, 6).double()
    positions = Positions((2, 2), (3, 3), (1, 0))
    out = attention(x, context, positions)
    q = attention.q(x).view(2, 5, 2, 4).transpose(1, 2)
    k, v = attention.kv(context).view(2, 9, 2, 2, 4).permute(2, 0, 3, 1, 4)
    z = attention.rpe(q, k, v, grid=positions, impl="reference")
    torch.testing.assert_close(out, attention.proj(z.transpose(1, 2).flatten(2)))
    moved = Positions(Points(Grid((2, 2)).coordinates() + 1), (3, 3), (1, 0))
    assert not torch.allclose(attention(x, context, moved), out)


def test_padding_is_left_out_whatever_it_holds():
    points = Points.of_grids(torch.tensor([[2, 3], [1, 2]]), 6)
    positions = Positions(points)
    encoding, q, k, v = make_unequal("cross-contextual-kv", positions)
    out = encoding(q, k, v, grid=positions)
    with torch.no_grad():
        k[1, :, 2:], v[1, :, 2:] = 99, 99
    torch.testing.assert_close(encoding(q, k, v, grid=positions), out)
    alone = encoding(*(x[1:, :, :2] for x in (q, k, v)), grid=(1, 2))
    torch.testing.assert_close(out[1:, :, :2], alone)
    additive = torch.zeros(6, 6).double()
    torch.testing.assert_close(encoding(q, k, v, grid=positions, attn_mask=additive), out)
    everything = torch.ones(2, 1, 6, 6).bool()
    torch.testing.assert_close(encoding(q, k, v, grid=positions, attn_mask=everything), out)


@pytest.mark.parametrize(
    ("positions", "parts"),
    [
        (Positions((2, 2), None, 1), ["(1, 1)", "num_prefix_tokens=0"]),
        (Positions((2, 3)), ["4 queries", "6", "2x3"]),
        (Positions((2, 2), (2, 3)), ["4 keys", "6", "2x2 / 2x3"]),
        (Positions((4,)), ["1 axes", "2 axes"]),
        (Positions(Subset((3, 3), torch.tensor([[0, 1, 2, 3]] * 3))), ["3 images", "2"]),
    ],
)
@pytest.mark.parametrize("spec", ["euclidean-contextual-k", "rope-axial"])
def test_positions_of_another_number_are_refused(positions, parts, spec):
    encoding = RelativePositionEncoding(spec, HEADS, DIM)
    q = torch.randn(2, HEADS, 4, DIM)
    is_whole = positions.grid is not None
    with pytest.raises(ValueError, match="positions|axes" if is_whole else ".") as error:
        encoding(q, q, q, grid=positions)
    if spec != "rope-axial" or is_whole:
        for part in parts:
            assert part in str(error.value)


def test_prefix_tokens_of_cross_attention_are_checked_on_each_side():
    x, context = torch.randn(2, 5, 8), torch.randn(2, 9, 6)
    with pytest.raises(ValueError, match=r"\(0, 1\).*num_prefix_tokens=\(1, 0\)"):
        make_cross()(x, context, Positions((5,), (8,), (0, 1)))


@pytest.mark.slow
def test_positions_can_be_compiled():
    encoding, q, k, v = make_unequal("product-contextual-k", UNEQUAL["pooled"], torch.float32)
    positions = UNEQUAL["pooled"]
    compiled = torch.compile(lambda *qkv: encoding(*qkv, grid=positions), backend="eager")
    torch.testing.assert_close(compiled(q, k, v), encoding(q, k, v, grid=positions))
