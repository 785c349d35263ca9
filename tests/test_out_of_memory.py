"""Out of GPU memory: less at once, the same gradient and the same episodes, and at the end one line."""

from __future__ import annotations

import pytest
import torch

from configs.config import LossConfig, UpdateConfig
from errors import BadInput
from rl.objectives import policy_objective
from rl.rollout import Acting, Batching, Randomness, collect
from rl.trajectory import Episode
from rl.update import optimise
from tests.fakes import FakePolicy, FakePool, Script, acted_batch, adamw, parameters_of
from tests.small_checkpoint import make_small_checkpoint
from tests.whole_program import command_line, flags_into, use_fakes
from vla.policy import Policy
from vla.probes import synthetic_observations

LENGTHS = (3, 2, 3)
ADVANTAGES = torch.tensor([1.0, 0.4, -2.0, 0.5, 0.3, -0.7, -1.0, 1.5])
REASON = "CUDA out of memory. Tried to allocate 2 GiB."
MESSAGE = f"{REASON}\nmore lines"


class ShortOfMemory(FakePolicy):
    """Holds `room` decisions with their graphs, and `room_to_act` of those that are to be decided.

    With `room` 0.5 not even one decision fits before its activations are recomputed.
    """

    def __init__(self, room: float = 99, room_to_act: int = 99, **options):
        super().__init__(**options)
        self.room, self.room_to_act = room, room_to_act
        self.sizes: list[int] = []
        self.is_recomputing = True  # nothing to gain by it

    def chunk_logits(self, observations):
        if torch.is_grad_enabled():
            self.sizes.append(len(observations))
            if len(observations) > self.room:
                raise torch.OutOfMemoryError(MESSAGE)
        return super().chunk_logits(observations)

    def act(self, observations, *args, **options):
        if len(observations) > self.room_to_act:
            raise torch.OutOfMemoryError(MESSAGE)
        return super().act(observations, *args, **options)

    def recompute_everything(self) -> bool:
        before, self.is_recomputing = self.is_recomputing, True
        self.room *= 1 if before else 2
        return not before


def updated(policy: FakePolicy, micro_batch_size: int, **options) -> list[torch.Tensor]:
    """The parameters after an update of two epochs."""
    batch = acted_batch(policy, LENGTHS)
    objective = policy_objective(policy, batch, ADVANTAGES, LossConfig(), 1.0, micro_batch_size=1)
    config = UpdateConfig(n_epochs=2, batch_size=4, micro_batch_size=micro_batch_size)
    optimise(policy, adamw(policy, **options), batch, objective, config, seed=0, update=0)
    return parameters_of(policy)


