"""`irpe gpu`: proves and times on the GPU that is there what models with encodings use."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from irpe.errors import UserError


def gpu(
    *,
    images: Annotated[int, "Images in a training step of DeiT-S; 0 leaves it out."] = 64,
    interpret: Annotated[bool, "Prove some kernels in Triton's interpreter, no GPU."] = False,
    output: Annotated[Path, "The report; a picture of the same name lies beside it."] = Path(
        "gpu.json"
    ),
    as_json: Annotated[bool, "Print JSON."] = False,
) -> None:
    """Prove and time on this GPU what models with encodings use.

    From then on impl="auto" takes the fastest of what was proved. The JSON and the picture can be
    attached to an issue of the kind "GPU report".

    Examples:
        irpe gpu
        irpe gpu --interpret
    """
    if interpret:
        _interpret(as_json)
        return
    from dataclasses import asdict

    from irpe.cli.console import ProgressBar, print_json, print_lines, print_table
    from irpe.cli.parse import wrap
    from irpe.files import check_writable, write_text
    from irpe.profile.gpu import measure_gpu
    from irpe.viz import plot_gpu_times, save_figure

    check_writable(output)
    with ProgressBar() as bar:
        report = measure_gpu(images=images, listen=bar)
    write_text(output, json.dumps(asdict(report), indent=1))
    picture = output.with_suffix(".png")
    save_figure(plot_gpu_times(report), picture)
    if as_json:
        print_json(asdict(report))
        return
    rows = [
        [
            f"{row.model}, {row.encoding}, {'training' if row.training else 'inference'}",
            row.chosen,
            *(_milliseconds(row.ms, name) for name in ("fast", "folded", "triton")),
            f"{row.without_ms:.3g}",
        ]
        for row in report.attentions
    ]
    columns = ["one attention, ms", "auto", "fast", "folded", "triton", "without"]
    print_table(columns, rows, report.device)
    print_lines("", *(line for text in report.in_words() for line in wrap(text)))
    speeds = (f"{name} {speed:.0f}" for name, speed in report.images_per_second.items())
    if images:
        print_lines(f"DeiT-S, images a second in training: {', '.join(speeds)}")
    print_lines(f"written: {output}, {picture}")


def _interpret(as_json: bool) -> None:
    """Prints what the interpreter says of some kernels; fails if one is wrong."""
    from irpe.cli.console import ProgressBar, print_json, print_table
    from irpe.profile.gpu import prove_in_interpreter

    with ProgressBar() as bar:
        found = prove_in_interpreter(listen=bar)
    if as_json:
        print_json({str(signature): answer._asdict() for signature, answer in found.items()})
    else:
        rows = [
            [str(signature).partition(", ")[2], answer.error or f"{answer.worst:.2f}"]
            for signature, answer in found.items()
        ]
        print_table(["signature", "error, in PyTorch's own"], rows, "Triton's interpreter")
    failed = [str(signature) for signature, answer in found.items() if answer.error]
    if failed:
        raise UserError(f"the kernels failed for {'; '.join(failed)}: do not use impl='triton'")


def _milliseconds(times: Mapping[str, float | None], name: str) -> str:
    if name not in times:
        return "-"
    time = times[name]
    return "no memory" if time is None else f"{time:.3g}"
