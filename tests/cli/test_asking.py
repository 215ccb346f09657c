"""`irpe encodings` and `irpe models`: what there is, and what can be equipped."""

import json

import pytest
from cli.terminal import irpe

pytest.importorskip("timm", reason="needs the extra 'timm'")


from irpe.core.encodings import NAMES
from irpe.profile.catalogue import catalogue
from irpe.profile.cost import count

DEIT_S = "deit_small_patch16_224"


def ask(*arguments):
    done = irpe(*arguments, cwd=".")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_encoding_is_listed_within_80_columns():
    output = ask("encodings")
    first_words = {line.split()[0] for line in output.splitlines() if line}
    assert {*NAMES, "product-contextual-qkv", "cross-contextual-k"} <= first_words
    assert max(map(len, output.splitlines())) < 80
    listed = json.loads(ask("encodings", "--json"))["rows"]
    assert [entry["encoding"] for entry in listed] == [entry.encoding for entry in catalogue()]
    starred = {line.split()[0] for line in output.splitlines() if line.split()[1:2] == ["*"]}
    assert starred == {"cpvt", "rope-axial", "rope-mixed", "alibi-2d"}


def test_the_listed_costs_are_those_of_the_model():
    listed, plain = {each.encoding: each for each in catalogue()}, count(DEIT_S, "none")
    for text in ("product-contextual-qkv", "cpvt", "rope-mixed", "log-cpb"):
        encoded = count(DEIT_S, text)
        assert listed[text].extra_parameters == encoded.parameters - plain.parameters
        assert listed[text].extra_macs == encoded.macs - plain.macs


def test_families_and_single_models():
    output = ask("models")
    assert "timm" in output
    assert "torchvision" in output
    output = ask("models", "deit_tiny_patch16_224", "resnet18")
    assert "deit_tiny_patch16_224: yes" in output
    assert "12 x timm.layers.attention.Attention" in output
    assert "resnet18: no" in output
    assert max(map(len, output.splitlines())) < 80
    told = json.loads(ask("models", "resnet18", "--json"))
    assert not told["resnet18"]["supported"]
    assert "no self-attention" in told["resnet18"]["reason"]


def test_a_command_of_an_answer_can_be_pasted():
    from irpe.cli.commands.ablate import _item

    command = (
        "Next: irpe train laptop_64 --data cats --encoding product-contextual-k --absolute none"
    )
    assert _item(command) == [f"- {command}"]
    assert max(map(len, _item("Images as they are: keep absolute. " * 4))) <= 80


def test_models_of_transformers_by_their_types():
    pytest.importorskip("transformers", reason="needs the extra 'transformers'")
    told = json.loads(ask("models", "vit", "swin", "bert", "--json"))
    assert told["vit"]["supported"]
    assert told["swin"]["supported"]
    assert not told["bert"]["supported"]
    done = irpe("models", "vitt", cwd=".")
    assert (done.returncode, "'vitt'" in done.stderr) == (1, True)
