"""What a run ends with, and two processes that work in one directory."""

import multiprocessing
from functools import partial

import torch
from adapters.small_models import make_vit, perturb
from hostile.cases import Case
from train import little

import irpe
from irpe.train.run import Run, read_metrics, read_weights

MEASURED = {"seconds", "images_per_second"}  # differ between any two runs
FORK = multiprocessing.get_context("fork")


def outcome(directory):
    """Returns what a run ended with, apart from what a clock measured."""
    state = Run(directory).checkpoint()
    rows = [{k: v for k, v in row.items() if k not in MEASURED} for row in state["history"]]
    table = {k: v for k, v in read_metrics(directory).items() if k not in MEASURED}
    return {**state, "history": rows, "table": table, "weights": read_weights(directory)}


def is_same(one, other):
    """Returns whether two nested values are equal, tensors bit for bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(is_same, one, other))
    are_nan = one != one and other != other  # a score of objects that are not there
    return are_nan or one == other


def _together(targets):
    """Runs functions at once, each in a process of its own, and returns how they ended."""
    started = [FORK.Process(target=target) for target in targets]
    for process in started:
        process.start()
    for process in started:
        process.join()
    return [process.exitcode for process in started]


def check_runs(folder, seed):
    """Two runs in one directory: one trains, the other is refused."""
    config = little.CONFIG.replace(seed=seed, epochs=3)
    alone, both = folder / f"alone-{seed}", folder / f"both-{seed}"
    little.train(alone, config)
    targets = [partial(little.train, both, config) for _ in range(2)]
    codes = _together([partial(_refused_is_1, target) for target in targets])
    if sorted(codes) not in ([0, 0], [0, 1]):  # the second may have come when the first had ended
        return f"exit codes {codes}"
    return "equal" if is_same(outcome(both), outcome(alone)) else "another result"


def _refused_is_1(train):
    try:
        train()
    except ValueError as error:
        raise SystemExit(1 if "is in use by a run that is alive" in str(error) else 2) from None


def check_saving(folder, seed):
    """Two processes save models to one directory: what is there is one of them, at any moment."""
    path = folder / f"saved-{seed}"
    models = [perturb(irpe.equip(make_vit(), "product-bias-k"), seed + k) for k in range(2)]

    def save(model):
        for _ in range(10):
            irpe.save_equipped(model, path)

    def load():
        for _ in range(30):
            found = irpe.load_equipped(path).state_dict()
            if not any(is_same(dict(found), dict(model.state_dict())) for model in models):
                raise SystemExit(7)

    save(models[0])
    codes = _together([*(partial(save, model) for model in models), load])
    if codes != [0, 0, 0]:
        return f"exit codes {codes}"
    load()
    return "equal"


def cases(seed, count, folder):
    """Yields `count` pairs of processes of each kind."""
    for number in range(seed, seed + count):
        for check in (check_runs, check_saving):
            yield Case(f"{check.__name__} {number}", partial(check, folder, number))
