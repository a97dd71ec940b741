"""runtime/captured.py and prefetch.py: few sizes, graphs, compiled kernels and batches drawn ahead change no number."""

import copy

import numpy as np
import pytest
import torch
from test_update import KeepWeights, gradients, no_chance, small, window

from agent import Agent, Policy
from replay import Replay
from runtime import captured
from runtime.captured import CapturedPolicy, CapturedUpdate, compile_networks, packed, pad, unpacked
from runtime.prefetch import Prefetcher
from train import make_optimizer
from update import VARIANTS, update

__all__ = ["no_chance"]  # a fixture


@pytest.fixture
def few_steps(monkeypatch):
    "Multiples so small that a small batch is padded."
    monkeypatch.setattr(captured, "TIME_STEPS", 4)
    monkeypatch.setattr(captured, "STATES", 16)


@pytest.fixture
def graphs(monkeypatch):
    "A replay calls the work again and writes to the memory of its first result, as a graph does."

    def record(work, generator=None):
        before, state = [x.clone() for x in places(*record.parts)], torch.get_rng_state()
        result = work()
        with torch.no_grad():  # recording runs nothing
            for x, old in zip(places(*record.parts), before):
                x.copy_(old)
        torch.set_rng_state(state)

        def replay():
            record.replays += 1
            result.copy_(work())

        return replay, result

    record.replays, record.parts = 0, None
    monkeypatch.setattr(captured, "record", record)
    return record


def places(agent, optimizer, schedule) -> list:
    "Everything that an update may change."
    states = [x for own in optimizer.state.values() for x in own.values()]
    return [*agent.parameters(), *agent.buffers(), *states, schedule.made, schedule.rate]


def learner(variant="ind_ind", **changes):
    config = small(chunk=16, variant=variant, **changes)
    torch.manual_seed(0)
    agent = Agent(config, observation_dim=7, action_dim=3, discrete=True)
    optimizer, schedule = make_optimizer(agent, config)
    return config, agent, optimizer, schedule


@pytest.mark.parametrize("variant", VARIANTS)
def test_padding_to_a_few_sizes_changes_nothing(no_chance, few_steps, variant):
    config, batch = small(chunk=16, grad_clip=1e9, variant=variant), window()
    more = pad(batch, context=64)
    assert more.mask_BT.shape == (4, 12) and len(more.real_S) == 32 and more.lengths == (12,) * 4
    assert more.obs_BTO.shape[1] == more.time_BT.shape[1] == 13
    _, plain, expected = gradients(config, batch, num_tasks=2)
    _, padded, got = gradients(config, more, num_tasks=2)
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-6)
    for name in plain.keys() - {"popart/mu", "popart/sigma"}:
        torch.testing.assert_close(padded[name], plain[name], rtol=1e-4, atol=1e-6)
    if variant != "ind_ind":  # there the groups of a plain batch enter one after another
        torch.testing.assert_close(padded["popart/mu"], plain["popart/mu"])


def test_padding_never_exceeds_the_context_and_keeps_full_batches(few_steps):
    batch = window()
    assert pad(batch, context=10).mask_BT.shape[1] == 10
    assert pad(pad(batch, 64), 64).mask_BT.shape == (4, 12)


def test_packed_bytes_are_the_batch():
    batch = window()
    block = packed(batch)
    for own, given in zip(unpacked(block, batch), batch):
        assert torch.equal(own, given) if isinstance(given, torch.Tensor) else own is given
    assert all(x.data_ptr() % 16 == block.data_ptr() % 16 for x in unpacked(block, batch)[:3])


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_update_changes_everything_in_place(variant):
    "A replayed graph writes where the recorded one wrote."
    config, agent, optimizer, schedule = learner(variant)
    update(agent, optimizer, schedule, window(), config)
    before = [x.data_ptr() for x in places(agent, optimizer, schedule)]
    values = [x.clone() for x in places(agent, optimizer, schedule)]
    update(agent, optimizer, schedule, window(seed=1), config)
    assert before == [x.data_ptr() for x in places(agent, optimizer, schedule)]
    moved = sum(not torch.equal(a, b) for a, b in zip(values, places(agent, optimizer, schedule)))
    assert moved > 60


@pytest.mark.parametrize("variant", ["ind_ind", "dep_dep"])
def test_replayed_updates_are_the_updates(graphs, few_steps, variant):
    "Batches of two sizes in turn; dropout draws the same."
    batches = [pad(window(T=T, seed=seed), 64) for seed, T in enumerate((9, 13, 9, 13, 9, 9, 13))]
    runs = []
    for capture in (False, True):
        config, agent, optimizer, schedule = learner(variant, dropout=0.1)
        step = lambda b, parts=(agent, optimizer, schedule), c=config: update(*parts, b, c, 2)
        graphs.parts = agent, optimizer, schedule
        step = CapturedUpdate(step, agent) if capture else step
        torch.manual_seed(1)
        runs.append(([step(b) for b in batches], places(agent, optimizer, schedule)))
    (plain, expected), (replayed, got) = runs
    assert graphs.replays == 5  # the first update of each size is made without
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    for a, b in zip(plain, replayed, strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name].float(), b[name]) for name in a)


