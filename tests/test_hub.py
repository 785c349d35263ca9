"""Folders of checkpoints: local ones and complete downloads need no network; without a network, one line says so.

The hub is played by a server in this process that takes connections and never answers.
"""

import socket

import pytest
from huggingface_hub import constants

from contracts import BadInput
from vla import hub
from vla.hub import commit_of, resolve_checkpoint


@pytest.fixture
def silent_hub(monkeypatch):
    """A hub that sends nothing. Gives a function that tells whether it was asked."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

        def was_asked() -> bool:
            try:
                server.accept()[0].close()
            except BlockingIOError:
                return False
            return True

        yield was_asked


def cache_snapshot(tmp_path, monkeypatch):
    """Make `tmp_path` the download cache, with a snapshot of someone/policy that has config.json alone."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--someone--policy"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    (snapshot / "config.json").write_text("{}")
    return snapshot


def test_local_path_is_looked_up_without_network(tmp_path, silent_hub):
    assert resolve_checkpoint(str(tmp_path)) == tmp_path
    assert commit_of(tmp_path) is None
    for name in ("/no/such/folder", "./missing", "runs/a/checkpoints/best"):
        with pytest.raises(BadInput, match=name):
            resolve_checkpoint(name)
    assert not silent_hub()


def test_a_cached_snapshot_is_used_where_the_hub_does_not_answer(tmp_path, silent_hub, monkeypatch, caplog):
    monkeypatch.setattr(hub, "HUB_TIMEOUT_S", 0.2)
    snapshot = cache_snapshot(tmp_path, monkeypatch)
    assert resolve_checkpoint("someone/policy") == snapshot
    assert commit_of(snapshot) == "a" * 40
    assert "no action head" in caplog.text


def test_files_that_the_cached_snapshot_lacks_are_asked_for_at_its_commit(tmp_path, silent_hub, monkeypatch):
    """Without its head an L1 checkpoint would be read as one of action tokens; another commit has other weights."""
    snapshot = cache_snapshot(tmp_path, monkeypatch)
    revisions = []

    def download(name, revision=None, local_files_only=False, **_):
        if not local_files_only:
            revisions.append(revision)
        return str(snapshot)

    monkeypatch.setattr(hub.HfApi, "model_info", lambda *_, **__: None)
    monkeypatch.setattr(hub, "snapshot_download", download)
    assert resolve_checkpoint("someone/policy") == snapshot
    assert revisions == ["a" * 40]


def test_a_name_that_is_neither_cached_nor_answered_for_is_one_line(
    tmp_path, silent_hub, monkeypatch, caplog
):
    monkeypatch.setattr(hub, "HUB_TIMEOUT_S", 0.2)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(BadInput, match="someone/policy"):
        resolve_checkpoint("someone/policy")
    assert silent_hub()
    # A mistyped path is not looked for elsewhere in silence.
    assert "someone/policy" in caplog.text
