"""Compiles the Triton kernels for GPUs that need not be there: registers, spills, shared memory.

python -m benchmarks.triton              # every pair of factors, and six for other GPUs: minutes
python -m benchmarks.triton --index 0 7  # some variants

A variant is one call, forward and backward, on one GPU. Its kernels are compiled to machine code
with the arguments of that call. A spill is an instruction that moves a register to or from local
memory; those in a loop cost time in each round of it.
"""

import argparse
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

import irpe
from benchmarks.timing import write_report
from tests.pairs import all_pairs

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # before triton is loaded
GPUS = {
    "sm_80": ("cuda", 80, 32),
    "sm_86": ("cuda", 86, 32),
    "sm_89": ("cuda", 89, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
FACTORS = {
    "gpu": ["sm_80", "sm_90", "gfx942"],
    "dtype": ["float16", "bfloat16", "float32"],
    "dim": [16, 24, 32, 64, 80, 128],
    "targets": ["bias", "q", "k", "v", "qk", "qv", "kv", "qkv"],
    "method": ["product", "cross"],
    "mask": [None, "padding", "boolean", "learned"],
    "dropout": [0.0, 0.1],
    "rotated": [False, True],
}
MOST = {"method": "cross", "mask": "boolean", "dropout": 0.1, "rotated": True}
LEAST = {"method": "product", "mask": None, "dropout": 0.0, "rotated": False}
VARIANTS = [
    *(
        {"gpu": gpu, "dtype": "float16", "dim": 64, "targets": targets, **rest}
        for gpu in ("sm_80", "sm_90", "gfx942")
        for targets, rest in (("k", LEAST), ("qkv", LEAST), ("qkv", MOST))
    ),
    *(
        {"gpu": gpu, "dtype": "bfloat16", "dim": 64, "targets": targets, **rest}
        for gpu in ("sm_86", "sm_89", "sm_100")
        for targets, rest in (("k", LEAST), ("qkv", MOST))
    ),
    *all_pairs(**FACTORS),
]


def main() -> None:
    arguments = parse_arguments()
    indices = arguments.index or range(len(VARIANTS))
    rows: list[dict] = []
    with ProcessPoolExecutor(arguments.jobs, get_context("spawn")) as processes:
        for row in processes.map(compile_variant, (VARIANTS[index] for index in indices)):
            rows.append(row)
            print_row(row)
    write_report(arguments.output, {"rows": rows})


def compile_variant(variant: dict[str, Any]) -> dict[str, Any]:
    """Returns the variant with what each of its kernels takes; "error" if one does not compile."""
    import triton
    from triton.backends.compiler import GPUTarget

    from irpe.ops.impl import triton as implementation
    from irpe.ops.impl.triton import launch

    torch.set_num_threads(1)
    target = GPUTarget(*GPUS[variant["gpu"]])
    triton.runtime.driver.set_active(_Driver(target))
    kernels: dict[str, dict[str, int]] = {}

    def compile_only(kernel: Any, grid: Any, arguments: Any, constants: Any) -> None:
        kernel.device_caches.clear()  # it is kept by device, and this one changes
        compiled = kernel.warmup(*arguments, grid=grid, **constants)
        kernels[kernel.__name__.removesuffix("_kernel")] = _resources(compiled)

    implementation._what_is_missing = lambda *_: None
    launch.launch = compile_only
    try:
        make_call(variant)()
    except Exception as error:
        return {**variant, "error": f"{type(error).__name__}: {error}", "kernels": kernels}
    return {**variant, "kernels": kernels}


class _Driver:
    """Stands for a GPU where there is none."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self.target


def make_call(variant: dict[str, Any]) -> Callable[[], object]:
    """Returns a training step of one attention of 197 tokens, as a variant says."""
    heads, tokens, dim = 2, 197, variant["dim"]
    dtype = getattr(torch, variant["dtype"])

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, requires_grad=True)

    targets = variant["targets"]
    spec = f"{variant['method']}-" + ("bias-k" if targets == "bias" else f"contextual-{targets}")
    maps = irpe.bucket_maps(spec, (14, 14), 1)
    q, k, v = (leaf(1, heads, tokens, dim) for _ in range(3))
    rows = [m.num_buckets for m in maps]
    names = {"q": "query_tables", "k": "key_tables", "v": "value_tables"}
    if targets == "bias":
        tables = {"bias_tables": [leaf(1, count) for count in rows]}
    else:
        tables = {names[t]: [leaf(1, count, dim) for count in rows] for t in targets}
    mask = {
        None: None,
        "padding": torch.ones(1, 1, 1, tokens, dtype=torch.bool),
        "boolean": torch.ones(1, 1, tokens, tokens, dtype=torch.bool),
        "learned": leaf(1, heads, tokens, tokens),
    }[variant["mask"]]
    rotated: dict[str, torch.Tensor] = {}
    if variant["rotated"] and "key_tables" in tables:
        rotated["table_q"] = q * 1
    if variant["rotated"] and "query_tables" in tables:
        rotated["table_k"] = k * 1

    def step() -> object:
        return irpe.rpe_attention(
            q, k, v, maps, **tables, **rotated, attn_mask=mask, dropout_p=variant["dropout"],
            impl="triton",
        ).sum().backward()  # fmt: skip

    return step


def _resources(compiled: Any) -> dict[str, int]:
    shared = {"shared bytes": compiled.metadata.shared}
    if "cubin" in compiled.asm:
        return {**_of_cubin(compiled.asm["cubin"]), **shared}
    return {**_of_amdgcn(compiled.asm["amdgcn"]), **shared}


def _of_cubin(cubin: bytes) -> dict[str, int]:
    from triton.backends import nvidia

    tool = Path(nvidia.__path__[0]) / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = (
            subprocess.run([tool, option, file.name], capture_output=True, text=True).stdout
            for option in ("-res-usage", "-sass")
        )
    registers = re.search(r"REG:(\d+)", usage)
    assert registers is not None, usage
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", code)
    lines = [(int(address, 16), text) for address, text in found]
    jumps = [(at, re.search(r"BRA.*?0x([0-9a-f]+)", text)) for at, text in lines]
    loops = [(int(to[1], 16), at) for at, to in jumps if to and int(to[1], 16) < at]
    spills = [at for at, text in lines if re.search(r"\b(LDL|STL)\b", text)]
    found = _count("instructions", [at for at, _ in lines], loops)
    return {"registers": int(registers[1]), **_count("spills", spills, loops), **found}


def _of_amdgcn(code: str) -> dict[str, int]:
    lines = [line.strip() for line in code.splitlines()]
    labels = {
        line.split(":")[0]: at for at, line in enumerate(lines) if re.match(r"\.LBB\w+:", line)
    }
    jumps = [(at, re.match(r"s_c?branch\w*\s+(\.LBB\w+)", line)) for at, line in enumerate(lines)]
    loops = [(labels[to[1]], at) for at, to in jumps if to and labels.get(to[1], at) < at]
    spills = [at for at, line in enumerate(lines) if line.startswith("scratch_")]
    registers = re.search(r"\.vgpr_count:\s+(\d+)", code)
    assert registers is not None
    instructions = [at for at, line in enumerate(lines) if re.match(r"[a-z]+_", line)]
    found = _count("instructions", instructions, loops)
    return {"registers": int(registers[1]), **_count("spills", spills, loops), **found}


def _count(name: str, places: list[int], loops: list[tuple[int, int]]) -> dict[str, int]:
    inside = sum(any(first <= at <= last for first, last in loops) for at in places)
    return {name: len(places), f"{name} in loops": inside}


def print_row(row: dict[str, Any]) -> None:
    name = " ".join(f"{value}" for key, value in row.items() if key not in ("kernels", "error"))
    print(f"{name}: {row.get('error', '')}")
    for kernel, found in row["kernels"].items():
        print(f"  {kernel:8}" + ", ".join(f"{found[key]} {key}" for key in found), flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--index", type=int, nargs="+", help="variants by index; all if not given")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("-o", "--output", type=Path, help="write a report here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
