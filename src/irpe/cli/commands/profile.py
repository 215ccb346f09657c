"""`irpe profile`: what encodings cost, in parameters, MACs, time and memory."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from irpe.cli.parse import wrap
from irpe.errors import UserError

if TYPE_CHECKING:
    from irpe.profile.comparison import Comparison
    from irpe.profile.cost import EncodingCost, ExtraMacs

_MODEL, _ENCODING, _ROUNDS = "deit_small_patch16_224", "product-contextual-k", 10


class Table(NamedTuple):
    """What is printed of some costs."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str]


def profile(
    model: Annotated[str | None, f"A model of timm or transformers [{_MODEL}].", "MODEL"] = None,
    *,
    encoding: Annotated[list[str] | None, f"An encoding; repeat it [{_ENCODING}]."] = None,
    compare: Annotated[bool, "All encodings, with time and memory (Fig. 10)."] = False,
    resolutions: Annotated[
        str | None, "Extra MACs at these sides: 224,384,512 (Fig. 4).", "PIXELS,..."
    ] = None,
    paper: Annotated[bool, "The paper's Tables 2 and 5 beside what is counted."] = False,
    image_size: Annotated[int | None, "Height and width of the images [the model's]."] = None,
    rounds: Annotated[int | None, f"Timed passes; 0 counts only [{_ROUNDS}]."] = None,
    as_json: Annotated[bool, "Print JSON."] = False,
) -> None:
    """Parameters, MACs, time and memory of a model with encodings.

    Examples:
        irpe profile
        irpe profile vit_tiny_patch16_224 --encoding K --encoding shaw --rounds 30
        irpe profile --resolutions 224,384,512
        irpe profile --paper --json
    """
    from irpe.cli.console import ProgressBar, print_json, print_lines, print_table
    from irpe.profile.models import is_known

    if model is not None and Path(model).exists() and not is_known(model):
        raise UserError(
            f"MODEL {model!r} is a path: irpe profile takes the name of a model, such as {_MODEL}; "
            "for a model in memory there is irpe.profile.count_macs"
        )
    measured = {"--image-size": image_size, "--rounds": rounds}
    name, texts = model or _MODEL, encoding or [_ENCODING]
    conditions: dict[str, Any]
    with ProgressBar() as bar:
        if paper:
            others = {"MODEL": model, "--encoding": encoding, "--resolutions": resolutions}
            _refuse("--paper", {**others, "--compare": compare or None, **measured})
            from irpe.profile.comparison import compare_with_paper

            found = compare_with_paper(listen=bar)
            conditions, table = {"tables": [2, 5]}, paper_table(found)
        elif resolutions is not None:
            _refuse("--resolutions", {"--compare": compare or None, **measured})
            if len(texts) > 1:
                raise UserError(f"--resolutions takes one encoding, not {', '.join(texts)}")
            from irpe.profile.cost import extra_macs_by_resolution

            found = extra_macs_by_resolution(name, texts[0], parse_sizes(resolutions), bar)
            conditions, table = {"model": name, "encoding": texts[0]}, _resolutions_table(found)
        else:
            if compare:
                _refuse("--compare", {"--encoding": encoding})
            import torch

            from irpe.profile.cost import COMPARED, measure_costs

            names: list[str] = [*COMPARED] if compare else texts
            conditions = {
                "batch": 1,
                "rounds": _ROUNDS if rounds is None else rounds,
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
            }
            refused: dict[str, str] = {}
            is_list = len(names) > 1  # one that does not fit is an error, of several a note
            how = (image_size, 1, conditions["rounds"], bar)
            found = measure_costs(name, names, *how, refused if is_list else None)
            if is_list and len(refused) == len(names):
                raise UserError(next(iter(refused.values())))
            table = _cost_table(found, conditions, refused)
    if as_json:
        print_json({**conditions, "rows": [asdict(each) for each in found]})
        return
    print_table(table.headings, table.rows, table.title)
    print_lines("", *(line for note in table.notes for line in wrap(note)))


def _refuse(option: str, others: dict[str, object]) -> None:
    given = [name for name, value in others.items() if value is not None]
    if given:
        raise UserError(f"{option} cannot be combined with {', '.join(given)}")


