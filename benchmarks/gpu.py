"""What a GPU gives: correctness, times, throughput and memory, for a machine that has one.

python -m benchmarks.gpu            # writes benchmarks/results/gpu.json and gpu.png
python -m benchmarks.gpu --stand-in # tries the lines of this file on the CPU, with small sizes

Times are medians of rounds in which the contestants take turns, relative to
`scaled_dot_product_attention` of the same dtype. Without a GPU the command fails.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812

import irpe
from benchmarks.timing import write_report
from irpe.ops.choose import IMPLEMENTATIONS

SPECS = {"K": "product-contextual-k", "QKV": "product-contextual-qkv", "bias": "product-bias-k"}
CONTESTANTS = [name for name in IMPLEMENTATIONS if name not in ("reference", "plain")]


class Attention(NamedTuple):
    """The size of one attention."""

    batch: int
    heads: int
    dim: int
    grid: tuple[int, int]
    num_prefix_tokens: int


class Plan(NamedTuple):
    """What is measured, and on what."""

    device: str
    dtype: torch.dtype
    attentions: dict[str, Attention]
    grids: list[tuple[int, int]]
    images: int
    size: int
    model: str
    rounds: int


GPU = Plan(
    "cuda",
    torch.bfloat16,
    {
        "DeiT-Ti": Attention(256, 3, 64, (14, 14), 1),
        "DeiT-S": Attention(256, 6, 64, (14, 14), 1),
        "DeiT-B": Attention(256, 12, 64, (14, 14), 1),
        "DETR": Attention(2, 8, 32, (25, 34), 0),
    },
    [(14, 14), (28, 28), (32, 32), (48, 48), (64, 64)],
    128,
    224,
    "vit_small_patch16_224",
    20,
)
STAND_IN = GPU._replace(
    device="cpu",
    attentions={"small": Attention(2, 2, 16, (3, 5), 1)},
    grids=[(4, 4), (8, 8)],
    images=2,
    size=32,
    model="vit_tiny_patch16_224",
    rounds=2,
)


def main() -> None:
    arguments = parse_arguments()
    if not arguments.stand_in and not torch.cuda.is_available():
        sys.exit("benchmarks.gpu needs a CUDA or ROCm GPU, and torch.cuda.is_available() is False")
    plan = STAND_IN if arguments.stand_in else GPU
    device = torch.cuda.get_device_name() if plan.device == "cuda" else "the CPU, as a stand-in"
    results: dict[str, Any] = {"device": device, "dtype": str(plan.dtype)}
    results["correctness"] = check_correctness(arguments.stand_in)
    results["attention"] = {n: time_attention(plan, a) for n, a in plan.attentions.items()}
    results["throughput"] = measure_throughput(plan)
    results["memory"] = {str(g): measure_memory(plan, g) for g in plan.grids}
    for name, found in results.items():
        print(f"{name}: {found}")
    write_report(arguments.output, results)
    draw(results, arguments.output.with_suffix(".png"))
    print(advice(results))
    if not results["correctness"]["passed"] and not arguments.stand_in:
        sys.exit(1)


def check_correctness(is_stand_in: bool) -> dict[str, Any]:
    """Runs the tests that need a GPU, the whole matrix of the kernels among them."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-m", "cuda", "tests/ops"]
    command += ["-k", "test_kernels_are_right"] if is_stand_in else []
    done = subprocess.run(command, capture_output=True, text=True)
    *_, last = done.stdout.strip().splitlines() or [""]
    return {"passed": done.returncode == 0 and " passed" in last, "summary": last}


def time_attention(plan: Plan, size: Attention) -> dict[str, dict[str, float]]:
    """Returns the time of each contestant, forward and backward, relative to SDPA."""
    found = {}
    for what in ("inference", "training"):
        runs = {"SDPA": make_run(plan, size, None, "auto", what)}
        for name, spec in SPECS.items():
            for impl in CONTESTANTS:
                runs[f"{name}, {impl}"] = make_run(plan, size, spec, impl, what)
        runs["K, flex"] = make_flex_run(plan, size, what)
        seconds = interleaved(plan, {name: run for name, run in runs.items() if works(run)})
        found[what] = {name: round(s / seconds["SDPA"], 3) for name, s in seconds.items()}
    return found


def make_run(
    plan: Plan, size: Attention, spec: str | None, impl: str, what: str
) -> Callable[[], object]:
    """Returns a pass of one attention."""
    q, k, v, grad = make_tokens(plan, size, what)
    leaves, attend = [q, k, v], lambda: F.scaled_dot_product_attention(q, k, v)
    if spec is not None:
        encoding = irpe.RelativePositionEncoding(
            spec, size.heads, size.dim, size.num_prefix_tokens, impl=impl
        ).to(plan.device, plan.dtype)
        leaves.extend(encoding.parameters())
        attend = lambda: encoding(q, k, v, grid=size.grid)  # noqa: E731
    return as_pass(attend, leaves, grad, what)


def make_flex_run(plan: Plan, size: Attention, what: str) -> Callable[[], object]:
    """Returns a pass of FlexAttention with a key table: z is gathered for each pair."""
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v, grad = make_tokens(plan, size, what)
    maps = irpe.bucket_maps(SPECS["K"], size.grid, size.num_prefix_tokens, plan.device)
    ids = maps[0].compact_ids.int()
    shape = (maps[0].num_used_buckets, size.dim)
    table = torch.randn(shape, device=plan.device, dtype=plan.dtype)
    table.requires_grad_(what == "training")
    flex = torch.compile(flex_attention) if plan.device == "cuda" else flex_attention

    def attend() -> torch.Tensor:
        z = (q @ table.mT) * size.dim**-0.5

        def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return score + z[b, h, i, ids[i, j]]

        return flex(q, k, v, score_mod=score_mod)

    return as_pass(attend, [q, k, v, table], grad, what)


