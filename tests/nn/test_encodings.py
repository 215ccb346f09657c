"""Encodings with a name, against loops over their equations and timm."""

import copy
import functools
import math
import pickle

import oracles_modern as modern
import oracles_others as others
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from nn.random_encodings import DIM, HEADS, nested
from nn.random_encodings import make as make_random
from pairs import all_pairs, text
from torch import nn

from irpe import (
    AugmentedGrid,
    RelativePositionEncoding,
    RPEAttention,
    bucket_maps,
    rpe_attention,
)
from irpe.core.sinusoid import offset_sinusoids

SCORES = {  # an oracle of b_ij: of a query, a key and their positions
    "rope-axial": modern.rope_axial,
    "rope-axial@7.5": lambda *on: modern.rope_axial(*on, base=7.5),
    "rope-axial+normalized": modern.rope_axial_normalized,
    "rope-axial+ref4": lambda *on: modern.rope_axial(*on, reference=(4,)),
    "rope-mixed": modern.rope_mixed,
    "rope-mixed+ref4x10": lambda *on: modern.rope_mixed(*on, reference=(4, 10)),
    "decomposed@5": lambda *on: modern.decomposed(*on, size=5),
    "log-cpb": modern.log_cpb,
    "log-cpb@4": lambda *on: modern.log_cpb(*on, size=4),
    "alibi-2d": lambda *on: modern.alibi(*on, heads=HEADS),
}
VECTORS = {  # an oracle of the vectors r_ij, of queries, keys and values
    "shaw": others.shaw,
    "huang": others.huang,
    "sasa@9": lambda learned: others.sasa(learned, 9),
    "transformer-xl": others.transformer_xl,
    "axial-deeplab@2": lambda learned: others.axial_deeplab(learned, 2),
}
JOINED = [
    "rope-axial+product-contextual-qkv@clip1",
    "rope-mixed+decomposed@5",
    "rope-axial+log-cpb",
]
ALL = [*VECTORS, *SCORES, *JOINED]
FROM_ZERO = [*VECTORS, "sasa", "axial-deeplab", "decomposed", "bias-table"]  # all they learn
GRIDS = [(3, 5), (1, 9), (1, 1), (7,), (2, 3, 4)]
make = functools.partial(make_random, spread=0.3)


def loops(name, encoding, qkv, grid, prefix, scale):
    """The output, the weights and b_ij of every image and head."""
    if name in SCORES:
        return loops_of_scores(name, encoding, qkv, grid, prefix, scale)
    return loops_of_vectors(name, encoding, qkv, grid, prefix, scale)


def loops_of_vectors(name, encoding, qkv, grid, prefix, scale):
    equation = VECTORS[name](nested(encoding))
    positions = others.positions_of(grid, prefix)
    results = [[], [], []]
    for of_head in qkv[0].new_tensor(torch.stack(qkv).tolist()).flatten(1, 2).unbind(1):
        q, k, v = of_head.tolist()
        for kept, result in zip(
            results, others.attention(q, k, v, positions, scale, **equation), strict=True
        ):
            kept.append(result)
    lead = qkv[0].shape[:2]
    return [torch.tensor(kept, dtype=torch.float64).unflatten(0, lead) for kept in results]


def loops_of_scores(name, encoding, qkv, grid, prefix, scale):
    (q, k, v), positions, learned = qkv, others.positions_of(grid, prefix), nested(encoding)
    scores = torch.zeros(*q.shape[:3], k.shape[2], dtype=torch.float64)
    for head in range(HEADS):
        score = SCORES[name](learned, head, grid)
        for image in range(len(q)):
            rows, columns = (x[image, head].tolist() for x in (q, k))
            scores[image, head] = torch.tensor(
                [
                    [score(a, b, x, y) for b, y in zip(columns, positions, strict=True)]
                    for a, x in zip(rows, positions, strict=True)
                ],
                dtype=torch.float64,
            )
    weights = ((q @ k.mT + scores) * scale).softmax(-1)
    return weights @ v, weights, scores


