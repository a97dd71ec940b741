"""What a GPU would meet, on a pretend one: one device in every operation, no waits, few launches."""

import dataclasses
from unittest import mock

import launches
import learner
import numpy as np
import pytest
import torch
from pretend_gpu import PretendGPU

import update as update_module
from agent import Agent, Policy
from runtime import captured, checkpoint
from runtime.memory import in_one_pass, learner_bytes, with_sizes
from train import make_optimizer
from update import VARIANTS, groups, update

ENVS = ("popgym", "metaworld", "procgen-easy", "babyai")
TINY = {"batch_size": 3, "context": 8, "encoder_hidden": 8, "encoder_dim": 8, "d_model": 16, "d_ff": 8}
TINY |= {"hidden": (4, 4), "bins": 8, "encoder_depths": (4, 4), "num_envs": 5, "n_step": 2}


def tiny(env: str, variant: str, **changes):
    "The paper preset of an environment with small widths: they do not change what is launched."
    return launches.config_of(env, variant, **TINY | changes)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("env", ENVS)
def test_update_acting_save_and_load_stay_on_one_device_and_wait_only_for_actions(env, variant, tmp_path):
    "With numbers, bf16, the fused optimizer's step and windows of several lengths."
    config = tiny(env, variant, layers=1)
    torch.manual_seed(0)
    batch = learner.make_batch(config)
    if env != "procgen-easy":
        batch = launches.cut(batch, [8, 5, 2])
    with PretendGPU() as gpu:
        agent = Agent(config, *learner.SIZES[env]).to("pretend")
        optimizer, schedule = make_optimizer(agent, config)
        before = {name: p.cpu() for name, p in agent.named_parameters()}
        gpu.reset()
        metrics = [update(agent, optimizer, schedule, batch.to("pretend"), config, 3) for _ in range(2)]
        assert gpu.waits == 0, gpu.waits_at
        assert gpu.by_name["_fused_adamw_"] == 2 and all(
            x.device.type == "pretend" for x in metrics[1].values()
        )
        assert metrics[1]["skipped"].item() == 0
        moved = sum(not torch.equal(p.cpu(), before[name]) for name, p in agent.named_parameters())
        assert moved > 0.8 * len(before)

        policy, obs = Policy(agent, config, config.num_envs), launches.observations(config)
        assert policy.cache.key.dtype == torch.bfloat16
        policy(obs)
        gpu.reset()
        policy(obs)
        policy.reset(np.array([True, False, False, True, False]))
        assert gpu.waits == 1, gpu.waits_at  # for the actions

        state = {"agent": agent.state_dict(), "optimizer": optimizer.state_dict()}
        state |= {"schedule": schedule.state_dict(), "policy": policy.state_dict()}
        checkpoint.save(tmp_path / "x.pt", state)
        state = checkpoint.load(tmp_path / "x.pt")
        other = Agent(config, *learner.SIZES[env]).to("pretend")
        parts = make_optimizer(other, config)
        other.load_state_dict(state["agent"])
        parts[0].load_state_dict(state["optimizer"])
        parts[1].load_state_dict(state["schedule"])
        policy.load_state_dict(state["policy"])
        gpu.reset()
        update(other, *parts, batch.to("pretend"), config, 3)
        assert gpu.waits == 0, gpu.waits_at
        policy(obs)


@pytest.mark.parametrize("env,variant", [*((env, "ind_ind") for env in ENVS), ("popgym", "dep_dep")])
def test_an_update_has_few_launches(env, variant):
    "Bounds a little above results/launches.csv; the host is free again after as many times 6 microseconds."
    bounds = {"popgym": 1100, "metaworld": 1100, "procgen-easy": 1260, "babyai": 1600}
    config, most = tiny(env, variant, n_step=1, encoder_depths=(4, 4, 4)), bounds[env]
    with PretendGPU(numbers=False) as gpu:
        eager = launches.count_update(config, learner.make_batch(config), False, gpu)
    assert eager["waits"] == 0 and 500 < eager["launches"] <= most and eager["copies"] <= 10
    with PretendGPU(numbers=False) as gpu, mock.patch.object(captured, "record", launches.record_on(gpu)):
        graph = launches.count_update(config, learner.make_batch(config), True, gpu)
        acting = launches.count_acting(config, True, gpu)
    assert graph["waits"] == 0 and graph["launches"] + graph["copies"] <= 5
    assert acting["waits"] == 1 and acting["launches"] + acting["copies"] <= 8


def test_windows_of_real_lengths_have_at_most_four_groups_and_launches_to_match():
    config = launches.config_of(
        "popgym", "ind_ind", **{**TINY, "n_step": 1, "batch_size": 24, "context": 600}
    )
    lengths = launches.window_lengths(24, 600)
    batch = launches.cut(learner.make_batch(config), lengths)
    assert len(groups(batch, config)) <= 4
    with PretendGPU(numbers=False) as gpu:
        counts = launches.count_update(config, batch, False, gpu)
    assert counts["waits"] == 0 and counts["launches"] <= 4400


