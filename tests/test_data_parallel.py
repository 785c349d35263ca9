"""Three devices behind one policy equal one device: outputs, gradients, teacher, parameters; and how their faults look.

The devices are CPUs, and everything but the hardware is what GPUs use. Starting a process takes its imports, so most
tests have their replicas in threads (of this process; requests and shared memory travel in the same way).
"""

import gc
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from errors import BadInput
from tests.small_checkpoint import make_small_checkpoint
from vla import data_parallel, replica_handle
from vla import replica as replica_module
from vla.data_parallel import load_data_parallel
from vla.policy import Policy
from vla.probes import synthetic_observations
from vla.replica import Backward, Exchange, Forward, Recompute, Replica, Start, as_fault, serve, views
from vla.replica_handle import ReplicaHandle

PROJECT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
OPTIONS = {"task_suite": "libero_spatial", "lora_rank": 4, "lora_alpha": 4}
# Relative to the largest element of a tensor. Rows are summed in another order, and padded to another length.
ROUNDING = 1e-5
TRANSIT = torch.empty(10**6)
PATIENCE_S = 300  # for what is certain to happen: only a failing test waits that long


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(make_small_checkpoint(tmp_path_factory.mktemp("small") / "checkpoint", l1_head=True))


class ThreadInPlaceOfProcess(threading.Thread):
    """What `start_child` starts, with the methods of subprocess.Popen that `end_child` calls."""

    def __init__(self, connection):
        super().__init__(target=self._serve, args=(connection,), daemon=True)
        self.returncode = None
        self.start()

    def _serve(self, connection):
        connection.recv_bytes()
        with suppress(EOFError):
            serve(connection)
        self.returncode = 0

    def wait(self, timeout_s):
        self.join(timeout_s)

    def poll(self):
        return self.returncode


def start_thread(module, stalled_s):
    assert module == "vla.replica"
    ours, theirs = multiprocessing.Pipe()
    return ThreadInPlaceOfProcess(theirs), ours


@pytest.fixture(scope="module")
def three_devices(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica_handle, "start_child", start_thread)
        return load_data_parallel(folder, [CPU] * 3, **OPTIONS)


@pytest.fixture(scope="module")
def one_device(folder):
    return load_data_parallel(folder, [CPU], **OPTIONS)


@pytest.fixture
def policies(one_device, three_devices) -> tuple[Policy, Policy]:
    """With the same parameters, which differ from the pretrained ones, and without gradients."""
    for policy in (one_device, three_devices):
        policy.reduce_gradients()  # left by a test that failed
        generator = torch.Generator().manual_seed(1)
        for name, parameter in policy.named_trainable_parameters():
            small = 0.2 if "lora" in name else 0.02
            with torch.no_grad():
                parameter.copy_(small * torch.randn(parameter.shape, generator=generator))
            parameter.grad = None
        policy.parameters_changed()
    return one_device, three_devices


@pytest.fixture(scope="module")
def observations(one_device):
    """Seven, of three prompt lengths."""
    texts = ("turn on the stove", "pick up the black bowl between the plate and the ramekin", "open the drawer")
    plain = synthetic_observations(one_device, 7)
    return [replace(observation, instruction=texts[i % 3]) for i, observation in enumerate(plain)]


def assert_equal_but_for_rounding(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=ROUNDING * expected.abs().max().item())


def gradients(policy: Policy, batches: Sequence, loss_of) -> list[torch.Tensor | None]:
    """Of the sum of `loss_of` over all batches, reduced once."""
    for batch in batches:
        loss_of(*policy.chunk_outputs(batch)).backward()
    policy.reduce_gradients()
    found = [parameter.grad for _, parameter in policy.named_trainable_parameters()]
    for _, parameter in policy.named_trainable_parameters():
        parameter.grad = None
    return found


# Outputs


@pytest.mark.parametrize("count", [1, 2, 4, 7])
def test_outputs_are_those_of_one_device(policies, observations, count):
    """Of 3 devices, 1 row leaves two and 2 rows leave one without work; 4 and 7 are no multiples of 3."""
    (logits, hidden), (all_logits, all_hidden) = (policy.chunk_outputs(observations[:count]) for policy in policies)
    assert_equal_but_for_rounding(all_logits, logits)
    assert_equal_but_for_rounding(all_hidden, hidden)
    assert logits.std() > 0.5


