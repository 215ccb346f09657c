"""The program with bad arguments, each in a process of its own.

A failure is a traceback, exit 0 where something is wrong, exit 70, an error of several lines, a
process that does not end, or a file that is left.
"""

import json
import subprocess
import sys

import numpy as np
from hostile.cases import Case
from train.processes import ENVIRONMENT

SECONDS = 120
HOSTILE = [
    "", " ", "-1", "0", "0.0", "-0.0", "nan", "inf", "-inf", "1e308", "1e-308", "1e999", "0x10",
    "1_0", "9" * 30, "9" * 5000, "\N{ARABIC-INDIC DIGIT FIVE}", "none", "None", "null", "true",
    "{}", "[]",
    "{", "[" * 100_000, '{"depth": -1}', '{"depth": 1.5}', '{"num_heads": 0}', '{"embed_dim": 25}',
    '{"patch_size": 0}', '{"num_heads": 5}', "../..", "/", "/proc/self/mem", "/dev/null/x",
    "a" * 300, "a/b", "caf\u00e9", "\U0001f4a5", "a\nb", "%s%n", "--", "-", "$(id)", "product",
    "product-contextual", "product-contextual-k@", "product-contextual-k@0",
    "product-contextual-k@1e300", "product-contextual-k@1:2", "cross-bias-v", "shaw+shaw", "@",
    "7", "1000000000", "1000000x1000000", "0x0", "3x", "4,4", "-1,0", "rand-mfoo", "torch/nothing",
]  # fmt: skip

# Every one of these must fail, with 1 or 2.
WRONG = [
    ["nothing"], ["--nothing"], ["train"], ["train", "a", "b"], ["eval"], ["eval", "nowhere"],
    ["eval", "."], ["eval", "/dev/null"], ["eval", "nowhere", "--batch-size", "0"],
    ["eval", "nowhere", "--workers", "-1"], ["convert"], ["convert", "nowhere", "-o", "x"],
    ["convert", ".", "-o", "x"], ["convert", "/dev/null", "-o", "x"],
    ["profile", "no_such_model"], ["profile", "resnet18"], ["profile", "--rounds", "-1"],
    ["profile", "--batch-size", "0"], ["profile", "--image-size", "0"],
    ["profile", "--image-size", "-16"],
    ["profile", "--image-size", "16000000"],
    ["profile", "--format", "json"],
    ["profile", "--encoding", "product-contextual-k@1e9", "--rounds", "0"],
    ["show", "nothing"], ["show", "buckets", "--grid", "1000000x1000000"],
    ["show", "buckets", "--grid", "0x4"], ["show", "buckets", "--grid", "4"],
    ["show", "buckets", "--at", "99,99"], ["show", "buckets", "-o", "x.txt"],
    ["show", "buckets", "product-contextual-k@1e300"],
    ["show", "buckets", "-o", "no/such/x.png"], ["show", "index", "--index", "clip3"],
    ["show", "index", "--index", "nan"], ["show", "index", "--clip", "-1"],
    ["show", "weights", "nowhere"], ["show", "attention", "."], ["show", "tables", "/dev/null"],
    ["show", "locality", "nowhere"], ["explore", "-o", "x.png"],
    ["explore", "--image", "x.png"], ["show", "training", "nowhere"],
    ["show", "training", "."], ["show", "robustness", "nowhere"], ["show", "robustness", "."],
    ["show", "cost", "--resolutions", "0"], ["show", "cost", "--resolutions", "a"],
    ["show", "cost", "--encoding", "nothing"], ["ablate", "--data", "nowhere"],
    ["ablate", "--table", "9"],
    ["ablate", "--seeds", "0"], ["ablate", "--grid", "5"], ["ablate", "--row", "x"],
    ["train", "--resume", "nowhere"], ["train", "--resume", "."],
    ["train", "laptop", "--resume", "."], ["train", "laptop", "--set", "root=x"],
    ["train", "laptop", "--set", "auto_augment=rand-mfoo"],
    ["train", "laptop", "--set", "optimizer=x"],
    ["train", "laptop", "--set", "builtin_bias=drop"], ["train", "laptop", "--precision", "int8"],
    ["train", "laptop", "-o", "/proc/x"], ["train", "laptop", "--set", "model=resnet18"],
    ["train", "laptop", "--set", "model=resnet18", "--encoding", "product-contextual-k"],
    ["train", "laptop", "--encoding", "product-contextual-k@1e9"],
    ["train", "detr_small", "--data", "."], ["train", "detr_small", "--data", "nowhere"],
]  # fmt: skip

