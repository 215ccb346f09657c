"""`resize`: sets a model to another input size, in place, equipped or plain.

What an encoding has learned belongs to offsets and stays as it is. What the library made for the
old size is resampled: by the library where it does that, else as it does, from a model that it
builds for the new size, without values, which says what is to be different (`adopt_size`).
"""

import copy
import logging
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from math import prod
from typing import Any, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from irpe.adapters.equip import apply_equipment, changes_of, remember_changes, undo_equipment
from irpe.adapters.equipped import Equipment, equipment_of, has_generator, is_equipped
from irpe.adapters.hosts import hosts_of
from irpe.adapters.swaps import Snapshot, Swap, undo_change
from irpe.errors import UserError, UserTypeError

Model = TypeVar("Model", bound=nn.Module)
Size = tuple[int, int]  # rows and columns of an image, in pixels

_RESIZED = "_irpe_resized"  # the attribute of a model that holds what `resize` has changed
_MOST_OTHERS = 2  # sizes that are named
_FACTORS = (1, 2, 4, 8)  # of the side of a patch, by which sizes that would do are looked for


@dataclass(eq=False)
class Resized:
    """What `resize` has changed in a model, so that going back gives the tensors of before.

    Args:
        change: The change, which has been made.
        made: The tensors that were made, and copies of their values: while they are equal, nothing
            was learned since.
    """

    change: list[Swap]
    made: list[tuple[Swap, Tensor]]

    def is_untouched(self) -> bool:
        """Returns whether all tensors that were made are as they were made."""
        for swap, values in self.made:
            now = vars(swap.owner)[swap.kind].get(swap.key)
            if now is None or now.shape != values.shape:
                return False
            if not torch.equal(now.detach().to(values), values):
                return False
        return True


def resize(model: Model, image_size: int | Sequence[int]) -> Model:
    """Sets a model to another input size, in place, and returns the model.

    Plain or equipped; encodings stay as they are. If the model cannot be had at the size, an error
    says why and which sizes would do, and the model is unchanged. Resizing back to where it came
    from, with nothing learned in between, makes the model what it was.

    Args:
        model: A model of timm, transformers or torchvision, or one that contains such models.
        image_size: The rows and columns of an image, in pixels; one number for a square.

    Examples:
        >>> import irpe, timm
        >>> model = irpe.equip(timm.create_model("vit_tiny_patch16_224", depth=2), "K")
        >>> irpe.resize(model, (160, 320)).patch_embed.grid_size
        (10, 20)
    """
    size = _as_size(image_size)
    if not isinstance(model, nn.Module):
        raise UserTypeError(f"model is a {type(model).__qualname__}, not a torch.nn.Module")
    inner = model._modules.get("_orig_mod") or model  # of a wrapper of torch.compile
    parts = list(_parts_of(inner))
    if not parts:
        raise UserError(
            f"{type(inner).__qualname__} is not a model of timm, transformers or torchvision that "
            "takes images, and has none in it"
        )
    failure = _try_size(inner, size)
    if failure is not None:
        found = (other for other in _others(parts, size) if _would_do(inner, other))
        sizes = " or ".join(f"{rows} x {columns}" for rows, columns in islice(found, _MOST_OTHERS))
        raise UserError(
            f"{type(inner).__qualname__} cannot be had at {size[0]} x {size[1]} pixels: {failure}"
            f"{f'; {sizes} would do' if sizes else ''}"
        )
    return model


def _as_size(value: Any) -> Size:
    sides: Any = (value, value) if isinstance(value, int) else value
    if isinstance(sides, tuple | list) and len(sides) == 2:
        rows, columns = sides
        if all(type(side) is int and side > 0 for side in (rows, columns)):
            return rows, columns
    raise UserError(
        f"image_size = {value!r} must be a whole number of pixels, or rows and columns, as in 224 "
        "or (160, 320)"
    )


def _try_size(model: nn.Module, size: Size) -> str | None:
    """Sets a model to a size, or returns why it cannot be and leaves it as it is."""
    before = _snapshot(model)
    try:
        with torch.inference_mode(False), torch.no_grad():
            return _set_size(model, size)
    except UserError as error:
        before.restore()
        return str(error)
    except Exception as error:  # of the library, on its way to a size that it was not made for
        before.restore()
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return lines[0]
    except BaseException:
        before.restore()
        raise


def _snapshot(model: nn.Module) -> Snapshot:
    earlier: Resized | None = vars(model).get(_RESIZED)
    return Snapshot(model, [*changes_of(model), *([] if earlier is None else [earlier.change])])


