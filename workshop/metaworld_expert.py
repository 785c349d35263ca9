"""Use Meta-World's own scripted experts, one for each of its tasks, like a `workshop.expert.Expert`."""

import warnings

import numpy as np

from envs.metaworld import MetaWorldEnv


class MetaWorldExpert:
    """Chooses the actions of the episode that runs in `env`. Make a new one for every episode."""

    def __init__(self, env: MetaWorldEnv) -> None:
        from metaworld.policies import ENV_POLICY_MAP

        self._env = env
        self._policy = ENV_POLICY_MAP[env.name]()

    def decide(self) -> np.ndarray:
        """The action (4,) for the present state, clipped to [-1, 1] as the simulator clips it."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the policies warn of actions beyond the bounds
            action = np.asarray(self._policy.get_action(self._env.raw), dtype=np.float64)
        return np.clip(action, -1.0, 1.0)
