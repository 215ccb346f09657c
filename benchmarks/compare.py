"""What a change costs: the same attentions and models in two checkouts, side by side.

python -m benchmarks.compare OLD NEW                   # the sizes of benchmarks.implementations
python -m benchmarks.compare OLD NEW --most-pairs 2e6 --rounds 5 --models vit_tiny_patch16_224
IRPE_NATIVE=0 python -m benchmarks.compare OLD NEW     # without the compiled kernels

One process for each checkout; they take turns in every round. CPU time of one thread, the median of
NEW relative to that of OLD: below 1 the new one is faster. OLD and NEW are folders of the project,
for example of `git worktree add ../old COMMIT`.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ENCODINGS = {
    "SDPA": None,  # a control: nothing of the project runs
    "K": "product-contextual-k",
    "QKV": "product-contextual-qkv",
    "cross K": "cross-contextual-k",
}
SECONDS = 0.02  # a timing repeats what takes less


def main() -> None:
    arguments = parse_arguments()
    if arguments.serve:
        serve()
        return
    workers = [start(folder) for folder in arguments.folders]
    ratios: dict[str, list[float]] = {}
    for cell in cells(arguments):
        taken: list[list[float]] = [[], []]
        for _ in range(arguments.rounds):
            for worker, seconds in zip(workers, taken, strict=True):
                seconds.append(ask(worker, cell))
        old, new = map(statistics.median, taken)
        ratios.setdefault(f"{cell['encoding']}, {cell['what']}", []).append(new / old)
        where = cell["model"] or cell["shape"]
        print(f"{where!s:24} {cell['encoding']:8} {cell['what']:9} {1e3 * old:9.3f} ms "
              f"-> {1e3 * new:9.3f} ms  {new / old:.3f}", flush=True)  # fmt: skip
    print("geometric means")
    for name, found in ratios.items():
        mean = math.exp(statistics.fmean(map(math.log, found)))
        print(f"  {name:20} {mean:.3f}, at most {max(found):.3f}, of {len(found)}")


def cells(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns what is measured."""
    from benchmarks.implementations import all_shapes

    shapes = [
        (batch, heads, tokens, dim)
        for batch, heads, tokens, dim in all_shapes()
        if arguments.least_pairs < batch * heads * tokens**2 <= arguments.most_pairs
    ]
    where = [(shape, None) for shape in shapes] + [(None, name) for name in arguments.models]
    return [
        {"shape": shape, "model": model, "encoding": encoding, "what": what}
        for shape, model in where
        for what in ("inference", "training")
        for encoding in arguments.encodings
    ]


def start(folder: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, str(Path(__file__).resolve()), "--serve", ".", "."]
    environment = {**os.environ, "PYTHONPATH": str(folder.resolve() / "src")}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)


def ask(worker: "subprocess.Popen[str]", cell: dict[str, Any]) -> float:
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(json.dumps(cell) + "\n")
    worker.stdin.flush()
    return float(worker.stdout.readline())


def serve() -> None:
    """Answers each cell with the seconds that it takes."""
    torch.set_num_threads(1)
    last, run, repeats = "", None, 1
    for line in sys.stdin:
        if line != last:
            cell, last = json.loads(line), line
            run = make_model_run(cell) if cell["model"] else make_run(cell)
            run()  # loads what is loaded on first use
            repeats = max(1, math.ceil(SECONDS / measure(run, 1)))
        assert run is not None
        print(measure(run, repeats), flush=True)


def measure(run: Callable[[], object], repeats: int) -> float:
    start = time.thread_time()
    for _ in range(repeats):
        run()
    return (time.thread_time() - start) / repeats


def make_run(cell: dict[str, Any]) -> Callable[[], object]:
    import irpe

    torch.manual_seed(0)
    _, heads, tokens, dim = cell["shape"]
    side = int(tokens**0.5)
    q, k, v = (torch.randn(cell["shape"], requires_grad=True) for _ in range(3))
    leaves, attend = [q, k, v], lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v)
    if ENCODINGS[cell["encoding"]] is not None:
        spec = ENCODINGS[cell["encoding"]]
        encoding = irpe.RelativePositionEncoding(spec, heads, dim, tokens - side * side)
        for table in encoding.parameters():
            torch.nn.init.normal_(table, std=0.02)
        leaves.extend(encoding.parameters())
        attend = lambda: encoding(q, k, v, grid=(side, side))  # noqa: E731
    return with_passes(cell["what"], attend, leaves)


def make_model_run(cell: dict[str, Any]) -> Callable[[], object]:
    import timm

    import irpe

    torch.manual_seed(0)
    model = timm.create_model(cell["model"]).train(cell["what"] == "training")
    if ENCODINGS[cell["encoding"]] is not None:
        irpe.equip(model, ENCODINGS[cell["encoding"]])
    images = torch.randn(4, 3, *model.patch_embed.img_size)
    return with_passes(cell["what"], lambda: model(images), list(model.parameters()))


def with_passes(
    what: str, forward: Callable[[], torch.Tensor], leaves: list[torch.Tensor]
) -> Callable[[], object]:
    def infer() -> object:
        with torch.inference_mode():
            return forward()

    def train() -> object:
        out = forward()
        return torch.autograd.grad(out, leaves, torch.ones_like(out))

    return infer if what == "inference" else train


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs=2, help="two checkouts of the project")
    parser.add_argument("--least-pairs", type=float, default=0, help="leave out smaller calls")
    parser.add_argument("--most-pairs", type=float, default=math.inf, help="leave out larger calls")
    parser.add_argument("--encodings", nargs="+", default=list(ENCODINGS), choices=list(ENCODINGS))
    parser.add_argument("--models", nargs="*", default=["deit_small_patch16_224"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