def _would_do(model: nn.Module, size: Size) -> bool:
    before = _snapshot(model)
    failure = _try_size(model, size)
    before.restore()
    return failure is None


def _set_size(model: nn.Module, size: Size) -> None:
    """Sets a model to a size; raises an error on the way if it cannot be."""
    calls, changes = equipment_of(model), changes_of(model)
    if any(call.grid is not None for call in calls):
        raise UserError(
            f"irpe.equip was told grid={calls[0].grid}: leave grid= out there, and the grid is "
            "taken from each input"
        )
    if len(changes) != len(calls):
        raise UserError("it has encodings whose changes are not known: resize it before irpe.equip")
    encodings = list(_encodings_in(model))
    if calls:
        undo_equipment(model)
    earlier: Resized | None = vars(model).pop(_RESIZED, None)
    if earlier is not None and earlier.is_untouched():
        undo_change(earlier.change)
    plain = Snapshot(model)
    for part, host in _parts_of(model):
        _set_part(part, host, size)
    change = plain.change()
    if change:
        made = [
            (swap, vars(swap.owner)[swap.kind][swap.key].detach().clone())
            for swap in change
            if swap.kind == "_parameters" and swap.key in vars(swap.owner)[swap.kind]
        ]
        vars(model)[_RESIZED] = Resized(change, made)
    _equip_again(model, calls, changes, encodings)


def _equip_again(
    model: nn.Module,
    calls: Sequence[Equipment],
    changes: Sequence[list[Swap]],
    encodings: Sequence[tuple[nn.Module, str, nn.Module]],
) -> None:
    """Equips a model as it was, with the same encodings."""
    new: list[list[Swap]] = []
    for call in calls:
        if call.builtin_bias == "convert":  # our tables have what was converted
            call = replace(call, builtin_bias="drop")
        new.append(apply_equipment(model, call))
    if changes:
        remember_changes(model, new)
    for owner, name, module in encodings:
        owner._modules[name] = module


