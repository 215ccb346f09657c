"""The time that is left, from medians of like cells."""

from ablation.small import small_cells

from irpe.ablation.pace import Pace


def test_the_remaining_time_is_that_of_like_cells(tmp_path):
    cells = small_cells(tmp_path, "embedded", epochs=2)  # absolute, K, absolute, K
    pace = Pace(cells, jobs=2)
    assert pace.remaining() is None
    pace.start(cells[0], steps=10, done=0)
    for step, seconds in enumerate((1.0, 90.0, 1.0), 1):  # one step was disturbed
        pace.step(cells[0], step, seconds)
    assert pace.fraction(cells[0]) == 0.3
    assert pace.remaining() == (7 + 10 + 10 + 10) / 2  # K is taken to be as fast
    pace.step(cells[1], 1, 3.0)
    assert pace.remaining() == (7 + 27 + 10 + 30) / 2
    pace.evaluate(2.0)  # an epoch; two epochs and two shifts a cell
    left = 7 + 1.4 * 2 + 4 + 27 + 1.8 * 2 + 4 + 10 + 4 + 4 + 30 + 4 + 4
    assert abs(pace.remaining() - left / 2) < 1e-9
    for cell in cells[:3]:
        pace.end(cell)
    assert pace.remaining() == 30 + 4 + 4  # one cell has one job
