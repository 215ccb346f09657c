"""Equipped models on disk: a directory with the tensors (safetensors) and a description (json).

Nothing that is read here can run code; whatever else is in the directory stays. A save writes its
tensors to a hidden file named by their checksum, replaces the description, which holds the checksum
and so decides which tensors count, and then moves the hidden file over the old tensors. Whatever
interrupts it, the directory holds the old model or the new one; the next save tidies up.
"""

import json
import os
import re
import warnings
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from irpe.adapters.equip import LACKS, apply_equipment, remember_changes, removed_by
from irpe.adapters.equipped import Equipment, equipment_of
from irpe.adapters.hosts import host_named, hosts_of
from irpe.adapters.swaps import Swap, undo_change
from irpe.core.encodings import parse_encoding
from irpe.errors import MissingFileError, TakenPathError, UserError
from irpe.extras import require
from irpe.files import (
    check_json,
    check_writable,
    is_ours,
    locked,
    move,
    read_safetensors,
    tensor_checksum,
    to_json,
    to_safetensors,
    version_of,
    write_bytes,
    write_text,
)

_DESCRIPTION, _TENSORS = "irpe.json", "model.safetensors"
_LOCK = f".{_DESCRIPTION}.lock"
_CHECKSUM = re.compile("[0-9a-f]{64}")
_FORMAT = 1


def save_equipped(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Writes an equipped model to a directory; one that is there already is replaced.

    Args:
        model: A model that `equip` returned, or `torch.compile` of one.
        path: The directory. Other files in it stay as they are.

    Examples:
        >>> import irpe, tempfile, timm
        >>> model = irpe.equip(timm.create_model("vit_tiny_patch16_224", depth=1), "product-bias-k")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     irpe.save_equipped(model, f"{folder}/model")
    """
    path = Path(path)
    equipment = equipment_of(model)
    _check_model(model, equipment)
    model = _uncompiled(model)
    _check_directory(path)
    tensors = {
        name: tensor.detach().clone(memory_format=torch.contiguous_format)
        for name, tensor in model.state_dict().items()
    }
    checksum = tensor_checksum(tensors)
    description = {
        "format": _FORMAT,
        "equipment": [call.to_dict() for call in equipment],
        "host": _describe(model, equipment),
        "tensors": checksum,
    }
    with _new_folder(Path(os.path.realpath(path))), locked(path / _LOCK):
        _replace(path, to_json(description), checksum, to_safetensors(tensors))


def _replace(path: Path, description: str, checksum: str, tensors: bytes) -> None:
    """Replaces a save by another one; the replacement of the description decides."""
    hidden = _hidden(path, checksum)
    check_writable(path / _TENSORS)
    old = next((path / name for name in (_TENSORS, _DESCRIPTION) if (path / name).is_file()), None)
    try:
        write_bytes(hidden, tensors, like=old)
        write_text(path / _DESCRIPTION, description, like=old)
        move(hidden, path / _TENSORS)
    finally:
        _tidy(path)


def _hidden(path: Path, checksum: str) -> Path:
    """Returns where the tensors of a save are until they have replaced those before."""
    target = Path(os.path.realpath(path / _TENSORS))
    return target.with_name(f".{target.name}.{checksum[:16]}")


def _tidy(path: Path) -> None:
    """Removes what interrupted saves have left, but for tensors that the description names."""
    checksum = _named_checksum(path)
    used = None if checksum is None else _hidden(path, checksum)
    for target in (Path(os.path.realpath(path / name)) for name in (_TENSORS, _DESCRIPTION)):
        left = re.compile(rf"\.\.?{re.escape(target.name)}(\.[0-9a-f]+)+")
        for file in target.parent.iterdir():
            if left.fullmatch(file.name) and file != used:
                file.unlink(missing_ok=True)


def _named_checksum(path: Path) -> str | None:
    """Returns the checksum of the tensors in a description, `None` without an intact one."""
    try:
        with warnings.catch_warnings(action="ignore"):
            return _read_description(path / _DESCRIPTION)["tensors"]
    except (OSError, ValueError):
        return None


@contextmanager
def _new_folder(path: Path) -> Generator[None]:
    """Makes a folder and those above it; removes those that are new if there is an error."""
    new = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for folder in new:
            with suppress(OSError):  # it was not made, or somebody else uses it
                folder.rmdir()
        raise


def load_equipped(path: str | os.PathLike[str], model: nn.Module | None = None) -> nn.Module:
    """Returns the equipped model that `save_equipped` wrote, in eval mode.

    Every tensor has the dtype in which it was saved.

    Args:
        path: The directory; one that `save_pretrained` of transformers wrote will do too.
        model: A plain model of the same kind, for models that cannot be built from a description
            (those of torch.nn, models inside others, and classes of your own); it is equipped and
            filled in place.

    Examples:
        >>> import irpe, tempfile, timm
        >>> model = irpe.equip(timm.create_model("vit_tiny_patch16_224", depth=1), "product-bias-k")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     irpe.save_equipped(model, f"{folder}/model")
        ...     same = irpe.load_equipped(f"{folder}/model")
    """
    path, is_given = Path(path), model is not None
    if model is not None:
        _check_values(model)
    if not (path / _DESCRIPTION).exists() and (path / "config.json").is_file():
        description, tensors = _read_pretrained(path, model)
    else:
        description, tensors = _read_save(path)
    if model is None:
        model = _build(description["host"], path)
    changes = _equip_all(description, path / _DESCRIPTION, model)
    try:
        check_tensors(model, tensors, path)
    except UserError:
        _undo_all(changes)
        raise
    remember_changes(model, changes)
    if not is_given and removed_by(equipment_of(model)):
        vars(model)[LACKS] = True
    _cast(model, tensors)
    model.load_state_dict(tensors)
    return model.eval()


def _check_model(model: nn.Module, equipment: Sequence[Equipment]) -> None:
    """Raises an error if a model cannot be saved as it is, and says which one can."""
    if not equipment:
        inside = [name for name, module in model.named_modules() if equipment_of(module)]
        if inside:
            raise UserError(
                f"{type(model).__qualname__} is not an equipped model, but has one in it: "
                f"irpe.save_equipped(model.{inside[0]}, path)"
            )
        raise UserError("the model has no encodings: call irpe.equip(model, spec) first")
    if any(type(module).__module__.startswith("peft.") for module in model.modules()):
        raise UserError(
            "the model has adapters of PEFT: save these with model.save_pretrained, or merge them "
            "first, irpe.save_equipped(model.merge_and_unload(), path)"
        )
    _check_values(model)
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "full_tensor"):  # DTensor
            raise UserError(
                f"the model is sharded, {name} is a DTensor: gather it in all processes, state = "
                "torch.distributed.checkpoint.state_dict.get_model_state_dict(model, options="
                "StateDictOptions(full_state_dict=True, cpu_offload=True)), then in the first "
                "process load_state_dict(state) of the same model, equipped and not sharded, and "
                "save that"
            )


def _check_values(model: nn.Module) -> None:
    """Raises an error if a tensor of a model has a shape, but no values."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise UserError(
                f"{name} of the model is on the meta device, where tensors have no values: build "
                "the model on the CPU or another device"
            )


