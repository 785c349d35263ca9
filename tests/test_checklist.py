"""Checks are listed with a line each; the first failure stops a run, and is one line of many for --check-only."""

import pytest

from contracts import BadInput, SelfCheckError
from experiment.checklist import Check, Checks
from experiment.start_times import StartTimes


def failing(message: str, kind=BadInput):
    def check(*_):
        raise kind(message)

    return check


def finding(status: str, text: str = "fine"):
    return lambda *_: Check(status, text)


def test_every_finding_is_one_line(capsys, caplog):
    checks = Checks(StartTimes(), show_all=True)
    checks.run("good", finding("ok"))
    checks.run("slow", finding("warning", "software rendering; unset MUJOCO_GL"))
    assert checks.make("broken", finding("ok"), failing("no such folder: " + "long " * 60)) is None
    checks.run("wrong", failing("disagree", SelfCheckError))
    checks.run("needs a value", finding("ok"), None)
    checks.run("needs a check", finding("ok"), after=["broken"])
    checks.run("odd", failing("by zero\nsecond line", ZeroDivisionError))
    assert checks.make("small", finding("FAILED", "too small"), lambda: 3) is None
    assert checks.make("large", finding("ok"), lambda: 4) == 4
    assert {name: check.status for name, check in checks.made.items()} == {
        "good": "ok",
        "slow": "warning",
        "broken": "FAILED",
        "wrong": "FAILED",
        "needs a value": "skipped",
        "needs a check": "skipped",
        "odd": "FAILED",
        "small": "FAILED",
        "large": "ok",
    }
    # A traceback goes where the log goes: to the terminal, too, once a program of this process has said so.
    lines = [line for line in capsys.readouterr().out.splitlines() if " s  " in line]
    assert [line[9:23].strip() for line in lines] == list(checks.made)
    assert "ZeroDivisionError: by zero" in lines[6]
    assert "Traceback" in caplog.text
    with pytest.raises(BadInput, match="4 of 9 checks FAILED; broken: no such folder"):
        checks.conclude()
    assert "2 ok, 1 warning, 4 FAILED, 2 skipped" in capsys.readouterr().out
    assert [title for title, _ in checks.rows()] == ["checks", "start", "warning"]


@pytest.mark.parametrize("kind", [BadInput, SelfCheckError, ZeroDivisionError])
def test_a_run_stops_at_the_first_failure(kind):
    checks = Checks(StartTimes())
    with pytest.raises(kind, match="what is wrong"):
        checks.run("fault", failing("what is wrong", kind))
    with pytest.raises(BadInput, match="what is wrong"):
        checks.run("failure", finding("FAILED", "what is wrong"))
