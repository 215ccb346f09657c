"""What a call of the library costs beside the arithmetic: small attentions and a small model.

python -m benchmarks.overhead    # CPU time of one thread, ratios of medians in one process

- One attention without gradients, (1, 2, 50, 24), K: relative to the same encoding by hand, in four
  lines of PyTorch (product with the table, gather, `scaled_dot_product_attention` with it as mask).
- A training step of the model of `irpe ablate`, K and QKV: relative to the model without encoding.
- An equipped vit_tiny_patch16_224 at 64 x 64, one image without gradients: relative to the plain
  model. Other hosts of its size: microseconds an attention that they cost above it.
"""

import argparse
from pathlib import Path

import timm
import torch
import torch.nn.functional as F  # noqa: N812
import transformers

import irpe
from benchmarks.implementations import repeated
from benchmarks.timing import interleaved_medians, write_report

GRID, HEADS, DIM = (7, 7), 2, 24
VIT = {"img_size": 28, "patch_size": 4, "embed_dim": 48, "depth": 3, "num_heads": 2}


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    results = {"one attention": one_attention(arguments.rounds)}
    results["training step"] = training_step(arguments.rounds)
    results["inference"], results["us an attention above the first"] = inference(arguments.rounds)
    for what, found in results.items():
        print(what, *(f"{name} {value:.2f}" for name, value in found.items()), sep="  ")
    write_report(arguments.output, results)


def one_attention(rounds: int) -> dict[str, float]:
    """Returns the time of one attention relative to four lines by hand."""
    encoding = irpe.RelativePositionEncoding("product-contextual-k", HEADS, DIM, 1)
    maps, table = encoding.maps(GRID), encoding.key_tables[0]
    ids, tables = maps[0].compact_ids.long(), [table.detach()]
    q, k, v = torch.randn(3, 1, HEADS, 50, DIM)

    def by_hand():
        z = q @ (table[0].T * DIM**-0.5)
        b = z.gather(-1, ids.expand(1, HEADS, -1, -1))
        return F.scaled_dot_product_attention(q, k, v, b)

    runs = {
        "by hand": by_hand,
        "PyTorch without encoding": lambda: F.scaled_dot_product_attention(q, k, v),
        "rpe_attention": lambda: irpe.rpe_attention(q, k, v, maps, key_tables=tables),
        "RelativePositionEncoding": lambda: encoding(q, k, v, grid=GRID),
    }
    with torch.no_grad():
        torch.testing.assert_close(by_hand(), encoding(q, k, v, grid=GRID))
        times = interleaved_medians({n: repeated(r, 200) for n, r in runs.items()}, rounds)
    return {name: round(times[name]["cpu"] / times["by hand"]["cpu"], 3) for name in runs}


def training_step(rounds: int) -> dict[str, float]:
    """Returns the time of a training step relative to the model without encoding."""
    runs = {}
    for name in ("without", "product-contextual-k", "product-contextual-qkv"):
        torch.manual_seed(0)
        model = timm.models.VisionTransformer(**VIT, in_chans=1, num_classes=10)
        if name != "without":
            irpe.equip(model, name)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        x, y = torch.randn(50, 1, 28, 28), torch.randint(10, (50,))

        def step(model=model, optimizer=optimizer, x=x, y=y):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

        runs[name] = step
    times = interleaved_medians({n: repeated(r, 3) for n, r in runs.items()}, rounds)
    plain = times["without"]["cpu"]
    return {name: round(times[name]["cpu"] / plain, 3) for name in runs}


SIDE, DEPTH, WIDTH = 64, 12, 192  # of vit_tiny_patch16_224, but for the size of the image
OF_TIMM = {"img_size": SIDE, "embed_dim": WIDTH, "depth": DEPTH, "num_heads": 3}
OF_TRANSFORMERS = {
    "image_size": SIDE, "hidden_size": WIDTH, "num_hidden_layers": DEPTH, "num_attention_heads": 3,
    "intermediate_size": 4 * WIDTH,
}  # fmt: skip
HOSTS = {
    name: lambda name=name: timm.create_model(name, **OF_TIMM)
    for name in (
        "vit_tiny_patch16_224",
        "vit_small_patch16_dinov3",
        "vit_small_patch16_rope_mixed_224",
        "beit_base_patch16_224",
        "vit_relpos_small_patch16_224",
    )
} | {
    "ViTModel": lambda: transformers.ViTModel(transformers.ViTConfig(**OF_TRANSFORMERS)),
    "DINOv3ViTModel": lambda: transformers.DINOv3ViTModel(
        transformers.DINOv3ViTConfig(**OF_TRANSFORMERS)
    ),
}


def inference(rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Returns what equipped models cost: the first as a ratio, others by attention above it."""
    runs, x = {}, torch.randn(1, 3, SIDE, SIDE)
    for name, make in HOSTS.items():
        for kind in ("plain", "equipped"):
            model = make().eval()
            if kind == "equipped":
                irpe.equip(model, "product-contextual-k")
            runs[name, kind] = lambda model=model: model(x)
    with torch.inference_mode():
        found = interleaved_medians({n: repeated(r, 5) for n, r in runs.items()}, rounds)
    times = {name: found[name]["cpu"] / 5 for name in runs}
    costs = {n: (times[n, "equipped"] - times[n, "plain"]) / DEPTH * 1e6 for n in HOSTS}
    first, *others = HOSTS
    ratio = times[first, "equipped"] / times[first, "plain"]
    return {first: round(ratio, 3)}, {n: round(costs[n] - costs[first], 1) for n in others}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("-o", "--output", type=Path, help="write a report here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
