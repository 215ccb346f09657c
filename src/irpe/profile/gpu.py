"""What "auto" does on the GPU at hand, proved and timed at the sizes of known models."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from irpe.errors import UserError
from irpe.nn.tables import RelativePositionEncoding
from irpe.ops.call import AttentionCall
from irpe.ops.checks import check_call
from irpe.ops.choose import PROVER
from irpe.ops.proof.child import Child, ChildLostError
from irpe.ops.proof.decide import Prover, Request
from irpe.ops.proof.judge import Answer
from irpe.ops.proof.problem import random_problem
from irpe.ops.proof.serve import Task
from irpe.ops.proof.signature import Signature
from irpe.ops.proof.timing import seconds_of
from irpe.ops.proof.verdicts import environment
from irpe.profile.models import create
from irpe.progress import Listener, silent, tracked

ENCODINGS = {
    "K": "product-contextual-k",
    "QK": "product-contextual-qk",
    "QKV": "product-contextual-qkv",
    "bias": "product-bias-k",
    "cross": "cross-contextual-k",
}
_STEPS = 10


class AttentionSize(NamedTuple):
    """The size of one attention of a model."""

    batch: int  # images, or windows of all images
    heads: int
    dim: int  # of a head
    grid: tuple[int, int]
    num_prefix_tokens: int


SIZES = {
    "DeiT-S": AttentionSize(64, 6, 64, (14, 14), 1),
    "Swin-T windows": AttentionSize(1024, 3, 32, (7, 7), 0),
    "DETR encoder": AttentionSize(2, 8, 32, (25, 34), 0),
    "SAM-B windows": AttentionSize(25, 12, 64, (14, 14), 0),
    "SAM-B global": AttentionSize(1, 12, 64, (64, 64), 0),
}


@dataclass(frozen=True)
class AttentionTimes:
    """Times of one attention of the size of a model's, with an encoding."""

    model: str
    encoding: str
    training: bool  # whether a training step was timed, or a forward pass
    chosen: str  # what "auto" takes from now on
    without_ms: float  # of PyTorch's attention without an encoding
    ms: Mapping[str, float | None]  # of each implementation that was timed; `None`: no memory
    known: Mapping[str, str]  # what the proof of each candidate found

    @property
    def ratio(self) -> float | None:
        """The time of what is chosen, relative to attention without an encoding."""
        chosen = self.ms.get(self.chosen)
        return None if chosen is None else chosen / self.without_ms


@dataclass(frozen=True)
class GpuReport:
    """What was proved and timed on a GPU."""

    device: str
    environment: Mapping[str, str]  # versions
    attentions: Sequence[AttentionTimes]
    images_per_second: Mapping[str, float] = field(default_factory=dict[str, float])

    def in_words(self) -> list[str]:
        """Returns what "auto" will do from now on, a line for each encoding and use."""
        lines: dict[str, list[str]] = {}
        for row in self.attentions:
            times = "" if row.ratio is None else f" ({row.ratio:.2f} x)"
            use = f"{row.encoding}, {'training' if row.training else 'inference'}"
            lines.setdefault(use, []).append(f"{row.chosen} for {row.model}{times}")
        return [f"{use}: {', '.join(taken)}" for use, taken in lines.items()]