@pytest.mark.parametrize(
    "factors", all_pairs(prefix=[0, 1, 5], grid=GRIDS, name=[*VECTORS, *SCORES]), ids=text
)
def test_the_loops_over_the_equation_agree(factors):
    name, grid, prefix = factors["name"], factors["grid"], factors["prefix"]
    if "rope-mixed" in name and len(grid) != 2:
        with pytest.raises(ValueError, match=f"grid of {len(grid)} axes.*'rope-axial' takes any"):
            make(name, grid, prefix)
        return
    encoding, (q, k, v) = make(name, grid, prefix)
    out, weights, scores = loops(name, encoding, [q, k, v], grid, prefix, scale=0.3)
    torch.testing.assert_close(encoding(q, k, v, grid=grid, scale=0.3), out)
    torch.testing.assert_close(encoding.weights(q, k, grid=grid, scale=0.3), weights)
    torch.testing.assert_close(encoding.scores(q, k, grid=grid), scores, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("name", ALL)
def test_every_implementation_has_the_gradients_of_the_reference(name, prefix):
    grid = (3, 5)
    encoding, qkv = make(name, grid, prefix)
    leaves = [*qkv, *encoding.parameters()]
    mask = torch.rand(qkv[0].shape[2], qkv[0].shape[2]) > 0.2
    weight = torch.randn_like(qkv[0])

    def gradients(impl):
        out = encoding(*qkv, grid=grid, attn_mask=mask, impl=impl)
        return torch.autograd.grad((out * weight).sum(), leaves)

    expected = gradients("reference")
    assert all((gradient != 0).any() for gradient in expected)
    for impl in ["plain", "fast", "auto"]:
        for actual, gradient in zip(gradients(impl), expected, strict=True):
            torch.testing.assert_close(actual, gradient)


@pytest.mark.parametrize("name", FROM_ZERO)
def test_new_parameters_are_zero_and_change_nothing(name):
    attention = RPEAttention(32, num_heads=4, spec=name, num_prefix_tokens=1)
    assert attention.rpe.spec.keeps_output
    assert sum(p.numel() for p in attention.rpe.parameters())
    assert all((parameter == 0).all() for parameter in attention.rpe.parameters())
    x = torch.randn(2, 16, 32)
    q, k, v = attention.qkv(x).view(2, 16, 3, 4, 8).permute(2, 0, 3, 1, 4)
    plain = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 16, 32)
    actual = attention(x, grid=(3, 5))
    torch.testing.assert_close(actual, attention.proj(plain), rtol=0, atol=1e-5)


