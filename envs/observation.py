"""What the policy sees of the simulator, and how it is cut out of LIBERO's observation dictionary.

Conventions are those of the published OpenVLA-OFT evaluation: cameras in the order agentview, wrist; images turned by
180 degrees (LIBERO renders upside down and the training data were turned); proprioception as eef position,
axis-angle of the eef orientation, gripper joint positions.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

IMAGE_SIZE = 256
CAMERAS = ("agentview", "robot0_eye_in_hand")  # a policy with n images reads the first n


@dataclass(frozen=True)
class Observation:
    images: np.ndarray  # (num_images, 256, 256, 3) uint8, RGB, turned by 180 degrees; order: agentview, wrist
    proprio: np.ndarray  # (8,) float64: eef position (m) 3, axis-angle (rad) 3, gripper joint positions (m) 2
    instruction: str
    prepared: bool = False  # `images` are what the policy's preprocessing made of the frames: (num_images, S, S, 3)


def upright(image: np.ndarray) -> np.ndarray:
    """Turn one frame (256, 256, 3) by 180 degrees: both axes, which is not the same as a vertical flip."""
    return np.ascontiguousarray(image[::-1, ::-1])


def axis_angle(quaternion: np.ndarray) -> np.ndarray:
    """Rotation vector (3,) of a quaternion (x, y, z, w).

    No sign canonicalisation: q and -q give different vectors, as in the data the policies were trained on.
    """
    w = min(max(float(quaternion[3]), -1.0), 1.0)
    sin_half = math.sqrt(1.0 - w * w)
    if math.isclose(sin_half, 0.0):
        return np.zeros(3)
    return quaternion[:3] * 2.0 * math.acos(w) / sin_half


def observation_from_libero(raw: Mapping[str, np.ndarray], num_images: int, instruction: str) -> Observation:
    images = np.stack([upright(raw[f"{camera}_image"]) for camera in CAMERAS[:num_images]])
    proprio = np.concatenate(
        [raw["robot0_eef_pos"], axis_angle(raw["robot0_eef_quat"]), raw["robot0_gripper_qpos"]], dtype=np.float64
    )
    return Observation(images, proprio, instruction)
