"""`optimise`: exact accumulation, gradient protection, and decisions that are left out without a trace."""

import copy
import math

import pytest
import torch

from configs.config import LossConfig, PhaseConfig, UpdateConfig
from errors import BadInput
from rl.losses import Statistics
from rl.objectives import Objective, distillation_objective, policy_objective
from rl.update import optimise
from tests.fakes import FakePolicy, acted_batch, adamw, parameters_of

LENGTHS = (3, 2, 3)
N = sum(LENGTHS)
ADVANTAGES = torch.tensor([1.0, 0.0, -2.0, 0.5, 0.0, 0.0, -1.0, 1.5])


class Recorder:
    """An optimizer that keeps the gradients it is to step with and does not step."""

    def __init__(self, policy: FakePolicy):
        self.param_groups = [{"params": [p for _, p in policy.named_trainable_parameters()], "lr": 0.0}]
        self.gradients: list[torch.Tensor] = []

    def step(self) -> None:
        if not self.found_inf:
            self.gradients.append(torch.cat([p.grad.flatten() for p in self.param_groups[0]["params"]]))

    def zero_grad(self, set_to_none: bool) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None


@pytest.fixture
def policy() -> FakePolicy:
    return FakePolicy(adapter_scale=0.2)


@pytest.fixture
def batch(policy):
    return acted_batch(policy, LENGTHS)


def settings(**changes) -> UpdateConfig:
    return UpdateConfig(**({"n_epochs": 1, "batch_size": N, "micro_batch_size": N, "max_grad_norm": 1e6} | changes))


def gradients(policy, batch, objective, **changes) -> list[torch.Tensor]:
    recorder = Recorder(policy)
    optimise(policy, recorder, batch, objective, settings(**changes), seed=0, update=0)
    return recorder.gradients


def ppo(policy, batch, advantages=ADVANTAGES, temperature=1.0, **loss) -> Objective:
    return policy_objective(policy, batch, advantages, LossConfig(**loss), temperature, micro_batch_size=2)


def custom(per_row, active=None) -> Objective:
    """An objective from a function of (logits (B, A, V), row numbers) -> (B,) losses."""

    def loss(logits, rows):
        return per_row(logits, rows).sum(), Statistics({}, {}, len(rows))

    return Objective(loss, torch.ones(N, dtype=torch.bool) if active is None else active)


# accumulation


@pytest.mark.parametrize("micro_batch_size", [1, 3])
@pytest.mark.parametrize("kind", ["ppo", "ppo by token", "ppo by trajectory", "distillation"])
def test_micro_batches_add_up_to_the_gradient_of_the_whole_minibatch(policy, batch, micro_batch_size, kind):
    objective = {
        "ppo": lambda: ppo(policy, batch),
        "ppo by token": lambda: ppo(policy, batch, ratio_level="token"),
        "ppo by trajectory": lambda: ppo(policy, batch, aggregation="trajectory", kl_coef=0.1, entropy_coef=0.1),
        "distillation": lambda: distillation_objective(policy, batch, PhaseConfig(), 2),
    }[kind]()
    (whole,) = gradients(policy, batch, objective)
    (accumulated,) = gradients(policy, batch, objective, micro_batch_size=micro_batch_size)
    assert (accumulated - whole).norm() / whole.norm() < 1e-5


def test_gradients_of_all_devices_meet_before_the_norm_and_parameters_go_out_after_the_step(policy, batch):
    """Four rows fit: two per device. What other devices add is part of the norm."""
    calls = []

    def reduce_gradients():
        calls.append("reduce")
        policy.bias.grad += 3.0

    policy.devices = ("first", "second")
    policy.reduce_gradients, policy.parameters_changed = reduce_gradients, lambda: calls.append("changed")
    optimizer = adamw(policy)
    optimizer.register_step_pre_hook(lambda *_: calls.append("step"))
    outputs_of, sizes = policy.chunk_logits, []
    policy.chunk_logits = lambda observations: sizes.append(len(observations)) or outputs_of(observations)
    metrics = optimise(
        policy, optimizer, batch, custom(lambda logits, rows: 0 * logits.sum((1, 2))),
        settings(batch_size=N, micro_batch_size=2, max_grad_norm=1.0), 0, 0,
    )  # fmt: skip
    assert sizes == [4, 4]
    assert calls == ["reduce", "step", "changed"]
    assert metrics["train/grad_norm"] == pytest.approx(3.0 * policy.bias.numel() ** 0.5)


def test_the_gradient_is_that_of_the_mean_loss_over_the_minibatch(policy, batch):
    (found,) = gradients(policy, batch, distillation_objective(policy, batch, PhaseConfig(), 2), micro_batch_size=1)
    objective = distillation_objective(policy, batch, PhaseConfig(), 2)
    loss, _ = objective.loss(policy.chunk_logits(batch.observations), torch.arange(N))
    expected = torch.autograd.grad(loss / N, [p for _, p in policy.named_trainable_parameters()])
    torch.testing.assert_close(found, torch.cat([g.flatten() for g in expected]))