def test_every_row_stays_in_its_place(policies, observations):
    """Rows that differ by more than rounding: any permutation would be seen."""
    logits = policies[0].chunk_logits(observations).detach().flatten(1)
    distances = torch.cdist(policies[1].chunk_logits(observations).detach().flatten(1), logits)
    assert torch.equal(distances.argmin(1), torch.arange(7))
    assert (distances + 1e9 * torch.eye(7)).min() > 1000 * distances.diagonal().max()


@pytest.mark.parametrize("mode", ["greedy", "sample", "l1"])
def test_decisions_are_those_of_one_device(policies, observations, mode):
    acted, together = (
        policy.act(observations, mode, 1.6, [torch.Generator().manual_seed(i) for i in range(7)]) for policy in policies
    )
    # Rounding moves a bin edge under one of 392 uniform numbers at most.
    assert (acted.tokens != together.tokens).sum() <= 1
    again = policies[1].token_logprobs(policies[1].chunk_logits(observations), together.tokens, 1.6)
    assert torch.equal(again.detach(), together.logprobs)


def test_the_teacher_is_the_teacher_on_every_device(policies, observations):
    with torch.no_grad():
        student = policies[1].chunk_logits(observations)
        for _ in range(2):
            with policies[0].teacher(), policies[1].teacher():
                with policies[1].teacher():
                    pass
                expected, found = (policy.chunk_logits(observations) for policy in policies)
            assert_equal_but_for_rounding(found, expected)
            assert (found - student).abs().amax((1, 2)).min() > 0.1  # on every row, hence on every device
        assert torch.equal(policies[1].chunk_logits(observations), student)


def test_images_prepared_elsewhere_give_the_same_bits(policies, observations):
    policy = policies[1]
    elsewhere = [replace(o, images=policy.prepare(o.images), prepared=True) for o in observations]
    assert torch.equal(policy.chunk_logits(elsewhere), policy.chunk_logits(observations))


# Gradients


@pytest.mark.parametrize("reads", ["logits", "hidden", "both"])
def test_the_gradient_of_several_micro_batches_is_that_of_one_device(policies, observations, reads):
    def loss(logits, hidden):
        of_logits, of_hidden = -logits.log_softmax(-1)[..., 7].mean(1).sum(), hidden[..., :3].sum()
        return {"logits": of_logits, "hidden": of_hidden, "both": of_logits + of_hidden}[reads]

    batches = (observations[:4], observations[4:5], observations[5:])
    alone, together = (gradients(policy, batches, loss) for policy in policies)
    assert [g is None for g in together] == [g is None for g in alone]
    for found, expected in zip(together, alone, strict=True):
        if expected is not None:
            assert_equal_but_for_rounding(found, expected)
    names = [name for name, _ in policies[1].named_trainable_parameters()]
    assert together[names.index("proprio_projector.fc1.weight")].abs().max() > 0
    nothing = gradients(policies[1], [observations[:1]], lambda logits, hidden: 0 * logits.sum())
    assert all(g is None or not g.any() for g in nothing)  # a reduction leaves nothing for the next one


def test_backward_passes_in_another_order_than_their_forward_passes_have_the_same_gradient(policies, observations):
    """Gradients pass through the same memory: no one may be overwritten before it is read."""
    policy = policies[1]
    parts = (observations[:4], observations[1:], observations[3:])  # the second needs more memory than the first
    in_order = gradients(policy, parts, lambda logits, _: logits.logsumexp(-1).sum())
    losses = [policy.chunk_logits(part).logsumexp(-1).sum() for part in parts]
    for loss in (losses[1], losses[2], losses[0]):
        loss.backward()
    policy.reduce_gradients()
    for (_, parameter), expected in zip(policy.named_trainable_parameters(), in_order, strict=True):
        if expected is not None:
            assert_equal_but_for_rounding(parameter.grad, expected)
    assert any(expected is not None and expected.any() for expected in in_order)


def test_the_teacher_between_forward_and_backward_leaves_the_gradient(policies, observations):
    policy = policies[1]
    plain = gradients(policy, [observations], lambda logits, _: logits.logsumexp(-1).sum())

    def with_teacher(logits, _):
        with torch.no_grad(), policy.teacher():
            policy.chunk_logits(observations)
        return logits.logsumexp(-1).sum()

    interrupted = gradients(policy, [observations], with_teacher)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(interrupted, plain, strict=True))


