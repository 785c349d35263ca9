"""wandb gets a copy of the records, and whatever it does, a run goes on."""

import logging
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from experiment.wandb_log import WandbLog, resolve_mode

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _no_login(monkeypatch, tmp_path):
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_DIR", "WANDB_PROJECT", "WANDB_SERVICE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))


def open_log(folder: Path, run_id: str | None = None) -> WandbLog:
    return WandbLog("online", "name", folder, {"seed": 0}, run_id)


def broken(*_, **__):
    raise RuntimeError("the network is down")


@pytest.fixture
def run():
    """A wandb run that only notes what it is told."""
    return Mock(id="fake-id", url="")


@pytest.mark.parametrize("failing", ["init", "define_metric", "log", "finish"])
def test_a_failure_is_reported_once_and_ends_logging(monkeypatch, tmp_path, caplog, run, failing):
    setattr(run, failing, broken)
    monkeypatch.setattr("wandb.init", broken if failing == "init" else lambda **_: run)
    log = open_log(tmp_path)
    for step in range(3):
        log.log({"global_step": step})
    log.finish()
    log.finish()
    (line,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert "the network is down" in line


def test_online_without_a_login_is_one_line_and_asks_nobody(tmp_path):
    program = (
        "import sys; from pathlib import Path; from experiment.wandb_log import WandbLog\n"
        "WandbLog('online', 'name', Path(sys.argv[1]), {}, None)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    reader, terminal = os.openpty()
    subprocess.run(command, cwd=ROOT, check=True, stdin=terminal, stdout=terminal, stderr=terminal)
    (line,) = os.read(reader, 10_000).decode().splitlines()
    assert "No API key configured" in line


def test_a_resumed_run_goes_on_in_the_same_wandb_run(monkeypatch, tmp_path, run):
    init = Mock(return_value=run)
    monkeypatch.setattr("wandb.init", init)
    log = open_log(tmp_path)
    log.log({"global_step": 5})
    run.log.assert_called_once_with({"global_step": 5})
    open_log(tmp_path, run_id=log.id)
    assert [call.kwargs["id"] for call in init.call_args_list] == [None, "fake-id"]


def test_auto_is_online_with_a_login_and_obeys_wandb_mode(monkeypatch, tmp_path):
    assert resolve_mode("auto") == "offline"
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password y\n")
    assert resolve_mode("auto") == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert resolve_mode("auto") == "disabled"
    assert resolve_mode("offline") == "offline"
