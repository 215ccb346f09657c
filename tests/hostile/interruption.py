"""Saves that are interrupted or killed at any call of the system: old or new, and modes stay."""

import os
import random
import stat
from functools import partial

import torch
from adapters.small_models import make_vit, perturb
from hostile.cases import Case

import irpe
from irpe.files import write_whole

# What a save asks of the system, in the order in which it does.
CALLS = ["open", "chown", "chmod", "fsync", "replace", "unlink", "close"]
FILES = {"irpe.json", "model.safetensors"}


class Interrupter:
    """Raises an error, or kills the process, before or after one call of the system."""

    def __init__(self, number, is_after, kills):
        self.left, self.is_after, self.kills = number, is_after, kills
        self.calls = {name: getattr(os, name) for name in CALLS}

    def __enter__(self):
        for name, call in self.calls.items():
            setattr(os, name, partial(self.call, call))

    def __exit__(self, *_):
        for name, call in self.calls.items():
            setattr(os, name, call)

    def call(self, call, *arguments, **options):
        self.left -= 1
        if self.left == 0 and not self.is_after:
            self.stop()
        result = call(*arguments, **options)
        if self.left == 0:
            self.stop()
        return result

    def stop(self):
        if self.kills:
            os._exit(7)
        raise KeyboardInterrupt


def attempt(save, draw):
    """Saves with an interruption somewhere; returns whether it went through."""
    interrupter = Interrupter(draw.randint(1, 32), draw.random() < 0.5, draw.random() < 0.5)
    if not interrupter.kills:
        try:
            with interrupter:
                save()
        except KeyboardInterrupt:
            return False
        return True
    child = os.fork()
    if child == 0:
        try:
            with interrupter:
                save()
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 7), code
    return code == 0


def make(number):
    spec = ["product-bias-k", "cross-contextual-k", "euclidean-bias-k"][number % 3]
    return perturb(irpe.equip(make_vit(), spec), number)


def is_same(one, other):
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


def modes(folder):
    return {stat.S_IMODE(f.stat().st_mode) for f in folder.iterdir() if f.name in FILES}


def check_models(folder, seed):
    """Five saves of which each may be interrupted, over one another."""
    draw, path, possible = random.Random(seed), folder / f"model-{seed}", [None]
    mode = draw.choice([0o600, 0o640, 0o644])
    for number in range(seed, seed + 5):
        model, had_mode = make(number), (path / "irpe.json").exists()
        went_through = attempt(partial(irpe.save_equipped, model, path), draw)
        found = irpe.load_equipped(path) if (path / "irpe.json").exists() else None
        possible = [model] if went_through else [*possible, model]
        kept = [m for m in possible if (m and found and is_same(m, found)) or m is found]
        if not kept:
            return "neither the old model nor the new one"
        possible = kept
        if found is not None:
            if had_mode and modes(path) != {mode}:
                return f"modes {modes(path)} instead of {mode}"
            for file in path.iterdir():
                file.chmod(mode)
    irpe.save_equipped(make(seed), path)
    left = {*os.listdir(path)} - FILES
    return f"left {left}" if left else "equal"


def check_files(folder, seed):
    """One file, written by somebody else's function, which may be interrupted as well."""
    draw, path = random.Random(seed), folder / f"file-{seed}"
    path.write_bytes(old := draw.randbytes(100))
    path.chmod(mode := draw.choice([0o600, 0o640, 0o644]))
    new = draw.randbytes(100)
    went_through = attempt(partial(write_whole, path, lambda file: file.write(new)), draw)
    if path.read_bytes() not in ([new] if went_through else [old, new]):
        return "neither the old file nor the new one"
    return "equal" if stat.S_IMODE(path.stat().st_mode) == mode else "another mode"


def cases(seed, count, folder):
    """Yields `count` models and files."""
    for number in range(seed, seed + count):
        for check in (check_models, check_files):
            yield Case(f"{check.__name__} {number}", partial(check, folder, number))
