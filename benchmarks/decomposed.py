"""What SAM's own encoding costs as the library computes it, and converted into our tables.

python -m benchmarks.decomposed
python -m benchmarks.decomposed --sides 14,32 --rounds 3

One attention of SAM's base model (12 heads of 64) over a map of side x side tokens: the default of
transformers ("sdpa") as it is, equipped with builtin_bias="keep" and with "convert". Times are CPU
times of one thread, medians of interleaved rounds.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from transformers import SamVisionConfig
from transformers.models.sam.modeling_sam import SamVisionSdpaAttention

import irpe
from benchmarks.attention import resident
from benchmarks.timing import interleaved_medians, write_report

HEADS, DIM = 12, 64
CHOICES = ("theirs", "keep", "convert")


def main() -> None:
    arguments = parse_arguments()
    if arguments.memory_of:
        choice, side = arguments.memory_of.split(":")
        print(json.dumps(peak_memory(choice, int(side))))
        return
    torch.set_num_threads(1)
    sides = [int(side) for side in arguments.sides.split(",")]
    rows = [measure(side, arguments.rounds) for side in sides]
    print_table(rows)
    write_report(arguments.output, {"heads": HEADS, "dim": DIM, "batch": 1, "rows": rows})


def measure(side: int, rounds: int) -> dict[str, object]:
    row: dict[str, object] = {"side": side, "difference": largest_difference(side)}
    for what in ("inference", "training step"):
        runs = {choice: make_run(choice, side, what) for choice in CHOICES}
        row[what] = {name: t["cpu"] for name, t in interleaved_medians(runs, rounds).items()}
    row["peak MB"] = {choice: peak_in_subprocess(choice, side) for choice in CHOICES}
    row["one (heads, n, n) tensor in MB"] = HEADS * side**4 * 4 / 2**20
    return row


def make_attention(choice: str, side: int) -> nn.Module:
    """Returns an attention over the whole image, with vectors as large as queries are."""
    torch.manual_seed(0)
    config = SamVisionConfig(image_size=16 * side, hidden_size=HEADS * DIM)
    attention = SamVisionSdpaAttention(config, window_size=0).eval()
    for vectors in (attention.rel_pos_h, attention.rel_pos_w):
        nn.init.normal_(vectors, std=0.1)
    if choice != "theirs":
        irpe.equip(attention, f"cross-contextual-k@clip{side - 1}", builtin_bias=choice)
    return attention


def make_run(choice: str, side: int, what: str) -> Callable[[], object]:
    attention = make_attention(choice, side)
    x = torch.randn(1, side, side, HEADS * DIM, generator=torch.Generator().manual_seed(1))
    leaves = list(attention.parameters())

    def infer() -> torch.Tensor:
        with torch.inference_mode():
            return attention(x)[0]

    def train() -> object:
        return torch.autograd.grad(attention(x)[0].sum(), leaves)

    return infer if what == "inference" else train


def largest_difference(side: int) -> float:
    """Returns how far the converted output is from theirs, relative to its largest element."""
    theirs, ours = (make_run(choice, side, "inference")() for choice in ("theirs", "convert"))
    return float((theirs - ours).abs().max() / theirs.abs().max())


def peak_memory(choice: str, side: int) -> dict[str, float]:
    """Returns the peaks of a forward, and of a forward and backward pass, in MB, maps included."""
    torch.set_num_threads(1)
    peaks: dict[str, float] = {}
    for what in ("inference", "training step"):
        make_run(choice, 2, what)()  # loads what is loaded on first use
        run = make_run(choice, side, what)
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
        run()
        peaks[what] = resident("VmHWM") - before
    return peaks


def peak_in_subprocess(choice: str, side: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.decomposed", "--memory-of", f"{choice}:{side}"]
    return json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)


def print_table(rows: list[dict]) -> None:
    print("time relative to theirs, and peak memory in MB")
    for what in ("inference", "training step"):
        names = "".join(f"{choice:>10}" for choice in CHOICES)
        print(f"{what:14}{names}   MB:{names}  one (heads, n, n)  difference")
        for row in rows:
            times = [row[what][choice] / row[what]["theirs"] for choice in CHOICES]
            peaks = [row["peak MB"][choice][what] for choice in CHOICES]
            print(
                f"{row['side']:>3} x {row['side']:<8}"
                + "".join(f"{each:10.2f}" for each in times)
                + "      "
                + "".join(f"{each:10.0f}" for each in peaks)
                + f"{row['one (heads, n, n) tensor in MB']:19.0f}{row['difference']:12.0e}"
            )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sides", default="14,32,64", help="grid sides, comma-separated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path, help="write a report here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
