"""wandb copies the records, and whatever it does, a run goes on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import wandb

from experiment.wandb_log import WandbLog, resolve_mode

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _no_login(monkeypatch, tmp_path):
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def open_log(folder, mode="offline", run_id=None) -> WandbLog:
    return WandbLog(mode, "name", folder, {"seed": 0}, run_id)


def broken(*_, **__):
    raise RuntimeError("the network is down")


class FakeRun:
    """A wandb run that notes what it is told; the methods named in `failing` raise."""

    id = "fake-id"

    def __init__(self, failing: str = ""):
        self.rows, self.metrics, self.exit_code = [], {}, None
        for method in failing.split():
            setattr(self, method, broken)

    def define_metric(self, name, step_metric=None):
        self.metrics[name] = step_metric

    def log(self, row):
        self.rows.append(row)

    def finish(self, exit_code):
        self.exit_code = exit_code


def use(monkeypatch, run) -> dict:
    """Let wandb.init return `run`; what init was called with."""
    arguments = {}
    monkeypatch.setattr(wandb, "init", lambda **given: (arguments.update(given), run)[1])
    return arguments


def test_a_failing_start_leaves_a_log_that_does_nothing(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(wandb, "init", broken)
    log = open_log(tmp_path, "online")
    log.log({"global_step": 1})
    log.video("video/x", tmp_path / "none.mp4", 1)
    log.finish()
    assert caplog.messages == ["wandb could not start (the network is down); metrics.jsonl has everything"]


@pytest.mark.parametrize("failing", ["define_metric", "log", "finish"])
def test_a_failure_later_is_reported_once_and_ends_logging(monkeypatch, tmp_path, caplog, failing):
    use(monkeypatch, FakeRun(failing))
    log = open_log(tmp_path, "online")
    for step in range(3):
        log.log({"global_step": step})
    log.finish()
    log.finish()
    assert len(caplog.messages) == 1
    assert "the network is down" in caplog.messages[0]


def test_online_without_a_login_is_one_line_and_asks_nobody(tmp_path):
    program = "import sys; from pathlib import Path; from experiment.wandb_log import WandbLog\n" + (
        "WandbLog('online', 'name', Path(sys.argv[1]), {}, None)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    ours, terminal = os.openpty()
    subprocess.run(command, cwd=ROOT, check=True, stdin=terminal, stdout=terminal, stderr=terminal)
    (line,) = os.read(ours, 10_000).decode().splitlines()
    assert line.startswith("wandb could not start (No API key configured")


def test_records_go_through_with_env_steps_as_x_axis_and_a_resumed_run_keeps_its_id(monkeypatch, tmp_path):
    run = FakeRun()
    arguments = use(monkeypatch, run)
    log = open_log(tmp_path, "online")
    assert log.id == "fake-id"  # what a checkpoint remembers
    assert (arguments["id"], arguments["resume"]) == (None, None)
    assert (arguments["config"], arguments["mode"], arguments["dir"]) == ({"seed": 0}, "online", tmp_path)
    log.log({"global_step": 5, "rollout/success_rate": 0.5})
    log.finish(exit_code=1)
    assert (run.rows, run.exit_code) == ([{"global_step": 5, "rollout/success_rate": 0.5}], 1)
    assert run.metrics["*"] == "global_step"
    open_log(tmp_path, "online", run_id="fake-id")
    assert (arguments["id"], arguments["resume"]) == ("fake-id", "allow")


def test_auto_is_online_with_a_key_or_a_netrc_login_and_obeys_wandb_mode(monkeypatch, tmp_path):
    netrc = tmp_path / "netrc"
    netrc.write_text("machine example.org login x password y\n")
    assert resolve_mode("auto") == "offline"
    netrc.write_text("machine api.wandb.ai login user password y\n")
    assert resolve_mode("auto") == "online"
    netrc.unlink()
    monkeypatch.setenv("WANDB_API_KEY", "y")
    assert resolve_mode("auto") == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert resolve_mode("auto") == "disabled"
    assert resolve_mode("offline") == "offline"
