import itertools
import pickle

import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st

from irpe import Clip, Piecewise, RPESpec

indices = st.one_of(
    st.floats(1e-6, 1e20).map(Piecewise.from_ratio),
    st.tuples(*[st.floats(1e-3, 1e3)] * 3)
    .map(sorted)
    .filter(lambda abc: abc[0] < abc[1] < abc[2])
    .map(lambda abc: Piecewise(*abc)),
    st.floats(1e-6, 1e20).map(Clip),
)
specs = st.builds(
    lambda method, mode_targets, index, shared: RPESpec(method, *mode_targets, index, shared),
    st.sampled_from(oracles.METHODS),
    st.sampled_from([("bias", "k"), *(("contextual", t) for t in oracles.CONTEXTUAL_TARGETS)]),
    indices,
    st.booleans(),
)


@given(specs)
def test_text_round_trip(spec):
    assert RPESpec.parse(str(spec)) == spec
    assert hash(RPESpec.parse(str(spec))) == hash(spec)
    assert pickle.loads(pickle.dumps(spec)) == spec


def test_text_always_has_the_index():
    assert str(RPESpec()) == "product-contextual-k@1.9"
    assert str(RPESpec.parse("cross-bias-k+unshared")) == "cross-bias-k@20+unshared"
    assert str(RPESpec(index=Clip(3))) == "product-contextual-k@clip3"
    assert str(RPESpec(index=Piecewise(1, 3, 9))) == "product-contextual-k@1:3:9"


@pytest.mark.parametrize("method", oracles.METHODS)
def test_default_index_is_the_papers_best(method):
    assert RPESpec(method).index == Piecewise.from_ratio(oracles.RATIOS[method])


@pytest.mark.parametrize("method", oracles.METHODS)
@pytest.mark.parametrize("prefix", oracles.PREFIXES)
@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_num_buckets_counts_the_rows_and_one_for_the_prefix(method, prefix, ndim):
    spec = RPESpec(method, index=Clip(3))
    expected = tuple(r + (prefix > 0) for r in oracles.num_buckets(method, 3, ndim))
    assert spec.num_buckets(ndim, prefix) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("product", ["product", "METHOD-MODE-TARGETS"]),
        ("product-contextual", ["METHOD-MODE-TARGETS"]),
        ("product-contextual-k-v", ["METHOD-MODE-TARGETS"]),
        ("produkt-contextual-k", ["'produkt'", "euclidean, quantization, cross, product", "mean"]),
        ("product-ctx-k", ["'ctx'", "bias, contextual"]),
        ("product-contextual-kk", ["'kk'", "qkv", "write 'k'"]),
        ("product-contextual-kq", ["write 'qk'"]),
        ("product-contextual-x", ["'x'", "q, k, v"]),
        ("product-contextual-", ["''", "q, k, v"]),
        ("product-bias-v", ["'v'", "scores", "'contextual'"]),
        ("product-bias-qk", ["'qk'", "'k'"]),
        ("product-contextual-k@", ["''", "ratio"]),
        ("product-contextual-k@1:2", ["'1:2'", "alpha:beta:gamma"]),
        ("product-contextual-k@clip", ["'clip'"]),
        ("product-contextual-k@clip1:2:8", ["'clip1:2:8'"]),
        ("product-contextual-k@3:2:8", ["0 < alpha < beta < gamma"]),
        ("product-contextual-k@nan", ["finite"]),
        ("product-contextual-k@0", ["0 < alpha"]),
        ("product-contextual-k@1.9+shared", ["'1.9+shared'"]),
        ("Product-contextual-k", ["'Product'", "'product'"]),
    ],
)
def test_parse_refuses_typos_and_says_what_is_valid(text, words):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        RPESpec.parse(text)
    for word in words:
        assert word in str(error.value)


def test_constructor_refuses_wrong_types():
    with pytest.raises(TypeError, match="Piecewise"):
        RPESpec(index=1.9)
    with pytest.raises(TypeError, match="True or False"):
        RPESpec(shared_heads=1)
    with pytest.raises(TypeError, match="METHOD-MODE-TARGETS"):
        RPESpec.parse(None)


def test_every_combination_of_choices_is_valid_or_refused():
    for method, target in itertools.product(oracles.METHODS, oracles.CONTEXTUAL_TARGETS):
        assert RPESpec(method, "contextual", target).targets == target
        if target != "k":
            with pytest.raises(ValueError, match="one table"):
                RPESpec(method, "bias", target)
