"""Which geoms a camera cannot see: leaving them out of a frame changes its cost, not its pixels."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import mujoco
import numpy as np

HIDDEN_GROUP = mujoco.mjNGROUP - 1  # robosuite draws groups 1 and 2
MARGIN = 1e-3  # metres, far above the rounding of the single-precision pipeline that draws


@contextmanager
def only_what_is_in_view(model: mujoco.MjModel, data: mujoco.MjData, camera: int) -> Iterator[None]:
    """Within this block geoms outside the square view of `camera` are in a group that is not drawn.

    MuJoCo sends all geoms to the renderer, which drops what is out of view triangle by triangle. For the wrist camera
    that is most of the arm. Mirrors and shadows show what the camera itself cannot see: with them all geoms stay.
    """
    if _has_mirrors_or_shadows(model):
        yield
        return
    hidden = out_of_view(model, data, camera)
    groups = model.geom_group[hidden]
    model.geom_group[hidden] = HIDDEN_GROUP
    try:
        yield
    finally:
        model.geom_group[hidden] = groups


def out_of_view(model: mujoco.MjModel, data: mujoco.MjData, camera: int) -> np.ndarray:
    """Indices of the geoms whose bounding boxes lie wholly outside one of the five planes that bound the view."""
    slope = math.tan(math.radians(model.cam_fovy[camera]) / 2)
    inward = np.array([[1, 0, -slope], [-1, 0, -slope], [0, 1, -slope], [0, -1, -slope], [0, 0, -1]])  # it looks to -z
    inward /= np.linalg.norm(inward, axis=1, keepdims=True)
    inward = inward @ data.cam_xmat[camera].reshape(3, 3).T
    axes = data.geom_xmat.reshape(-1, 3, 3)
    centre, half_size = model.geom_aabb[:, :3, None], model.geom_aabb[:, 3:, None]  # in the frame of the geom
    centres = data.geom_xpos + (axes @ centre)[:, :, 0] - data.cam_xpos[camera]
    reach = (np.abs(inward @ axes) @ half_size)[:, :, 0]  # (ngeom, 5): from the centre along each normal
    is_outside = (centres @ inward.T + reach).min(axis=1) < -MARGIN
    return np.flatnonzero(is_outside & (model.geom_rbound > 0))  # rbound 0: an infinite plane


def _has_mirrors_or_shadows(model: mujoco.MjModel) -> bool:
    materials = model.geom_matid[model.geom_matid >= 0]
    return bool(model.light_castshadow.any() or model.mat_reflectance[materials].any())
