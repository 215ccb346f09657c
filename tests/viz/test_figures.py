"""The figures show the library's numbers, and are written whole or not at all."""

import subprocess
import sys

import pytest
import torch

import irpe
from irpe import viz
from irpe.nn.tables import RelativePositionEncoding
from irpe.viz.attention_maps import references, short_name

pytest.importorskip("matplotlib", reason="needs the extra 'viz'")
pytest.importorskip("timm", reason="needs the extra 'timm'")

from adapters.small_models import images, make_vit, perturb


def calls(spec="product-contextual-k", height=24, width=40):
    model = perturb(irpe.equip(make_vit(dynamic_img_size=True), spec))
    return viz.capture(model, images(height, width))


def pictures(figure):
    """The matrices that the axes of a figure show, colour scales left out."""
    shown = [axes.images[0].get_array() for axes in figure.axes if axes.images]
    return [torch.tensor(matrix.filled(torch.nan)) for matrix in shown]


def test_index_curves_are_the_functions():
    piecewise, clip = irpe.Piecewise(2, 4, 16), irpe.Clip(3)
    (axes,) = viz.plot_index(piecewise, clip).axes
    curves = [line for line in axes.lines if "(x)" in str(line.get_label())]
    for line, function in zip(curves, (piecewise, clip), strict=True):
        x = torch.tensor(line.get_xdata(), dtype=torch.float64)
        assert line.get_ydata().tolist() == function(x).tolist()
    assert float(x.max()) == 20.0


@pytest.mark.parametrize("prefix", [0, 1, 5])
@pytest.mark.parametrize("method", ["euclidean", "quantization", "cross", "product"])
def test_bucket_maps_show_who_shares_a_bucket(method, prefix):
    spec, grid, at = irpe.RPESpec(method, index=irpe.Piecewise.from_ratio(1.2)), (3, 7), (1, 4)
    shown = pictures(viz.plot_buckets([spec], grid, prefix, [at]))
    maps = irpe.bucket_maps(spec, grid, prefix)
    assert len(shown) == len(maps)
    for picture, bucket_map in zip(shown, maps, strict=True):
        ids = bucket_map.ids[prefix + at[0] * 7 + at[1]]
        above = 2 if prefix else 0
        assert picture.shape == (3 + above, 7)
        drawn = torch.cat([picture[:1].flatten()[:prefix], picture[above:].flatten()])
        assert torch.equal(drawn[:, None] == drawn, ids[:, None] == ids)
        assert int(picture.isnan().sum()) == above * 7 - prefix


def test_bucket_maps_by_default_are_those_of_the_paper():
    figure = viz.plot_buckets()
    titles = [axes.get_title() for axes in figure.axes[:5]]
    numbers = [20, 51, 28, 28, 50]
    assert [t.split("\n")[1] for t in titles] == [f"{n} buckets in use" for n in numbers]
    stars = [[(line.get_xdata()[0], line.get_ydata()[0]) for line in a.lines] for a in figure.axes]
    assert stars == [[(0, 2)]] * 5 + [[(7, 9)]] * 5  # two lines for the prefix token stand above


def test_encodings_with_short_names_are_drawn():
    short, full = (
        pictures(viz.plot_buckets([spec], (3, 5), 0, [(0, 0)]))
        for spec in ("K", "product-contextual-k")
    )
    assert torch.equal(short[0], full[0])
    shaw = pictures(viz.plot_buckets(["shaw"], (3, 5), 0, [(0, 0)]))
    clipped = pictures(viz.plot_buckets(["product-contextual-k@clip3"], (3, 5), 0, [(0, 0)]))
    assert torch.equal(shaw[0], clipped[0])
    assert viz.plot_positions(irpe.Positions((3, 5)), ["QKV"]).axes
    with pytest.raises(irpe.UserError, match=r"rope-axial.* has no buckets"):
        viz.plot_buckets(["rope-axial"])


def test_titles_tell_encodings_of_one_method_apart():
    specs = ["product-bias-k", "product-bias-k@clip2", "cross-bias-k@1:2:5"]
    titles = [a.get_title() for a in viz.plot_buckets(specs, (5, 5), 0, [(0, 0)]).axes]
    names = ["product", "product @clip2", "cross @1:2:5, rows", "cross @1:2:5, columns"]
    assert [title.split("\n")[0] for title in titles] == names


def test_flat_maps_stand_below_each_other_and_are_larger_than_their_stars():
    figure = viz.plot_buckets(grid=(7, 28))
    figure.canvas.draw()
    boxes = [axes.get_window_extent() for axes in figure.axes]
    assert [round(box.x0) for box in boxes[::2]] == [round(boxes[0].x0)] * 5
    for axes, box in zip(figure.axes, boxes, strict=True):
        star = axes.lines[0].get_markersize() * figure.dpi / 72
        assert star < 1.5 * box.width / 28
        assert box.height > axes.title.get_fontsize() * figure.dpi / 72


def test_more_prefix_tokens_than_columns_take_more_lines():
    (picture,) = pictures(viz.plot_buckets(["product-bias-k"], (2, 3), 5, [(0, 0)]))
    assert picture.shape == (2 + 3, 3)
    assert int((~picture[:2].isnan()).sum()) == 5


