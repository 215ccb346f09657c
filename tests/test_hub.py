"""Weights of the hub, where there is a network and where there is none."""

import socket

import pytest

from irpe.hub import cached_if_unreachable, is_reachable

constants = pytest.importorskip("huggingface_hub.constants")


@pytest.fixture
def address(monkeypatch):
    """A server that takes connections."""
    monkeypatch.setattr("irpe.hub.getproxies", dict)
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_the_cache_alone_is_used_without_a_network_only(address, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", address)
    with cached_if_unreachable():
        assert not constants.HF_HUB_OFFLINE
    monkeypatch.setattr(constants, "ENDPOINT", "https://nowhere.invalid")
    with cached_if_unreachable():
        assert constants.HF_HUB_OFFLINE
    assert not constants.HF_HUB_OFFLINE


def test_a_proxy_is_trusted(monkeypatch):
    assert not is_reachable("https://nowhere.invalid")
    monkeypatch.setattr("irpe.hub.getproxies", lambda: {"https": "http://proxy"})
    assert is_reachable("https://nowhere.invalid")
    monkeypatch.setattr("irpe.hub.getproxies", lambda: {"all": "http://proxy"})
    assert is_reachable("https://nowhere.invalid")


def test_weights_that_cannot_be_had_are_the_users_to_mend(monkeypatch):
    pytest.importorskip("timm", reason="needs the extra 'timm'")
    from irpe.adapters.hosts.timm.building import create_timm_model
    from irpe.cli.errors import is_of_user

    monkeypatch.setattr("irpe.hub.getproxies", dict)
    monkeypatch.setattr(constants, "ENDPOINT", "https://nowhere.invalid")
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail(f"waits for {seconds} s"))
    with pytest.raises(FileNotFoundError, match="start from a file or a run instead") as error:
        create_timm_model("vit_pe_core_tiny_patch16_384", {}, pretrained=True)
    assert is_of_user(error.value)


def test_segmenters_do_not_wait_for_weights_that_cannot_be_had(monkeypatch):
    transformers = pytest.importorskip("transformers", reason="needs the extra 'transformers'")
    from irpe.tasks.segment.pretrained import fill_pretrained

    monkeypatch.setattr("irpe.hub.getproxies", dict)
    monkeypatch.setattr(constants, "ENDPOINT", "https://nowhere.invalid")
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail(f"waits for {seconds} s"))
    sizes = {"depths": [1] * 4, "hidden_sizes": [8] * 4, "num_attention_heads": [1] * 4}
    network = transformers.SegformerForSemanticSegmentation(transformers.SegformerConfig(**sizes))
    with pytest.raises(ValueError, match="cannot be had from the hub"):
        fill_pretrained(network, "somebody/something")