def test_only_graphs_whose_outputs_live_are_kept(policies, observations):
    graphs = policies[1].replicas._graphs
    logits = [policies[1].chunk_logits(observations[:3]) for _ in range(2)]
    assert len(graphs) == 2
    with torch.no_grad():
        policies[1].chunk_logits(observations)
    logits.pop()
    assert [graph.name for graph in graphs] == [logits[0].grad_fn.graph.name]


def test_after_a_pass_that_the_first_device_could_not_make_the_next_one_is_right(policies, observations):
    """The replicas' answers to it are not taken for those to the next."""
    policy = policies[1]
    expected = policy.chunk_logits(observations)

    def no_memory(_):
        raise torch.OutOfMemoryError

    for _ in range(3):
        with pytest.raises(torch.OutOfMemoryError):
            policy.replicas.chunk_outputs(no_memory, observations[::-1], as_teacher=False, needs_hidden=False)
        assert torch.equal(policy.chunk_logits(observations), expected)
    assert policy.replicas.are_equal()


# Parameters


def test_after_20_optimizer_steps_all_devices_have_the_same_bits(policies, observations):
    policy = policies[1]
    parameters = [parameter for _, parameter in policy.named_trainable_parameters()]
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    for step in range(20):
        for batch in (observations[:4], observations[step % 4 :]):
            policy.chunk_logits(batch).log_softmax(-1)[..., step].mean().backward()
        policy.reduce_gradients()
        optimizer.step()
        assert not policy.replicas.are_equal()
        policy.parameters_changed()
        assert policy.replicas.are_equal()
        optimizer.zero_grad(set_to_none=True)
    moved = [not torch.equal(parameter, old) for parameter, old in zip(parameters, before, strict=True)]
    assert sum(moved) > len(moved) / 2
    with torch.no_grad():
        for own, trained in zip(policies[0].named_trainable_parameters(), parameters, strict=True):
            own[1].copy_(trained)
    assert_equal_but_for_rounding(policy.chunk_logits(observations), policies[0].chunk_logits(observations))


def test_nobody_touches_the_exchange_memory_in_the_turn_of_another(monkeypatch, policies, observations):
    """On GPUs, where asking is not doing: what waits for what, in the order in which it was asked."""
    log = []
    for module in (data_parallel, replica_module):
        monkeypatch.setattr(module, "record", lambda turn, _: log.append(f"{turn} ends"))
        monkeypatch.setattr(module, "wait_for", lambda turn, _: log.append(f"after {turn}"))
    policy = policies[1]
    replicas = policy.replicas
    monkeypatch.setattr(replicas, "_turn", "first")
    for name, handle in zip(("second", "third"), replicas._handles, strict=True):
        monkeypatch.setattr(handle, "turn", name)
    of_replica = ["after None", "None ends"]  # they have been told the names that CPUs have
    everything_before = ["after second", "after third"]

    logits = policy.chunk_logits(observations)
    assert sorted(log[:4]) == sorted(2 * of_replica)  # both write at the same time, each into memory of its own
    assert log[4:] == [*everything_before, "first ends"]

    log.clear()
    logits.sum().backward()
    for handle in replicas._handles:
        handle.catch_up()
    own = [entry for entry in log if "None" not in entry]
    assert own == ["after second", "first ends", "after third", "first ends"]
    assert sorted(entry for entry in log if "None" in entry) == sorted(2 * of_replica)
    assert log.index("first ends") < log.index("after None")

    log.clear()
    policy.reduce_gradients()
    one_after_another = ["first ends", *of_replica, "after second", "first ends", *of_replica, "after third"]
    assert log == everything_before + one_after_another

    log.clear()
    policy.parameters_changed()
    assert log[:3] == [*everything_before, "first ends"]
    assert sorted(log[3:]) == sorted(2 * of_replica)  # both read at the same time

    log.clear()
    assert policy.replicas.are_equal()
    assert log == everything_before + one_after_another


