"""What attention with encodings is: the paper's loops, and what follows from them."""

import oracles
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from cases import CPU_IMPLEMENTATIONS, SPECS, Case

from irpe import (
    BucketMap,
    Clip,
    RPESpec,
    bucket_maps,
    rpe_attention,
    rpe_attention_weights,
    rpe_scores,
)

IMPLS = CPU_IMPLEMENTATIONS


@pytest.mark.parametrize("spec", SPECS[::3], ids=str)
@pytest.mark.parametrize(("grid", "prefix"), [((3, 4), 1), ((1, 5), 0), ((2, 1, 3), 2)])
def test_reference_is_the_papers_equations(spec, grid, prefix):
    case = Case(spec, grid, prefix, batch=1)
    names = {"query_tables": "query", "key_tables": "key", "value_tables": "value"}
    out = case.attention("reference")
    scored = {name: tables for name, tables in case.tables.items() if name != "value_tables"}
    weights = rpe_attention_weights(case.q, case.k, case.maps, **scored)
    scores = rpe_scores(case.q, case.k, case.maps, **scored)
    for b in range(case.batch):
        for h in range(case.heads):
            table_head = 0 if spec.shared_heads else h
            tables = {
                names.get(name, "bias"): [t[table_head].tolist() for t in ts]
                for name, ts in case.tables.items()
            }
            expected = oracles.attention(
                *(x[b, h].tolist() for x in (case.q, case.k, case.v)),
                [m.ids.tolist() for m in case.maps],
                tables,
                case.dim**-0.5,
            )
            for actual, wanted in zip((out, weights, scores), expected, strict=True):
                wanted = torch.tensor(wanted, dtype=torch.float64)
                torch.testing.assert_close(actual[b, h], wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("impl", IMPLS)
def test_zero_tables_are_plain_attention(impl):
    for targets in ("qkv", "bias"):
        spec = RPESpec(mode="bias") if targets == "bias" else RPESpec(targets=targets)
        case = Case(spec, (7, 8), dtype=torch.float32, dim=16)
        case.tables = {name: [t * 0 for t in tables] for name, tables in case.tables.items()}
        plain = F.scaled_dot_product_attention(case.q, case.k, case.v)
        torch.testing.assert_close(case.attention(impl), plain, rtol=0, atol=1e-5)


def test_shared_is_unshared_with_equal_tables():
    for spec in (spec for spec in SPECS if spec.shared_heads):
        case = Case(spec, (3, 5))
        shared = case.attention("reference")
        case.tables = {
            name: [t.repeat(case.heads, *[1] * (t.ndim - 1)) for t in tables]
            for name, tables in case.tables.items()
        }
        torch.testing.assert_close(case.attention("reference"), shared, rtol=1e-12, atol=1e-12)


def test_cross_is_the_sum_of_its_axes():
    case = Case(RPESpec("cross", targets="k"), (3, 5))
    rows, columns = (
        rpe_scores(case.q, case.k, [m], key_tables=[t])
        for m, t in zip(case.maps, case.tables["key_tables"], strict=True)
    )
    scale = case.dim**-0.5
    expected = F.scaled_dot_product_attention(
        case.q, case.k, case.v, attn_mask=(rows + columns) * scale
    )
    torch.testing.assert_close(case.attention("reference"), expected, rtol=1e-10, atol=1e-12)


def test_bias_stands_inside_the_scale():
    case = Case(RPESpec(mode="bias"), (3, 5))
    bias = case.tables["bias_tables"][0][:, case.maps[0].ids.long()]
    for scale in (None, 0.3, 2):
        factor = case.dim**-0.5 if scale is None else scale
        expected = F.scaled_dot_product_attention(
            case.q, case.k, case.v, attn_mask=bias * factor, scale=factor
        )
        actual = case.attention("reference", scale=scale)
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("mask", ["boolean", "padding", "additive"])
def test_masks_mean_what_sdpa_means(mask):
    case = Case(RPESpec(targets="k"), (3, 5), mask=mask)
    case.tables = {name: [t * 0 for t in tables] for name, tables in case.tables.items()}
    mask = case.attn_mask[None] if case.mask == "additive" else case.attn_mask
    expected = F.scaled_dot_product_attention(case.q, case.k, case.v, attn_mask=mask)
    torch.testing.assert_close(case.attention("reference"), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_query_with_no_key_left_gets_zero_and_finite_gradients(impl):
    case = Case(RPESpec(targets="qkv"), (7, 8), mask="boolean")
    out, *gradients = case.output_and_gradients(impl)
    assert (out[0, :, 0] == 0).all()
    assert all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("impl", IMPLS)
def test_dropout_drops_weights_and_keeps_the_mean(impl):
    maps = bucket_maps("product-contextual-kv@clip1", (3, 5), 1)
    tokens = 16
    q = torch.zeros(200, 1, tokens, tokens)
    tables = [torch.zeros(1, 10, tokens)]
    torch.manual_seed(0)
    out = rpe_attention(
        q, q, torch.eye(tokens).expand_as(q), maps, key_tables=tables, value_tables=tables,
        dropout_p=0.25, impl=impl,
    )  # fmt: skip
    kept = out[out != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / tokens / 0.75))
    assert abs((out == 0).float().mean().item() - 0.25) < 0.01


def test_dropout_of_values_and_their_encodings_is_the_same():
    maps = bucket_maps("product-contextual-v", (3, 5))
    q = torch.randn(4, 2, 15, 8)
    tables = [torch.ones(1, 49, 8)]
    torch.manual_seed(0)
    out = rpe_attention(q, q, -torch.ones_like(q), maps, value_tables=tables, dropout_p=0.5)
    torch.testing.assert_close(out, torch.zeros_like(out), rtol=0, atol=1e-5)


def test_bias_and_contextual_tables_add_up():
    case = Case(RPESpec(targets="k"), (7, 8))
    bias = torch.randn(1, 50, dtype=torch.float64)
    outs = [
        rpe_attention(
            case.q, case.k, case.v, case.maps, **case.tables, bias_tables=[bias], impl=impl
        )
        for impl in IMPLS
    ]
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0])
    assert not torch.allclose(outs[0], case.attention("reference"))