@pytest.mark.parametrize("batch_size", [N, 2, 3])
@pytest.mark.parametrize("aggregation", ["decision", "trajectory"])
def test_leaving_out_zero_advantages_gives_the_gradient_of_running_them(policy, batch, batch_size, aggregation):
    lean = ppo(policy, batch, aggregation=aggregation)
    everything = Objective(lean.loss, torch.ones(N, dtype=torch.bool))
    without = gradients(policy, batch, lean, batch_size=batch_size, micro_batch_size=1)
    with_all = gradients(policy, batch, everything, batch_size=batch_size, micro_batch_size=1)
    run = [g for g in with_all if g.any()]  # minibatches of zeros only take no step
    assert len(without) == len(run) > 0
    for a, b in zip(without, run, strict=True):
        assert torch.equal(a, b)


def test_zero_advantages_cost_no_forward_pass(policy, batch):
    objective = ppo(policy, batch)
    policy.rows_run = 0
    optimise(policy, adamw(policy), batch, objective, settings(n_epochs=3), seed=0, update=0)
    assert policy.rows_run == 3 * int((ADVANTAGES != 0).sum())


@pytest.mark.parametrize("term", ["kl_coef", "entropy_coef"])
def test_with_kl_or_entropy_zero_advantages_run_and_move_the_policy(policy, batch, term):
    before = parameters_of(policy)
    metrics = optimise(
        policy, adamw(policy), batch, ppo(policy, batch, torch.zeros(N), **{term: 0.1}), settings(), seed=0, update=0
    )
    assert metrics["train/optimizer_steps"] == 1
    assert not torch.equal(policy.bias, before[1])


# degenerate rollouts


def test_a_rollout_without_advantages_leaves_no_trace(policy, batch):
    before, optimizer = parameters_of(policy), adamw(policy, weight_decay=0.5)
    metrics = optimise(policy, optimizer, batch, ppo(policy, batch, torch.zeros(N)), settings(), seed=0, update=0)
    assert all(torch.equal(a, b) for a, b in zip(before, parameters_of(policy), strict=True))
    assert optimizer.state_dict()["state"] == {}
    assert metrics["train/optimizer_steps"] == metrics["train/skipped_steps"] == 0
    assert metrics["train/zero_advantage_fraction"] == 1
    assert all(math.isfinite(value) for value in metrics.values())
    assert "train/policy_loss" not in metrics


def test_a_minibatch_without_advantages_takes_no_weight_decay_or_momentum_step(policy, batch):
    advantages = torch.zeros(N)
    advantages[0] = 1.0
    expected = copy.deepcopy(policy)
    (gradient,) = gradients(expected, batch, ppo(expected, batch, advantages), batch_size=1)
    for (_, p), g in zip(expected.named_trainable_parameters(), gradient.split(policy.adapter.numel()), strict=True):
        p.grad = g.view_as(p)
    adamw(expected, weight_decay=0.5).step()  # torch's own AdamW, one step
    optimiser = adamw(policy, weight_decay=0.5)
    metrics = optimise(policy, optimiser, batch, ppo(policy, batch, advantages), settings(batch_size=1), 0, 0)
    assert metrics["train/optimizer_steps"] == 1
    assert all(torch.equal(a, b) for a, b in zip(parameters_of(policy), parameters_of(expected), strict=True))


# gradient protection


def poisoned(batch, factor: float) -> Objective:
    """One decision's loss is scaled by `factor`."""
    return custom(lambda logits, rows: logits.logsumexp(-1).mean(-1) * torch.where(rows == 2, factor, 1.0))


@pytest.mark.parametrize("factor", [math.nan, math.inf, 1e9])
def test_a_bad_gradient_skips_the_step_and_leaves_nothing_behind(policy, batch, factor):
    clean = copy.deepcopy(policy)
    config = settings(batch_size=1, max_grad_norm=1.0)
    metrics = optimise(policy, adamw(policy), batch, poisoned(batch, factor), config, seed=0, update=0)
    good_rows = torch.arange(N) != 2
    only_good = custom(lambda logits, rows: logits.logsumexp(-1).mean(-1), active=good_rows)
    optimise(clean, adamw(clean), batch, only_good, config, seed=0, update=0)
    assert (metrics["train/skipped_steps"], metrics["train/optimizer_steps"]) == (1, N - 1)
    assert all(torch.equal(a, b) for a, b in zip(parameters_of(policy), parameters_of(clean), strict=True))
    assert all(p.grad is None for _, p in policy.named_trainable_parameters())