def _uncompiled(model: nn.Module) -> nn.Module:
    """Returns the model in a wrapper of torch.compile, whose names have a prefix."""
    inner = model._modules.get("_orig_mod")
    return model if inner is None else _uncompiled(inner)


def _check_directory(path: Path) -> None:
    """Raises an error if a path holds something else, so that a model is not mixed with it."""
    if not path.exists():
        return
    is_free = path.is_dir() and _may_be_replaced(path)
    if is_free and not (path / _DESCRIPTION).is_file():
        is_free = all(map(_is_of_a_killed_save, path.iterdir()))
    if not is_free:
        raise TakenPathError(
            f"{path} exists and is not an equipped model: choose another path, or remove it first"
        )


def _may_be_replaced(path: Path) -> bool:
    """Returns whether a directory has no tensors, or those of an equipped model."""
    file = path / _TENSORS
    if not file.exists() or is_ours(file):
        return True
    with suppress(OSError, ValueError), warnings.catch_warnings(action="ignore"):
        return tensor_checksum(read_safetensors(file)) == _named_checksum(path)  # a copy of them
    return False


def _is_of_a_killed_save(file: Path) -> bool:
    """Returns whether the name of a file is one that a save uses, also before it has ended."""
    hidden = f".{_DESCRIPTION}.", f".{_TENSORS}.", f"..{_TENSORS}."
    return file.name in (_DESCRIPTION, _TENSORS) or file.name.startswith(hidden)


def _describe(model: nn.Module, equipment: Sequence[Equipment]) -> dict[str, Any] | None:
    """Returns what a host needs to build the plain model again, or `None` if none can.

    A library does not record what was changed by hand since, so a model without values is built
    and equipped, and compared: its modules, what they print of themselves, and its tensors.
    """
    for library, host in hosts_of(model).items():
        arguments = host.describe_model(model) if hasattr(host, "describe_model") else None
        if arguments is None:
            continue
        description = {"library": library, "arguments": arguments}
        try:
            with torch.device("meta"):
                twin = _build(description, Path())
            for call in equipment:
                apply_equipment(twin, call)
        except ValueError:  # it was made with arguments that the library does not record
            continue
        if _structure(twin) == _structure(model):
            return description
    return None


def _structure(model: nn.Module) -> list[tuple[object, ...]]:
    """Returns what a model prints of its modules, and the shapes of its tensors, without dtypes."""
    modules = [
        (name, type(module), module.extra_repr())
        for name, module in model.named_modules()
        if not isinstance(module, nn.ParameterList)
    ]
    tensors = model.state_dict().items()
    return [*modules, *((name, x.shape, x.is_contiguous()) for name, x in tensors)]