# Each takes one more argument of HOSTILE; all fail, since the data or the model is not there.
OPTIONS = [
    "encoding", "absolute", "model-args", "initial", "epochs", "batch-size", "lr", "seed",
    "workers", "image-size", "holdout", "warmup-epochs", "output",
]  # fmt: skip
SET = [
    "model", "weight_decay", "channels", "crop", "mixup", "auto_augment", "min_scale", "drop_path",
    "device_batch_size", "flip", "ema_decay", "root", "max_broken", "label_smoothing",
    "color_jitter", "compile",
]  # fmt: skip
PREFIXES = [
    *(["train", "laptop", "--data", "nowhere", f"--{name}"] for name in OPTIONS),
    *(["train", "laptop", "--data", "nowhere", "--set", f"{name}="] for name in SET),
    ["train", "laptop", "--data", "nowhere", "--set"],
    *(["ablate", "--data", "nowhere", f"--{name}"] for name in ("seeds", "row", "table", "grid")),
    *(["eval", "nowhere", f"--{name}"] for name in ("data", "root", "batch-size", "precision")),
    ["train", "--resume"],
    ["train", "nothing"],
    ["convert", "nowhere", "-o", "x", "--model"],
    ["show", "tables", "nowhere", "--block"],
    ["show", "attention", "nowhere", "--patch"],
    ["show", "robustness", "nowhere", "--sizes"],
    ["profile", "no_such_model", "--encoding"],
    ["profile", "no_such_model", "--image-size"],
    ["profile", "no_such_model", "--resolutions"],
    ["show", "buckets", "--at", "99,99", "--grid"],
]


class Server:
    """Runs commands, each in a process of its own.

    Args:
        folder: An empty folder.
        prefix: What stands before the command of the process that forks them.
        module: Its module and arguments.
    """

    def __init__(self, folder, prefix=(), module=("hostile.forked",)):
        self.folder = folder / "commands" / "here"
        self.folder.mkdir(parents=True)
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-W", "ignore", "-m", *module],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT,
        )  # fmt: skip

    def run(self, arguments):
        """Returns how a command ended, and what it said on stderr."""
        request = {"arguments": arguments, "cwd": str(self.folder), "seconds": SECONDS}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        code = int(self.process.stdout.readline())
        return code, (self.folder.parent / "stderr").read_text(errors="replace")

    def check(self, arguments):
        """Returns whether a command fails as it should."""
        code, said = self.run(arguments)
        left = sorted(path.name for path in self.folder.rglob("*"))
        for path in sorted(self.folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        if code not in (1, 2) or "Traceback" in said:
            return f"exit {code}: {said[-300:]}"
        lines = [x for x in said.strip().splitlines() if not x.startswith("comparing ")]
        if code == 1 and len(lines) != 1:  # an ablation says first what it will compare
            return f"several lines: {said[-300:]}"
        return f"left {left}" if left else "refused"

    def close(self):
        """Ends it."""
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def _add(prefix, value):
    """The words of a command with one more, or with its last one completed."""
    is_open = prefix[-1].endswith("=")
    return [*prefix[:-1], prefix[-1] + value] if is_open else [*prefix, value]


def cases(seed, count, server):
    """Yields `count` commands: the listed ones first, then random ones."""
    listed = [list(arguments) for arguments in WRONG]
    random = np.random.default_rng(seed)
    pairs = [_add(prefix, value) for prefix in PREFIXES for value in HOSTILE if "\0" not in value]
    drawn = [pairs[k] for k in random.permutation(len(pairs))]
    for arguments in [*(listed[k] for k in random.permutation(len(listed))), *drawn][:count]:
        name = " ".join(argument[:60] for argument in arguments)
        yield Case(name, lambda arguments=arguments: server.check(arguments))
