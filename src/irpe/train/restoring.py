"""Whether what a checkpoint holds fits the run that goes on from it; checked before it is used."""

from typing import Any

from torch import Tensor

from irpe.errors import UserError


def check_position(state: dict[str, Any], epochs: int, steps: int, num_images: int) -> None:
    """Raises an error unless the run can stand where its checkpoint says.

    Args:
        state: The checkpoint.
        epochs: The epochs of the run.
        steps: The steps of an epoch.
        num_images: The number of training images.
    """
    for name, high in {"epoch": epochs, "step": steps if state["epoch"] < epochs else 0}.items():
        if state[name] > high:
            raise UserError(f"{name} = {state[name]} must be at most {high}")
    if [row["epoch"] for row in state["history"]] != list(range(1, state["epoch"] + 1)):
        raise UserError(f"the table of epochs does not have the epochs 1 to {state['epoch']}")
    if any(index >= num_images for index in state["broken"]):
        raise UserError(f"it names an image above {num_images - 1} as broken")


def check_groups(optimizer: Any, read: list[dict[str, Any]]) -> None:
    """Raises an error unless settings in a checkpoint are of the types that the optimizer has."""
    for own, group in zip(optimizer.state_dict()["param_groups"], read, strict=True):
        for name, value in own.items():
            kind = (int, float) if isinstance(value, int | float) else type(value)
            if name not in group or not isinstance(group[name], kind):
                found = group.get(name, "missing")
                raise UserError(f"{name} of the optimizer is {found!r}, not like {value!r}")


def check_moments(optimizer: Any, done: int) -> None:
    """Raises an error unless the state of an optimizer fits its parameters.

    Args:
        optimizer: The optimizer, with the state of a checkpoint.
        done: The steps of the run so far.
    """
    moments = "exp_avg", "exp_avg_sq", "momentum_buffer"
    states: dict[Tensor, dict[str, Any]] = dict(optimizer.state)
    for parameter, state in states.items():
        shapes = {name: getattr(state.get(name), "shape", None) for name in moments}
        for name, shape in shapes.items():
            if state.get(name) is not None and shape != parameter.shape:
                raise UserError(f"{name} of the optimizer is {shape}, not {parameter.shape}")
        step: Any = state.get("step", 0)
        if not 0 <= float(step) <= done:
            raise UserError(f"step {step} of the optimizer is not between 0 and {done}")