def test_weights_are_shares_of_the_scores_at_the_reference_patches():
    first, second = calls()
    shown = pictures(viz.plot_weights([first, second], heads=[1, 0]))
    assert len(shown) == 4
    rows, columns = first.grid.shape
    patches = [(row, column) for row in (0, 1, 2) for column in (0, 2, 4)]
    assert [patch for line in references(first.grid) for patch in line] == patches
    for picture, (call, head) in zip(
        shown, [(first, 1), (second, 1), (first, 0), (second, 0)], strict=True
    ):
        b = call.score_shares()[head, 1:, 1:].view(rows, columns, rows, columns)
        for number, patch in enumerate(patches):
            top, left = number // 3 * (rows + 1), number % 3 * (columns + 1)
            tile = picture[top : top + rows, left : left + columns]
            torch.testing.assert_close(tile, b[patch])
        assert int(picture.isnan().sum()) == picture.numel() - 9 * rows * columns


def test_weights_have_one_scale_that_shows_little_as_little():
    model = irpe.equip(make_vit(), "product-contextual-k", layers=[0])
    irpe.equip(model, "product-bias-k", layers=[1])
    torch.nn.init.normal_(model.blocks[1].attn.rpe.bias_tables[0], std=100.0)
    weak, strong = viz.capture(model, images(batch=1))
    torch.nn.init.normal_(weak.encoding.key_tables[0], std=1e-3)
    for drawn, bound in (([weak], 1.0), ([weak, strong], float(strong.score_shares().abs().max()))):
        figure = viz.plot_weights(drawn, heads=[0], image=viz.default_image())
        limits = [axes.images[0].get_clim() for axes in figure.axes[1 : 1 + len(drawn)]]
        assert limits == [limits[0]] * len(drawn)
        assert 1.0 <= limits[0][1] <= bound
    titles = [axes.get_title() for axes in figure.axes[:3]]
    assert titles[0] == "image, with the\nreference patches"
    assert float(titles[1].split("encoding: ")[1].split()[0]) < 1
    assert float(titles[2].split("encoding: ")[1].split()[0]) > 90


def test_reference_patches_are_spread_and_follow_the_longer_side():
    squares = [references(irpe.Grid((n, n))) for n in (1, 2, 7, 14)]
    assert [[column for _, column in grid[0]] for grid in squares] == [
        [0], [0, 1], [1, 3, 5], [2, 6, 11],
    ]  # fmt: skip
    assert references(irpe.Grid((7, 28))) == [[(3, 4)], [(3, 14)], [(3, 23)]]
    assert references(irpe.Grid((28, 7))) == [[(4, 3), (14, 3), (23, 3)]]


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("blocks.0.attn", "blocks.0"),
        ("model.encoder.layers.3.self_attn", "layers.3"),
        ("layers.1.blocks.0.attn", "layers.1.blocks.0"),
        ("attention", "attention"),
    ],
)
def test_names_of_attentions_are_short(name, short):
    assert short_name(name) == short


def test_scales_are_in_per_cent_without_an_exponent_beside_them():
    figure = viz.plot_attention(calls()[:1], (0, 0))
    figure.canvas.draw()
    for axes in figure.axes[-2:]:  # the scales
        assert axes.yaxis.get_offset_text().get_text() == ""
        assert all(label.get_text().endswith(" %") for label in axes.get_yticklabels())


def test_attention_shows_without_with_and_the_change():
    call = calls()[1]
    without, with_it, change = pictures(viz.plot_attention([call], (2, 1), head=0))
    query = 1 + 2 * 5 + 1
    torch.testing.assert_close(without, call.attention_without()[0, query, 1:].view(3, 5))
    torch.testing.assert_close(with_it, call.attention()[0, query, 1:].view(3, 5))
    torch.testing.assert_close(change, with_it - without)
    mean = pictures(viz.plot_attention([call]))[1]  # of the centre
    torch.testing.assert_close(mean, call.attention().mean(0)[1 + 1 * 5 + 2, 1:].view(3, 5))


def pooled_call():
    """Queries on 4 x 6 patches, keys on 2 x 3 cells of them."""
    encoding = RelativePositionEncoding(irpe.RPESpec(targets="k"), 2, 8, 0)
    torch.manual_seed(0)
    for table in encoding.parameters():
        torch.nn.init.normal_(table)
    where = irpe.Positions((4, 6), irpe.PooledGrid((2, 3), 2))
    q, k = torch.randn(1, 2, 24, 8), torch.randn(1, 2, 6, 8)
    return viz.CapturedAttention("blocks.0.attn", encoding, q, k, where, None, None)


