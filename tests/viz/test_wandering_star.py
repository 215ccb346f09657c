import pytest
import timm
import torch
from PIL import Image

import irpe
from irpe import viz
from irpe.viz.wandering_star import wander


@pytest.fixture(scope="module")
def calls():
    sizes = {"img_size": (24, 40), "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
    model = irpe.equip(timm.create_model("vit_tiny_patch16_224", **sizes), "product-contextual-k")
    torch.nn.init.normal_(model.blocks[0].attn.rpe.key_tables[0])
    return viz.capture(model, torch.randn(1, 3, 24, 40))


@pytest.mark.parametrize("grid", [(1, 1), (1, 4), (3, 5), (14, 14)])
def test_the_star_goes_once_around_by_steps_of_one_patch(grid):
    trip = wander(grid)
    assert len(set(trip)) == len(trip)
    assert all(0 <= row < grid[0] and 0 <= column < grid[1] for row, column in trip)
    after = trip[1:] + trip[:1]
    steps = [abs(a[0] - b[0]) + abs(a[1] - b[1]) for a, b in zip(trip, after, strict=True)]
    assert max(steps[:-1], default=0) <= 1


@pytest.mark.parametrize("ending", viz.wandering_star.ANIMATIONS)
def test_it_moves_and_is_small(calls, tmp_path, ending):
    pictures = viz.animate_star(calls[0], Image.new("RGB", (40, 24)))
    path = viz.save_animation(pictures, tmp_path / f"star{ending}")
    with Image.open(path) as moving:
        assert moving.n_frames == len(pictures) == len(wander((3, 5)))
        assert moving.info["loop"] == 0
    assert path.stat().st_size < 400_000
    assert len({picture.tobytes() for picture in pictures}) == len(pictures)


def test_an_encoding_of_two_maps_is_refused(tmp_path):
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
    model = irpe.equip(timm.create_model("vit_tiny_patch16_224", **sizes), "cross-bias-k")
    (call,) = viz.capture(model, torch.randn(1, 3, 16, 16))
    with pytest.raises(irpe.UserError, match="cross-bias-k"):
        viz.animate_star(call)
    with pytest.raises(irpe.UserError, match=r"star\.png"):
        viz.save_animation([], tmp_path / "star.png")
