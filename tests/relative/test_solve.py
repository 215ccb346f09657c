"""The solution of one attention against what it must be."""

from dataclasses import replace

import pytest
import torch
from relative.built import (
    DIM,
    GRID,
    HEADS,
    PREFIX,
    TOKENS,
    built_batch,
    random_encoding,
)

from irpe import RelativePositionEncoding
from irpe.relative.make_relative import solve_attention
from irpe.relative.solve import (
    Batch,
    ScoreSystem,
    attention,
    converted_attention,
    krylov,
    missing_scores,
)

SPECS = [
    "product-bias-k",
    "product-bias-k+unshared",
    "cross-bias-k+unshared",
    "euclidean-contextual-k",
    "product-contextual-k@clip1+unshared",
    "cross-contextual-k@clip2",
    "product-contextual-q@clip1+unshared",
    "product-contextual-qk@clip1",
    "huang",
    "euclidean-contextual-kv+unshared",
    "product-contextual-v@clip1",
]
MASK = torch.zeros(TOKENS, TOKENS, dtype=torch.float64)
MASK[5, 4], MASK[7, 9] = -torch.inf, 3.0


def zero_encoding(spec, dtype=torch.float64):
    return RelativePositionEncoding(spec, HEADS, DIM, PREFIX, dtype=dtype)


@pytest.mark.parametrize("mask", [None, MASK], ids=["no mask", "mask"])
@pytest.mark.parametrize("spec", SPECS)
def test_the_tables_of_a_relative_model_are_recovered(spec, mask):
    true = random_encoding(spec)
    solving, held_out = built_batch(true, 1, mask=mask), built_batch(true, 2, mask=mask)
    encoding = zero_encoding(spec)
    solved = solve_attention(encoding, [solving], [held_out], steps=400)
    scale = {"scale": 0.5, "grid": GRID, "attn_mask": mask}
    new = built_batch(true, 3).converted
    with torch.no_grad():
        expected = true.weights(new.q, new.k, **scale)
        found = encoding.weights(new.q, new.k, **scale)
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=0)
    assert solved.divergence_after < 1e-5
    if encoding.value_tables:
        outputs = [
            each(new.q, new.k, new.v, impl="reference", **scale) for each in (encoding, true)
        ]
        torch.testing.assert_close(*outputs, atol=2e-2, rtol=0)
    else:
        assert solved.explained > 0.999
        assert solved.divergence_before > 0.02


def quadratic(encoding, batch, table):
    """The sum over queries of (D - b)^T W (D - b), in plain loops."""
    inputs, total = batch.converted, 0
    (bucket_map,) = encoding.maps(GRID)
    missing, a = missing_scores(batch), attention(batch.original)
    for image in range(len(inputs.q)):
        for head in range(HEADS):
            rows = table[head if len(table) > 1 else 0]
            for i in range(TOKENS):
                b = torch.stack([inputs.q[image, head, i] @ rows[r] for r in bucket_map.ids[i]])
                rest = missing[image, head, i] - b * inputs.scale
                w = a[image, head, i]
                total = total + rest @ (torch.diag(w) - torch.outer(w, w)) @ rest
    return total


@pytest.mark.parametrize("spec", ["euclidean-contextual-k", "euclidean-contextual-k+unshared"])
def test_the_solution_has_no_gradient(spec):
    """With the original of another attention, so that no tables explain all that is missing."""
    batch = Batch(
        built_batch(random_encoding("product-bias-k+unshared"), 5, images=2).original,
        built_batch(random_encoding(spec), 6, images=2).converted,
    )
    encoding = zero_encoding(spec)
    system = ScoreSystem(encoding, [batch])
    c = system.right_hand_side()
    t = krylov(system.apply, c, 400, tolerance=1e-12).solve(1e-9)
    (shape,) = [table.shape for table in encoding.parameters()]
    table = t.view(shape).clone().requires_grad_()
    (gradient,) = torch.autograd.grad(quadratic(encoding, batch, table), table)
    zero = torch.zeros_like(table).requires_grad_()
    (at_zero,) = torch.autograd.grad(quadratic(encoding, batch, zero), zero)
    torch.testing.assert_close(at_zero.flatten(1), -2 * c)
    assert gradient.norm() < 1e-6 * at_zero.norm()


