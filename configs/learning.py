"""Settings of how the policy learns from it: phases, losses, critic, optimizer. See configs/config.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from configs.require import require


@dataclass(frozen=True)
class PhaseConfig:
    """Who acts and which loss is minimised, as a function of env steps."""

    warmup: bool = True
    """--no-warmup: pure RL from step 0 (no warmup, no transition)."""
    warmup_steps: int = 25_000
    """Env steps in which the teacher acts and the student learns to match it."""
    transition_steps: int = 5_000
    """Env steps in which the teacher acts with a probability that falls linearly from 1 to 0."""
    total_steps: int = 100_000
    """Env steps of the whole run."""
    warmup_only: bool = False
    """Stop at the end of the warmup."""
    distill_target: Literal["greedy", "sharpened"] = "greedy"
    """What the warmup matches: the teacher's tokens, or its distribution at --distill-temperature."""
    distill_temperature: float = 0.5
    """Temperature that sharpens the teacher's distribution (only with --distill-target sharpened)."""
    distill_student_temperature: float = 1.0
    """Temperature of the student's distribution that the warmup matches to the target. At the sampling temperature
    (--temperature) the sampled student learns to do what the teacher does; at 1 its argmax does."""
    importance: Literal["student", "behaviour"] = "student"
    """Denominator of PPO's ratio in the transition: the student's own probability, or the exact probability of the
    mixture that acted (then ratios are of joint chunk probabilities)."""

    def __post_init__(self) -> None:
        for flag, value in (
            ("--warmup-steps", self.warmup_steps),
            ("--transition-steps", self.transition_steps),
            ("--total-steps", self.total_steps),
        ):
            require(value >= 0, f"{flag} must not be negative, got {value}")
        for flag, temperature in (
            ("--distill-temperature", self.distill_temperature),
            ("--distill-student-temperature", self.distill_student_temperature),
        ):
            require(temperature > 0, f"{flag} must be positive, got {temperature}")
        require(self.warmup or not self.warmup_only, "--warmup-only and --no-warmup contradict each other")


@dataclass(frozen=True)
class LossConfig:
    """Advantages and the clipped surrogate."""

    advantage: Literal["absolute", "group", "rloo", "batch", "gae"] = "absolute"
    """Advantage of a trajectory: its return, or its return relative to the others of its group or of the rollout; or
    of each decision, by a critic (gae)."""
    discount: float = 1.0
    """Discount, 0 to 1, per decision, counted back from the last one (only with --advantage absolute or gae)."""
    ratio_level: Literal["chunk", "token"] = "chunk"
    """Clip the ratio of chunk log-probs (mean over tokens) or each token's ratio (SimpleVLA-RL)."""
    clip_high: float = 0.28
    """Distance of the ratio from 1 beyond which it earns no more: upwards where A > 0, downwards where A < 0."""
    kl_coef: float = 0.0
    """Weight of the exact KL divergence, in nats per token, from the teacher's distribution."""
    entropy_coef: float = 0.0
    """Weight of the bonus for entropy, in nats per token."""
    aggregation: Literal["decision", "trajectory"] = "decision"
    """Every decision, or every trajectory, weighs the same in the loss."""

    def __post_init__(self) -> None:
        require(0 < self.discount <= 1, f"--discount must lie in (0, 1], got {self.discount}")
        require(
            self.discount == 1 or self.advantage in ("absolute", "gae"),
            f"--discount {self.discount} needs --advantage absolute or gae: {self.advantage} compares plain returns",
        )
        require(0 < self.clip_high < 1, f"--clip-high must lie in (0, 1), got {self.clip_high}")
        for flag, value in (("--kl-coef", self.kl_coef), ("--entropy-coef", self.entropy_coef)):
            require(value >= 0, f"{flag} must not be negative, got {value}")


@dataclass(frozen=True)
class CriticConfig:
    """The value head of --advantage gae."""

    gae_lambda: float = 0.95
    """Lambda of the generalised advantage estimate, 0 to 1, per decision."""
    value_lr: float = 1e-4
    """Learning rate of the value head, per optimizer step."""
    value_coef: float = 0.5
    """Weight of the value loss (squared return)."""
    value_clip: float = 0.2
    """Largest change of a value, in units of the return, that the value loss rewards within one update."""
    value_warmup_steps: int = 0
    """Env steps, after the warmup phase, in which only the value head learns."""
    critic_through_backbone: bool = False
    """Let the value loss train the adapters, too."""

    def __post_init__(self) -> None:
        require(0 <= self.gae_lambda <= 1, f"--gae-lambda must lie in [0, 1], got {self.gae_lambda}")
        for flag, value in (
            ("--value-lr", self.value_lr),
            ("--value-coef", self.value_coef),
            ("--value-clip", self.value_clip),
        ):
            require(value > 0, f"{flag} must be positive, got {value}")
        require(
            self.value_warmup_steps >= 0, f"--value-warmup-steps must not be negative, got {self.value_warmup_steps}"
        )


@dataclass(frozen=True)
class UpdateConfig:
    """The optimizer."""

    n_epochs: int = 10
    """Passes over a rollout."""
    batch_size: int = 2
    """Decisions per optimizer step, over all ranks."""
    micro_batch_size: int | Literal["auto"] = "auto"
    """Decisions per forward and backward pass and device; the gradient does not depend on it, memory does (auto: as
    fits, at most the device's share of --batch-size)."""
    lr: float = 1e-6
    """Learning rate of AdamW, per optimizer step."""
    warmup_lr: float | None = None
    """Learning rate in the warmup, per optimizer step (None: --lr); imitation bears larger steps than reinforcement."""
    weight_decay: float = 0.01
    """Weight decay of AdamW: the share, times --lr, that a weight loses per optimizer step."""
    max_grad_norm: float = 1.0
    """L2 norm of the gradient above which it is scaled down (1000 times it: the step is skipped)."""
    target_kl: float | None = None
    """End the epochs of an update when the approximate KL of a whole epoch, in nats per token, exceeds this (None:
    never)."""

    def __post_init__(self) -> None:
        for flag, value in (
            ("--n-epochs", self.n_epochs),
            ("--batch-size", self.batch_size),
            ("--micro-batch-size", self.batch_size if self.micro_batch_size == "auto" else self.micro_batch_size),
        ):
            require(value >= 1, f"{flag} must be at least 1, got {value}")
        require(self.lr > 0, f"--lr must be positive, got {self.lr}")
        require(self.warmup_lr is None or self.warmup_lr > 0, f"--warmup-lr must be positive, got {self.warmup_lr}")
        require(self.weight_decay >= 0, f"--weight-decay must not be negative, got {self.weight_decay}")
        require(self.max_grad_norm > 0, f"--max-grad-norm must be positive, got {self.max_grad_norm}")
        require(self.target_kl is None or self.target_kl > 0, f"--target-kl must be positive, got {self.target_kl}")

    @property
    def micro_batch(self) -> int:
        """`micro_batch_size` as a number: `assembly.fit_to_memory` decides what `auto` is."""
        if self.micro_batch_size == "auto":
            raise ValueError("the micro-batch size has not been decided yet")
        return self.micro_batch_size