def test_a_result_read_in_the_update_is_counted_as_a_wait(monkeypatch):
    config, td_target = tiny("popgym", "ind_ind"), update_module.n_step_target

    def reads(*arguments):
        y_SG = td_target(*arguments)
        return y_SG * (1.0 if y_SG.abs().max() < 1e9 else 0.0)

    monkeypatch.setattr(update_module, "n_step_target", reads)
    with PretendGPU() as gpu:
        assert launches.count_update(config, learner.make_batch(config), False, gpu)["waits"] == 1
        ((name, line),) = gpu.waits_at
        assert name == "_local_scalar_dense" and line.startswith("test_gpu.py")


def test_two_devices_in_one_operation_raise(monkeypatch):
    config = tiny("popgym", "ind_ind")
    with PretendGPU():
        agent = Agent(config, *learner.SIZES["popgym"]).to("pretend")
        agent.gamma_G = agent.gamma_G.cpu()
        parts, batch = make_optimizer(agent, config), learner.make_batch(config).to("pretend")
        with pytest.raises(RuntimeError, match="two devices"):
            update(agent, *parts, batch, config)
        mask_BT = torch.ones(3, 8, dtype=torch.bool)
        with pytest.raises(RuntimeError, match="two devices"):
            batch.obs_BTO[:, 1:].masked_fill(~mask_BT.unsqueeze(-1), 0.0)


def test_what_makes_a_gpu_wait_is_counted():
    with PretendGPU() as gpu:
        x = torch.arange(6.0, device="pretend")
        gpu.reset()
        waiting = [
            lambda: x[x > 2],
            lambda: x.nonzero(),
            lambda: x.sum().item(),
            lambda: bool(x[0] > 1),
            lambda: x.cpu(),
            lambda: x.tolist(),
            lambda: torch.ones(3).to("pretend"),
            lambda: x.copy_(torch.ones(6)),
            lambda: torch.unique_consecutive(x),
            lambda: torch.equal(x, x),
        ]
        for number, work in enumerate(waiting, 1):
            work()
            assert gpu.waits == number, number
        free = [
            lambda: torch.ones(3).to("pretend", non_blocking=True),
            lambda: x.masked_fill(x > 2, 0.0),
            lambda: x.index_select(0, torch.zeros(2, dtype=torch.long, device="pretend")),
            lambda: torch.where(x > 2, x, 0.0),
            lambda: torch.nn.functional.one_hot(x.long(), 7),
        ]
        for work in free:
            work()
            assert gpu.waits == len(waiting)


def test_memory_is_counted_while_a_tensor_lives():
    with PretendGPU(numbers=False) as gpu:
        before = gpu.live
        x = torch.zeros(1000, 1000, device="pretend")
        y = x[:500]
        assert gpu.live - before == 4e6
        del x
        assert gpu.live - before == 4e6
        del y
        assert gpu.live == before and gpu.peak - before == 4e6


@pytest.mark.parametrize("env", ["popgym", "procgen-memory-hard"])
def test_the_estimate_of_memory_covers_what_is_live(env):
    config = launches.config_of(env, "ind_ind")
    width, _, _, image_shape = learner.SIZES[env][:4]
    whole = config.batch_size * (config.context + 1)
    estimate = learner_bytes(
        dataclasses.replace(config, chunk=whole, steps_per_pass=whole), width, image_shape
    )
    with PretendGPU(numbers=False) as gpu:
        counts = launches.count_update(config, learner.make_batch(config), False, gpu)
    assert counts["gb"] * 1e9 < estimate < 3 * counts["gb"] * 1e9


@pytest.mark.parametrize("env", [*ENVS, "procgen-memory-hard"])
def test_the_largest_sizes_that_fit_are_taken_on_a_gpu(env, monkeypatch, capsys):
    config = dataclasses.replace(
        launches.config_of(env, "ind_ind"), chunk="auto", steps_per_pass="auto", capture=True
    )
    width, _, _, image_shape = learner.SIZES[env][:4]
    whole, device = config.batch_size * (config.context + 1), torch.device("cuda")
    for free, all_at_once in ((140e9, True), (24e9, None), (2e9, False)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (int(free), int(free)))
        sized = with_sizes(config, width, image_shape, device)
        if all_at_once is not None:
            assert ((sized.chunk, sized.steps_per_pass) == (whole, whole)) == all_at_once
        if free > 2e9:
            assert learner_bytes(sized, width, image_shape) < 0.8 * free
        assert sized.capture == (sized.steps_per_pass >= whole)
        assert f"--chunk {sized.chunk}, --steps_per_pass {sized.steps_per_pass}" in capsys.readouterr().out
    typed = dataclasses.replace(config, chunk=100, steps_per_pass=50)
    assert with_sizes(typed, width, image_shape, device).chunk == 100
    on_cpu = with_sizes(config, width, image_shape, torch.device("cpu"))
    assert (on_cpu.chunk, on_cpu.steps_per_pass) == (256, 1024 if image_shape else 2048)
    # Compiled batches are padded, and a padded batch has no groups.
    compiled = with_sizes(dataclasses.replace(config, compile=True), width, image_shape, torch.device("cpu"))
    assert in_one_pass(compiled) and not in_one_pass(on_cpu)