def equal(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# updates


@pytest.mark.parametrize("room", [1, 2, 3])
def test_an_update_that_runs_out_of_memory_equals_one_that_began_smaller(caplog, room):
    fits = 1 << (room.bit_length() - 1)  # halves of 4: 2 or 1
    policy = ShortOfMemory(room, adapter_scale=0.2)
    assert equal(updated(policy, 4), updated(FakePolicy(adapter_scale=0.2), fits))
    assert max(policy.sizes[policy.sizes.index(fits) :]) == fits  # it does not try again within the update
    assert caplog.messages[-1] == f"out of GPU memory ({REASON}); the run goes on with {fits} decisions at once"


@pytest.mark.parametrize("failing", ["forward", "backward"])
def test_what_a_minibatch_had_accumulated_before_does_not_count_twice(failing):
    """The second micro-batch fails: the first one's gradient is there already."""
    policy, passes = FakePolicy(adapter_scale=0.2), {"forward": 0, "backward": 0}
    logits_of = policy.chunk_logits

    def passed(kind: str) -> None:
        passes[kind] += 1
        if kind == failing and passes[kind] == 2:
            raise torch.OutOfMemoryError(MESSAGE)

    def chunk_logits(observations):
        passed("forward")
        logits = logits_of(observations)
        logits.register_hook(lambda _: passed("backward"))
        return logits

    policy.chunk_logits = chunk_logits
    after = updated(policy, 2)
    assert passes[failing] > 8  # 2 with 2 at once, the rest with 1
    for a, b in zip(after, updated(FakePolicy(adapter_scale=0.2), 1), strict=True):
        assert torch.equal(a, b)


def test_where_one_decision_does_not_fit_its_activations_are_recomputed(caplog):
    policy = ShortOfMemory(room=0.5, adapter_scale=0.2)
    policy.is_recomputing = False
    assert equal(updated(policy, 2), updated(FakePolicy(adapter_scale=0.2), 1))
    assert caplog.messages[-1].endswith("the run goes on with all activations recomputed")


def test_where_nothing_fits_the_line_names_the_flags(caplog):
    with pytest.raises(BadInput) as stopped:
        updated(ShortOfMemory(room=0, adapter_scale=0.2), 4)
    message = str(stopped.value)
    assert "\n" not in message
    assert all(flag in message for flag in ("--micro-batch-size", "--gradient-checkpointing", "--memory-budget"))


def test_a_pass_that_other_devices_take_part_in_is_not_run_again():
    policy = ShortOfMemory(room=1, adapter_scale=0.2)
    policy.is_alone = False
    with pytest.raises(BadInput, match="several devices share: lower --micro-batch-size"):
        updated(policy, 4)


def test_the_next_update_tries_the_whole_micro_batch_again():
    policy = ShortOfMemory(room=1, adapter_scale=0.2)
    updated(policy, 4)
    policy.room, tried = 99, len(policy.sizes)
    updated(policy, 4)
    assert policy.sizes[tried] == 4


def test_the_real_policy_recomputes_its_blocks_without_another_gradient(tmp_path):
    folder = make_small_checkpoint(tmp_path / "checkpoint")
    policy = Policy.load(str(folder), task_suite="libero_spatial", lora_rank=4, lora_alpha=4)
    observations = synthetic_observations(policy, 2)

    def gradient():
        parameters = [p for _, p in policy.named_trainable_parameters()]
        found = torch.autograd.grad(policy.chunk_logits(observations).sum(), parameters, allow_unused=True)
        return [g for g in found if g is not None]

    kept = gradient()
    assert policy.is_alone
    assert policy.recompute_everything()
    assert not policy.recompute_everything()  # that is all there is
    for a, b in zip(kept, gradient(), strict=True):
        torch.testing.assert_close(a, b)


# rollouts


def played(policy, num_envs: int = 4, **batching):
    pool = FakePool(lambda *_: Script(env_steps=10), num_envs)
    acting = Acting(epsilon=0.5, temperature=1.0, record_student_logprobs=True)
    episodes = [Episode(i, 0, i, i) for i in range(6)]
    collected = collect(policy, pool, episodes, acting, Randomness(0, "x"), batching=Batching(**batching))
    return [[(d.tokens.tolist(), d.by_teacher) for d in t.decisions] for t in collected.trajectories]


@pytest.mark.parametrize("room", [1, 2, 3])
def test_a_rollout_that_runs_out_of_memory_plays_the_same_episodes(caplog, room):
    policy = ShortOfMemory(room_to_act=room, adapter_scale=0.2)
    assert played(policy) == played(FakePolicy(adapter_scale=0.2))
    assert max(size for _, size in policy.modes) <= room
    assert len(caplog.messages) <= 2  # 4 at once, then 2: it does not try again within the rollout


def test_a_rollout_that_cannot_decide_for_one_environment_says_so():
    with pytest.raises(BadInput, match=r"\(CUDA .*\) in a decision with --max-batch 1: lower --num-envs"):
        played(ShortOfMemory(room_to_act=0))


# the program


def test_elsewhere_it_is_one_line_and_the_checkpoint_stays(monkeypatch, capsys, tmp_path):
    """As in an optimizer step, of which nothing can be taken back."""
    use_fakes(monkeypatch)

    def step(*_):
        raise torch.OutOfMemoryError(MESSAGE)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    assert command_line(monkeypatch, *flags_into(tmp_path)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"train_grpo.py: out of GPU memory ({REASON}): lower --micr")
    (run,) = tmp_path.iterdir()
    assert (run / "checkpoints" / "latest").resolve().name == "step_0"
