"""Folders of checkpoints: local ones and complete downloads need no network; without a network, one line says so.

The hub is played by a server in this process that takes connections and never answers.
"""

import json
import socket
from types import SimpleNamespace

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


def cache_snapshot(tmp_path, monkeypatch, files: dict[str, str]):
    """Make `tmp_path` the download cache, with a snapshot of someone/policy that has these files."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--someone--policy"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    for name, content in files.items():
        (snapshot / name).write_text(content)
    return snapshot


def test_local_path_is_looked_up_without_network(tmp_path, silent_hub):
    assert resolve_checkpoint(str(tmp_path)) == tmp_path
    assert commit_of(tmp_path) is None
    for name in ("/no/such/folder", "./missing", "runs/a/checkpoints/best"):
        with pytest.raises(BadInput, match=name):
            resolve_checkpoint(name)
    assert not silent_hub()


def test_a_relative_folder_that_is_missing_is_named_with_where_it_was_looked_for(tmp_path, monkeypatch):
    """As after --config and --resume in another folder than the one where the run was started."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput) as relative:
        resolve_checkpoint("checkpoints/my/policy")
    with pytest.raises(BadInput) as absolute:
        resolve_checkpoint("/checkpoints/my/policy")
    assert f"no such folder below {tmp_path}" in str(relative.value)
    assert str(tmp_path) not in str(absolute.value)


def test_complete_snapshot_in_the_cache_needs_no_network(tmp_path, silent_hub, monkeypatch):
    monkeypatch.setattr(hub, "HUB_TIMEOUT_S", 0.2)
    snapshot = cache_snapshot(tmp_path, monkeypatch, {"config.json": "{}", "model.safetensors": ""})
    assert resolve_checkpoint("someone/policy") == snapshot
    assert commit_of(snapshot) == "a" * 40


def test_a_head_that_the_cached_snapshot_lacks_is_downloaded(tmp_path, silent_hub, monkeypatch):
    """Without its head an L1 checkpoint would be read as one of action tokens."""
    snapshot = cache_snapshot(tmp_path, monkeypatch, {"config.json": "{}", "model.safetensors": ""})
    files = ["config.json", "model.safetensors", "action_head--1_checkpoint.pt", "modeling.py"]
    listed = SimpleNamespace(siblings=[SimpleNamespace(rfilename=file) for file in files])
    monkeypatch.setattr(hub.HfApi, "model_info", lambda *_, **__: listed)
    monkeypatch.setattr(hub, "snapshot_download", fake_download := FakeDownload(snapshot))
    assert resolve_checkpoint("someone/policy") == snapshot
    assert fake_download.downloads == 1
    (snapshot / files[2]).touch()
    assert resolve_checkpoint("someone/policy") == snapshot
    assert fake_download.downloads == 1


class FakeDownload:
    """In place of `snapshot_download`: finds the snapshot in the cache, and counts the downloads."""

    def __init__(self, snapshot):
        self.snapshot = snapshot
        self.downloads = 0

    def __call__(self, name, local_files_only=False, **_):
        self.downloads += not local_files_only
        return str(self.snapshot)


def test_incomplete_snapshot_is_asked_for_and_the_hub_given_up_within_the_timeout(
    tmp_path, silent_hub, monkeypatch, caplog
):
    monkeypatch.setattr(hub, "HUB_TIMEOUT_S", 0.2)
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = json.dumps({"weight_map": {"a": shards[0], "b": shards[1]}})
    cache_snapshot(tmp_path, monkeypatch, {"model.safetensors.index.json": index, shards[0]: ""})
    with pytest.raises(BadInput, match="someone/policy"):
        resolve_checkpoint("someone/policy")
    assert silent_hub()
    # A mistyped path is not looked for elsewhere in silence.
    assert "someone/policy" in caplog.text


def test_a_download_folder_that_cannot_be_written_is_named_with_what_to_set(
    tmp_path, silent_hub, monkeypatch
):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied", "/home/other/.cache")

    monkeypatch.setattr(hub.HfApi, "model_info", refuse)
    with pytest.raises(BadInput, match=r"/home/other/\.cache .*HF_HOME"):
        resolve_checkpoint("someone/policy")