def test_a_loaded_adapter_reaches_every_device(policies, observations, tmp_path):
    policies[0].save_adapter(tmp_path)
    for _, parameter in policies[1].named_trainable_parameters():
        parameter.detach().zero_()
    policies[1].load_adapter(tmp_path)
    assert policies[1].replicas.are_equal()
    assert_equal_but_for_rounding(policies[1].chunk_logits(observations), policies[0].chunk_logits(observations))


# One device


def test_one_device_is_the_plain_policy(one_device):
    assert one_device.replicas is None
    assert one_device.devices == [CPU]
    assert dict(one_device.describe())["devices"] == "cpu"
    one_device.reduce_gradients()
    one_device.parameters_changed()


# The replica itself, in this process


@pytest.fixture
def replica(folder, one_device):
    size = sum(parameter.numel() for _, parameter in one_device.named_trainable_parameters())
    load = {"checkpoint": folder, "device": "cpu", "dtype": torch.bfloat16, **OPTIONS}
    return Replica(Start(load, None, 1, torch.zeros(size), None, None))


def test_a_replica_frees_the_graphs_that_nobody_will_ask_for(replica, observations):
    for name, alive in ((0, ()), (1, (0,)), (2, (1,))):
        replica.run(Forward(observations[:1], False, False, name, frozenset(alive), TRANSIT))
    assert sorted(replica._graphs) == [1, 2]
    replica.run(Forward(observations[:1], False, False, None, frozenset({1, 2}), None))
    replica.run(Forward(observations[:1], True, False, 3, frozenset({1, 2}), None))  # a teacher has no gradient
    assert sorted(replica._graphs) == [1, 2]
    replica.run(Forward(observations[:1], False, True, 4, frozenset({1}), None))
    replica.run(Backward(4, [True, False]))
    assert sorted(replica._graphs) == [1]


def test_outputs_of_a_bfloat16_replica_lose_nothing_on_their_way(replica, observations):
    logits, hidden = replica._policy.chunk_outputs(observations[:2])
    transit = torch.zeros(logits.numel() + hidden.numel() + 1)
    replica.run(Forward(observations[:2], False, True, None, frozenset(), transit))
    assert hidden.dtype == torch.bfloat16
    written = views(transit, [logits.shape, hidden.shape])
    assert torch.equal(written[0], logits)
    assert torch.equal(written[1].to(hidden), hidden)
    assert transit[-1] == 0