@pytest.mark.parametrize("impl", ["reference", "plain", "fast", "auto"])
@pytest.mark.parametrize("name", [*JOINED, "rope-mixed+alibi-2d"])
def test_tables_meet_queries_and_keys_before_they_are_turned(name, impl):
    """The rotation and the tables by hand: two modules, `rpe_attention` with both pairs."""
    encoding, (q, k, v) = make(name, (3, 5), 1)
    rotary, tables = (
        RelativePositionEncoding(part, HEADS, DIM, 1).double() for part in name.split("+")
    )
    state = encoding.state_dict()
    rotary.load_state_dict({key: state[key] for key in rotary.state_dict()})
    tables.load_state_dict({key: state[key] for key in tables.state_dict()})
    turned = (q @ k.mT + rotary.scores(q, k, grid=(3, 5)) + tables.scores(q, k, grid=(3, 5))) * 0.3
    torch.testing.assert_close(encoding.weights(q, k, grid=(3, 5), scale=0.3), turned.softmax(-1))
    leaves = [q, k, v, *encoding.parameters()]

    def run(impl):
        out = encoding(q, k, v, grid=(3, 5), impl=impl)
        return out, *torch.autograd.grad((out * torch.arange(DIM)).sum(), leaves)

    for actual, expected in zip(run(impl), run("reference"), strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("name", ["rope-axial", "rope-mixed", *JOINED])
def test_moving_all_positions_changes_no_score_of_patches(name):
    """The same tokens in another place of a larger grid have the same scores among themselves."""
    for prefix in (0, 1):
        encoding, _ = make(name, (6, 8), prefix)
        q, k = torch.randn(2, 1, HEADS, prefix + 48, DIM, dtype=torch.float64)
        grid = torch.arange(48).view(6, 8)
        here, there = grid[:3, :4].flatten() + prefix, grid[3:, 4:].flatten() + prefix
        q[:, :, there], k[:, :, there] = q[:, :, here], k[:, :, here]
        scores = encoding.scores(q, k, grid=(6, 8))
        torch.testing.assert_close(scores[:, :, here][..., here], scores[:, :, there][..., there])
        if prefix:  # the class token is not turned: it sees a move
            assert not torch.allclose(scores[:, :, 0, here], scores[:, :, 0, there])


@pytest.mark.parametrize("name", ["rope-axial@7.5", "rope-mixed"])
def test_a_reference_grid_scales_every_other_grid(name):
    """On a grid of twice the size, every second token is a token of the reference grid."""
    plain, (q, k, _) = make(name, (3, 5), 1)
    encoding, (large_q, large_k, _) = make(f"{name}+ref3x5", (6, 10), 1)
    expected = plain.scores(q, k, grid=(3, 5))
    assert torch.equal(encoding.scores(q, k, grid=(3, 5)), expected)
    tokens = torch.arange(60).view(6, 10)[::2, ::2].flatten() + 1
    chosen = torch.cat([torch.zeros(1, dtype=torch.long), tokens])
    with torch.no_grad():
        large_q[:, :, chosen], large_k[:, :, chosen] = q, k
    scores = encoding.scores(large_q, large_k, grid=(6, 10))
    torch.testing.assert_close(scores[:, :, chosen][..., chosen], expected)


@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("text", ["+shift1.5", "+jitter1.3", "+rescale2", "+shift.5+rescale3"])
@pytest.mark.parametrize("name", ["rope-axial", "rope-axial+normalized", "rope-mixed+ref4"])
def test_augmented_positions_against_the_coordinates_of_each_token(name, text, prefix):
    """Tokens at coordinates: shifted, scaled for each axis, then scaled for all."""
    encoding, (q, k, _) = make(name + text, (3, 5), prefix)
    grid = AugmentedGrid.of((3, 5), generator=torch.Generator().manual_seed(2))
    of_all, *of_axes = grid.sample.double().tolist()
    chosen = encoding.spec.augmentation
    at = []
    for position in others.positions_of((3, 5), 0):
        if "normalized" in name:
            position = [2 * (x + 0.5) / n - 1 for x, n in zip(position, (3, 5), strict=True)]
        if "ref4" in name:
            position = modern.scaled(position, (3, 5), (4,))
        moved = [x + (chosen.shift or 0) * u for x, u in zip(position, of_axes[2:], strict=True)]
        moved = [x * (chosen.jitter or 1) ** u for x, u in zip(moved, of_axes[:2], strict=True)]
        at.append([x * (chosen.rescale or 1) ** of_all for x in moved])
    plain = "rope-mixed" if "mixed" in name else "rope-axial"
    turns = 2 * math.pi if "normalized" in name else 1
    at = [None] * prefix + [[turns * x for x in position] for position in at]
    scores = torch.zeros(*q.shape[:3], k.shape[2], dtype=torch.float64)
    for head in range(HEADS):
        score = SCORES[plain](nested(encoding), head, (3, 5))
        for image in range(len(q)):
            rows, columns = (x[image, head].tolist() for x in (q, k))
            scores[image, head] = torch.tensor(
                [
                    [score(a, b, x, y) for b, y in zip(columns, at, strict=True)]
                    for a, x in zip(rows, at, strict=True)
                ]
            )
    torch.testing.assert_close(encoding.scores(q, k, grid=grid), scores, rtol=1e-6, atol=1e-6)
    plain_scores = encoding.eval().scores(q, k, grid=(3, 5))
    assert torch.equal(encoding.scores(q, k, grid=grid), plain_scores)
    is_relative = text.startswith("+shift1") and not prefix  # patches among themselves
    assert torch.allclose(plain_scores, scores, atol=1e-3) == is_relative


def test_a_turned_query_in_the_tables_would_see_where_it_is():
    encoding, (q, k, v) = make("rope-axial+product-contextual-k", (3, 5), 0)
    right = encoding(q, k, v, grid=(3, 5))
    rotary = RelativePositionEncoding("rope-axial", HEADS, DIM)
    turned_q, turned_k, *_ = rotary._on((3, 5), q, k)
    maps = bucket_maps("product-contextual-k", (3, 5))
    wrong = rpe_attention(turned_q, turned_k, v, maps, key_tables=[*encoding.key_tables])
    by_hand = rpe_attention(
        turned_q, turned_k, v, maps, key_tables=[*encoding.key_tables], table_q=q
    )
    torch.testing.assert_close(right, by_hand)
    assert not torch.allclose(right, wrong)


def test_a_random_network_changes_nothing_at_the_start():
    encoding, (q, k, v) = make("log-cpb", (3, 5), 1)
    encoding.reset_parameters()
    assert encoding.spec.keeps_output
    torch.testing.assert_close(
        encoding(q, k, v, grid=(3, 5)), F.scaled_dot_product_attention(q, k, v)
    )


@pytest.mark.parametrize("name", ["rope-axial", "rope-mixed", "alibi-2d", *JOINED])
def test_the_others_say_that_the_output_changes(name):
    encoding, (q, k, v) = make(name, (3, 5), 1)
    encoding.reset_parameters()
    assert not encoding.spec.keeps_output
    plain = F.scaled_dot_product_attention(q, k, v)
    assert not torch.allclose(encoding(q, k, v, grid=(3, 5)), plain)


@pytest.mark.parametrize("name", [*ALL, "rope-axial+product-contextual-qkv+unshared"])
def test_every_parameter_learns_after_one_step(name):
    encoding, qkv = make(name, (3, 5), 1)
    encoding.reset_parameters()
    before = [parameter.detach().clone() for parameter in encoding.parameters()]
    for _ in range(2):
        encoding.zero_grad()
        encoding(*qkv, grid=(3, 5)).square().sum().backward()
        with torch.no_grad():
            for parameter in encoding.parameters():
                parameter -= 0.01 * parameter.grad
    for parameter, start in zip(encoding.parameters(), before, strict=True):
        assert not torch.equal(parameter, start)


@pytest.mark.parametrize("name", ALL)
def test_copies_text_and_state_round_trips(name):
    encoding, qkv = make(name, (3, 5), 1)
    expected = encoding(*qkv, grid=(3, 5))
    twin = RelativePositionEncoding(str(encoding.spec), HEADS, DIM, 1, dtype=torch.float64)
    assert twin.spec == encoding.spec
    twin.load_state_dict(encoding.state_dict())
    for other in (twin, copy.deepcopy(encoding), pickle.loads(pickle.dumps(encoding))):
        assert torch.equal(other(*qkv, grid=(3, 5)), expected)


@pytest.mark.parametrize(
    "name", [*VECTORS, "rope-axial", "rope-mixed+decomposed@5", "log-cpb", "alibi-2d"]
)
def test_compile_without_a_graph_break_and_export(name):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoding, _ = make(name, (3, 5), 1, torch.float32)

        def forward(self, q, k, v):
            return self.encoding(q, k, v, grid=(3, 5))

    model, (_, qkv) = Model(), make(name, (3, 5), 1, torch.float32)
    expected = model(*qkv)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*qkv), expected)
    torch._dynamo.reset()
    program = torch.export.export(model, tuple(x.detach() for x in qkv))
    torch.testing.assert_close(program.module()(*qkv), expected)


