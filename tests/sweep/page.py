"""The verdicts of the sweep as two pages of the reference, one for each library."""

import importlib.metadata
import re
from collections import Counter
from collections.abc import Iterable, Sequence

COMMAND = "python -m tests.sweep"
HOW = f"""Made by `{COMMAND}`: a model is built on the meta device and equipped with
`product-contextual-k`. One of each kind that is not too large is then run with random weights: zero
tables must leave its output as it is, random tables must change it ("run"). "Resized" is the size
that `irpe.resize` then set it to, for which it ran, and from which it went back with every tensor
as before; or why not. The same by families: [supported models](supported-models.md).
"""
MEANINGS = {
    "equipped": "These attentions have an encoding.",
    "refused": "The sentence is the reason that the error gives.",
    "not built": "The library itself could not build the class from its defaults.",
}

# class, attentions, number of models, verdict, size that it was resized to, sentence
TimmRow = tuple[str, str, int, str, str, str]
OtherRow = tuple[str, str, str, str, str]  # class, model type, verdict, resized, sentence


def render_timm(rows: Iterable[TimmRow]) -> str:
    """Returns the page of timm's models."""
    models = Counter[str]()
    tables: dict[str, list[Sequence[object]]] = {}
    tried: list[str] = []
    for kind, attentions, count, verdict, resized, sentence in rows:
        models[verdict] += count
        names = re.sub(r"\w+\.", "", attentions)
        tables.setdefault(verdict, []).append((kind, names, count, resized, reason_of(sentence)))
        tried.append(resized)
    title = f"# timm {version('timm')}\n\nModels with attention: {counted(models)}. {done(tried)}\n"
    heads = ("class", "attentions", "models", "resized", "")
    return "\n".join([title, HOW, *sections(tables, heads)])


def render_transformers(rows: Iterable[OtherRow]) -> str:
    """Returns the page of transformers' classes, a row for those of one type with one reason."""
    classes = Counter[str]()
    kinds: dict[tuple[str, str, str, str], list[str]] = {}
    for kind, model_type, verdict, resized, sentence in rows:
        classes[verdict] += 1
        kinds.setdefault((verdict, model_type, resized, reason_of(sentence)), []).append(kind)
    tables: dict[str, list[Sequence[object]]] = {}
    for (verdict, model_type, resized, reason), names in kinds.items():
        tables.setdefault(verdict, []).append((model_type, ", ".join(names), resized, reason))
    title = f"# transformers {version('transformers')}\n"
    count = f"Classes that take images: {counted(classes)}. {done([key[2] for key in kinds])}\n"
    heads = ("model type", "classes", "resized", "")
    return "\n".join([title, count, HOW, *sections(tables, heads)])


def done(resized: Sequence[str]) -> str:
    """Returns how many of the rows that were run were resized."""
    tried = [each for each in resized if each]
    return f"Resized: {sum('not:' not in each for each in tried)} of {len(tried)} rows that ran."


def sections(tables: dict[str, list[Sequence[object]]], heads: Sequence[str]) -> list[str]:
    """Returns a section for each verdict, those that can be used first."""
    return [
        f"## {verdict.capitalize()}\n\n{meaning}\n\n{table(heads, rows)}"
        for verdict, meaning in MEANINGS.items()
        if (rows := sorted(tables.get(verdict, []), key=str))
    ]


def reason_of(sentence: str) -> str:
    """Returns the reason alone, out of the whole error message, with short names of classes."""
    reason = sentence.partition("cannot be equipped: ")[2] or sentence
    return re.sub(
        r"\b(?:timm|transformers)\.(?:\w+\.)+", "", reason.partition(". Supported are")[0]
    )


def version(library: str) -> str:
    """Returns the version of a library that is installed."""
    return importlib.metadata.version(library)


def counted(verdicts: Counter[str]) -> str:
    """Returns how many there are of each verdict."""
    return ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items()))


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns a table in Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in lines) + "\n"


def cell(value: object) -> str:
    """Returns a value that does not break a table."""
    return " ".join(str(value).split()).replace("|", "\\|")