def test_tables_meet_the_tokens_before_a_rotation():
    """Moving all positions of a rotary attention changes nothing, tables included."""
    case = Case(RPESpec(targets="qk", index=Clip(2)), (3, 5), 0)
    angles = torch.arange(15.0, dtype=torch.float64)

    def rotated(x, start):
        first, second = x.unflatten(-1, (2, 2)).unbind(-1)
        sin, cos = (angles + start)[:, None].sin(), (angles + start)[:, None].cos()
        parts = [first * cos - second * sin, first * sin + second * cos]
        return torch.stack(parts, -1).flatten(-2)

    def attend(start, **unrotated):
        q, k = rotated(case.q, start), rotated(case.k, start)
        return rpe_attention(q, k, case.v, case.maps, **case.tables, **unrotated, impl="reference")

    unrotated = {"table_q": case.q, "table_k": case.k}
    torch.testing.assert_close(attend(0.0, **unrotated), attend(7.0, **unrotated))
    assert not torch.allclose(attend(0.0), attend(7.0))


def test_each_image_of_a_batch_may_have_its_own_map():
    case = Case(RPESpec(targets="qkv", index=Clip(1)), (3, 4), 0)
    (first,), (second,) = case.maps, bucket_maps(case.spec, (4, 3))
    both = BucketMap(torch.stack([first.ids, second.ids]), first.num_buckets)
    together = rpe_attention(case.q, case.k, case.v, [both], **case.tables, impl="reference")
    for image, bucket_map in enumerate((first, second)):
        one = slice(image, image + 1)
        alone = rpe_attention(
            case.q[one], case.k[one], case.v[one], [bucket_map], **case.tables, impl="reference"
        )
        torch.testing.assert_close(together[one], alone)


