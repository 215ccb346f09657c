"""How many functions of the library a call goes through."""

import sys
from collections import Counter
from pathlib import Path

import torch
from adapters.hosts.table import make_on_tokens
from adapters.small_models import images, make_vit

import irpe

ROOT = f"{Path(irpe.__file__).parent}/"
NOT_COUNTED = ("<genexpr>", "<lambda>", "<listcomp>", "<dictcomp>", "<setcomp>", "<module>")


def calls_of(run, folder=""):
    """How often each function in a folder of the library is called."""
    found = Counter()

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT + folder):
            found[code.co_qualname] += code.co_name not in NOT_COUNTED

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def test_equip_of_twelve_blocks():
    irpe.equip(make_vit(), "product-contextual-k")  # what is found once for a class
    model = make_vit(depth=12)
    calls = calls_of(lambda: irpe.equip(model, "product-contextual-k"))
    assert calls.total() <= 600, calls.most_common(20)


def test_an_equipped_attention():
    model, x = irpe.equip(make_vit(depth=2), "product-contextual-k"), torch.randn(2, 17, 32)
    attention = model.blocks[0].attn
    model(images())
    for run in (lambda: attention(x), torch.inference_mode()(lambda: attention(x))):
        run()
        calls = calls_of(run)
        assert calls.total() <= 70, calls.most_common(20)


def test_an_answered_attention():
    """The adapters alone: what an encoding costs is not theirs."""
    rotary = make_on_tokens("vit_small_patch16_dinov3")
    for most, model in ((15, make_vit(depth=2)), (21, rotary)):
        irpe.equip(model, "product-contextual-k")
        x = images(*model.patch_embed.img_size)
        with torch.inference_mode():
            model(x)
            calls = calls_of(lambda model=model, x=x: model(x), "adapters/")
        assert calls.total() <= most * len(model.blocks) + 12, calls.most_common(20)
