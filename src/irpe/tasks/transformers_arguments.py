"""Arguments of a configuration of transformers, which would take any name and ignore it."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from transformers import PreTrainedConfig

from irpe.errors import UserError, did_you_mean


def check_arguments(
    arguments: Mapping[str, Any], config_class: Any, name: str, fixed: Collection[str] = ()
) -> None:
    """Raises an error for an argument that is not one of a model's own."""
    known = own_arguments(config_class) - set(fixed)
    unknown = sorted(set(arguments) - known)
    if unknown:
        hint = did_you_mean(unknown[0], known)
        raise UserError(
            f"model_args {unknown[0]!r} is not an argument of transformers' {name}{hint or ';'} "
            "{} takes all of its defaults"
        )


def own_arguments(config_class: Any) -> set[str]:
    """Returns the arguments of a configuration, without those that every one has."""
    every = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    names = {field.name for field in dataclasses.fields(config_class)} - every
    return {name.removeprefix("_") for name in names}  # _out_features is given without