def _encodings_in(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for module in model.modules():
        for name, is_there in (("rpe", is_equipped(module)), ("peg", has_generator(module))):
            encoding = module._modules.get(name) if is_there else None
            if encoding is not None:
                yield module, name, encoding


def _parts_of(model: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """Yields the outermost models of a library in a model, with the host that knows their size."""
    hosts = [host.sizes for host in hosts_of(model).values() if hasattr(host, "sizes")]
    inside: set[int] = set()
    for module in model.modules():
        if id(module) in inside:
            continue
        host = next((host for host in hosts if host.image_size_of(module) is not None), None)
        if host is not None:
            inside |= {id(part) for part in module.modules()}
            yield module, host


def _set_part(part: nn.Module, host: Any, size: Size) -> None:
    """Sets a model of a library to a size, and makes sure that it runs at it."""
    own = host.image_size_of(part)
    can_be_run = _failure_at(part, host, own) is None
    if not host.set_input_size(part, size):
        if can_be_run and _failure_at(part, host, size) is None:
            return  # it takes images of several sizes
        adopt_size(part, own, size, host)
    failure = _failure_at(part, host, size) if can_be_run else None
    if failure is not None:
        raise failure


def _failure_at(part: nn.Module, host: Any, size: Size) -> Exception | None:
    """Returns why a model does not run at a size, `None` if it does; nothing is computed."""
    tensors = (*part.parameters(), *part.buffers())
    twin = copy.deepcopy(part, {id(tensor): tensor for tensor in tensors}).eval()
    for module in twin.modules():  # BEiT of transformers would keep a fake index in its cache
        cached = getattr(module, "generate_relative_position_index", None)
        if cached is not None:
            vars(module)["generate_relative_position_index"] = cached.__wrapped__
    like = next((x for x in tensors if x.is_floating_point()), torch.empty(0))
    try:
        with _unlogged(), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            image = torch.zeros(2, host.channels_of(part), *size, device=like.device)
            host.run(twin, image.to(like.dtype))
    except Exception as error:
        return error
    return None


@contextmanager
def _unlogged() -> Generator[None]:
    """Keeps torch from logging what does not run, which is an answer here."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _others(parts: Sequence[tuple[nn.Module, Any]], size: Size) -> list[Size]:
    """Returns sizes near one, the nearest first: whole patches, squares among them."""
    patch = max(host.patch_of(part) for part, host in parts)
    found: dict[Size, int] = {}
    for side in (patch * factor for factor in _FACTORS):
        axes = [
            {max(1, length // side) * side, max(1, -(-length // side)) * side} for length in size
        ]
        sizes = [(rows, columns) for rows in axes[0] for columns in axes[1]]
        sizes += [(length, length) for axis in axes for length in axis]
        for each in sizes:
            found[each] = abs(each[0] - size[0]) + abs(each[1] - size[1])
    found.pop(size, None)
    return sorted(found, key=lambda each: (found[each], each))[:8]


def adopt_size(part: nn.Module, own: Size, size: Size, host: Any) -> None:
    """Makes a model what its library builds for another size, with the values that it has."""
    old, new = (host.build_for_size(part, each) for each in (own, size))
    grids = tuple(_grid(each, host.patch_of(part)) for each in (own, size))
    olds, news = dict(old.named_modules()), dict(new.named_modules())
    for name, module in part.named_modules():
        if name not in news:
            continue
        window = vars(news[name]).get("window_size")
        if hasattr(module, "set_window_size") and vars(olds[name]).get("window_size") != window:
            whole: Any = module
            whole.set_window_size(window)  # of timm, which resamples the tables
        _adopt_attributes(module, olds[name], news[name])
        for kind in ("_parameters", "_buffers"):
            for key, tensor in list(vars(module)[kind].items()):
                other = vars(news[name])[kind].get(key)
                if tensor is not None and other is not None and tensor.shape != other.shape:
                    values = resampled(key, tensor, tuple(other.shape), *grids).contiguous()
                    is_parameter = kind == "_parameters"
                    made = nn.Parameter(values, tensor.requires_grad) if is_parameter else values
                    vars(module)[kind][key] = made
    host.adopt_configuration(part, old, new)


def _grid(size: Size, patch: int) -> Size:
    return size[0] // patch, size[1] // patch


def _adopt_attributes(module: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Sets the plain attributes in which the models for two sizes differ."""
    for name, value in vars(new).items():
        is_plain = isinstance(value, int | float | tuple | list) and name != "training"
        if is_plain and name in vars(module) and vars(old).get(name) != value:
            vars(module)[name] = value


def resampled(
    name: str, tensor: Tensor, shape: tuple[int, ...], grid: Size, new_grid: Size
) -> Tensor:
    """Returns what a model has learned, or counted, for the positions of another grid.

    Args:
        name: What the tensor is called.
        tensor: The tensor.
        shape: The shape that it is to have.
        grid: The grid of patches that it is for.
        new_grid: The grid that it is to be for.
    """
    axes = [n for n in range(tensor.ndim) if tensor.shape[n] != shape[n]]
    values = tensor.detach()
    if not tensor.is_floating_point() and values.equal(
        torch.arange(values.numel()).view_as(values)
    ):
        return torch.arange(prod(shape), device=values.device).view(shape)
    if values.ndim == 4 and values.is_floating_point():
        first = (
            2 if 3 in axes or axes == [2] else 1
        )  # batch channels rows columns, or channels last
        maps = values if first == 2 else values.permute(0, 3, 1, 2)
        sides = shape[first : first + 2]
        maps = _on_grid(maps, (sides[0], sides[1]))
        return maps if first == 2 else maps.permute(0, 2, 3, 1)
    if len(axes) == 1 and values.is_floating_point():
        (axis,) = axes
        if name.startswith("rel_pos"):  # a vector for each offset of an axis
            rows = values.float().T[None]
            return F.interpolate(rows, size=shape[axis], mode="linear")[0].T.to(values)
        count = values.shape[axis] - prod(grid)
        if 0 <= count == shape[axis] - prod(new_grid) and axis == values.ndim - 2:
            prefix, patches = values.split([count, prod(grid)], dim=axis)
            maps = patches.reshape(1, *grid, -1).permute(0, 3, 1, 2)
            patches = _on_grid(maps, new_grid).permute(0, 2, 3, 1)
            patches = patches.reshape(*prefix.shape[:axis], prod(new_grid), -1)
            return torch.cat([prefix, patches], dim=axis)
    raise UserError(
        f"{name} has the shape {tuple(tensor.shape)} and would have {shape}: how to resample it is "
        "not known"
    )


def _on_grid(maps: Tensor, grid: Size) -> Tensor:
    """Returns maps, batch channels rows columns, on another grid, as transformers does it."""
    found = F.interpolate(maps.float(), size=grid, mode="bicubic", align_corners=False)
    return found.to(maps)
