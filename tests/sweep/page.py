"""docs/hosts.md: the verdicts of the sweep as tables."""

import importlib.metadata
from collections import Counter
from collections.abc import Iterable, Sequence

COMMAND = "python -m tests.sweep"
INTRODUCTION = f"""# Hosts

Every class of timm and transformers that the sweep saw, and whether `irpe.equip` takes it. Made by

```
{COMMAND}
```

A model is built on the meta device and equipped with `product-contextual-k`. One of each kind that
is not too large is then run with random weights: zero tables must leave its output as it is, random
tables must change it ("run"). *equipped*: the attentions named have an encoding. *refused*: the
sentence is the reason that the error gives. *not built*: the library itself could not build the
class from its defaults. [adapters.md](adapters.md) shows how hosts are used, and how to equip an
attention of your own.
"""


def render(timm_rows: Iterable[Sequence[object]], other_rows: Iterable[Sequence[object]]) -> str:
    """Returns the page.

    Args:
        timm_rows: Class, attentions, number of models, verdict, sentence.
        other_rows: Class, model type, verdict, sentence.
    """
    timm_rows, other_rows = ([with_reason(row) for row in rows] for rows in (timm_rows, other_rows))
    models = Counter[object]()
    for row in timm_rows:
        models[row[3]] += row[2] if isinstance(row[2], int) else 0
    classes = Counter(row[2] for row in other_rows)
    parts = [
        INTRODUCTION,
        f"## timm {version('timm')}\n",
        f"Models with attention: {counted(models)}.\n",
        table(("class", "attentions", "models", "verdict", ""), timm_rows),
        f"\n## transformers {version('transformers')}\n",
        f"Classes that take images: {counted(classes)}.\n",
        table(("class", "model type", "verdict", ""), other_rows),
    ]
    return "\n".join(parts)


def with_reason(row: Sequence[object]) -> Sequence[object]:
    """Returns a row whose sentence is the reason alone, out of the whole error message."""
    *rest, sentence = row
    reason = str(sentence).partition("cannot be equipped: ")[2] or str(sentence)
    return *rest, reason.partition(". Supported are")[0]


def version(library: str) -> str:
    """Returns the version of a library that is installed."""
    return importlib.metadata.version(library)


def counted(verdicts: Counter[object]) -> str:
    """Returns how many there are of each verdict."""
    return ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items(), key=str))


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns a table in Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in lines) + "\n"


def cell(value: object) -> str:
    """Returns a value that does not break a table."""
    return " ".join(str(value).split()).replace("|", "\\|")