def parse_sizes(text: str) -> list[int]:
    """Returns the sizes in a text such as "224,384"."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < 10 and int(part) for part in parts):
        raise UserError(f"--resolutions {text!r}: write sizes such as 224,384,512")
    return [int(part) for part in parts]


def paper_table(found: "Sequence[Comparison]") -> Table:
    """Returns what the paper reports beside what is counted, and notes on differences."""
    reasons = list(dict.fromkeys(reason for row in found for reason in row.reasons))

    def cells(row: "Comparison") -> list[str]:
        p = row.published
        marks = ",".join(str(reasons.index(reason) + 1) for reason in row.reasons)
        return [
            f"T{p.table} {p.label}", f"{row.parameters / 1e6:.2f}", p.parameters,
            f"{row.macs / 1e6:.0f}", f"{p.macs}", f"{row.extra_macs / 1e6:.1f}",
            f"{row.formula_macs / 1e6:.1f}", f"{row.paper_extra_macs / 1e6:.0f}", marks or "ok",
        ]  # fmt: skip

    return Table(
        "The paper's costs (Tables 2 and 5) beside what is counted on timm's models",
        ("model", "params", "paper", "MACs", "paper", "extra", "closed", "paper", "ok"),
        [cells(row) for row in found],
        [
            "Millions. extra: MACs beyond the plain model; closed: the same by the closed "
            "formulas. ok: extra MACs within 8 % or 2 M of the paper's, parameters as printed "
            "there. Totals here are up to 0.7 % lower: matrix products and convolutions are "
            "counted, the paper's counter adds other operations.",
            *(f"{number}: {reason}" for number, reason in enumerate(reasons, 1)),
        ],
    )


def _resolutions_table(found: "Sequence[ExtraMacs]") -> Table:
    def cells(row: "ExtraMacs") -> list[str]:
        extra = [
            text
            for macs in (row.direct, row.efficient)
            for text in (f"{macs / 1e6:.0f}", f"{100 * macs / row.plain:.2f} %")
        ]
        return [str(row.resolution), str(row.tokens), f"{row.plain / 1e6:.0f}", *extra]

    most = max(100 * row.efficient / row.plain for row in found)
    return Table(
        f"Extra MACs of {found[0].encoding} on {found[0].model} (Fig. 4)",
        ("resolution", "tokens", "plain", "direct", "extra", "efficient", "extra"),
        [cells(row) for row in found],
        [
            "Millions of MACs for one image, counted. direct: the row of every pair is multiplied; "
            f"efficient: what the library runs. The efficient form adds at most {most:.2f} %."
        ],
    )


def _cost_table(
    found: "Sequence[EncodingCost]", conditions: dict[str, Any], refused: dict[str, str]
) -> Table:
    headings = ["encoding", "params", "MACs", "extra", "closed"]
    notes = [
        "params, MACs: millions, MACs for one image. extra: beyond the plain model, none; closed: "
        "the extra MACs by the closed formulas."
    ]
    rounds, batch, threads = (conditions[name] for name in ("rounds", "batch", "threads"))
    if rounds:
        headings += ["ms", "time", "MB", "extra"]
        notes += [
            f"ms: best of {rounds} forward passes, batch {batch}, float32, on the CPU with "
            f"{threads} thread{'s'[: threads > 1]}. time: relative to the plain model in turns "
            "with it; on a busy machine it moves much. More --rounds help.",
            "MB: tensors alive at once in a forward pass, beyond weights, images and bucket maps.",
        ]
    notes += [f"{name} is left out: {reason}" for name, reason in refused.items()]
    rows: list[list[str]] = []
    for row in found:
        cells = [f"{row.parameters / 1e6:.3f}", f"{row.macs / 1e6:.0f}"]
        cells += [f"{macs / 1e6:.1f}" for macs in (row.extra_macs, row.formula_macs)]
        if row.seconds is not None:
            cells += [f"{row.seconds * 1e3:.0f}", f"{row.time_ratio:.2f}"]
            cells += [f"{(size or 0) / 2**20:.1f}" for size in (row.memory, row.extra_memory)]
        rows.append([row.encoding, *cells])
    size = found[0].resolution
    return Table(f"{found[0].model}, {size} x {size}", headings, rows, notes)
