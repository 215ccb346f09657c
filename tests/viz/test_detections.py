"""Pictures of detections show the boxes, their names and scores, legibly."""

import random

import pytest

from irpe.viz import DetectedImage, plot_contact_sheet, plot_detections, save_figure
from irpe.core.colours import COLOURS
from irpe.viz.detections import readable_on

colors = pytest.importorskip("matplotlib.colors", reason="needs the extra 'viz'")
pillow = pytest.importorskip("PIL.Image", reason="needs the extra 'viz'")

BOXES = [[4, 10, 20, 8], [30, 2, 25, 25]]


def picture(width=64, height=32, mode="RGB"):
    return pillow.new(mode, (width, height), 100)


def crowd(width, height, count, classes=("cell", "platelet"), seed=0):
    """Boxes spread over a picture, many at its border."""
    draw = random.Random(seed)
    boxes = []
    for _ in range(count):
        w, h = width * draw.uniform(0.05, 0.2), height * draw.uniform(0.05, 0.25)
        boxes.append([draw.uniform(0, width - w), draw.uniform(0, height - h), w, h])
    labels = [draw.choice(classes) for _ in boxes]
    scores = [draw.random() for _ in boxes]
    truth = list(zip(boxes, labels, strict=True))
    return DetectedImage(picture(width, height), boxes, labels, scores, truth, f"{seed}.jpg")


def code(colour):
    return colors.to_hex(colour).upper()


def drawn(axes):
    """What the coloured rectangles show: place, colour, whether dashed."""
    return [
        (
            [*patch.get_xy(), patch.get_width(), patch.get_height()],
            code(patch.get_edgecolor()),
            patch.get_linestyle() not in ("-", "solid"),
        )
        for patch in axes.patches
        if code(patch.get_edgecolor()) != "#FFFFFF"  # what lies below, for contrast
    ]


def texts(axes):
    return [text.get_text() for text in axes.texts]


def legend(figure):
    return [text.get_text() for one in figure.legends for text in one.get_texts()]


def test_boxes_names_and_scores_are_drawn():
    figure = plot_detections(picture(), BOXES, ["dog", "cat"], [0.5, 0.912])
    (axes,) = figure.axes
    cat, dog = COLOURS[:2]
    assert drawn(axes) == [(BOXES[0], dog, False), (BOXES[1], cat, False)]  # the best on top
    assert texts(axes) == ["dog 0.50", "cat 0.91"]
    assert axes.images[0].get_extent() == [0, 64, 32, 0]  # boxes count from the picture's corner
    backgrounds = [code(text.get_bbox_patch().get_facecolor()) for text in axes.texts]
    assert backgrounds == [dog, cat]
    assert legend(figure) == []


def test_true_boxes_are_dashed_in_the_colour_of_their_class():
    figure = plot_detections(picture(), BOXES[:1], ["dog"], [0.5], truth=[(BOXES[1], "cat")])
    assert drawn(figure.axes[0]) == [(BOXES[1], COLOURS[0], True), (BOXES[0], COLOURS[1], False)]
    assert texts(figure.axes[0]) == [" cat ", "dog 0.50"]
    assert legend(figure) == ["found", "true"]


def test_that_nothing_was_found_is_said_with_the_threshold():
    figure = plot_detections(picture(), [], [], [], threshold=0.3)
    assert texts(figure.axes[0]) == ["nothing above 0.3"]
    items = [DetectedImage(picture(), [], [], [], [(BOXES[1], "cat")], threshold=0.25)]
    items.append(DetectedImage(picture(), BOXES[:1], ["cat"], [0.5], threshold=0.25))
    sheet = plot_contact_sheet(items)
    assert [texts(axes) for axes in sheet.axes] == [[" cat ", "nothing above 0.25"], ["0.50"]]


@pytest.mark.parametrize("size", [(640, 480), (300, 900), (4000, 700)])
def test_labels_stand_at_their_boxes_and_in_the_picture(size):
    item = crowd(*size, count=25)
    figure = plot_detections(item.image, item.boxes, item.labels, item.scores)
    figure.canvas.draw()
    (axes,) = figure.axes
    frame = axes.get_window_extent().padded(2)
    order = sorted(range(25), key=lambda n: item.scores[n])
    for text, number in zip(axes.texts, order, strict=True):
        assert text.get_text() == f"{item.labels[number]} {item.scores[number]:.2f}"
        left, top, width, _ = item.boxes[number]
        assert text.get_position() in ((left, top), (left + width, top))
        extent = text.get_bbox_patch().get_window_extent()
        assert frame.x0 <= extent.x0 < extent.x1 <= frame.x1
        assert frame.y0 <= extent.y0 < extent.y1 <= frame.y1


