"""The hub itself is played by a server in this process: it counts requests, and never answers one."""

import socket
import threading

import pytest
from huggingface_hub import constants

from contracts import BadInput
from vla import hub
from vla.checkpoint import resolve_checkpoint


@pytest.fixture
def silent_hub(monkeypatch):
    """A hub that accepts connections and sends nothing. Yields the list of accepted connections."""
    server = socket.create_server(("127.0.0.1", 0))
    connections = []

    def accept():
        while True:
            try:
                connections.append(server.accept())
            except OSError:
                return

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield connections
    server.shutdown(socket.SHUT_RDWR)
    server.close()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty download cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _cache_snapshot(cache, files):
    repository = cache / "models--someone--policy"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    for name, content in files.items():
        (snapshot / name).write_text(content)
    return snapshot


def test_local_folder_is_used_without_network(tmp_path, silent_hub):
    assert resolve_checkpoint(str(tmp_path)) == tmp_path
    assert not silent_hub


@pytest.mark.parametrize("name", ["/no/such/folder", "./missing", "runs/a/checkpoints/best"])
def test_missing_local_path_is_reported_without_network(name, silent_hub):
    with pytest.raises(BadInput, match="no such folder"):
        resolve_checkpoint(name)
    assert not silent_hub


def test_complete_snapshot_in_the_cache_needs_no_network(cache, silent_hub):
    snapshot = _cache_snapshot(cache, {"config.json": "{}", "model.safetensors": ""})
    assert resolve_checkpoint("someone/policy") == snapshot
    assert not silent_hub


def test_unreachable_hub_is_one_line_that_says_what_to_do(cache, silent_hub, monkeypatch):
    monkeypatch.setattr(hub, "REACH_TIMEOUT_S", 0.2)
    # A snapshot that lacks a shard is not taken for complete.
    index = '{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}'
    _cache_snapshot(cache, {"model.safetensors.index.json": index, "model-00001-of-00002.safetensors": ""})
    with pytest.raises(BadInput, match="give a local folder") as caught:
        resolve_checkpoint("someone/policy")
    assert "someone/policy" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert silent_hub  # it was asked, and given up within the timeout
