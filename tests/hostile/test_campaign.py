"""The campaign: a seeded part of it in every run of the tests, the rest with `pytest -m slow`."""

from contextlib import closing
from unittest.mock import ANY

import numpy as np
import pytest
import torch
from hostile import areas, disks, mounts, operators
from hostile.cases import Case, run

import irpe


def check(name, size, folder):
    if name == "disks" and not mounts.is_permitted():
        pytest.skip("needs a mount namespace: unshare --mount")
    count = areas.run_area(name, size, folder)
    assert count.cases
    assert not count.failures, "\n".join(count.failures[:10])


@pytest.mark.parametrize("name", areas.AREAS)
def test_a_part_of_the_campaign(name, tmp_path):
    check(name, areas.QUICK, tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*has no checksum")  # where the name of one is damaged
@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # where there is one core
@pytest.mark.parametrize("name", areas.AREAS)
def test_the_campaign(name, tmp_path):
    check(name, areas.WHOLE, tmp_path)


@pytest.mark.slow
def test_what_fails_on_a_full_disk_works_on_another(tmp_path):
    if not mounts.is_permitted():
        pytest.skip("needs a mount namespace: unshare --mount")
    with closing(disks.DiskServer(tmp_path, "plain")) as server:
        for arguments in disks.WRITING:
            before = server.listing()
            assert server.run(arguments) == (0, ANY), arguments
            assert server.listing() - before, arguments


def test_the_campaign_finds_what_is_wrong(monkeypatch):
    """A term that is left out, a row that is off by one, an error that is not ours."""
    plain = irpe.rpe_attention

    def without_bias(*args, bias_tables=None, **options):
        zero = bias_tables and [0 * table for table in bias_tables]
        return plain(*args, bias_tables=zero, **options)

    monkeypatch.setattr(irpe, "rpe_attention", without_bias)
    assert run(operators.cases(0, 20)).failures
    assert run([Case("a defect", lambda: {}["nothing"])]).failures


def test_the_oracle_is_plain_attention_without_tables():
    q, k, v = (np.random.default_rng(n).standard_normal((2, 2, 5, 4)) for n in range(3))
    x = {"q": q, "k": k, "v": v, "bias": [], "query": [], "key": [], "value": []}
    found = operators.attention(x, [], 0.5, None)
    inputs = (torch.tensor(part) for part in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(*inputs, scale=0.5)
    torch.testing.assert_close(torch.tensor(found), expected)


@pytest.mark.parametrize("impl", ["auto", *operators.IMPLEMENTATIONS])
@pytest.mark.parametrize("mask", ["none", "learned"])
def test_an_empty_batch_where_grid_rows_repeat(impl, mask):
    draw = operators.Draw([0, 0])
    draw.grid, draw.prefix, draw.batch, draw.mask = (3, 5), 0, 0, mask
    draw.method, draw.targets, draw.dtype = "cross", "k", torch.bfloat16
    assert operators.check_attention(draw, impl) in ("equal", "refused")