def test_the_best_cover_the_others():
    scores = [n / 40 for n in range(40)]
    figure = plot_detections(picture(), [[20, 10, 3, 3]] * 40, ["a class"] * 40, scores)
    assert texts(figure.axes[0]) == [f"a class {score:.2f}" for score in scores]
    assert len(drawn(figure.axes[0])) == 40


@pytest.mark.parametrize("colour", COLOURS)
def test_letters_stand_out_from_their_background(colour):
    def luminance(colour):
        parts = colors.to_rgb(colour)
        parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), parts, strict=True))

    dark, light = sorted(map(luminance, (colour, readable_on(colour))))
    assert (light + 0.05) / (dark + 0.05) > 3


def test_a_sheet_has_titles_scores_true_boxes_and_a_legend():
    items = [crowd(64, 48, 3, seed=seed) for seed in range(5)]
    figure = plot_contact_sheet(items, classes=("platelet", "cell"))
    assert len(figure.axes) == 5
    for axes, item in zip(figure.axes, items, strict=True):
        assert axes.get_title() == item.title
        names = [f" {label} " for _, label in item.truth]
        assert texts(axes) == names + [f"{score:.2f}" for score in sorted(item.scores)]
        assert [dashed for _, _, dashed in drawn(axes)] == [True] * 3 + [False] * 3
    assert legend(figure) == ["platelet", "cell", "found", "true"]
    lines = figure.legends[0].get_lines()
    assert [code(line.get_color()) for line in lines[:2]] == list(COLOURS[:2])


def test_a_sheet_of_more_classes_than_colours_has_names_on_boxes():
    names = [f"class {n}" for n in range(len(COLOURS) + 1)]
    items = [DetectedImage(picture(), BOXES[:1], [name], [0.5]) for name in names]
    figure = plot_contact_sheet(items)
    assert [texts(axes) for axes in figure.axes] == [[f"{name} 0.50"] for name in names]
    assert legend(figure) == []


def test_the_order_of_classes_gives_the_colours():
    for label, colour in (("cat", COLOURS[2]), ("dog", COLOURS[0])):
        figure = plot_detections(
            picture(), BOXES[:1], [label], [0.5], classes=["dog", "cow", "cat"]
        )
        assert drawn(figure.axes[0])[0][1] == colour
    with pytest.raises(ValueError, match="'cat' is not one of the classes: dog, cow"):
        plot_detections(picture(), BOXES[:1], ["cat"], [0.5], classes=["dog", "cow"])


@pytest.mark.parametrize("mode", ["L", "P", "RGBA"])
def test_pictures_of_any_mode_are_drawn_as_they_are(mode):
    image = picture(mode="RGB").convert(mode)
    (axes,) = plot_detections(image, [], [], []).axes
    shown = axes.images[0].get_array()
    assert shown.shape == (32, 64, 3)
    assert shown.tobytes() == image.convert("RGB").tobytes()


def test_long_titles_are_shortened_in_the_middle():
    item = DetectedImage(picture(), [], [], [], title="a" * 60 + "the end.jpg")
    (axes,) = plot_contact_sheet([item]).axes
    assert len(axes.get_title()) == 40
    assert axes.get_title().startswith("aaa")
    assert axes.get_title().endswith("the end.jpg")


def test_names_are_not_taken_for_formulas(tmp_path):
    item = DetectedImage(picture(), BOXES[:1], ["$5 \\or $9"], [0.5], title="$a_{.jpg$")
    figure = plot_contact_sheet([item])
    assert save_figure(figure, tmp_path / "sheet.png").is_file()
    assert (figure.axes[0].get_title(), legend(figure)) == ("$a_{.jpg$", ["$5 \\or $9"])
    one = plot_detections(item.image, item.boxes, item.labels, item.scores)
    assert save_figure(one, tmp_path / "one.png").is_file()


@pytest.mark.parametrize("name", ["sheet.png", "sheet.svg"])
def test_equal_sheets_are_equal_files(tmp_path, name):
    first, second = (
        save_figure(plot_contact_sheet([crowd(64, 48, 6)]), tmp_path / f"{n}{name}")
        for n in range(2)
    )
    assert first.read_bytes() == second.read_bytes()


def test_what_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match="2 boxes have 1 labels and 2 scores"):
        plot_detections(picture(), BOXES, ["cat"], [0.5, 0.4])
    with pytest.raises(ValueError, match="a true box is a pair"):
        plot_detections(picture(), [], [], [], truth=BOXES)
    with pytest.raises(ValueError, match="pass at least one picture"):
        plot_contact_sheet([])