def test_compile_where_nothing_needs_a_gradient():
    encoding, qkv = make("alibi-2d", (3, 5), 1, torch.float32)
    qkv = [x.detach() for x in qkv]
    compiled = torch.compile(encoding, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*qkv, grid=(3, 5)), encoding(*qkv, grid=(3, 5)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ALL)
def test_other_dtypes(name, dtype):
    exact, qkv = make(name, (3, 5), 1)
    expected = exact(*qkv, grid=(3, 5))
    actual = copy.deepcopy(exact).to(dtype)(*(x.to(dtype) for x in qkv), grid=(3, 5))
    assert actual.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 0.15
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


def test_inference_first_then_training():
    offset_sinusoids.cache_clear()
    for name in ("rope-axial@33", "rope-mixed@33", "log-cpb@33", "alibi-2d", "transformer-xl"):
        encoding, qkv = make(name, (2, 5), 1)
        with torch.inference_mode():
            encoding(*qkv, grid=(2, 5))
        encoding(*qkv, grid=(2, 5)).sum().backward()
        assert all(x.grad.isfinite().all() for x in (*qkv, *encoding.parameters()))


def test_heads_that_cannot_be_split():
    with pytest.raises(ValueError, match="multiple of 3"):
        RelativePositionEncoding("sasa", 2, 8, ndim=3)
    with pytest.raises(ValueError, match="multiple of 4"):
        RelativePositionEncoding("transformer-xl", 2, 6)
    with pytest.raises(ValueError, match=r"rope-axial@100: heads of dimension 10.*multiple of 4"):
        RelativePositionEncoding("rope-axial", 2, 10)
    with pytest.raises(ValueError, match="reference grid has 2 axes, and the grid has 3"):
        RelativePositionEncoding("rope-axial+ref14x20", 2, 12, ndim=3)
    with pytest.raises(ValueError, match="multiple of 6"):
        RelativePositionEncoding("rope-axial+product-contextual-k", 2, 16, ndim=3)
    with pytest.raises(ValueError, match="multiple of 4"):
        RelativePositionEncoding("rope-mixed", 2, 6)


