"""Texts and encodings: every name, every error, and what the maps of the named ones are."""

import itertools
import pickle

import pytest
import torch

from irpe import Clip, RPESpec, bucket_maps, parse_encoding
from irpe.core.encodings import NAMES, SHORT_NAMES, Joined
from irpe.core.encodings.alibi import Alibi2D
from irpe.core.encodings.axial_deeplab import AxialDeepLab
from irpe.core.encodings.decomposed import Decomposed
from irpe.core.encodings.log_cpb import LogCPB
from irpe.core.encodings.model_only import CPVT, NoEncoding
from irpe.core.encodings.rope import RopeAxial, RopeMixed
from irpe.core.encodings.sasa import Sasa
from irpe.core.encodings.transformer_xl import TransformerXL
from irpe.core.index import Cut
from irpe.errors import UserError

MEANINGS = {
    "shaw": RPESpec("product", "contextual", "k", Clip(3)),
    "huang": RPESpec("product", "contextual", "qk", Clip(3), tied=True),
    "sasa": Sasa(32),
    "transformer-xl": TransformerXL(),
    "axial-deeplab": AxialDeepLab(3),
    "cpvt": CPVT(),
    "rope-axial": RopeAxial(100),
    "rope-mixed": RopeMixed(10),
    "decomposed": Decomposed(14),
    "bias-table": RPESpec("product", "bias", "k", Clip(13), shared_heads=False),
    "log-cpb": LogCPB(),
    "alibi-2d": Alibi2D(),
    "none": NoEncoding(),
}


def test_every_name_has_its_meaning():
    assert {name: parse_encoding(name) for name in NAMES} == MEANINGS


@pytest.mark.parametrize(
    "text",
    [
        *NAMES,
        "sasa@14",
        "axial-deeplab@7",
        "cross-bias-k+unshared",
        "product-contextual-qk",
        "rope-axial@12.125+normalized",
        "rope-mixed@123456789",
        "log-cpb@14",
        "rope-axial+product-contextual-qk@1.5+tied+unshared",
        "product-contextual-k+unshared+rope-mixed",
        "rope-axial+normalized+decomposed@7",
        "rope-axial+ref14+product-contextual-k+unshared",
        "rope-mixed@7.5+ref14x20+shift.5+jitter1.25+rescale2",
        "product-contextual-k+rope-axial+normalized+rescale1.0001",
    ],
)
def test_text_round_trip(text):
    encoding = parse_encoding(text)
    assert parse_encoding(str(encoding)) == encoding
    assert parse_encoding(encoding) is encoding
    assert pickle.loads(pickle.dumps(encoding)) == encoding
    assert hash(parse_encoding(str(encoding))) == hash(encoding)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("shav", "'shav' is not known: write one of shaw, huang.*METHOD.*did you mean 'shaw'"),
        ("transfomer-xl", "did you mean 'transformer-xl'"),
        ("axial-deep-lab", "did you mean 'axial-deeplab'"),
        ("Huang", "did you mean 'huang'"),
        ("cptv", "did you mean 'cpvt'"),
        ("product-contextual", "did you mean 'product-contextual-k'"),
        ("produkt-contextual-k", "did you mean 'product'"),
        ("", "'' is not known"),
        ("shaw@3", "shaw takes no number.*product-contextual-k@clip3"),
        ("transformer-xl@3", "transformer-xl takes no number"),
        ("sasa@", "'' must be a whole number"),
        ("sasa@1.5", "'1.5' must be a whole number"),
        ("sasa@1", "size = 1 must be 2 or more"),
        ("axial-deeplab@0", "threshold = 0 must be 1 or more"),
        ("sasa+unshared", "sasa has no option 'unshared', METHOD-MODE-TARGETS has$"),
        ("shaw+unshared", "has no option 'unshared'.*write product-contextual-k@clip3[+]unshared"),
        ("rope", "rotary encodings are 'rope-axial' and 'rope-mixed'"),
        ("rop-axial", "did you mean 'rope-axial'"),
        ("rope-axial@1", "base = 1.0 must be a finite number greater than 1"),
        ("rope-axial@-3", "'-3' must be a number greater than 1"),
        ("rope-mixed@1e3", "'1e3' must be a number"),
        ("rope-mixed+normalized", "only 'rope-axial' has 'normalized', without a value"),
        ("rope-axial+normalized2", "only 'rope-axial' has 'normalized', without a value"),
        ("product-contextual-k+normalized", "has no option 'normalized'; 'rope-axial' has"),
        ("K+ref14", "K has no option 'ref14'; 'rope-axial' has"),
        ("sasa+rescale2", "sasa has no option 'rescale2'; 'rope-axial' has"),
        ("rope-axial+ref", "'ref' is followed by the size of a grid"),
        ("rope-axial+ref14x", "'ref' is followed by the size of a grid"),
        ("rope-axial+ref0", "grid \\(0,\\) is not a grid"),
        ("rope-axial+normalized+ref3", "an axis runs from -1 to 1 on every grid already"),
        ("rope-axial+rescale", "'rescale' is followed by a number, as in 'rescale2'"),
        ("rope-axial+rescale1", "rescale = 1.0 must be a finite number greater than 1"),
        ("rope-axial+jitter.9", "jitter = 0.9 must be a finite number greater than 1"),
        ("rope-axial+shift0", "shift = 0.0 must be a finite number greater than 0"),
        ("rope-axial+rescale2+rescale3", "has option 'rescale' twice"),
        ("rope-axial+tied", "has normalized, ref, shift, jitter, rescale"),
        ("unshared+rope-axial", "begins with the option 'unshared': an option stands after"),
        ("rope-axial+rope-mixed", "rotates 2 times: write one of rope-axial@100 and rope-mixed"),
        ("rope-axial+rope-axial", "rotates 2 times"),
        ("shaw+sasa", "joins 2 encodings with tables: join a rotation.*with one"),
        ("rope-axial+shaw+sasa", "joins 2 encodings with tables"),
        ("rope-axial+none", "none cannot be joined"),
        ("rope-axial+transformer-xl", "transformer-xl cannot be joined"),
        ("rope-axial+", "'rope-axial[+]' is not known"),
        ("decomposed@0", "size = 0 must be 1 or more"),
        ("log-cpb@1", "size = 1 must be 2 or more"),
        ("alibi-2d@3", "alibi-2d takes no number"),
        ("product-contextual-k+tied", "'k' cannot be tied"),
        ("product-bias-k+tied", "'k' cannot be tied"),
    ],
)
def test_typos_get_the_nearest_name(text, message):
    with pytest.raises(ValueError, match=message):
        parse_encoding(text)


