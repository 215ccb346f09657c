"""Which of timm's models can be equipped, and if not, why.

Every model is built on the meta device, where its size does not matter, and equipped there. Models
of one class with the same attentions are one row. The smallest of a row is then run with weights:
zero tables must not change its output, random ones must.
"""

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

import timm
import torch
from torch import nn

import irpe
from irpe.adapters.equipped import equipped_attentions, table_names
from irpe.adapters.hosts import full_name
from irpe.adapters.refusals import REFUSED, is_attention

from .page import TimmRow
from .resizing import try_resize
from .verdicts import Verdicts

SPEC = "product-contextual-k"
MOST_PARAMETERS = 60_000_000  # of a model that is run


@dataclass
class Row:
    """Models of one class with the same attentions.

    Args:
        model: The class.
        verdict: equipped, refused or not built.
        sentence: What is equipped, or the reason.
        attentions: Its attentions.
        names: The models, by size.
        resized: The size that one of them was resized to, or why not; empty if none was run.
    """

    model: str
    verdict: str
    sentence: str
    attentions: tuple[str, ...]
    names: dict[str, int] = field(default_factory=dict[str, int])
    resized: str = ""


def rows(
    names: Iterable[str] | None = None, run: bool = True, known: Verdicts | None = None
) -> list[Row]:
    """Returns a row for each class and its attentions, for all models with self-attention.

    Args:
        names: The models; all of them by default.
        run: Whether one model of each row is run.
        known: What an earlier sweep has found.
    """
    known = known or Verdicts()
    found: dict[tuple[str, ...], Row] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in timm.list_models() if names is None else names:
            verdict = known.of(name, partial(judge, name))
            if verdict is not None:
                *key, attentions, size = verdict
                row = found.setdefault((*key, *attentions), Row(*key, tuple(attentions)))
                row.names[name] = size
        for row in found.values():
            if run and row.verdict == "equipped":
                name, size = min(row.names.items(), key=lambda item: item[1])
                done, row.resized = known.of(f"run {name}", partial(try_out, name, size))
                row.sentence = f"{row.sentence}; {done}"
    return sorted(found.values(), key=lambda row: (row.model, row.attentions))


def verdicts(known: Verdicts) -> Iterator[TimmRow]:
    """Yields the rows of the page."""
    for row in rows(known=known):
        attentions, count = ", ".join(row.attentions), len(row.names)
        yield row.model, attentions, count, row.verdict, row.resized, row.sentence


def judge(name: str) -> tuple[str, str, str, list[str], int] | None:
    """Returns the first fields of a model's row and its number of parameters.

    A model without self-attention has no row: `None`.
    """
    try:
        with torch.device("meta"):
            model = timm.create_model(name)
    except Exception as error:
        return name, "not built", str(error).splitlines()[0], [], 0
    found = sorted({short_name(type(m)) for m in model.modules() if is_known(m)})
    if not found:
        return None
    try:
        irpe.equip(model, SPEC)
    except ValueError as error:
        verdict, sentence = "refused", str(error)
    else:
        verdict, sentence = "equipped", what_is_equipped(model)
    size = sum(parameter.numel() for parameter in model.parameters())
    return short_name(type(model)), verdict, sentence, found, size


def is_known(module: nn.Module) -> bool:
    """Returns whether a module is an attention, or one that a reason is given for."""
    return is_innermost(module) or full_name(type(module)) in REFUSED


def is_innermost(module: nn.Module) -> bool:
    """Returns whether a module is an attention that has none inside it."""
    return is_attention(module) and sum(map(is_attention, module.modules())) == 1


def what_is_equipped(model: nn.Module) -> str:
    """Returns which attentions of a model have an encoding, and which stay as they are."""
    done = {type(each).__base__.__name__ for each in equipped_attentions(model).values()}
    left = {type(m).__name__ for m in model.modules() if is_innermost(m) and not hasattr(m, "rpe")}
    text = ", ".join(name + (" (in part)" if name in left else "") for name in sorted(done))
    rest = ", ".join(sorted(left - done))
    return text + (f"; as before: {rest}" if rest else "")


def short_name(kind: type) -> str:
    """Returns the name of a class with its module, as seen from timm's folders."""
    return full_name(kind).removeprefix("timm.").removeprefix("models.").removeprefix("layers.")


def try_out(name: str, size: int) -> tuple[str, str]:
    """Returns what a model does with tables, and whether it can be resized.

    Args:
        name: The model.
        size: Its number of parameters.
    """
    if size > MOST_PARAMETERS:
        return f"{name} not run, it has {size / 1e6:.0f} million parameters", ""
    torch.manual_seed(0)
    model = timm.create_model(name).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.02)
    image = torch.randn(1, *model.pretrained_cfg["input_size"])
    with torch.no_grad():
        plain = model(image)
        same = irpe.equip(model, SPEC)(image)
        for table in table_names(model):
            nn.init.normal_(model.get_parameter(table), std=1.0)
        changed = model(image)
    scale = float(plain.abs().max())
    if not torch.allclose(same, plain, rtol=1e-3, atol=1e-3 * scale):
        raise AssertionError(f"{name}: zero tables change the output")
    if torch.allclose(changed, same, rtol=1e-6, atol=1e-6 * scale):
        raise AssertionError(f"{name}: random tables do not change the output")
    return f"{name} run", try_resize(model, image.shape[-2:])
