"""Folders of checkpoints: local ones need no network; a download is used as far as it goes where the hub fails."""

import pytest
from huggingface_hub import constants

from contracts import BadInput
from vla import hub
from vla.hub import commit_of, resolve_checkpoint

COMMIT = "a" * 40


@pytest.fixture
def asked(monkeypatch) -> list[str]:
    """A hub that does not answer; the names that it is asked for."""
    names = []

    def model_info(_, name, revision, timeout):
        names.append(name)
        raise TimeoutError

    monkeypatch.setattr(hub.HfApi, "model_info", model_info)
    return names


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """A download cache with a snapshot of someone/policy that has config.json alone."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--someone--policy"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    (snapshot / "config.json").write_text("{}")
    return snapshot


def test_what_is_no_hub_id_is_looked_up_without_network(tmp_path, asked):
    assert resolve_checkpoint(str(tmp_path)) == tmp_path
    with pytest.raises(BadInput, match="runs/a/checkpoints/best"):
        resolve_checkpoint("runs/a/checkpoints/best")
    assert not asked


def test_a_cached_snapshot_is_used_where_the_hub_does_not_answer_and_lacks_a_head_aloud(
    cached, asked, caplog
):
    assert resolve_checkpoint("someone/policy") == cached
    assert commit_of(cached) == COMMIT
    assert "no L1 head" in caplog.text


def test_files_that_the_cached_snapshot_lacks_are_asked_for_at_its_commit(cached, monkeypatch):
    """Without its head an L1 checkpoint would be read as one of action tokens; another commit has other weights."""
    revisions = []

    def download(name, revision=None, local_files_only=False, **_):
        if not local_files_only:
            revisions.append(revision)
        return str(cached)

    monkeypatch.setattr(hub.HfApi, "model_info", lambda *_, **__: None)
    monkeypatch.setattr(hub, "snapshot_download", download)
    assert resolve_checkpoint("someone/policy") == cached
    assert revisions == [COMMIT]


def test_a_name_that_is_neither_cached_nor_answered_for_is_one_line(tmp_path, asked, monkeypatch, caplog):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(BadInput, match="someone/policy"):
        resolve_checkpoint("someone/policy")
    assert asked == ["someone/policy"]
    assert "someone/policy" in caplog.text  # a mistyped path is not looked for elsewhere in silence