def test_an_update_without_a_single_finite_step_is_an_error(policy, batch):
    before = parameters_of(policy)
    with pytest.raises(BadInput, match="non-finite"):
        optimise(
            policy, adamw(policy), batch, custom(lambda logits, _: logits.sum((1, 2)) * math.nan), settings(),
            seed=0, update=0,
        )  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(before, parameters_of(policy), strict=True))


def test_a_training_that_has_diverged_in_the_middle_of_an_update_stops_with_the_epoch(policy, batch):
    """20 steps in a row without a usable gradient, in whichever epochs: the update is not saved."""
    taken: list[int] = []

    def loss(logits, rows):
        taken.append(1)
        return logits.sum() * (1.0 if len(taken) <= 5 else math.nan), Statistics({}, {}, len(rows))

    config = settings(batch_size=1, micro_batch_size=1, n_epochs=9)
    with pytest.raises(BadInput, match=r"20 optimizer steps in a row .* is not saved; resume from an earlier"):
        optimise(policy, adamw(policy), batch, Objective(loss, torch.ones(N, dtype=torch.bool)), config, 0, update=0)
    assert len(taken) == 4 * N  # the 20th was step 25, in the fourth epoch of 8 steps


def test_single_bad_gradients_among_good_ones_do_not_stop_a_run(policy, batch):
    config = settings(batch_size=1, micro_batch_size=1, n_epochs=40)
    metrics = optimise(policy, adamw(policy), batch, poisoned(batch, math.nan), config, seed=0, update=0)
    assert metrics["train/skipped_steps"] == 40


def test_a_step_that_makes_a_parameter_infinite_is_not_saved(policy, batch):
    objective = custom(lambda logits, _: logits.logsumexp(-1).mean(-1))
    with pytest.raises(BadInput, match="steps after which adapter is not finite"):
        optimise(policy, adamw(policy, lr=math.inf), batch, objective, settings(), seed=0, update=0)


def with_norm(policy, batch, norm: float) -> Objective:
    """An objective whose gradient over the whole batch has the given norm."""
    size = gradients(policy, batch, custom(lambda logits, _: logits.logsumexp(-1).mean(-1)))[0].norm().item()
    return custom(lambda logits, _: logits.logsumexp(-1).mean(-1) * (norm / size))


@pytest.mark.parametrize(
    ("norm", "stepped_norm", "spikes"),
    [(0.5, 0.5, 0), (50.0, 1.0, 0), (99.0, 1.0, 0), (101.0, 1.0, 1), (999.0, 1.0, 1)],
)
def test_norms_above_the_bound_are_scaled_down_to_it_and_spikes_counted(policy, batch, norm, stepped_norm, spikes):
    recorder = Recorder(policy)
    objective = with_norm(policy, batch, norm)
    metrics = optimise(policy, recorder, batch, objective, settings(max_grad_norm=1.0), seed=0, update=0)
    assert (metrics["train/gradient_spikes"], metrics["train/skipped_steps"]) == (spikes, 0)
    assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-4)  # before clipping
    assert recorder.gradients[0].norm().item() == pytest.approx(stepped_norm, rel=1e-4)


def test_a_norm_above_1000_times_the_bound_takes_no_step(policy, batch):
    recorder = Recorder(policy)
    with pytest.raises(BadInput, match="enormous"):
        optimise(policy, recorder, batch, with_norm(policy, batch, 1001.0), settings(max_grad_norm=1.0), 0, 0)
    assert recorder.gradients == []


# early stop


def test_epochs_end_when_a_whole_epoch_drifted_too_far(policy, batch):
    fast = settings(n_epochs=10, target_kl=1e-3)
    metrics = optimise(policy, adamw(policy, lr=0.05), batch, ppo(policy, batch), fast, seed=0, update=0)
    assert metrics["train/epochs"] == 2  # the first epoch has one minibatch, at ratio 1; the second has drifted


def test_without_a_target_all_epochs_run(policy, batch):
    metrics = optimise(
        policy, adamw(policy, lr=0.05), batch, ppo(policy, batch), settings(n_epochs=4), seed=0, update=0
    )
    assert metrics["train/epochs"] == 4


def test_distillation_knows_no_target_kl(policy, batch):
    objective = distillation_objective(policy, batch, PhaseConfig(), 2)
    config = settings(n_epochs=4, target_kl=1e-9)
    assert optimise(policy, adamw(policy), batch, objective, config, seed=0, update=0)["train/epochs"] == 4


# first-minibatch ratio


@pytest.mark.parametrize("temperature", [1.0, 1.6])
def test_first_ratio_error_is_0_when_update_and_rollout_agree(policy, temperature):
    batch = acted_batch(policy, LENGTHS, temperature)
    objective = ppo(policy, batch, temperature=temperature)
    config = settings(n_epochs=3, batch_size=2, micro_batch_size=1)
    metrics = optimise(policy, adamw(policy, lr=0.1), batch, objective, config, seed=0, update=0)
    assert metrics["train/first_ratio_error"] < 1e-5  # though later minibatches have moved far
    assert metrics["train/ratio_max"] > 1.05


