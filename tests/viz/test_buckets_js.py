"""The arithmetic in the explorer page against the Python core, run by Node."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from viz.settings import as_page_spec, random_settings

import irpe
from irpe.core.methods import METHODS
from irpe.profile.count import count_macs, count_parameters
from irpe.viz.explorer import MODELS
from irpe.viz.offset_colours import bucket_colours

ASSETS = Path(irpe.__file__).parent / "viz/assets"
NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="needs Node, to run the page's arithmetic")

SCRIPT = """
const { bucketMaps, bucketOf, cost, indexOf, specText } = require(process.argv[1]);
const settings = JSON.parse(require("fs").readFileSync(0));
const out = settings.map(({ spec, grid, prefix, model, xs, brief }) => {
  const bucket = (map, query, key) => bucketOf(map, grid, prefix, query, key);
  const maps = bucketMaps(spec.method, spec.index, grid, prefix);
  const tokens = [...Array(brief ? 0 : prefix + grid[0] * grid[1]).keys()];
  return {
    rows: maps.map((map) => map.rows),
    used: maps.map((map) => map.used),
    offsets: maps.map((map) => [...map.ids]),
    pairs: maps.map((map) => tokens.map((q) => tokens.map((k) => bucket(map, q, k)))),
    cost: model && cost(model, spec, maps, grid, prefix),
    text: specText(spec),
    indices: (xs || []).map((x) => indexOf(spec.index, x)),
  };
});
console.log(JSON.stringify(out));
"""


def run_page(settings):
    done = subprocess.run(
        [NODE, "-e", SCRIPT, str(ASSETS / "buckets.js")],
        input=json.dumps(settings), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_buckets_of_random_settings_equal_the_core():
    cases = list(random_settings(400))
    pages = run_page([{"spec": as_page_spec(s), "grid": g, "prefix": p} for s, g, p in cases])
    assert len(pages) == 400
    for (spec, grid, prefix), page in zip(cases, pages, strict=True):
        maps = irpe.bucket_maps(spec, grid, prefix)
        assert page["rows"] == [item.num_buckets for item in maps], (spec, grid, prefix)
        assert page["used"] == [item.used_rows.tolist() for item in maps], (spec, grid, prefix)
        assert page["pairs"] == [item.ids.tolist() for item in maps], (spec, grid, prefix)
        assert page["text"] == str(spec)


def test_buckets_of_large_grids_equal_the_core():
    indices = (None, irpe.Piecewise.from_ratio(1), irpe.Piecewise.from_ratio(7), irpe.Clip(5))
    cases = [
        (irpe.RPESpec(method, index=index), grid)
        for method in METHODS
        for index in indices
        for grid in ((7, 28), (64, 64))
    ]
    # The pairs of a large grid are many; its distinct offsets tell as much.
    settings = [{"spec": as_page_spec(s), "grid": g, "prefix": 0, "brief": True} for s, g in cases]
    for (spec, grid), page in zip(cases, run_page(settings), strict=True):
        offsets = irpe.Grid(grid).distinct_offsets()
        ids = METHODS[spec.method].ids(offsets, spec.index_function)
        assert page["offsets"] == [item.flatten().tolist() for item in ids], (spec, grid)


COLOURS = """
const { bucketMaps } = require(process.argv[1]);
const { bucketColours } = require(process.argv[2]);
const settings = JSON.parse(require("fs").readFileSync(0));
console.log(JSON.stringify(settings.map(({ spec, grid }) =>
  bucketMaps(spec.method, spec.index, grid, 1).map(
    (map) => Object.fromEntries(bucketColours(map, spec.method, grid))))));
"""


def test_colours_of_buckets_are_those_of_the_figures():
    cases = [(spec, grid) for spec, grid, _ in random_settings(60, seed=2)]
    done = subprocess.run(
        [NODE, "-e", COLOURS, str(ASSETS / "buckets.js"), str(ASSETS / "colours.js")],
        input=json.dumps([{"spec": as_page_spec(s), "grid": g} for s, g in cases]),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    for (spec, grid), tables in zip(cases, json.loads(done.stdout), strict=True):
        expected = [
            {str(bucket): [255 * band for band in colour] for bucket, colour in table.items()}
            for table in bucket_colours(spec, irpe.Grid(grid))
        ]
        assert [table.keys() for table in tables] == [table.keys() for table in expected]
        for ours, theirs in zip(tables, expected, strict=True):
            for bucket, colour in ours.items():
                assert colour == pytest.approx(theirs[bucket], abs=0.51)


@pytest.mark.parametrize(
    "index", [irpe.Clip(3.5), irpe.Piecewise(3.6, 3.8, 9), irpe.Piecewise(9, 10, 20)]
)
def test_halves_are_rounded_to_even_on_both_sides_of_zero(index):
    xs = [k / 2 for k in range(-30, 31)]
    spec = irpe.RPESpec(index=index)
    (page,) = run_page([{"spec": as_page_spec(spec), "grid": (1, 1), "prefix": 0, "xs": xs}])
    assert page["indices"] == index(torch.tensor(xs, dtype=torch.float64)).tolist()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("DeiT-Ti", "product-contextual-k"),
        ("DeiT-S", "cross-contextual-qkv+unshared"),
        ("DeiT-Ti", "euclidean-bias-k+unshared"),
        ("DeiT-Ti", "quantization-contextual-qk"),
    ],
)
def test_costs_equal_those_counted_on_the_model(name, text):
    timm = pytest.importorskip("timm", reason="needs the extra 'timm'")
    host = {"DeiT-Ti": "deit_tiny_patch16_224", "DeiT-S": "deit_small_patch16_224"}[name]
    spec, x = irpe.RPESpec.parse(text), torch.zeros(1, 3, 224, 224)
    setting = {"spec": as_page_spec(spec), "grid": (14, 14), "prefix": 1, "model": MODELS[name]}
    (page,) = run_page([setting])
    model = timm.create_model(host)
    plain = count_parameters(model), count_macs(model, x)
    assert (page["cost"]["parameters"], page["cost"]["macs"]) == plain
    irpe.equip(model, spec)
    extra = count_parameters(model) - plain[0], count_macs(model, x) - plain[1]
    assert (page["cost"]["extraParameters"], page["cost"]["extraMacs"]) == extra
