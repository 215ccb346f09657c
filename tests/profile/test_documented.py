"""The costs on the pages of encodings are those of the models."""

import re
from pathlib import Path

import pytest

pytest.importorskip("timm", reason="needs the extra 'timm'")

from irpe.core.encodings import NAMES
from irpe.core.methods import METHODS
from irpe.profile.cost import count

PAGE = Path(__file__).parents[2] / "docs/explanation/encodings.md"
COST = re.compile(r"^`(\S+)`: ([-+][\d,]+) parameters, \+([\d.]+) M MACs", re.MULTILINE)
COSTS = COST.findall(PAGE.read_text())
DEIT_S = "deit_small_patch16_224"


def test_every_encoding_has_a_cost_line():
    texts = {text for text, _, _ in COSTS}
    assert {*NAMES} - {"none"} < texts
    assert {f"{method}-contextual-k" for method in METHODS} < texts


@pytest.fixture(scope="module")
def plain():
    return count(DEIT_S, "none")


@pytest.mark.parametrize(("text", "parameters", "macs"), COSTS, ids=[cost[0] for cost in COSTS])
def test_cost_lines_are_counted(plain, text, parameters, macs):
    encoded = count(DEIT_S, text)
    assert encoded.parameters - plain.parameters == int(parameters.replace(",", ""))
    assert f"{(encoded.macs - plain.macs) / 1e6:.1f}" == macs