def make_tokens(plan: Plan, size: Attention, what: str) -> list[torch.Tensor]:
    """Returns queries, keys, values and the gradient of the output."""
    tokens = size.grid[0] * size.grid[1] + size.num_prefix_tokens
    shape = (size.batch, size.heads, tokens, size.dim)
    made = [torch.randn(shape, device=plan.device, dtype=plan.dtype) for _ in range(4)]
    return [*(x.requires_grad_(what == "training") for x in made[:3]), made[3]]


def as_pass(
    attend: Callable[[], torch.Tensor], leaves: list[Any], grad: torch.Tensor, what: str
) -> Callable[[], object]:
    def infer() -> object:
        with torch.no_grad():
            return attend()

    def train() -> object:
        return torch.autograd.grad(attend(), leaves, grad)

    return train if what == "training" else infer


def works(run: Callable[[], object]) -> bool:
    """Runs once, which also compiles; what this device cannot do is left out."""
    try:
        run()
    except (ValueError, NotImplementedError, RuntimeError) as error:
        print(f"left out: {str(error).splitlines()[0][:100]}")
        return False
    return True


def interleaved(plan: Plan, runs: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Returns the median seconds of each run; all take turns in each round."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(plan.rounds):
        for name, run in runs.items():
            synchronize(plan)
            start = time.perf_counter()
            run()
            synchronize(plan)
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def synchronize(plan: Plan) -> None:
    if plan.device == "cuda":
        torch.cuda.synchronize()


def measure_throughput(plan: Plan) -> dict[str, float]:
    """Returns images per second of a training step, plain and equipped."""
    import timm

    x = torch.randn(plan.images, 3, plan.size, plan.size, device=plan.device)
    runs = {}
    for name, spec, impl in (("plain", None, ""), *contestants()):
        model = timm.create_model(plan.model, img_size=plan.size, num_classes=10)
        if spec is not None:
            model = irpe.equip(model, spec, impl=impl)
        optimizer = torch.optim.AdamW(model.to(plan.device).parameters())

        def step(model: Any = model, optimizer: Any = optimizer) -> None:
            with torch.autocast(plan.device, plan.dtype):
                loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        runs[name] = step
    seconds = interleaved(plan, {name: run for name, run in runs.items() if works(run)})
    return {name: round(plan.images / s, 1) for name, s in seconds.items()}


def contestants() -> list[tuple[str, str, str]]:
    return [(f"{name}, {impl}", SPECS[name], impl) for name in ("K", "QKV") for impl in CONTESTANTS]


def measure_memory(plan: Plan, grid: tuple[int, int]) -> dict[str, float]:
    """Returns the peak memory of a training step of one attention, in MB."""
    found, size = {}, Attention(1, 6, 64, grid, 0)
    for name, spec, impl in (("SDPA", None, "auto"), *contestants()):
        run = make_run(plan, size, spec, impl, "training")
        if not works(run):
            continue
        found[name] = 0.0
        if plan.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            run()
            found[name] = round(torch.cuda.max_memory_allocated() / 2**20, 1)
    return found


def draw(results: dict[str, Any], path: Path) -> None:
    """Draws the relative times and the memory over tokens."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    models = list(results["attention"])
    training = {model: results["attention"][model]["training"] for model in models}
    names = [n for n in next(iter(training.values())) if n != "SDPA"]
    width = 0.8 / max(1, len(names))
    for index, name in enumerate(names):
        heights = [training[model].get(name, 0.0) for model in models]
        left.bar([i + index * width for i in range(len(models))], heights, width, label=name)
    left.set_xticks([i + 0.4 - width / 2 for i in range(len(models))], models)
    left.axhline(1.0, color="black", linewidth=0.8)
    left.set_ylabel("training step, time relative to SDPA")
    left.legend(fontsize=7)
    for name in {name: None for found in results["memory"].values() for name in found}:
        taken = [found.get(name) for found in results["memory"].values()]
        right.plot(list(results["memory"]), taken, marker="o", label=name)
    right.set_ylabel("peak memory of a training step in MB")
    right.legend(fontsize=7)
    figure.suptitle(f"One attention on {results['device']}, {results['dtype']}")
    figure.savefig(path, dpi=120)
    print(f"written to {path}")


def advice(results: dict[str, Any]) -> str:
    """Returns what follows for `choose`."""
    if not results["correctness"]["passed"]:
        return "leave TRITON_IS_PROVEN in irpe/ops/choose.py as it is: the tests did not pass"
    slower = [
        f"{model} {name}"
        for model, found in results["attention"].items()
        for name in SPECS
        if found["training"].get(f"{name}, triton", float("inf"))
        > found["training"].get(f"{name}, fast", 0.0)
    ]
    if slower:
        return f"the tests passed, but triton is not faster than fast for {', '.join(slower)}"
    return "set TRITON_IS_PROVEN = True in irpe/ops/choose.py: the tests passed and it is faster"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stand-in", action="store_true", help="try it on the CPU")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/gpu.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