@pytest.mark.parametrize("value", [None, 3, b"shaw", True])
def test_what_is_no_text_is_refused(value):
    with pytest.raises(TypeError, match="METHOD-MODE-TARGETS"):
        parse_encoding(value)


def test_joined_parts_are_a_rotation_and_tables_in_any_order():
    k = RPESpec("product", "contextual", "k", shared_heads=False)
    expected = Joined(RopeAxial(), k)
    assert parse_encoding("rope-axial+product-contextual-k+unshared") == expected
    assert parse_encoding("product-contextual-k+unshared+rope-axial") == expected
    assert str(expected) == "rope-axial@100+product-contextual-k@1.9+unshared"


def test_a_rotation_has_no_maps():
    assert bucket_maps("rope-axial", (3, 5), 1) == ()
    joined = bucket_maps("rope-axial+product-contextual-k", (3, 5), 1)
    assert joined is bucket_maps("product-contextual-k", (3, 5), 1)


@pytest.mark.parametrize("make", [Sasa, AxialDeepLab, Decomposed, LogCPB])
def test_sizes_are_whole_numbers(make):
    with pytest.raises(TypeError, match="whole number"):
        make(2.5)
    with pytest.raises(TypeError, match="whole number"):
        make(True)


def test_tied_is_a_truth_value_of_queries_and_keys():
    with pytest.raises(TypeError, match="tied = 1"):
        RPESpec(targets="qk", tied=1)
    assert str(RPESpec(targets="qkv", tied=True)) == "product-contextual-qkv@1.9+tied"
    both = RPESpec.parse("cross-contextual-qk@clip2+tied+unshared")
    assert (both.tied, both.shared_heads) == (True, False)


def test_cut_tells_apart_up_to_its_threshold_and_has_one_index_beyond():
    distances = torch.tensor([-9, -3, -2, -1, 0, 1, 2, 3, 9])
    assert Cut(2)(distances).tolist() == [3, 3, -2, -1, 0, 1, 2, 3, 3]


@pytest.mark.parametrize("prefix", [0, 1, 5])
@pytest.mark.parametrize("grid", [(3, 5), (1, 1), (4,), (2, 3, 2)], ids=str)
def test_transformer_xl_tells_every_offset_apart(grid, prefix):
    (bucket_map,) = bucket_maps("transformer-xl", grid, prefix)
    positions = list(itertools.product(*map(range, grid)))
    offsets = {}
    for (i, a), (j, b) in itertools.product(enumerate(positions), repeat=2):
        offset = tuple(x - y for x, y in zip(a, b, strict=True))
        offsets.setdefault(offset, set()).add(int(bucket_map.ids[prefix + i, prefix + j]))
    in_order = sorted(offsets)  # row-major, as the sines of the offsets are
    assert [offsets[offset] for offset in in_order] == [{n} for n in range(len(offsets))]
    assert bucket_map.num_buckets == len(offsets) + (prefix > 0)
    if prefix:
        assert (bucket_map.ids[:prefix] == len(offsets)).all()
        assert (bucket_map.ids[:, :prefix] == len(offsets)).all()


def test_there_are_no_maps_of_what_no_attention_has():
    with pytest.raises(ValueError, match="between the blocks"):
        bucket_maps("cpvt", (3, 5))
    with pytest.raises(ValueError, match="'none' has no tables"):
        bucket_maps("none", (3, 5))


def test_short_names_of_the_papers_tables_are_encodings():
    for short, text in SHORT_NAMES.items():
        assert parse_encoding(short) == parse_encoding(text)
        assert parse_encoding(f"{short}@1.9+unshared") == parse_encoding(f"{text}@1.9+unshared")
    joined = parse_encoding("rope-axial + K")
    assert joined == parse_encoding("rope-axial+product-contextual-k")
    for wrong in ("k", "KQ", "absolute"):
        with pytest.raises(UserError, match=repr(wrong)):
            parse_encoding(wrong)
