"""A recording holds what the episode was: frames, states, the actions that were executed, on the env-step timeline."""

import numpy as np
import pytest
import simplejpeg
import torch

from rl.rerun_recording import ACTION_NAMES, STATE_NAMES, write_recording
from rl.trajectory import Decision, Episode, Trajectory
from tests.fakes import FakeObservation

pytest.importorskip("rerun", reason="the optional package rerun-sdk is not installed")
CHUNK = 4
EXECUTED = (4, 4, 2)  # the episode ends inside its last chunk


class SevenActions:
    """Turns tokens into actions as a policy does: token t is the number t."""

    @staticmethod
    def actions(tokens: np.ndarray) -> np.ndarray:
        return tokens.reshape(len(tokens), CHUNK, 7).astype(np.float64)


def filmed(num_images: int, teacher: bool = False) -> Trajectory:
    decisions = [
        Decision(
            FakeObservation(np.full((num_images, 16, 16, 3), 50 * i, np.uint8), np.arange(8.0) + 10 * i),
            torch.arange(CHUNK * 7) + 100 * i,
            teacher,
            None if teacher else torch.full((CHUNK * 7,), -0.5 * i),
            None,
            executed,
        )
        for i, executed in enumerate(EXECUTED)
    ]
    frames = [np.full((32, 32, 3), 20 * step, np.uint8) for step in range(sum(EXECUTED) + 1)]
    return Trajectory(Episode(0, 0, 40, 0), decisions, True, sum(EXECUTED), frames)


def columns(path) -> dict[str, dict]:
    """Entity -> its columns as lists, read back from the file."""
    from rerun.chunk import RrdReader

    chunks = RrdReader(path).stream().to_chunks()
    return {c.entity_path: c.to_record_batch().to_pydict() for c in chunks if not c.is_static}


@pytest.fixture(scope="module")
def entities(tmp_path_factory):
    path = tmp_path_factory.mktemp("rerun") / "rerun" / "student-step_5.rrd"
    write_recording(path, filmed(num_images=2), SevenActions())
    return columns(path)


def test_actions_are_the_executed_ones_at_their_env_steps(entities):
    for dimension, name in enumerate(ACTION_NAMES):
        of_action = entities[f"/action/{name}"]
        assert of_action["env_step"] == list(range(10))
        expected = [100 * (step // 4) + 7 * (step % 4) + dimension for step in range(10)]
        assert [value for (value,) in of_action["Scalars:scalars"]] == expected


def test_states_and_log_probs_are_at_the_decisions(entities):
    for dimension, name in enumerate(STATE_NAMES):
        of_state = entities[f"/observation/state/{name}"]
        assert of_state["env_step"] == [0, 4, 8]
        assert [value for (value,) in of_state["Scalars:scalars"]] == [dimension, 10 + dimension, 20 + dimension]
    assert [value for (value,) in entities["/policy/log_prob"]["Scalars:scalars"]] == [0.0, -0.5, -1.0]


def test_frames_are_jpegs_of_every_env_step_and_the_wrist_of_every_decision(entities):
    for camera, steps, grey in (("agentview", range(11), 20), ("wrist", (0, 4, 8), 50)):
        images = entities[f"/observation/images/{camera}"]
        assert images["env_step"] == list(steps)
        pixels = [simplejpeg.decode_jpeg(bytes(blob[0])) for blob in images["EncodedImage:blob"]]
        assert [int(image.mean().round()) for image in pixels] == [grey * i for i in range(len(images["env_step"]))]


def test_success_comes_with_the_last_env_step(entities):
    assert [value for (value,) in entities["/next/success"]["Scalars:scalars"]] == [0.0] * 9 + [1.0]


def test_seconds_run_at_the_control_rate(entities):
    assert entities["/action/x"]["timestamp"][4].total_seconds() == pytest.approx(0.2)


def test_an_episode_of_the_teacher_with_one_camera_has_neither_wrist_nor_log_probs(tmp_path):
    write_recording(tmp_path / "rerun" / "teacher.rrd", filmed(num_images=1, teacher=True), SevenActions())
    found = set(columns(tmp_path / "rerun" / "teacher.rrd"))
    assert "/observation/images/agentview" in found
    assert not found & {"/observation/images/wrist", "/policy/log_prob"}
