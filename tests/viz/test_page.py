"""The explorer page in Chromium: no complaint, every control, values equal to Python's."""

import json

import pytest
import torch
from viz.chromium import BROWSER, Page
from viz.settings import as_page_spec, random_settings

import irpe
from irpe.profile.count import count_parameters
from irpe.viz import capture, default_image, explorer_page

timm = pytest.importorskip("timm", reason="needs the extra 'timm'")
pytest.importorskip("PIL", reason="needs the extra 'viz'")

from adapters.small_models import images, make_vit, perturb  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="needs Chromium (apt-get install chromium)"),
]
CANVAS = "#maps canvas"
PICTURE = "[...document.querySelectorAll('#maps canvas')].map((c) => c.toDataURL()).join()"
NUMBERS = "[...document.querySelectorAll('#numbers dd')].map((d) => d.firstChild.data.trim())"


@pytest.fixture(scope="module")
def learned():
    model = make_vit(img_size=(24, 40))
    irpe.equip(model, "cross-contextual-qk@1.5+unshared", layers=[0])
    irpe.equip(model, "product-bias-k", layers=[1])
    return capture(perturb(model), images(24, 40, batch=1))


@pytest.fixture(scope="module")
def file(learned, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(explorer_page(learned, default_image(), "run <7>"))
    return path


@pytest.fixture
def run_page(file, tmp_path):
    """The page of a run."""
    with Page(file, tmp_path / "profile") as page:
        yield page
        assert page.errors == []


@pytest.fixture
def page(tmp_path):
    """The page without a run."""
    path = tmp_path / "plain.html"
    path.write_text(explorer_page())
    with Page(path, tmp_path / "profile") as page:
        yield page
        assert page.errors == []


def check_values(page, spec, grid, prefix):
    """What the page shows is what Python says of the encoding, from the star's place."""
    spec = irpe.parse_encoding(spec)
    maps = irpe.bucket_maps(spec, grid, prefix)
    row, column = page.run("state.star")
    query = prefix + row * grid[1] + column
    assert page.run("bucketsOfStar()") == [item.ids[query].tolist() for item in maps]
    rows, used, parameters, _ = page.run(NUMBERS)
    assert int(rows) == sum(item.num_buckets for item in maps)
    assert int(used) == sum(item.num_used_buckets for item in maps)
    assert page.run("document.querySelector('#code').textContent") == f'irpe.equip(model, "{spec}")'
    return int(parameters.replace(",", ""))


def test_the_page_loads_nothing_but_itself(run_page, file):
    page = run_page
    assert page.run("document.querySelector('#learned').hidden") is False
    assert page.run("document.querySelector('#run-name').textContent") == "run <7>"
    assert page.requests[0] == file.as_uri()
    assert all(url.startswith("data:image/png") for url in page.requests[1:])


def box(page, selector):
    """Left, top, right and bottom of an element."""
    return page.run(
        f"(() => {{ const b = document.querySelector('{selector}').getBoundingClientRect();"
        "return [b.left, b.top, b.right, b.bottom]; })()"
    )


def test_a_run_opens_on_its_grid_and_encoding_with_what_it_learned_in_sight(run_page):
    check_values(run_page, "cross-contextual-qk@1.5+unshared", (3, 5), 1)
    check_in_sight(run_page)


def test_a_square_table_is_in_sight(tmp_path):
    model = perturb(irpe.equip(make_vit(img_size=(56, 56)), "product-contextual-k"))
    path = tmp_path / "square.html"
    path.write_text(explorer_page(capture(model, images(56, 56, batch=1)), default_image()))
    with Page(path, tmp_path / "profile") as page:
        check_in_sight(page)


def check_in_sight(page):
    page.choose("head", "0")  # the first picture is drawn by then
    for selector in (CANVAS, "#weights", "#table-image"):
        left, top, right, bottom = box(page, selector)
        assert 0 <= left < right <= 1280
        assert 0 <= top < bottom <= 900


def test_a_run_of_one_encoding_opens_on_it(tmp_path):
    for number, spec in enumerate(["euclidean-bias-k@clip2", "product-contextual-qkv@1:2:5"]):
        model = irpe.equip(make_vit(img_size=(24, 40)), spec)
        path = tmp_path / f"{number}.html"
        path.write_text(explorer_page(capture(model, images(24, 40, batch=1)), default_image()))
        with Page(path, tmp_path / f"profile{number}") as page:
            check_values(page, spec, (3, 5), 1)


CHANGES = [  # a control, its value, and what the encoding, the grid and the prefix tokens are then
    ("rows", "7", "product-contextual-k", (7, 14), 1),
    ("columns", "28", "product-contextual-k", (7, 28), 1),
    ("prefix", "5", "product-contextual-k", (7, 28), 5),
    ("prefix", "0", "product-contextual-k", (7, 28), 0),
    ("ratio", "3.3", "product-contextual-k@3.3", (7, 28), 0),
    ("method", "euclidean", "euclidean-contextual-k", (7, 28), 0),
    ("method", "quantization", "quantization-contextual-k", (7, 28), 0),
    ("method", "cross", "cross-contextual-k", (7, 28), 0),
    ("kind", "clip", "cross-contextual-k@clip3", (7, 28), 0),
    ("clip", "4.5", "cross-contextual-k@clip4.5", (7, 28), 0),
    ("method", "product", "product-contextual-k@clip4.5", (7, 28), 0),
    ("kind", "piecewise", "product-contextual-k@1.9", (7, 28), 0),
    ("alpha", "1.1", "product-contextual-k@1.1:3.8:15.2", (7, 28), 0),
    ("beta", "5.5", "product-contextual-k@1.1:5.5:15.2", (7, 28), 0),
    ("gamma", "9", "product-contextual-k@1.1:5.5:9", (7, 28), 0),
]


def test_every_control_of_the_buckets_changes_the_picture_rightly(page):
    for name, value, spec, grid, prefix in CHANGES:
        before = page.run(PICTURE)
        page.choose(name, value)
        check_values(page, spec, grid, prefix)
        assert page.run(PICTURE) != before, name


def extra_parameters(host, spec):
    with torch.device("meta"):
        model = timm.create_model(host)
        plain = count_parameters(model)
        return count_parameters(irpe.equip(model, spec)) - plain


def test_every_control_of_the_costs_changes_the_numbers_rightly(page):
    changes = [
        ("targets", "qkv", "product-contextual-qkv", "deit_small_patch16_224"),
        ("shared", False, "product-contextual-qkv+unshared", "deit_small_patch16_224"),
        ("model", "DeiT-Ti", "product-contextual-qkv+unshared", "deit_tiny_patch16_224"),
        ("model", "DeiT-B", "product-contextual-qkv+unshared", "deit_base_patch16_224"),
        ("mode", "bias", "product-bias-k+unshared", "deit_base_patch16_224"),
        ("shared", True, "product-bias-k", "deit_base_patch16_224"),
        ("mode", "contextual", "product-contextual-qkv", "deit_base_patch16_224"),
    ]
    for name, value, spec, host in changes:
        before = page.run("document.querySelector('#numbers').textContent")
        page.choose(name, value)
        assert check_values(page, spec, (14, 14), 1) == extra_parameters(host, spec)
        assert page.run("document.querySelector('#numbers').textContent") != before
    assert page.run(NUMBERS)[3] == f"+{12 * 197 * 768 * 50 * 3 / 1e6:.2f} M"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("rows", "0", "rows must be a whole number of 1 to 64."),
        ("columns", "2.5", "columns must be a whole number of 1 to 64."),
        ("prefix", "", "prefix tokens must be a whole number of 0 to 16."),
        ("ratio", "-1", "ratio must be a number of 0.1 to 64."),
    ],
)
def test_wrong_values_are_said_and_nothing_wrong_is_shown(page, name, value, message):
    good = page.run(f"document.querySelector('#{name}').value")
    page.choose(name, value)
    assert page.run("document.querySelector('#error').textContent") == message
    assert page.run("document.querySelector('#shown').offsetParent") is None
    page.choose(name, good)
    assert page.run("document.querySelector('#error').hidden") is True
    check_values(page, "product-contextual-k", (14, 14), 1)


