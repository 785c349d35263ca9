"""wandb copies the records, and whatever it does, a run goes on."""

import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import wandb

import rl.wandb_log
from rl.wandb_log import WandbLog, resolve_mode

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _no_login(monkeypatch, tmp_path):
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def open_log(folder, mode="offline", run_id=None) -> WandbLog:
    return WandbLog(mode, "project", "name", folder, {"seed": 0}, run_id)


def broken(*_, **__):
    raise RuntimeError("the network is down")


class FakeRun:
    """A wandb run that notes what it is told; the methods named in `failing` raise."""

    id = "fake-id"

    def __init__(self, failing: str = ""):
        self.rows, self.metrics, self.summary, self.exit_code = [], {}, {}, None
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


# never fatal


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


# never waited for


def test_a_start_that_hangs_is_given_up_and_said(monkeypatch, tmp_path, caplog):
    for_ever = threading.Event()
    monkeypatch.setattr(wandb, "init", lambda **_: for_ever.wait())
    monkeypatch.setattr(rl.wandb_log, "START_S", 0.01)
    log = open_log(tmp_path, "online")
    for _ in range(3):
        log.log({"global_step": 1})
    log.finish()
    assert caplog.messages == ["wandb did not start within 0 s; metrics.jsonl has everything"]
    for_ever.set()


@pytest.mark.parametrize("hanging", ["log", "finish"])
def test_what_hangs_later_delays_the_end_of_a_run_only(monkeypatch, tmp_path, caplog, hanging):
    run, for_ever = FakeRun(), threading.Event()
    setattr(run, hanging, lambda *_, **__: for_ever.wait())
    use(monkeypatch, run)
    log = open_log(tmp_path, "online")
    for step in range(3):
        log.log({"global_step": step})
    monkeypatch.setattr(rl.wandb_log, "FINISH_S", 0.01)
    log.finish()
    log.finish()  # nothing is left to wait for
    assert caplog.messages == ["wandb did not finish within 0 s; metrics.jsonl has everything"]
    for_ever.set()


def test_the_program_ends_though_wandbs_own_process_hangs(tmp_path):
    """Stopped as a hung one is. Left alone, the hook that wandb puts into the interpreter waits for it for ever."""
    program = """
import os, signal, sys
from pathlib import Path
import rl.wandb_log
log = rl.wandb_log.WandbLog("offline", "project", "name", Path(sys.argv[1]), {}, None)
log.log({"a": 1})
(service,) = {c for t in Path("/proc/self/task").glob("*/children") for c in t.read_text().split()}
os.kill(int(service), signal.SIGSTOP)
rl.wandb_log.FINISH_S = 0.1
log.finish()
print(service)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "wandb did not finish within 0 s" in done.stderr
    with suppress(FileNotFoundError, ProcessLookupError):  # else the system has not put it away yet
        assert Path("/proc", done.stdout.strip(), "stat").read_text().rpartition(")")[2].split()[0] == "Z"


# what it is told


def test_records_go_through_unchanged_with_env_steps_as_x_axis(monkeypatch, tmp_path):
    run = FakeRun()
    arguments = use(monkeypatch, run)
    log = open_log(tmp_path, "online")
    log.log({"global_step": 5, "rollout/success_rate": 0.5})
    log.finish(exit_code=1)
    assert run.rows == [{"global_step": 5, "rollout/success_rate": 0.5}]
    assert run.metrics["*"] == "global_step"
    assert run.exit_code == 1
    assert arguments["config"] == {"seed": 0}
    assert arguments["mode"] == "online"
    assert arguments["dir"] == tmp_path


def test_a_resumed_run_continues_under_its_id(monkeypatch, tmp_path):
    arguments = use(monkeypatch, FakeRun())
    assert open_log(tmp_path, "online").id == "fake-id"  # what a checkpoint remembers
    assert (arguments["id"], arguments["resume"]) == (None, None)
    open_log(tmp_path, "online", run_id="fake-id")
    assert (arguments["id"], arguments["resume"]) == ("fake-id", "allow")


def test_disabled_does_not_touch_wandb(monkeypatch, tmp_path):
    monkeypatch.setattr(wandb, "init", broken)
    log = open_log(tmp_path, "disabled")
    log.log({"global_step": 1})
    log.finish()
    assert list(tmp_path.iterdir()) == []


def test_offline_writes_below_the_run_folder_only(tmp_path, monkeypatch):
    elsewhere, folder = tmp_path / "cwd", tmp_path / "run"
    elsewhere.mkdir()
    folder.mkdir()
    monkeypatch.chdir(elsewhere)
    log = open_log(folder)
    log.log({"global_step": 1, "a": 0.5})
    log.finish()
    (record,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    assert record.stat().st_size > 0
    assert list(elsewhere.iterdir()) == []


# auto mode


def test_without_a_home_variable_nothing_is_written_to_the_terminal(tmp_path):
    program = (
        "from pathlib import Path; from rl.wandb_log import WandbLog; import os, sys\n"
        "os.path.expanduser = lambda path: path.replace('~', sys.argv[1] + '/home')  # the account's\n"
        "log = WandbLog('offline', 'project', 'name', Path(sys.argv[1]), {}, None)\n"
        "log.log({'global_step': 1}); log.finish()"
    )
    foreign = ("HOME", "XDG_", "WANDB_")  # and no process of wandb's that other tests have started
    environ = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, env=environ, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(tmp_path.glob("wandb/offline-run-*"))
    assert list(tmp_path.glob("home/**/wandb/logs/*"))


def test_auto_is_online_with_a_key_or_a_netrc_login(monkeypatch, tmp_path):
    netrc = tmp_path / "netrc"
    netrc.write_text("machine example.org login x password y\n")
    assert resolve_mode("auto") == "offline"
    netrc.write_text("machine api.wandb.ai login user password y\n")
    assert resolve_mode("auto") == "online"
    netrc.unlink()
    monkeypatch.setenv("WANDB_API_KEY", "y")
    assert resolve_mode("auto") == "online"


def test_auto_obeys_wandb_mode_and_flags_go_before_it(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert resolve_mode("auto") == "disabled"
    assert resolve_mode("offline") == "offline"
