"""Runs that are compared: those that differ in the seed alone are a group, which has a name."""

import dataclasses
import re
from collections.abc import Sequence

from torch import nn

from irpe.errors import UserError
from irpe.train.config import RunConfig
from irpe.train.run import Run


def group_runs(configs: Sequence[RunConfig]) -> list[int]:
    """Returns the index of each run's group: runs that differ in the seed alone form a group.

    Args:
        configs: The configurations of the runs.
    """
    keys = [config.replace(seed=0).to_json() for config in configs]
    groups = {key: group for group, key in enumerate(dict.fromkeys(keys))}
    return [groups[key] for key in keys]


def name_groups(runs: Sequence[Run], labels: Sequence[str]) -> list[str]:
    """Returns the label of each run, which is the label of its group.

    Args:
        runs: The runs.
        labels: A name for each group, in the order of their first runs; empty: names made from
            the encodings.
    """
    configs = [run.config for run in runs]
    groups = group_runs(configs)
    first = [groups.index(group) for group in range(max(groups) + 1)]
    if labels and len(labels) != len(first):
        raise UserError(
            f"{len(labels)} labels for {len(first)} groups of runs (runs that differ in the seed "
            "alone are a group): give one label for each, in the order of "
            f"{', '.join(str(runs[index]) for index in first)}"
        )
    names = list(labels) or [label_encodings(configs[n], runs[n].load()) for n in first]
    for group, name in enumerate(names):
        other = names.index(name)
        if other < group:
            fields = _differences(configs[first[other]], configs[first[group]])
            raise UserError(
                f"two groups of runs are called {name!r}, and differ in {', '.join(fields)}: give "
                f"each of the {len(first)} groups a label of its own"
            )
    return [names[group] for group in groups]


def label_encodings(config: RunConfig, model: nn.Module) -> str:
    """Returns a short name for the encodings of a run, such as "absolute + K".

    Args:
        config: The run's configuration.
        model: The run's model.
    """
    keys = list(model.state_dict())
    parts: list[str] = []
    if config.absolute == "sinusoid":
        parts.append("sinusoid")
    elif any(key.split(".")[-1] == "pos_embed" for key in keys):
        parts.append("absolute")
    if any(key.endswith("relative_position_bias_table") for key in keys):
        parts.append("built-in bias")
    if config.encoding != "none":
        usual = re.fullmatch("product-contextual-([qkv]+)", config.encoding)
        parts.append(usual[1].upper() if usual else config.encoding)
    return " + ".join(parts) or "none"


def _differences(one: RunConfig, other: RunConfig) -> list[str]:
    names = [field.name for field in dataclasses.fields(one) if field.name != "seed"]
    return [name for name in names if getattr(one, name) != getattr(other, name)]