def test_a_rotation_alone_has_no_implementation_to_explain():
    encoding, (q, k, v) = make("rope-axial", (3, 5), 1)
    with pytest.raises(ValueError, match=r"rope-axial@100 has no tables.*scaled_dot_product"):
        encoding.explain(q, k, v, grid=(3, 5))
    joined, _ = make("rope-axial+product-contextual-k", (3, 5), 1)
    assert joined.explain(q, k, v, grid=(3, 5))


def test_sasa_takes_every_grid_up_to_its_size_and_no_larger():
    encoding, qkv = make("sasa@5", (5, 3), 1)
    larger = RelativePositionEncoding("sasa@6", HEADS, DIM, 1, dtype=torch.float64)
    for table, other in zip(encoding.parameters(), larger.parameters(), strict=True):
        other.data[:, 1:-2], other.data[:, -1] = table.data[:, :-1], table.data[:, -1]
    for grid in [(5, 3), (3, 5)]:
        torch.testing.assert_close(encoding(*qkv, grid=grid), larger(*qkv, grid=grid))
    with pytest.raises(ValueError, match=r"grid 2x6 is larger than the tables of sasa@5.*sasa@6"):
        encoding(*(torch.randn(3, 1, HEADS, 13, DIM).double()), grid=(2, 6))


def test_a_single_attention_cannot_have_cpvt():
    with pytest.raises(ValueError, match=r"between the blocks.*irpe\.equip"):
        RPEAttention(32, num_heads=4, spec="cpvt")


def test_the_tied_table_of_huang_is_one_parameter_with_both_gradients():
    encoding, qkv = make("huang", (3, 5), 1)
    assert [name for name, _ in encoding.named_parameters()] == ["key_tables.0"]
    untied = RelativePositionEncoding("product-contextual-qk@clip3", HEADS, DIM, 1).double()
    for table in untied.parameters():
        table.data = encoding.key_tables[0].data.clone()
    for module in (encoding, untied):
        module(*qkv, grid=(3, 5)).square().sum().backward()
    both = untied.query_tables[0].grad + untied.key_tables[0].grad
    torch.testing.assert_close(encoding.key_tables[0].grad, both)