@pytest.mark.parametrize("spec", ["euclidean-contextual-k", "euclidean-bias-k+unshared"])
def test_newton_steps_minimise_the_divergence(spec):
    """Its gradient by autograd is zero, where no tables explain all that is missing."""
    batch = Batch(
        built_batch(random_encoding("cross-bias-k+unshared", size=2.0), 5, images=4).original,
        built_batch(random_encoding(spec), 5, images=4).converted,
    )
    first, encoding = zero_encoding(spec), zero_encoding(spec)
    without = solve_attention(first, [batch], [batch], newton_steps=0, steps=400)
    solved = solve_attention(encoding, [batch], [batch], newton_steps=6, steps=400)
    assert 0.01 < solved.divergence_after < without.divergence_after

    def gradient(encoding):
        inputs = batch.converted
        with torch.enable_grad():
            scores = (inputs.q @ inputs.k.mT + encoding.scores(inputs.q, inputs.k, grid=GRID)) * 0.5
            total = -(attention(batch.original) * scores.log_softmax(-1)).sum()
            return torch.autograd.grad(total, list(encoding.parameters()))[0].norm()

    assert gradient(encoding) < 1e-4 * gradient(zero_encoding(spec))


@pytest.mark.parametrize("spec", ["product-bias-k", "euclidean-contextual-k+unshared"])
def test_a_shift_of_all_scores_of_a_row_changes_nothing(spec):
    true = random_encoding(spec)
    shift = torch.randn(TOKENS, 1, dtype=torch.float64) * 5
    tables = []
    for each in (0.0, shift):
        encoding = zero_encoding(spec)
        solve_attention(encoding, [built_batch(true, 1, shift=each)], [built_batch(true, 2)])
        tables.append(torch.cat([table.detach().flatten() for table in encoding.parameters()]))
    torch.testing.assert_close(*tables, atol=1e-6, rtol=1e-6)


def test_batches_are_summed():
    """The same images in one batch and in several give the same equations."""
    whole = built_batch(random_encoding("product-contextual-qk+unshared"), images=6)

    def part(batch, images):
        cut = [
            replace(
                each,
                q=each.q[images],
                k=each.k[images],
                v=each.v[images],
                rotated=tuple(x[images] for x in each.rotated),
            )
            for each in batch
        ]
        return Batch(*cut)

    encoding = zero_encoding("product-contextual-qk+unshared")
    parts = [part(whole, slice(0, 4)), part(whole, slice(4, 6))]
    t = torch.randn_like(ScoreSystem(encoding, [whole]).right_hand_side())
    for system, other in [(ScoreSystem(encoding, [whole]), ScoreSystem(encoding, parts))]:
        torch.testing.assert_close(system.right_hand_side(), other.right_hand_side())
        torch.testing.assert_close(system.apply(t), other.apply(t))


def test_noise_gets_no_tables():
    """Where nothing depends on position, held-out images choose a high ridge, or zero tables."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for seed in (1, 2):
        batch = built_batch(random_encoding("product-bias-k", size=0.0), seed, images=4)
        q = batch.original.q + 0.3 * torch.randn(
            batch.original.q.shape, generator=generator, dtype=torch.float64
        )
        original = replace(batch.original, q=q, rotated=(q, batch.original.k))
        batches.append(Batch(original, batch.converted))
    encoding = zero_encoding("product-contextual-k+unshared")
    solved = solve_attention(encoding, batches[:1], batches[1:])
    assert solved.divergence_after <= solved.divergence_before
    assert min(solved.ridges) >= 1e-2


def test_converted_attention_is_that_of_the_encoding():
    encoding = random_encoding("cross-contextual-qk+unshared")
    batch = built_batch(encoding, images=2, mask=MASK)
    found = converted_attention(encoding, batch)
    arguments = {"grid": GRID, "scale": 0.5, "attn_mask": MASK}
    expected = encoding.weights(batch.converted.q, batch.converted.k, **arguments)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found, attention(batch.original))
