"""Checkpoints in the layout of the paper's authors, read without running anything in them.

Their tables differ from ours in four ways: the query table is indexed by key minus query, so it is
mirrored; a bias was added after scaling, so it is multiplied by sqrt(d); contextual tables of
queries and keys are (heads, d, rows); cross keeps its two tables under names of their own.
"""

import argparse
import math
import pickle
import warnings
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from irpe.adapters.equipped import active_encoding, equipped_attentions
from irpe.adapters.saving import check_tensors
from irpe.errors import MissingFileError, UserError
from irpe.files import check_zip, warn_unchecked
from irpe.models.detr import rename_detr

WHERE = "https://github.com/wkcn/iRPE-model-zoo/releases/download/1.0/"
_INSIDE = {"product": ("",), "cross": ("rp_rows.", "rp_cols.")}
_ROLES = {"query": "q", "key": "k", "value": "v"}


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a file; the only other type that may occur in it is a Namespace."""
    if not path.is_file():
        raise MissingFileError(f"{path} does not exist: fetch it from {WHERE}")
    has_checksums = check_zip(path)
    with path.open("rb") as file:
        content = _load(file, path)
    if not has_checksums:
        warn_unchecked(path)
    tensors: Any = content.get("model") if isinstance(content, dict) else None
    if not isinstance(tensors, dict) or not tensors:
        raise UserError(
            f"{path} is not a checkpoint of the authors' code, which has its tensors under 'model'"
        )
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise UserError(
                f"{path} is not a checkpoint of the authors' code: {name!r} is not a tensor"
            )
    return tensors


def _load(file: IO[bytes], path: Path) -> Any:
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals([argparse.Namespace]):
            warnings.simplefilter("ignore")  # of other versions of pickle
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise UserError(
            f"{path} is damaged, or holds something else than tensors and an argparse.Namespace; "
            "nothing in it was run"
        ) from None
    except Exception as error:  # there are many ways to be damaged
        reason = str(error).partition(". ")[0] or type(error).__name__
        raise UserError(f"{path} is damaged or no file of PyTorch: {reason}") from error


def fill(model: nn.Module, tensors: dict[str, Tensor], path: Path) -> nn.Module:
    """Fills an equipped model, or raises an error and leaves it as it was.

    Args:
        model: The model.
        tensors: What `read_checkpoint` returned.
        path: The file, for errors.
    """
    ours = rename_detr(tensors) if "input_proj.weight" in tensors else dict(tensors)
    for name, attention in equipped_attentions(model).items():
        _convert_tables(ours, name, attention, path)
    check_tensors(model, ours, path)
    model.load_state_dict(ours)
    return model.eval()


def _convert_tables(
    tensors: dict[str, Tensor], name: str, attention: nn.Module, path: Path
) -> None:
    """Replaces their tables of one attention by ours."""
    encoding = active_encoding(attention)
    spec = encoding.spec
    if spec.method not in _INSIDE:
        raise UserError(
            f"the authors' {spec.method} is not the paper's: they publish no checkpoint with it, "
            f"and only {', '.join(_INSIDE)} can be read"
        )

    def take(letter: str, inside: str, kind: str) -> Tensor:
        key = f"{name}.rpe_{letter}.{inside}lookup_table_{kind}"
        if key not in tensors:
            raise UserError(f"{path} has no tensor {key}, which {spec} needs")
        table = tensors.pop(key)
        if table.ndim != (2 if kind == "bias" else 3):
            raise UserError(
                f"{path}: {key} has shape {tuple(table.shape)}, which is not that of a table"
            )
        return table

    for number, inside in enumerate(_INSIDE[spec.method]):
        if spec.mode == "bias":
            bias = take("k", inside, "bias") * math.sqrt(_head_dim(attention))
            tensors[f"{name}.rpe.bias_tables.{number}"] = bias
            continue
        for role, letter in _ROLES.items():
            if letter in spec.targets:
                table = take(letter, inside, "weight")
                table = table if letter == "v" else table.mT.contiguous()
                table = _mirror(table, encoding.num_prefix_tokens) if letter == "q" else table
                tensors[f"{name}.rpe.{role}_tables.{number}"] = table


def _head_dim(attention: nn.Module) -> int:
    head_dim = attention.head_dim
    assert isinstance(head_dim, int)
    return head_dim


def _mirror(table: Tensor, num_prefix_tokens: int) -> Tensor:
    """Turns the row of an offset into that of the opposite offset; the prefix row stays last."""
    end = table.shape[1] - (num_prefix_tokens > 0)
    return torch.cat([table[:, :end].flip(1), table[:, end:]], dim=1)