def _build(host: dict[str, Any] | None, path: Path) -> nn.Module:
    if host is None:
        raise UserError(
            f"{path} holds a model that cannot be built from its description alone: build the "
            "plain model and pass it, irpe.load_equipped(path, model=plain)"
        )
    try:
        module = host_named(host["library"])
        if not hasattr(module, "build_model"):
            raise UserError(f"modules of {host['library']} are not built, pass model=plain")
        return module.build_model(host["arguments"])
    except (
        ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError,
        ValueError,
    ) as error:  # fmt: skip
        raise UserError(
            f"{path / _DESCRIPTION} does not describe a model that can be built: {error!r}"
        ) from error


def _read_pretrained(
    path: Path, model: nn.Module | None
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    require("transformers", "transformers")
    host = host_named("transformers")
    description = host.read_config(path)
    equip = partial(_equip_all, description, path / "config.json")
    return description, host.read_tensors(path, description["host"]["arguments"], equip, model)


def _equip_all(description: dict[str, Any], file: Path, model: nn.Module) -> list[list[Swap]]:
    """Equips a model as a file describes it, and returns the changes."""
    changes: list[list[Swap]] = []
    try:
        for call in [_equipment(call) for call in description["equipment"]]:
            changes.append(apply_equipment(model, call))
    except (KeyError, TypeError, ValueError) as error:
        _undo_all(changes)
        raise UserError(f"{file} does not fit: {error}") from error
    if not changes:
        raise UserError(f"{file} is damaged: it names no encoding")
    return changes


def _undo_all(changes: Sequence[list[Swap]]) -> None:
    for change in reversed(changes):
        undo_change(change)


def _read_save(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Returns the description and the tensors of one save, also while others replace it."""
    file = path / _DESCRIPTION
    while True:
        if not file.is_file():
            raise MissingFileError(
                f"{file} does not exist: {path} is not a directory that irpe.save_equipped wrote"
            )
        before = version_of(file)
        description = _read_description(file)
        tensors = _read_tensors(path, description["tensors"])
        if description["tensors"] in (None, tensor_checksum(tensors)):
            return description, tensors
        if version_of(file) == before:
            raise UserError(f"{file} and {_TENSORS} are not of one save: save the model again")


def _read_description(path: Path) -> dict[str, Any]:
    try:
        description = json.loads(path.read_text())
        if description["format"] != _FORMAT:
            raise UserError(f"format {description['format']!r}, this release reads {_FORMAT}")
        read = {name: description[name] for name in ("equipment", "host")}
        checksum = description.get("tensors")
        if checksum is not None and not _CHECKSUM.fullmatch(checksum):
            raise UserError(f"checksum {checksum!r}")
    except (ValueError, KeyError, RecursionError, TypeError) as error:
        raise UserError(f"{path} is damaged or of another program: {error!r}") from error
    check_json(description, path)
    return {**read, "tensors": checksum}


def _read_tensors(path: Path, checksum: str | None) -> dict[str, torch.Tensor]:
    hidden = [] if checksum is None else [_hidden(path, checksum)]
    for file in (*hidden, path / _TENSORS):
        if file.is_file():
            with suppress(FileNotFoundError):  # a save that ends now has moved it
                return read_safetensors(file)
    raise MissingFileError(f"{path / _TENSORS} does not exist: the directory is incomplete")


def _equipment(call: dict[str, Any]) -> Equipment:
    fields: dict[str, Any] = {**call, "spec": parse_encoding(call["spec"])}
    for name in ("grid", "layers"):
        fields[name] = call[name] and tuple(call[name])
    return Equipment(**fields)


def check_tensors(model: nn.Module, tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Raises an error unless names, shapes and kinds of tensors agree, before any is copied."""
    own, read = _layouts(model.state_dict()), _layouts(tensors)
    wrong = sorted(name for name in {*own, *read} if own.get(name) != read.get(name))
    if wrong:
        name = wrong[0]
        raise UserError(
            f"{path} does not fit the model in {len(wrong)} tensors, the first is {name}: the file "
            f"has {read.get(name, 'none')}, the model {own.get(name, 'none')}"
        )


def _cast(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Gives every tensor of a model the dtype in which it was saved.

    Where one differs, buffers that are not saved get the dtype of most saved elements.
    """
    own = model.state_dict(keep_vars=True)
    if all(tensor.dtype == tensors[name].dtype for name, tensor in own.items()):
        return
    sizes = Counter[torch.dtype]()
    for tensor in tensors.values():
        if tensor.is_floating_point():
            sizes[tensor.dtype] += tensor.numel()
    model.to(sizes.most_common(1)[0][0])
    for name, tensor in model.state_dict(keep_vars=True).items():
        tensor.data = tensor.data.to(tensors[name].dtype)


def _layouts(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Returns kinds and shapes; one floating-point type may be copied to another, no other may."""
    return {
        name: f"{tuple(x.shape)}" + ("" if x.is_floating_point() else f" of {x.dtype}")
        for name, x in tensors.items()
    }