def test_replayed_actions_are_the_actions_also_after_an_update(monkeypatch):
    obs_TBO, acted = torch.randn(20, 3, 7).numpy(), []
    for kind in (Policy, CapturedPolicy):
        config, agent, optimizer, schedule = learner(context=8)
        policy = kind(agent, config, num_envs=3, seed=5)
        monkeypatch.setattr(captured, "record", of_policy(policy))
        steps = []
        for t in range(20):
            steps.append(policy(obs_TBO[t]).copy())  # on a CPU this is the graph's own memory
            if t == 9:
                update(agent, optimizer, schedule, window(), config)
                policy.reset(np.array([True, False, False]))
        acted.append(np.stack(steps))
    assert np.array_equal(*acted)


def of_policy(policy):
    "As `graphs`, for a policy: recording moves neither its memory nor its draws."

    def record(work, generator):
        before, state = copy.deepcopy(policy.cache), generator.get_state()
        time_B, result = policy.time_B.clone(), work()
        for name in ("key", "value", "count_B"):
            getattr(policy.cache, name).copy_(getattr(before, name))
        policy.time_B.copy_(time_B)
        generator.set_state(state)
        return lambda: result.copy_(work()), result

    return record


@pytest.mark.parametrize("variant", ["ind_ind", pytest.param("dep_dep", marks=pytest.mark.slow)])
def test_compiled_updates_have_the_losses_and_gradients_of_plain_ones(no_chance, variant):
    "Kernels that PyTorch makes with a C++ compiler."
    config, results = small(grad_clip=1e9, variant=variant, layers=1, critics=2, hidden=(8, 8)), []
    torch._dynamo.reset()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for compiled in (False, True):
        torch.manual_seed(0)
        agent = Agent(config, observation_dim=7, action_dim=3, discrete=True)
        if compiled:
            compile_networks(agent)
        torch.manual_seed(1)
        with torch._dynamo.config.patch(suppress_errors=False):
            metrics = update(agent, KeepWeights(), KeepWeights(), window(), config)
        results.append(metrics | {n: p.grad for n, p in agent.named_parameters() if p.grad is not None})
    plain, compiled = results
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= graphs + 3
    assert plain.keys() == compiled.keys()
    for name in plain:
        largest = plain[name].detach().float().abs().max()
        torch.testing.assert_close(compiled[name], plain[name], rtol=1e-5, atol=1e-5 * float(largest))


def filled_replay(segments=30, seed=0):
    replay, rng = Replay(3, (), np.int64, 20, capacity_trajectories=100, seed=seed), np.random.default_rng(0)
    for i in range(segments):
        T = int(rng.integers(3, 20))
        replay.add(np.full((T + 1, 3), i), np.zeros(T, int), np.zeros(T), True, 0, i)
    return replay


def test_batches_drawn_ahead_are_the_batches_one_draw_late():
    "What is drawn does not depend on when the thread runs; a batch waits while the replay grows."
    plain, ahead = filled_replay(), filled_replay()
    batches = Prefetcher(ahead, 4, 10, "cpu")
    expected = [plain.sample(4, 10) for _ in range(2)]
    got = [batches.next()]
    for replay in (plain, ahead):
        replay.add(np.full((5, 3), 99.0), np.zeros(4, int), np.zeros(4), True, 0, 30)
    expected += [plain.sample(4, 10) for _ in range(3)]
    got += [batches.next() for _ in range(4)]
    for a, b in zip(expected, got, strict=True):
        assert torch.equal(a.obs_BTO, b.obs_BTO) and a.lengths == b.lengths
    batches.close()


def test_the_batch_that_waits_is_saved_and_comes_next():
    replay = filled_replay()
    batches = Prefetcher(replay, 4, 10, "cpu")
    assert batches.state_dict() == {}
    batches.next()
    state = batches.state_dict()
    other = Prefetcher(filled_replay(segments=3, seed=9), 4, 10, "cpu")
    other.load_state_dict(state)
    expected, got = batches.next(), other.next()
    assert torch.equal(expected.obs_BTO, got.obs_BTO) and expected.lengths == got.lengths
    batches.close(), other.close()


def test_an_error_in_the_thread_comes_out_of_next(monkeypatch):
    replay = filled_replay()
    batches = Prefetcher(replay, 4, 10, "cpu")

    def broken(windows):
        raise OSError("the disk is gone")

    monkeypatch.setattr(replay, "gather", broken)
    with pytest.raises(OSError, match="the disk is gone"):
        batches.next()
    batches.close()
