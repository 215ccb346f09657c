"""What the encodings cost one attention as the image grows: time and memory against SDPA's.

python -m benchmarks.attention
python -m benchmarks.attention --sides 14,28,32 --rounds 3

Times are CPU times of one thread, medians of interleaved rounds.
"""

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812

import irpe
from benchmarks.timing import interleaved_medians, write_report

HEADS, DIM = 6, 64
FIGURE = Path("docs/figures/attention-growth.png")
ENCODINGS = {
    "plain": None,
    "bias": "product-bias-k",
    "K": "product-contextual-k",
    "QKV": "product-contextual-qkv",
    "cross K": "cross-contextual-k",
    "cross QKV": "cross-contextual-qkv",
}


def main() -> None:
    arguments = parse_arguments()
    if arguments.memory_of:
        name, side = arguments.memory_of.split(":")
        print(json.dumps(peak_memory(name, int(side))))
        return
    torch.set_num_threads(1)
    sides = [int(side) for side in arguments.sides.split(",")]
    rows = [measure(side, arguments.rounds) for side in sides]
    print_tables(rows)
    results = {"heads": HEADS, "dim": DIM, "batch": 1, "rows": rows, "exponents": exponents(rows)}
    write_report(arguments.output, results)
    draw(rows, FIGURE)


def measure(side: int, rounds: int) -> dict[str, object]:
    row: dict[str, object] = {"tokens": side * side}
    for what in ("inference", "training step"):
        runs = {name: make_run(name, side, what) for name in ENCODINGS}
        row[what] = {name: t["cpu"] for name, t in interleaved_medians(runs, rounds).items()}
    peaks = {name: peak_in_subprocess(name, side) for name in ENCODINGS}
    row["extra MB"] = {name: peaks[name] - peaks["plain"] for name in ENCODINGS}
    row["one (heads, n, n) tensor in MB"] = HEADS * side**4 * 4 / 2**20
    return row


def make_run(name: str, side: int, what: str) -> Callable[[], object]:
    torch.manual_seed(0)
    leaves = [torch.randn(1, HEADS, side * side, DIM, requires_grad=True) for _ in range(3)]
    attention = F.scaled_dot_product_attention
    if ENCODINGS[name]:
        encoding = irpe.RelativePositionEncoding(ENCODINGS[name], HEADS, DIM)
        leaves.extend(encoding.parameters())

        def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return encoding(q, k, v, grid=(side, side))

    def infer() -> object:
        with torch.inference_mode():
            return attention(*leaves[:3])

    def train() -> object:
        return torch.autograd.grad(attention(*leaves[:3]).sum(), leaves)

    return infer if what == "inference" else train


def peak_memory(name: str, side: int) -> float:
    """Returns the peak of a forward and a backward pass in MB, maps included, inputs not."""
    torch.set_num_threads(1)
    make_run("K", 2, "training step")()  # loads what is loaded on first use
    run = make_run(name, side, "training step")
    Path("/proc/self/clear_refs").write_text("5")  # the peak from now on, not that of the imports
    before = resident("VmRSS")
    run()
    return resident("VmHWM") - before


def resident(field: str) -> float:
    """Returns a line of this process's memory account in MB (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def peak_in_subprocess(name: str, side: int) -> float:
    command = [sys.executable, "-m", "benchmarks.attention", "--memory-of", f"{name}:{side}"]
    return float(subprocess.run(command, capture_output=True, check=True, text=True).stdout)


def exponents(rows: list[dict]) -> dict[str, dict[str, float]]:
    """Returns the slope of log time over log tokens, by least squares."""
    fitted: dict[str, dict[str, float]] = {}
    for what in ("inference", "training step"):
        fitted[what] = {}
        for name in ENCODINGS:
            x = [math.log(row["tokens"]) for row in rows]
            y = [math.log(row[what][name]) for row in rows]
            mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
            above = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
            below = sum((a - mean_x) ** 2 for a in x)
            fitted[what][name] = above / below if below else math.nan
    return fitted


def print_tables(rows: list[dict]) -> None:
    for what in ("inference", "training step"):
        print(f"{what}: time relative to SDPA")
        print(f"{'tokens':>8}" + "".join(f"{name:>11}" for name in ENCODINGS))
        for row in rows:
            ratios = [row[what][name] / row[what]["plain"] for name in ENCODINGS]
            print(f"{row['tokens']:8}" + "".join(f"{ratio:11.2f}" for ratio in ratios))
        slopes = exponents(rows)[what]
        print(f"{'exponent':>8}" + "".join(f"{slopes[name]:11.2f}" for name in ENCODINGS))
    print("forward and backward: peak memory beyond SDPA's in MB, maps included")
    print(f"{'tokens':>8}" + "".join(f"{name:>11}" for name in ENCODINGS) + "  one (heads, n, n)")
    for row in rows:
        extra = "".join(f"{row['extra MB'][name]:11.1f}" for name in ENCODINGS)
        print(f"{row['tokens']:8}{extra}{row['one (heads, n, n) tensor in MB']:19.1f}")


def draw(rows: list[dict], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots(1, 2)
    tokens = [row["tokens"] for row in rows]
    slopes = exponents(rows)["inference"]
    for name in ENCODINGS:
        label = f"{'SDPA' if name == 'plain' else name}, exponent {slopes[name]:.2f}"
        axes[0].plot(tokens, [row["inference"][name] * 1e3 for row in rows], "o-", label=label)
        if name == "plain":
            axes[1].plot([], [])  # the colours stay those of the left
            continue
        axes[1].plot(tokens, [max(row["extra MB"][name], 0.1) for row in rows], "o-", label=name)
    whole = [row["one (heads, n, n) tensor in MB"] for row in rows]
    axes[1].plot(tokens, whole, "k--", label="one (heads, n, n) tensor")
    axes[0].set(xscale="log", yscale="log", xlabel="tokens", ylabel="inference, ms")
    axes[1].set(xscale="log", yscale="log", xlabel="tokens", ylabel="extra memory, MB")
    for axis in axes:
        axis.set_xticks(tokens, [str(count) for count in tokens], fontsize=8, rotation=30)
        axis.minorticks_off()
        axis.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
    print(f"drawn to {path}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sides", default="14,28,32,48,64", help="grid sides, comma-separated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path, help="write a report here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