def _wrong(**changes):
    case = Case(RPESpec(targets="k"), (3, 5))
    arguments = {"q": case.q, "k": case.k, "v": case.v, "maps": case.maps, **case.tables, **changes}
    return rpe_attention(
        arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), arguments.pop("maps"),
        **arguments,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"q": torch.zeros(2, 16, 8)}, ValueError, ["(2, 16, 8)", "(batch, heads, tokens, dim)"]),
        ({"q": torch.zeros(2, 2, 16, 4).long()}, TypeError, ["torch.int64", "floating-point"]),
        ({"k": torch.zeros(2, 3, 16, 4)}, ValueError, ["(2, 3, 16, 4)", "(2, 2, 16, 4)"]),
        ({"k": torch.zeros(2, 2, 15, 4).double()}, ValueError, ["v of shape (2, 2, 16, 4)", "15"]),
        ({"v": torch.zeros(2, 2, 16, 5)}, ValueError, ["v of shape", "(2, 2, 16, 5)"]),
        ({"table_q": torch.zeros(2, 2, 9, 4)}, ValueError, ["table_q of shape (2, 2, 9, 4)"]),
        ({"table_k": torch.zeros(2, 2, 16, 4)}, TypeError, ["table_k is torch.float32"]),
        ({"table_k": torch.zeros(2, 2, 16, 4).double()}, ValueError, ["table_k", "query_tables"]),
        ({"key_tables": torch.zeros(1, 50, 4)}, TypeError, ["key_tables", "(1, 50, 4)", "[table]"]),
        ({"k": torch.zeros(2, 2, 16, 4)}, TypeError, ["torch.float32", "torch.float64"]),
        ({"maps": ()}, ValueError, ["irpe.bucket_maps"]),
        ({"maps": bucket_maps("product-contextual-k", (14, 14))}, ValueError, ["196", "16"]),
        ({"key_tables": [torch.zeros(1, 49, 4)]}, ValueError, ["(1, 49, 4)", "(1, 50, 4)"]),
        ({"key_tables": [torch.zeros(3, 50, 4)]}, ValueError, ["(3, 50, 4)", "(2, 50, 4)"]),
        ({"value_tables": [torch.zeros(1, 50)]}, ValueError, ["value_tables", "(1, 50, 4)"]),
        ({"bias_tables": [torch.zeros(1, 50, 4)]}, ValueError, ["bias_tables", "(1, 50)"]),
        ({"key_tables": [torch.zeros(1, 50, 4)] * 2}, ValueError, ["2 tables for 1 maps"]),
        ({"attn_mask": torch.zeros(3, 16, 16)}, ValueError, ["(3, 16, 16)", "(2, 2, 16, 16)"]),
        ({"attn_mask": torch.zeros(1, 1, 1, 16, 16)}, ValueError, ["(1, 1, 1, 16, 16)"]),
        ({"attn_mask": torch.zeros(16, 16).long()}, TypeError, ["torch.int64", "booleans"]),
        ({"key_tables": None}, ValueError, ["no tables", "scaled_dot_product_attention"]),
        ({"key_tables": [torch.zeros(1, 50, 4).int()]}, TypeError, ["torch.int32", "floating"]),
        (
            {"maps": bucket_maps("product-contextual-k", (3, 5), 1, "meta")},
            ValueError,
            ["maps on meta", "q on cpu", "irpe.bucket_maps"],
        ),
        (
            {"key_tables": [torch.zeros(1, 50, 4, device="meta")]},
            ValueError,
            ["key_tables on meta"],
        ),
        ({"attn_mask": torch.zeros(16, 16, device="meta")}, ValueError, ["attn_mask on meta"]),
        ({"scale": float("nan")}, ValueError, ["scale = nan", "finite"]),
        ({"maps": [BucketMap(torch.zeros(3, 16, 16).long(), 50)]}, ValueError, ["batch of 3"]),
        ({"dropout_p": 1.0}, ValueError, ["1.0", "less than 1"]),
        ({"dropout_p": -0.1}, ValueError, ["-0.1"]),
        ({"impl": "whole"}, ValueError, ["'whole'", "auto, reference, plain, fast"]),
    ],
)
def test_arguments_that_disagree_are_refused(changes, error, words):
    with pytest.raises(error) as raised:
        _wrong(**changes)
    for word in words:
        assert word in str(raised.value)