@pytest.mark.parametrize("importance_epsilon", [None, 0.5])
def test_a_temperature_that_only_sampling_knows_is_found_before_any_step(policy, importance_epsilon):
    batch, before = acted_batch(policy, LENGTHS, temperature=1.6), parameters_of(policy)
    objective = policy_objective(policy, batch, ADVANTAGES, LossConfig(), 1.0, 2, importance_epsilon)
    with pytest.raises(RuntimeError, match="does not see the policy that acted"):
        optimise(policy, adamw(policy), batch, objective, settings(), seed=0, update=0)
    assert all(torch.equal(a, b) for a, b in zip(before, parameters_of(policy), strict=True))


def test_weights_that_changed_after_the_rollout_are_found(policy, batch):
    with torch.no_grad():
        policy.adapter += 0.5 * torch.randn(policy.adapter.shape, generator=torch.Generator().manual_seed(3))
    with pytest.raises(RuntimeError, match="first minibatch"):
        optimise(policy, adamw(policy), batch, ppo(policy, batch), settings(), seed=0, update=0)


def test_a_nan_ratio_is_found_too(policy, batch):
    batch.student_logprobs[:] = math.nan
    with pytest.raises(RuntimeError, match="nan"):
        optimise(policy, adamw(policy), batch, ppo(policy, batch), settings(), seed=0, update=0)


# whole updates


def test_every_decision_is_seen_once_per_epoch_in_an_order_of_its_own(policy, batch):
    seen: list[int] = []

    def loss(logits, rows):
        seen.extend(rows.tolist())
        return logits.sum() * 0, Statistics({}, {}, len(rows))

    config = settings(n_epochs=3, batch_size=3, micro_batch_size=2)
    optimise(policy, adamw(policy), batch, Objective(loss, torch.ones(N, dtype=torch.bool)), config, seed=0, update=0)
    epochs = [seen[i * N : (i + 1) * N] for i in range(3)]
    assert all(sorted(order) == list(range(N)) for order in epochs)
    assert len({tuple(order) for order in epochs}) == 3


def test_an_update_is_a_function_of_seed_and_update_number(policy, batch):
    def result(seed, update):
        learner = copy.deepcopy(policy)
        config = settings(batch_size=2, micro_batch_size=1, n_epochs=2)
        optimise(learner, adamw(learner), batch, ppo(learner, batch), config, seed, update)
        return learner.bias.detach()

    assert torch.equal(result(0, 0), result(0, 0))
    assert not torch.equal(result(0, 0), result(0, 1))
    assert not torch.equal(result(0, 0), result(1, 0))


def test_distillation_makes_the_student_choose_the_teachers_tokens(policy):
    batch = acted_batch(policy, LENGTHS)
    with policy.teacher():
        batch.tokens.copy_(policy.act(batch.observations).tokens)
    objective = distillation_objective(policy, batch, PhaseConfig(), 2)
    config, optimizer = settings(n_epochs=1), adamw(policy, lr=0.1)
    first = optimise(policy, optimizer, batch, objective, config, seed=0, update=0)
    optimise(policy, optimizer, batch, objective, settings(n_epochs=20), seed=0, update=1)
    last = optimise(policy, optimizer, batch, objective, config, seed=0, update=2)
    assert first["distill/accuracy"] < last["distill/accuracy"] == 1
    assert last["distill/loss"] < first["distill/loss"]


def test_ppo_raises_the_probability_of_good_chunks_and_lowers_that_of_bad_ones(policy, batch):
    objective = ppo(policy, batch)
    optimise(policy, adamw(policy, lr=1e-3), batch, objective, settings(n_epochs=3), seed=0, update=0)
    new = policy.token_logprobs(policy.chunk_logits(batch.observations), batch.tokens, 1.0)
    change = ((new - batch.student_logprobs) * batch.executed).sum(-1)
    assert (change[ADVANTAGES > 0] > 0).all()
    assert (change[ADVANTAGES < 0] < 0).all()


def test_metrics_have_the_names_of_the_specification(policy, batch):
    metrics = optimise(policy, adamw(policy), batch, ppo(policy, batch), settings(), seed=0, update=0)
    names = "policy_loss clip_fraction approx_kl ratio_mean ratio_max first_ratio_error entropy grad_norm skipped_steps"
    for name in (*names.split(), "zero_advantage_fraction", "lr", "time_s"):
        assert math.isfinite(metrics[f"train/{name}"])
    assert metrics["train/zero_advantage_fraction"] == pytest.approx(3 / 8)
    assert metrics["train/lr"] == 1e-2