def test_an_index_that_is_none_is_said(page):
    page.choose("kind", "piecewise")
    page.choose("gamma", "2")
    assert "must hold" in page.run("document.querySelector('#error').textContent")


def test_random_settings_equal_the_core_in_the_browser(page):
    cases = list(random_settings(200, seed=1))
    settings = json.dumps([[as_page_spec(s), g, p] for s, g, p in cases])
    shown = page.run(
        f"{settings}.map(([spec, grid, prefix]) => "
        "bucketMaps(spec.method, spec.index, grid, prefix)"
        ".map((map) => [map.rows, map.used, [...Array(prefix + grid[0] * grid[1]).keys()].map("
        "(key) => bucketOf(map, grid, prefix, prefix, key))]))"
    )
    for (spec, grid, prefix), maps in zip(cases, shown, strict=True):
        expected = [
            [item.num_buckets, item.used_rows.tolist(), item.ids[prefix].tolist()]
            for item in irpe.bucket_maps(spec, grid, prefix)
        ]
        assert maps == expected, (spec, grid, prefix)


def cell(row, column, rows=14, columns=14, above=1.5):
    """The middle of a patch, in parts of the canvas, with the prefix tokens above."""
    return (column + 0.5) / columns, (above + row + 0.5) / (above + rows)


