"""TensorBoard holds the records of metrics.jsonl, also after a resume, and never ends a run."""

from dataclasses import replace

import numpy as np
import pytest

from configs.config import RunConfig, TrainConfig
from rl.run import Run
from rl.tensorboard_log import STRIP, TensorBoardLog, film_strip
from rl.video import write_video
from rl.wandb_log import WandbLog

event_accumulator = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator", reason="the optional package tensorboard is not installed"
)
CONFIG = TrainConfig(run=RunConfig(tensorboard=True, wandb_mode="disabled"))


def open_run(folder, config=CONFIG) -> Run:
    return Run(folder, config, WandbLog("disabled", "", "", folder, {}, None))


def written(folder):
    events = event_accumulator.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return events


def scalars(folder, key) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in written(folder).Scalars(key)]


def video(folder, step: int, num_frames: int = 20):
    path = folder / "videos" / f"student-step_{step}.mp4"
    write_video(path, [np.full((32, 48, 3), 10 * i, np.uint8) for i in range(num_frames)])
    return path


def test_every_number_of_a_record_is_a_scalar_at_its_env_step(tmp_path):
    run = open_run(tmp_path)
    run.record(100, 1, {"rollout/success_rate": 0.5, "train/lr": float("nan")})
    run.record(250, 2, {"rollout/success_rate": 0.75})
    run.close()
    assert scalars(tmp_path, "rollout/success_rate") == [(100, 0.5), (250, 0.75)]
    assert scalars(tmp_path, "update") == [(100, 1), (250, 2)]
    assert "train/lr" not in written(tmp_path).Tags()["scalars"]  # JSON and TensorBoard have no NaN


def test_a_resumed_run_has_the_curves_of_its_records_alone(tmp_path):
    run = open_run(tmp_path)
    run.record(100, 1, {"a": 1.0})
    run.show("video/student", video(tmp_path, 100), 100, "")
    kept = run.metrics_bytes()
    run.record(200, 2, {"a": 2.0})  # lost in the crash: played again with another result
    run.show("video/student", video(tmp_path, 200), 200, "")
    run.close()
    with (tmp_path / "metrics.jsonl").open("a") as metrics:
        metrics.truncate(kept)
    run = open_run(tmp_path)
    run.record(210, 2, {"a": 3.0})
    run.close()
    assert scalars(tmp_path, "a") == [(100, 1.0), (210, 3.0)]
    assert [image.step for image in written(tmp_path).Images("video/student")] == [100]


def test_a_run_without_the_flag_writes_nothing(tmp_path):
    run = open_run(tmp_path, replace(CONFIG, run=replace(CONFIG.run, tensorboard=False)))
    run.record(100, 1, {"a": 1.0})
    run.close()
    assert not (tmp_path / "tensorboard").exists()


def test_a_strip_shows_a_video_from_its_first_to_its_last_frame(tmp_path):
    strip = film_strip(video(tmp_path, 1))
    assert strip.shape == (32, STRIP * 48, 3)
    shown = strip.reshape(32, STRIP, 48, 3).mean((0, 2, 3))
    np.testing.assert_allclose(shown, [0, 30, 50, 80, 110, 140, 160, 190], atol=4)


@pytest.mark.parametrize("method", ["add_scalar", "close", "flush"])
def test_a_failure_is_said_once_and_the_records_go_on(tmp_path, monkeypatch, caplog, method):
    from torch.utils.tensorboard import SummaryWriter

    def broken(*_, **__):
        raise OSError("no space left on device")

    monkeypatch.setattr(SummaryWriter, method, broken)
    run = open_run(tmp_path)
    for step in range(3):
        run.record(step, step, {"a": 1.0})
    run.close()
    assert len(caplog.messages) == 1
    assert "no space left on device" in caplog.messages[0]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_start_that_fails_leaves_a_log_that_does_nothing(tmp_path, monkeypatch, caplog):
    (tmp_path / "tensorboard").write_text("in the way")
    log = TensorBoardLog(True, tmp_path)
    log.log({"global_step": 1, "a": 1.0})
    log.video("video/x", tmp_path / "none.mp4", 1)
    log.finish()
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("TensorBoard could not start (")
