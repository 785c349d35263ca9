"""Meta-World's own scripted experts, one for each of its tasks, with the few methods of `workshop.expert.Expert`."""

import warnings

import numpy as np

from envs.metaworld import MetaWorldEnv


class MetaWorldExpert:
    """Acts in the episode that runs in `env`; one per episode."""

    def __init__(self, env: MetaWorldEnv) -> None:
        from metaworld.policies import ENV_POLICY_MAP

        self._env, self._policy = env, ENV_POLICY_MAP[env.name]()

    def decide(self) -> tuple[str, np.ndarray]:
        """A name and the action (4,) for the present state, cut to [-1, 1] as the simulator would."""
        with warnings.catch_warnings():  # that the action was beyond it
            warnings.simplefilter("ignore")
            return "", np.clip(
                np.asarray(self._policy.get_action(self._env.raw), dtype=np.float64), -1.0, 1.0
            )