def test_the_pointer_moves_the_star_and_a_click_holds_it(page):
    before = page.run(PICTURE)
    page.point(CANVAS, *cell(2, 11))
    assert page.run("state.star") == [2, 11]
    check_values(page, "product-contextual-k", (14, 14), 1)
    assert page.run(PICTURE) != before
    page.point(CANVAS, *cell(3, 4), kind="click")
    page.point(CANVAS, *cell(12, 4))
    assert page.run("state.star") == [3, 4]
    status = page.run("document.querySelector('#status').textContent")
    ids = irpe.bucket_maps("product-contextual-k", (14, 14), 1)[0].ids[1 + 3 * 14 + 4]
    bucket = int(ids[1 + 12 * 14 + 4])
    assert f"offset (-9, 0) is bucket {bucket}, shared by {int((ids == bucket).sum())}." in status
    marked = page.run(PICTURE)
    page.point(CANVAS, *cell(0, 0))
    assert page.run(PICTURE) != marked
    page.press("Escape")
    page.point(CANVAS, *cell(5, 5))
    assert page.run("state.star") == [5, 5]


def test_the_arrow_keys_move_the_star_and_stop_at_the_edge(page):
    page.run("document.querySelector('#maps canvas').focus()")
    for key in ["ArrowUp", "ArrowRight", "ArrowRight", "ArrowDown", "ArrowDown", "ArrowLeft"]:
        page.press(key)
    assert page.run("state.star") == [8, 8]
    check_values(page, "product-contextual-k", (14, 14), 1)
    for _ in range(10):
        page.press("ArrowDown")
    assert page.run("state.star") == [13, 8]


def test_controls_can_be_reached_by_keyboard(run_page):
    page, reached = run_page, set()
    for _ in range(40):
        page.press_tab()
        reached.add(page.run("document.activeElement.id || document.activeElement.tagName"))
    wanted = {"rows", "columns", "prefix", "method", "mode", "targets", "shared", "kind", "ratio"}
    assert wanted | {"model", "CANVAS", "block", "head", "table", "weights"} <= reached


@pytest.mark.parametrize("head", ["mean", "0", "1"])
@pytest.mark.parametrize("block", [0, 1])
def test_what_was_learned_is_shown_for_block_and_head(run_page, learned, block, head):
    page = run_page
    page.choose("block", str(block))
    page.choose("head", head)
    call = learned[block]
    before = page.run("document.querySelector('#weights').toDataURL()")
    page.run("document.querySelector('#weights').focus()")
    page.press("ArrowUp")
    row, column = page.run("learned.star")
    assert (row, column) == (0, 2)
    b = call.extra_weights()[:, 1 + row * 5 + column, 1:]
    expected = b.mean(0) if head == "mean" else b[int(head)]
    shown = torch.tensor(page.run("chosenWeights()"))
    torch.testing.assert_close(shown, expected, rtol=2e-3, atol=2e-3)
    shares = (expected - expected.mean()) / call.score_unit()
    drawn = torch.tensor(page.run("scoreShares()"))
    torch.testing.assert_close(drawn, shares, rtol=2e-3, atol=2e-3)
    assert page.run("document.querySelector('#weights').toDataURL()") != before


def test_tables_of_blocks_are_shown(run_page, learned):
    page = run_page
    image = "document.querySelector('#table-image').toDataURL()"
    seen = set()
    for block, count in ((0, 4), (1, 1)):
        page.choose("block", str(block))
        for table in range(count):
            page.choose("table", str(table))
            seen.add(page.run(image))
    assert len(seen) == 5
    text = page.run("document.querySelector('#table-status').textContent")
    largest = float(learned[1].encoding.bias_tables[0].detach()[:, :-1].abs().max())
    assert text.startswith("49 buckets")
    assert float(text.split()[-1].rstrip(".")) == pytest.approx(largest, rel=0.01)


OVER = """[...document.querySelectorAll("section")].flatMap((section) => {
  const right = (element) => element.getBoundingClientRect().right;
  return [...section.querySelectorAll("*")].filter((e) => right(e) > right(section) - 8);
}).map((e) => e.id || e.tagName)"""


@pytest.mark.parametrize("width", [390, 768, 1024, 1100, 1120, 1200, 1280, 1600])
def test_nothing_runs_over_its_card(file, tmp_path, width):
    with Page(file, tmp_path / "profile", width, 900) as page:
        assert page.run(OVER) == []
        assert page.run("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize(("width", "dark"), [(390, False), (390, True), (1280, True)])
def test_widths_and_dark_mode(file, tmp_path, width, dark):
    with Page(file, tmp_path / "profile", width, 844, dark=dark, touch=width < 500) as page:
        assert page.run("document.documentElement.scrollWidth") <= width
        background = page.run("getComputedStyle(document.body).backgroundColor")
        assert background == ("rgb(20, 23, 26)" if dark else "rgb(251, 251, 249)")
        if width < 500:
            assert box(page, CANVAS)[3] < min(844, box(page, "#controls")[1])
            page.tap(CANVAS, *cell(1, 3, 3, 5))
            assert page.run("state.star") == [1, 3]
            check_values(page, "cross-contextual-qk@1.5+unshared", (3, 5), 1)
        assert page.errors == []