class TestTimm:
    """The parts of timm that do the same."""

    timm_layers = pytest.importorskip("timm.layers", reason="needs the extra 'timm'")

    @staticmethod
    def rotated(x, embedding, **arguments):
        layers = TestTimm.timm_layers
        return layers.apply_rot_embed_cat(x, embedding, **arguments)

    def check(self, encoding, q, k, turned_q, turned_k, grid):
        expected = turned_q @ turned_k.mT - q @ k.mT
        actual = encoding.scores(q, k, grid=grid)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("base", [100, 10000])
    def test_axial(self, base):
        part = self.timm_layers.RotaryEmbeddingCat(
            16, temperature=base, in_pixels=False, feat_shape=[3, 5]
        )
        encoding, (q, k, _) = make(f"rope-axial@{base}", (3, 5), 0, torch.float32, dim=16)
        embedding = part.get_embed()
        self.check(encoding, q, k, *(self.rotated(x, embedding) for x in (q, k)), (3, 5))

    def test_mixed_and_its_initial_frequencies(self):
        part = self.timm_layers.RotaryEmbeddingMixed(
            HEADS * 16, depth=1, num_heads=HEADS, feat_shape=[3, 5]
        )
        encoding, (q, k, _) = make("rope-mixed", (3, 5), 0, torch.float32, dim=16)
        with torch.no_grad():  # timm keeps the column's frequencies first
            encoding.frequencies.copy_(part.freqs[:, 0].flip(0))
        (embedding,) = part.get_embed()
        self.check(encoding, q, k, *(self.rotated(x, embedding) for x in (q, k)), (3, 5))

        encoding.reset_parameters()
        for frequencies in (encoding.frequencies, part.freqs[:, 0]):
            lengths = frequencies.square().sum(0).sqrt()  # of each head and pair
            expected = (10 ** -(torch.arange(4) / 4)).repeat(2).expand(HEADS, -1)
            torch.testing.assert_close(lengths, expected)
            first, second = frequencies[:, :, :4], frequencies[:, :, 4:]  # perpendicular
            torch.testing.assert_close((first * second).sum(0), torch.zeros(HEADS, 4))

    def test_normalized(self):
        """DINOv3 pairs element i with i + dim / 2: the same turns of reordered elements."""
        part = self.timm_layers.RotaryEmbeddingDinoV3(16, feat_shape=[3, 5])
        encoding, (q, k, _) = make("rope-axial+normalized", (3, 5), 0, torch.float32, dim=16)
        q, k = q.detach(), k.detach()
        halves = torch.arange(16).view(2, 8).T.flatten()  # ours[2 i], ours[2 i + 1]
        embedding = part.get_embed(shape=[3, 5])
        turned = [self.rotated(x, embedding, half=True) for x in (q, k)]
        self.check(encoding, q[..., halves], k[..., halves], *turned, (3, 5))

    @pytest.mark.parametrize(("grid", "size"), [((3, 5), 5), ((4, 4), 4), ((6, 3), 4)])
    def test_decomposed(self, grid, size):
        from timm.models.vision_transformer_sam import get_decomposed_rel_pos_bias

        encoding, (q, k, _) = make(f"decomposed@{size}", grid, 0, torch.float32, dim=16)
        rows, columns = (table[0] / math.sqrt(16) for table in encoding.key_tables)
        expected = get_decomposed_rel_pos_bias(q.flatten(0, 1), rows, columns, grid, grid)
        actual = encoding.scores(q, k, grid=grid) / math.sqrt(16)
        torch.testing.assert_close(actual.flatten(0, 1), expected, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("pretrained", [0, 8])
    def test_continuous_bias(self, pretrained):
        from timm.models.swin_transformer_v2 import WindowAttention

        window = WindowAttention(
            HEADS * 16, (3, 5), HEADS, pretrained_window_size=(pretrained, pretrained)
        )
        name = f"log-cpb@{pretrained}" if pretrained else "log-cpb"
        encoding, (q, k, _) = make(name, (3, 5), 0, torch.float32, dim=16)
        hidden, last = window.cpb_mlp[0], window.cpb_mlp[2]
        nn.init.normal_(last.weight)
        with torch.no_grad():
            encoding.hidden_weight.copy_(hidden.weight)
            encoding.hidden_bias.copy_(hidden.bias)
            encoding.last_weight.copy_(last.weight)
        table = 16 * window.cpb_mlp(window.relative_coords_table).view(-1, HEADS).sigmoid()
        expected = table[window.relative_position_index].view(15, 15, HEADS).permute(2, 0, 1)
        actual = encoding.scores(q, k, grid=(3, 5))[0] / math.sqrt(16)
        torch.testing.assert_close(actual, expected - 8, rtol=1e-4, atol=1e-4)

    def test_bias_table(self):
        from timm.models.swin_transformer import WindowAttention

        window = WindowAttention(HEADS * 16, HEADS, window_size=(5, 5))
        nn.init.normal_(window.relative_position_bias_table)
        encoding, (q, k, _) = make("bias-table@5", (5, 5), 0, torch.float32, dim=16)
        with torch.no_grad():
            encoding.bias_tables[0].copy_(window.relative_position_bias_table.T * math.sqrt(16))
        actual = encoding.scores(q, k, grid=(5, 5))[0] / math.sqrt(16)
        torch.testing.assert_close(actual, window._get_rel_pos_bias()[0])
