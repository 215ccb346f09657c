"""What positions cost in timm's own modules and as encodings of this library, on DeiT-S.

python -m benchmarks.theirs
python -m benchmarks.theirs --rounds 9 --batch 4

Each model is compared with the same one without positions in its attention: timm's relative biases
with its ViT of such biases, its rotary ViTs with the same class unrotated, ours with DeiT-S. All
are DeiT-S in size (197 tokens, 6 heads of 64) and take turns; CPU times of one thread, medians.
"""

import argparse
from pathlib import Path

import timm
import torch
from timm.models.vision_transformer_relpos import VisionTransformerRelPos
from torch import nn

import irpe
from benchmarks.models import PASSES, make_run, randomize_tables
from benchmarks.timing import interleaved_medians, ratios_to, write_report

DEIT, BIASED, ROTARY = "DeiT-S", "timm's ViT with biases", "timm's rotary ViT"
ENCODINGS = (
    "product-bias-k",
    "bias-table",
    "log-cpb",
    "rope-axial",
    "rope-mixed",
    "decomposed",
    "product-contextual-k",
)


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    families = make_families()
    images = torch.randn(arguments.batch, 3, 224, 224)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for what in PASSES:
        runs = {
            f"{plain}/{name}": make_run(model, images, what)
            for plain, models in families.items()
            for name, model in models.items()
        }
        medians = interleaved_medians(runs, arguments.rounds)
        for plain, models in families.items():
            own = {name: medians[f"{plain}/{name}"] for name in models}
            found.setdefault(plain, {})[what] = ratios_to("plain", own, "cpu")
    print_table(found)
    write_report(arguments.output, {"batch": arguments.batch, **found})


def make_families() -> dict[str, dict[str, nn.Module]]:
    """Returns models by what they are compared with, "plain" among each of them."""
    ours = {"plain": timm.create_model("deit_small_patch16_224")}
    for encoding in ENCODINGS:
        ours[encoding] = irpe.equip(timm.create_model("deit_small_patch16_224"), encoding)
        randomize_tables(ours[encoding])
    names = ("vit_small_patch16_rope_224", "vit_small_patch16_rope_mixed_224")
    turned = {"plain": timm.create_model(names[0], use_rot_pos_emb=False)}
    turned |= {name: timm.create_model(name) for name in names}
    biased = {"plain": make_biased("bias")}
    for block in biased["plain"].blocks:
        block.attn.rel_pos = None
    biased |= {"relative bias": make_biased("bias"), "Swin v2's bias": make_biased("mlp-swin")}
    return {BIASED: biased, ROTARY: turned, DEIT: ours}


def make_biased(kind: str) -> nn.Module:
    """Returns timm's ViT with a relative bias in each block, as large as DeiT-S."""
    return VisionTransformerRelPos(
        embed_dim=384,
        num_heads=6,
        class_token=True,
        global_pool="token",
        init_values=None,
        rel_pos_type=kind,
        rel_pos_dim=512 if kind.startswith("mlp") else None,
    )


def print_table(found: dict[str, dict[str, dict[str, float]]]) -> None:
    print(f"CPU time relative to the same model without it: {' / '.join(PASSES)}")
    for plain, passes in found.items():
        for name in passes[PASSES[0]]:
            ratios = " / ".join(f"{passes[what][name]:.2f}" for what in PASSES)
            print(f"{plain:24}{name:34}{ratios}", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-o", "--output", type=Path, help="write a report here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