def test_pooled_keys_are_drawn_on_their_own_grid():
    call = pooled_call()
    figure = viz.plot_attention([call], (3, 1), head=0)
    drawn = pictures(figure)[1]
    torch.testing.assert_close(drawn, call.attention()[0, 3 * 6 + 1].view(2, 3))
    (star,) = figure.axes[1].lines
    assert (star.get_ydata()[0], star.get_xdata()[0]) == (1.25, 0.25)
    (mosaic,) = pictures(viz.plot_weights([call], heads=[0], image=viz.default_image()))[1:]
    assert mosaic.shape == (3 * 3 - 1, 3 * 4 - 1)
    row, column = references(irpe.Grid((4, 6)))[2][1]
    expected = call.score_shares()[0, 6 * row + column].view(2, 3)
    torch.testing.assert_close(mosaic[6:8, 4:7], expected)
    with pytest.raises(ValueError, match="this picture is of one grid"):
        _ = call.grid


def test_costs_are_drawn_as_given():
    macs = {"direct": [1e9, 4e9], "per bucket": [5e8, 1e9]}
    (axes,) = viz.plot_cost_curves([224, 448], macs, [1e10, 2e10]).axes
    drawn = {line.get_label(): line.get_ydata().tolist() for line in axes.lines}
    assert drawn == {"direct": [10.0, 20.0], "per bucket": [5.0, 5.0]}
    assert axes.get_yscale() == "log"
    figure = viz.plot_cost_curves([224], {"bias": [0.0], "k": [1e9]}, [1e10])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["bias: nothing", "k"]
    bars = viz.plot_cost_bars({"none": 2.0, "k": 2.5}, {"none": 100, "k": 101}, "none").axes
    widths = [[bar.get_width() for bar in axes.patches] for axes in bars]
    assert widths == [[pytest.approx(25)], [pytest.approx(1)]]


def draw_nothing():
    def call():
        return calls()[0]

    return {
        "farthest = 0": lambda: viz.plot_index(farthest=0),
        r"patch \(3, 0\) is not on the grid 3x5": lambda: viz.plot_attention([call()], (3, 0)),
        r"patch \(0, -1\) is not on the grid": lambda: viz.plot_buckets(references=[(0, -1)]),
        "has 3 axes": lambda: viz.plot_buckets(grid=(2, 3, 4)),
        "at least one encoding": lambda: viz.plot_buckets([]),
        "at least one attention": lambda: viz.plot_weights([]),
        "head 2 does not exist: the attention has 0 to 1": lambda: viz.plot_weights([call()], [2]),
        "block 7 does not exist: the model has 0 to 1": lambda: viz.plot_tables(
            irpe.equip(make_vit(), "cross-bias-k"), [7]
        ),
        "at least one block": lambda: viz.plot_tables(irpe.equip(make_vit(), "cross-bias-k"), []),
        "2 values for 1 resolutions": lambda: viz.plot_cost_curves([224], {"k": [1, 2]}, [1]),
        "for the reference 'plain'": lambda: viz.plot_cost_bars({"k": 1}, {"k": 1}, "plain"),
        "at least one run": lambda: viz.plot_training({}),
    }


@pytest.mark.parametrize("message", list(draw_nothing()))
def test_what_cannot_be_drawn_is_an_error_that_says_why(message):
    with pytest.raises(ValueError, match=message):
        draw_nothing()[message]()


@pytest.mark.parametrize("grid", [(1, 1), (1, 28), (28, 1)])
def test_long_grids_leave_room_for_titles(tmp_path, grid):
    figure = viz.plot_buckets(grid=grid, num_prefix_tokens=0)
    viz.save_figure(figure, tmp_path / "buckets.png")  # matplotlib warns where there is none
    figure = viz.plot_weights(calls(height=8 * grid[0], width=8 * grid[1]))
    viz.save_figure(figure, tmp_path / "weights.png")


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_equal_figures_give_equal_files(tmp_path, ending):
    first, second = tmp_path / f"a.{ending}", tmp_path / f"b.{ending}"
    for path in (first, second):
        assert viz.save_figure(viz.plot_buckets(["product-bias-k"], (3, 5)), path) == path
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"a.{ending}", f"b.{ending}"]


def test_files_that_cannot_be_written_are_errors_and_leave_nothing(tmp_path):
    figure = viz.plot_index()
    with pytest.raises(ValueError, match=r"must end with \.png or \.svg"):
        viz.save_figure(figure, tmp_path / "figure.gif")
    with pytest.raises(FileNotFoundError, match="make it first"):
        viz.save_figure(figure, tmp_path / "none" / "figure.png")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(IsADirectoryError, match="name a file"):
        viz.save_figure(figure, tmp_path / "folder.png")
    assert [path.name for path in tmp_path.iterdir()] == ["folder.png"]


def test_figures_neither_use_pyplot_nor_the_settings_of_the_user(monkeypatch):
    import matplotlib

    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)  # others may have used it
    with matplotlib.rc_context({"font.size": 40, "image.origin": "lower"}):
        figure = viz.plot_buckets(["product-bias-k"], (3, 5))
        assert figure.axes[0].title.get_fontsize() < 10
        assert figure.axes[0].images[0].origin == "upper"
        assert matplotlib.rcParams["font.size"] == 40
    assert "matplotlib.pyplot" not in sys.modules


def test_importing_the_figures_loads_nothing_heavy():
    code = (
        "import sys, irpe.viz; "
        "print([name for name in ('matplotlib', 'PIL', 'timm') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")