def test_out_of_memory_stays_out_of_memory_and_the_rest_is_the_last_line_of_a_traceback(capfd):
    fault = as_fault(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nSee documentation"))
    assert isinstance(fault, torch.OutOfMemoryError)
    assert str(fault) == "CUDA out of memory. Tried to allocate 2 GiB."
    fault = as_fault(ZeroDivisionError("division by zero"))
    assert isinstance(fault, RuntimeError)
    assert str(fault) == "ZeroDivisionError: division by zero"
    assert "ZeroDivisionError" in capfd.readouterr().err


# Faults


def start_of(checkpoint: str) -> Start:
    return Start({"checkpoint": checkpoint, "device": "cpu", **OPTIONS}, None, 1, torch.zeros(1), None, None)


def test_what_the_user_can_repair_is_said_as_such(monkeypatch):
    monkeypatch.setattr(replica_handle, "start_child", start_thread)
    handle = ReplicaHandle(CPU, None)
    handle.send(start_of("/nowhere"))
    with pytest.raises(BadInput, match="the policy's replica on cpu: checkpoint /nowhere: no such folder"):
        handle.catch_up(PATIENCE_S)


def test_a_fault_in_a_backward_pass_is_the_answer_to_the_next_request(monkeypatch, folder):
    monkeypatch.setattr(replica_handle, "start_child", start_thread)
    handle = ReplicaHandle(CPU, None)
    handle.send(start_of(folder))
    handle.catch_up(PATIENCE_S)
    handle.send(Backward(7, [True]))
    with pytest.raises(RuntimeError, match="the policy's replica on cpu: KeyError: 7"):
        handle.ask(Exchange.GIVE_GRADIENT)


def test_a_process_computes_the_same_and_when_killed_is_one_error(folder, policies, observations):
    policy = load_data_parallel(folder, [CPU] * 2, **OPTIONS)
    for (_, parameter), (_, given) in zip(
        policy.named_trainable_parameters(), policies[0].named_trainable_parameters(), strict=True
    ):
        parameter.detach().copy_(given)
    policy.parameters_changed()
    assert policy.replicas.are_equal()
    alone, together = (
        gradients(p, [observations[:3]], lambda logits, _: logits[..., 7].sum()) for p in (policies[0], policy)
    )
    for found, expected in zip(together, alone, strict=True):
        if expected is not None:
            assert_equal_but_for_rounding(found, expected)

    process = policy.replicas._handles[0].process
    process.kill()
    with pytest.raises(RuntimeError, match=r"^the policy's replica on cpu died \(SIGKILL\)"):
        policy.chunk_logits(observations)
    assert process.returncode == -signal.SIGKILL


@pytest.fixture
def alarm_off():
    yield
    signal.alarm(0)


def test_a_hung_replica_is_one_error_and_gone(monkeypatch, alarm_off):
    """And the program that uses it has its end set, since its own GPU may now hang as well."""
    monkeypatch.setattr("child_process.END_S", 0.1)
    handle = ReplicaHandle(torch.device("cuda", 1), None)
    handle.process.send_signal(signal.SIGSTOP)
    handle.send(Recompute(0))
    with pytest.raises(RuntimeError, match=r"gave no answer in 0 s \(SIGKILL\)"):
        handle.catch_up(0.1)
    assert handle.process.returncode == -signal.SIGKILL
    soon = replica_handle.FAREWELL_S // 2
    assert soon < signal.alarm(soon) <= replica_handle.FAREWELL_S
    replica_handle.end_all([handle])  # sees it, too, and does not put the end off
    assert 0 < signal.alarm(0) <= soon


def test_a_program_ends_though_its_gpu_waits_for_a_dead_replica():
    """Killed together, as a batch system does; the replica's death is met at the program's end, in which CUDA hangs."""
    program = (
        "import ctypes, torch, weakref\n"
        "from vla import replica_handle\n"
        "replica_handle.FAREWELL_S = 1\n"
        "handle = replica_handle.ReplicaHandle(torch.device('cuda', 1), None)\n"
        "weakref.finalize(handle, replica_handle.end_all, [handle])\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.__cxa_atexit(libc.pause, None, None)\n"  # a library's farewell that never returns
        "handle.process.kill()\n"
        "handle.process.wait()\n"
        "print('the end')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=PROJECT, stdout=subprocess.PIPE, text=True, timeout=PATIENCE_S
    )
    assert ended.stdout == "the end\n"
    assert ended.returncode == -signal.SIGALRM


def test_a_replica_that_dies_while_nobody_talks_to_it_is_one_line_and_ends_the_program():
    """Python waits for the first GPU, which waits for the replica: here it waits for no one."""
    program = (
        "import signal, torch\n"
        "from vla import replica_handle\n"
        "replica_handle.FAREWELL_S, replica_handle.NOTICE_S = 3, 0.01\n"
        "handle = replica_handle.ReplicaHandle(torch.device('cuda', 1), None)\n"
        "handle.process.kill()\n"
        "signal.pause()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=PROJECT, stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S
    )
    line = (
        "the policy's replica on cuda:1 died (SIGKILL): the program waits for what it had begun, and ends within 3 s\n"
    )
    assert ended.stderr == line
    assert ended.returncode == -signal.SIGALRM


def test_replicas_end_with_their_policy(monkeypatch, folder, alarm_off):
    """And the program may go on."""
    monkeypatch.setattr(replica_handle, "start_child", start_thread)
    policy = load_data_parallel(folder, [CPU] * 3, **OPTIONS)
    for handle in policy.replicas._handles:
        handle.device = torch.device("cuda", 1)
    processes = [handle.process for handle in policy.replicas._handles]
    assert [process.returncode for process in processes] == [None, None]
    del policy, handle
    gc.collect()
    assert [process.returncode for process in processes] == [0, 0]
    assert signal.alarm(0) == 0


def test_a_replica_ends_when_its_parent_is_killed():
    program = (
        "from child_process import start_child\n"
        "process, connection = start_child('vla.replica', 60)\n"
        "print(process.pid, flush=True)\n"
        "process.wait()"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=PROJECT, stdout=subprocess.PIPE, text=True)
    replica = os.pidfd_open(int(parent.stdout.readline()))
    parent.kill()
    parent.communicate()
    assert select.select([replica], [], [], PATIENCE_S)[0]
    os.close(replica)
