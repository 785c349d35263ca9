"""A filmed episode as a rerun recording (.rrd): `rerun FILE` plays it. Entities have the names of LeRobot's features.

    observation/images/agentview   every env step
    observation/images/wrist       every decision, as the network sees it (policies of two images)
    observation/state/NAME         every decision
    action/NAME                    every env step, in the env's units
    policy/log_prob                every decision: mean of the chunk's token log-probs (not for a teacher's episode)
    next/success                   every env step

The timeline `env_step` counts 20 Hz control steps after settling, `timestamp` is the same in seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg

from rl.contracts import Policy
from rl.trajectory import Decision, Trajectory
from rl.video import FRAMES_PER_SECOND

ACTION_NAMES = ("x", "y", "z", "roll", "pitch", "yaw", "gripper")
STATE_NAMES = ("x", "y", "z", "axis_angle_x", "axis_angle_y", "axis_angle_z", "finger_left", "finger_right")


def write_recording(path: Path, trajectory: Trajectory, policy: Policy) -> None:
    """Write a filmed trajectory; the policy turns its tokens into actions again."""
    import rerun as rr  # an optional package, and a large one

    recording = rr.RecordingStream("vla-grpo", recording_id=path.stem)
    path.parent.mkdir(exist_ok=True)
    recording.save(path, default_blueprint=layout())

    def send(entity: str, steps: Sequence[int], columns: Any) -> None:
        seconds = [step / FRAMES_PER_SECOND for step in steps]
        times = [rr.TimeColumn("env_step", sequence=steps), rr.TimeColumn("timestamp", duration=seconds)]
        rr.send_columns(entity, times, columns, recording=recording)

    def send_images(name: str, steps: Sequence[int], images: Sequence[np.ndarray]) -> None:
        jpegs = [simplejpeg.encode_jpeg(np.ascontiguousarray(image), quality=90) for image in images]
        columns = rr.EncodedImage.columns(blob=jpegs, media_type=["image/jpeg"] * len(jpegs))
        send(f"observation/images/{name}", steps, columns)

    decisions = trajectory.decisions
    decided = list(decision_steps(decisions))
    send_images("agentview", range(len(trajectory.frames)), trajectory.frames)
    if len(decisions[0].observation.images) > 1:
        send_images("wrist", decided, [d.observation.images[1] for d in decisions])
    states = np.stack([d.observation.proprio for d in decisions])
    for name, values in zip(STATE_NAMES, states.T, strict=True):
        send(f"observation/state/{name}", decided, rr.Scalars.columns(scalars=values))

    actions = executed_actions(decisions, policy)
    steps = range(len(actions))
    for name, values in zip(ACTION_NAMES, actions.T, strict=True):
        send(f"action/{name}", steps, rr.Scalars.columns(scalars=values))
    ended = [float(trajectory.success and step == steps[-1]) for step in steps]
    send("next/success", steps, rr.Scalars.columns(scalars=ended))
    means = [d.student_logprobs.mean().item() for d in decisions if d.student_logprobs is not None]
    if len(means) == len(decisions):
        send("policy/log_prob", decided, rr.Scalars.columns(scalars=means))
    recording.disconnect()


def decision_steps(decisions: Sequence[Decision]) -> Iterator[int]:
    """The env step at which each decision was made."""
    step = 0
    for decision in decisions:
        yield step
        step += decision.executed


def executed_actions(decisions: Sequence[Decision], policy: Policy) -> np.ndarray:
    """Actions (env steps, 7) that the simulator was given."""
    chunks = policy.actions(np.stack([d.tokens.numpy() for d in decisions]))
    return np.concatenate([chunk[: d.executed] for chunk, d in zip(chunks, decisions, strict=True)])


def layout() -> Any:
    """Cameras above, curves below."""
    import rerun.blueprint as rrb

    cameras = [rrb.Spatial2DView(origin=f"observation/images/{name}", name=name) for name in ("agentview", "wrist")]
    curves = [rrb.TimeSeriesView(origin=origin) for origin in ("action", "observation/state", "policy", "next")]
    return rrb.Blueprint(rrb.Vertical(rrb.Horizontal(*cameras), rrb.Grid(*curves)), collapse_panels=True)
