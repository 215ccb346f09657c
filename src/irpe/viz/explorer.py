"""The explorer: one page of HTML that needs neither a server nor the network."""

import base64
import io
import json
from collections.abc import Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from irpe.core.encodings import Encoding
from irpe.core.encodings.spec import TARGETS, RPESpec
from irpe.core.index import Clip
from irpe.core.methods import METHODS
from irpe.errors import UserError
from irpe.viz.bucket_maps import check_image_grid
from irpe.viz.capture import CapturedAttention
from irpe.viz.table_maps import table_norms

if TYPE_CHECKING:
    from PIL.Image import Image

# The dimensions of the models whose costs the page shows, patches of 16 x 16 pixels.
MODELS = {
    "DeiT-Ti": {"dim": 192, "heads": 3, "depth": 12},
    "DeiT-S": {"dim": 384, "heads": 6, "depth": 12},
    "DeiT-B": {"dim": 768, "heads": 12, "depth": 12},
}
LARGEST = 5_000_000  # bytes of a page
_PARTS = {
    "style": "page.css",
    "buckets": "buckets.js",
    "colours": "colours.js",
    "drawing": "drawing.js",
    "page": "page.js",
    "learned": "learned.js",
}


def explorer_page(
    calls: Sequence[CapturedAttention] = (), image: "Image | None" = None, name: str = "a run"
) -> str:
    """Returns the page, with what a model has learned if its attentions are passed.

    Args:
        calls: The attentions of a model that saw one picture, of `irpe.viz.capture`.
        image: The picture; needed with `calls`.
        name: What the page calls the model.

    Examples:
        >>> import irpe.viz
        >>> page = irpe.viz.explorer_page()
        >>> page.startswith("<!doctype html>")
        True
    """
    facts = {
        "ratios": {method: METHODS[method].ratio for method in METHODS},
        "targets": TARGETS,
        "models": MODELS,
    }
    run = None
    if calls:
        if image is None:
            raise UserError("the attentions come without a picture: pass image= too")
        parted = [call.name for call in calls if not call.sees_whole_image]
        if parted:
            raise UserError(
                f"{parted[0]} works on several images or on windows of one, which the page cannot "
                "show: irpe show weights draws their mean"
            )
        blocks = [_describe(call) for call in calls]
        run = {"name": name, "image": _as_data(image), "blocks": blocks}
    page = _read("page.html")
    for part, file in _PARTS.items():
        page = page.replace(f"{{{{{part}}}}}", _read(file).rstrip())
    page = page.replace("{{facts}}", _as_json(facts)).replace("{{run}}", _as_json(run))
    if len(page.encode()) > LARGEST:
        raise UserError(
            f"the page would have {len(page.encode()) / 1e6:.1f} MB, more than {LARGEST / 1e6:g}: "
            "choose fewer blocks"
        )
    return page


def _read(name: str) -> str:
    return files("irpe.viz").joinpath("assets", name).read_text(encoding="utf-8")


def _as_json(value: object) -> str:
    """Returns a value as JSON that cannot end the element that it stands in."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")


def _as_data(image: "Image") -> str:
    file = io.BytesIO()
    image.save(file, format="PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _describe(call: CapturedAttention) -> dict[str, Any]:
    grid = check_image_grid(call.grid)
    tables = [
        {"name": name, "columns": table.values.shape[-1], "data": _as_halves(table.values)}
        for name, table in table_norms(call.encoding).items()
    ]
    return {
        "name": call.name,
        "spec": _describe_spec(call.encoding.spec),
        "grid": grid.shape,
        "prefix": call.num_prefix_tokens,
        "heads": call.num_heads,
        "tables": tables,
        "terms": _terms(call),
        **_scale(call),
    }


def _describe_spec(spec: Encoding) -> dict[str, Any]:
    if not isinstance(spec, RPESpec) or spec.tied:
        raise UserError(
            f"the page knows encodings of the form METHOD-MODE-TARGETS, not {spec}: draw it with "
            "irpe show weights, attention or locality"
        )
    index = spec.index_function
    numbers: dict[str, object] = {"kind": "clip" if isinstance(index, Clip) else "piecewise"}
    return {
        "method": spec.method,
        "mode": spec.mode,
        "targets": spec.targets,
        "shared": spec.shared_heads,
        "index": numbers | vars(index),
    }


def _scale(call: CapturedAttention) -> dict[str, float]:
    """Returns the unit of the attention scores, and how much of them is the encoding's."""
    if call.encoding.spec.targets == "v":  # which adds nothing to them
        return {"unit": 1.0, "share": 0.0}
    return {"unit": call.score_unit(), "share": call.encoding_share()}


def _terms(call: CapturedAttention) -> list[dict[str, Any]]:
    """Returns what b_ij is looked up in: a number for each head, owner and row in use (Eq. 27)."""
    encoding = call.encoding
    roles: list[tuple[str, Any, Tensor | None]] = [
        ("query", encoding.key_tables, call.q),
        ("key", encoding.query_tables, call.k),
        ("nobody", encoding.bias_tables, None),
    ]
    terms: list[dict[str, Any]] = []
    maps = encoding.maps(call.grid)
    for owner, tables, tokens in roles:
        for number, table in enumerate(tables):
            rows = table.detach()[:, maps[number].used_rows]
            if tokens is None:
                values = rows.unsqueeze(1).expand(call.num_heads, -1, -1)
            else:
                values = (tokens @ rows.transpose(-2, -1)).mean(0)  # heads, tokens, rows in use
            term = {"owner": owner, "map": number, "owners": values.shape[1]}
            terms.append(term | {"data": _as_halves(values)})
    return terms


def _as_halves(values: Tensor) -> str:
    """Returns numbers as base64 of 16 bits each, little-endian."""
    halves = values.detach().to(torch.float16)
    if not bool(halves.isfinite().all()):
        raise UserError("the tables, or what they give on this image, exceed 16-bit numbers")
    return base64.b64encode(halves.numpy().astype("<f2").tobytes()).decode()