def measure_gpu(
    sizes: Mapping[str, AttentionSize] = SIZES,
    encodings: Mapping[str, str] = ENCODINGS,
    *,
    prover: Prover = PROVER,
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    images: int = 64,
    listen: Listener = silent,
) -> GpuReport:
    """Proves and times attentions, and training steps of DeiT-S plain and equipped."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "there is no GPU here (torch.cuda.is_available() is False); irpe gpu --interpret "
            "proves some kernels in Triton's interpreter"
        )
    work = [(m, e, training) for training in (True, False) for m in sizes for e in encodings]
    rows: list[AttentionTimes] = []
    for model, encoding, training in tracked(listen, work, len(work), "proofs"):
        request = _request(prover, sizes[model], encodings[encoding], training, device, dtype)
        prover.prove([request])
        about = (request.signature, request.size_class)
        times = {n: s and 1000 * s for n, s in prover.seconds(*about).items()}
        known = {name: prover.describe(name, *about) for name in request.able}
        chosen = prover.best_known(*about, request.able)
        without = 1000 * _seconds_without(request)
        rows.append(AttentionTimes(model, encoding, training, chosen, without, times, known))
    name = torch.cuda.get_device_name() if device == "cuda" else device
    throughput = _train_deit(encodings, images, device, dtype, listen) if images else {}
    return GpuReport(name, environment(), rows, throughput)


def _request(
    prover: Prover, size: AttentionSize, text: str, training: bool, device: str, dtype: torch.dtype
) -> Request:
    """Returns what an attention asks."""
    encoding = RelativePositionEncoding(text, size.heads, size.dim, size.num_prefix_tokens)
    encoding = encoding.to(device, dtype)
    lists = ("query_tables", "key_tables", "value_tables", "bias_tables")
    tables: dict[str, Any] = {name: list(getattr(encoding, name)) for name in lists}
    tokens = size.num_prefix_tokens + size.grid[0] * size.grid[1]
    q = torch.empty(size.batch, size.heads, tokens, size.dim, device=device, dtype=dtype)
    with torch.set_grad_enabled(training):
        return prover.request(check_call(q, q, q, encoding.maps(size.grid, device), **tables))


class _WithoutEncoding:
    """PyTorch's attention, timed as the candidates are."""

    @staticmethod
    def supports(call: AttentionCall) -> str | None:
        """Returns why a call cannot be computed."""

    @staticmethod
    def attention(call: AttentionCall) -> Tensor:
        """Returns attention without an encoding."""
        return F.scaled_dot_product_attention(call.q, call.k, call.v)


def _seconds_without(request: Request) -> float:
    problem = random_problem(request.signature, request.sizes, request.maps, request.device)
    tokens = {name: part for name, part in problem.parts.items() if name in ("q", "k", "v", "grad")}
    return seconds_of(_WithoutEncoding, problem._replace(parts=tokens))


def _train_deit(
    encodings: Mapping[str, str], images: int, device: str, dtype: torch.dtype, listen: Listener
) -> dict[str, float]:
    """Returns images per second of training steps of DeiT-S, plain and equipped."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    x = torch.randn(images, 3, 224, 224, device=device)
    found: dict[str, float] = {}
    texts = {"plain": "none", **encodings}
    for name, text in tracked(listen, texts.items(), len(texts), "DeiT-S"):
        model = create("deit_small_patch16_224", text, None, "cpu").to(device).train()
        optimizer = torch.optim.AdamW(model.parameters())
        start = 0.0
        for step in range(2 + _STEPS):
            if step == 2:  # the first ones prove, time and compile
                wait()
                start = time.perf_counter()
            with torch.autocast(device, dtype):
                loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        wait()
        found[name] = images * _STEPS / (time.perf_counter() - start)
    return found


_K = Signature(
    device="the interpreter", dtype="float16", dim=32, query="", key="shared", value="", bias="",
    maps="1", bits=6, mask="", dropout="", rotated="", shape="square", alignment="odd",
    layout="heads first", tf32=False, training=True,
)  # fmt: skip
INTERPRETED = (
    _K,
    _K._replace(dtype="float32", dim=24, value="heads"),
    _K._replace(dtype="bfloat16", query="shared", value="shared"),
    _K._replace(key="", bias="heads", mask="boolean b11k", dtype="float32"),
    _K._replace(maps="2 by axis", alignment="aligned", training=False),
    _K._replace(rotated="q and k", query="heads", dim=16),
    _K._replace(mask="learned 1hqk", layout="tokens first"),
    _K._replace(dropout="dropout", value="shared", dtype="float32", dim=16),
)


def prove_in_interpreter(
    signatures: Sequence[Signature] = INTERPRETED,
    module: str = "irpe.ops.impl.triton",
    listen: Listener = silent,
) -> dict[Signature, Answer]:
    """Returns the result of proofs that run the kernels in Triton's interpreter, on the CPU."""
    found: dict[Signature, Answer] = {}
    with Child(600.0, {"TRITON_INTERPRET": "1"}) as child:
        for signature in tracked(listen, signatures, len(signatures), "proofs"):
            try:
                answer = child.ask(**Task(module, signature, "cpu")._asdict())
                found[signature] = Answer(**answer)
            except ChildLostError as error:
                found[signature] = Answer(str(error))
    return found
