"""What each implementation costs one attention, and how near "auto" comes to the best.

python -m benchmarks.implementations                     # the sizes that `choose` is judged by
python -m benchmarks.implementations --shape 8,6,197,64  # one size: batch, heads, tokens, head dim

CPU time of one thread relative to `scaled_dot_product_attention`, medians of interleaved rounds.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812

import irpe
from benchmarks.timing import interleaved_medians, write_report
from irpe.ops.choose import IMPLEMENTATIONS
from irpe.ops.impl.native import library

ENCODINGS = {
    "K": "product-contextual-k",
    "QKV": "product-contextual-qkv",
    "cross K": "cross-contextual-k",
}
HEADS = {24: 2, 64: 6}
PASSES = ("inference", "training")
MOST_PAIRS = 110_000_000  # one image of 4,096 tokens and 6 heads
MOST_WHOLE = 20_000_000  # what plain is tried on


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    rows = []
    for shape in arguments.shape or all_shapes():
        row = measure(shape, arguments.rounds)
        rows.append(row)
        print_row(row)
    for what in PASSES:
        worst = max(row[what][name]["auto / best"] for row in rows for name in ENCODINGS)
        print(f"{what}: auto takes at most {worst:.2f} times what the best implementation takes")
    write_report(arguments.output, {"rows": rows})


def all_shapes() -> list[tuple[int, int, int, int]]:
    """Returns the sizes that fit: batch, heads, tokens, head dim."""
    shapes = [
        (batch, HEADS[dim], tokens, dim)
        for dim in HEADS
        for tokens in (50, 197, 785, 4096)
        for batch in (1, 8, 64)
    ]
    return [s for s in shapes if s[0] * s[1] * s[2] ** 2 <= MOST_PAIRS]


def measure(shape: tuple[int, int, int, int], rounds: int) -> dict:
    row: dict = {"shape": shape}
    for what in PASSES:
        runs, chosen = {"SDPA": make_run(None, shape, what, "auto")[0]}, {}
        for name, spec in ENCODINGS.items():
            for impl in candidates(shape, name):
                runs[f"{name}, {impl}"], chosen[name] = make_run(spec, shape, what, impl)
        repeats = 1 if shape[0] * shape[1] * shape[2] ** 2 > 2_000_000 else 5
        times = interleaved_medians({n: repeated(r, repeats) for n, r in runs.items()}, rounds)
        plain = times.pop("SDPA")["cpu"]
        row[what] = {}
        for name in ENCODINGS:
            found = {
                impl: round(times[f"{name}, {impl}"]["cpu"] / plain, 3)
                for impl in candidates(shape, name)
            }
            best = min(found.values())
            row[what][name] = {
                **found,
                "auto": chosen[name],
                "auto / best": round(found[chosen[name]] / best, 3),
            }
    return row


def candidates(shape: tuple[int, int, int, int], name: str) -> list[str]:
    """Returns the implementations to try: those that hold all pairs only where these are few."""
    is_small = shape[0] * shape[1] * shape[2] ** 2 <= MOST_WHOLE
    left_out = ["reference", "triton", *(["native"] if library.why_unavailable() else [])]
    left_out += [] if name.startswith("cross") else ["folded"]
    return [
        impl
        for impl in IMPLEMENTATIONS
        if impl not in left_out and (is_small or impl in ("fast", "native"))
    ]


def make_run(
    spec: str | None, shape: tuple[int, int, int, int], what: str, impl: str
) -> tuple[Callable[[], object], str]:
    """Returns a pass, and the name of the implementation that "auto" takes for it."""
    torch.manual_seed(0)
    _, heads, tokens, dim = shape
    side = int(tokens**0.5)
    prefix = tokens - side * side  # 50, 197 and 785 tokens have a class token, 4,096 have none
    q, k, v = (torch.randn(shape, requires_grad=what == "training") for _ in range(3))
    grad, leaves, chosen = torch.randn(shape), [q, k, v], "auto"
    attend: Callable[[], torch.Tensor] = lambda: F.scaled_dot_product_attention(q, k, v)  # noqa: E731
    if spec is not None:
        encoding = irpe.RelativePositionEncoding(spec, heads, dim, prefix, impl=impl)
        for table in encoding.parameters():
            torch.nn.init.normal_(table, std=0.02)
        leaves.extend(encoding.parameters())
        grid = (side, side)
        attend = lambda: encoding(q, k, v, grid=grid)  # noqa: E731
        with torch.set_grad_enabled(what == "training"):
            chosen = encoding.explain(q, k, v, grid=grid).name

    def infer() -> object:
        with torch.inference_mode():
            return attend()

    def train() -> object:
        return torch.autograd.grad(attend(), leaves, grad)

    return (train if what == "training" else infer), chosen


def repeated(run: Callable[[], object], times: int) -> Callable[[], None]:
    def several() -> None:
        for _ in range(times):
            run()

    return several


def print_row(row: dict) -> None:
    print(f"batch, heads, tokens, dim = {row['shape']}: time relative to SDPA")
    for what in PASSES:
        for name in ENCODINGS:
            found = row[what][name]
            times = "".join(
                f"{impl:>10} {found[impl]:5.2f}" for impl in IMPLEMENTATIONS if impl in found
            )
            print(f"  {what:9} {name:8}{times}   auto: {found['auto']}", flush=True)


def parse_shape(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split(","))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", type=parse_shape, action="append", help="8,6,197,64; repeat it")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-o", "--output", type=Path, help="write a report here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
