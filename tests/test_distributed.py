"""ranks.py: two processes train one agent as one process with the mean gradient would, and resume as two."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from test_agent import window
from torch import nn

import train
from config import Config
from critics import move_target
from presets import preset
from runtime import checkpoint, distributed

ROOT = Path(__file__).resolve().parent.parent
FLAGS = ["--scale", "smoke", "--device", "cpu", "--tasks", "RepeatFirstEasy,MineSweeperEasy"]
FLAGS += ["--attempts", "1", "--eval_every", "1000", "--checkpoint_every", "1000", "--final_episodes", "1"]


def torchrun(program: Path, flags: list[str], launcher=("--standalone", "--nproc_per_node", "2")):
    command = [sys.executable, "-m", "torch.distributed.run", *launcher, str(program), *flags]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    )


def finished(process) -> str:
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 0, out
    return out


@pytest.fixture
def program(tmp_path):
    "train.py, with its runs in the test's own folder."
    path = tmp_path / "program.py"
    path.write_text(f"""
import pathlib, sys, train, checkpoint
train.ROOT = pathlib.Path({str(tmp_path)!r})
try:
    train.main(sys.argv[1:])
except (ValueError, OSError, checkpoint.CheckpointError) as error:
    sys.exit(f"error: {{error}}")
""")
    return path


def small(variant: str) -> tuple[Config, train.Agent]:
    "The same weights every time."
    config = Config(**{**preset("popgym", "smoke", variant), "variant": variant, "dropout": 0.0})
    torch.manual_seed(0)
    return config, train.Agent(config, 9, 5, True)


def batches(update: int) -> list:
    "A batch for each of two processes, of different lengths; the second with returns of another scale."
    both = [window(O=9, A=5, seed=2 * update + rank, T=6 + 3 * rank) for rank in range(2)]
    both[1].reward_BT = 30 * both[1].reward_BT + 5
    return both


TWENTY = """
import sys, torch, ranks, train
from test_ranks import batches, small
distributed.start()
config, agent = small(sys.argv[1])
optimizer, schedule = train.make_optimizer(agent, config)
for number in range(20):
    torch.manual_seed(100 * number + distributed.rank())
    metrics = train.update(agent, optimizer, schedule, batches(number)[distributed.rank()], config)
    assert not metrics["skipped"]
torch.save(agent.state_dict(), f"{sys.argv[2]}/{distributed.rank()}.pt")
distributed.stop()
"""


@pytest.mark.parametrize("variant", ["ind_ind", "dep_dep"])
def test_twenty_updates_of_two_processes_equal_one_with_the_mean_gradient(tmp_path, variant):
    (tmp_path / "twenty.py").write_text(TWENTY)
    finished(torchrun(tmp_path / "twenty.py", [variant, str(tmp_path)]))
    ours, theirs = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    # What the actor and the critic learn, and what the inputs and targets are normalised by. PopArt's numbers
    # are for the log alone with ind_ind, and each process keeps its own.
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)

    config, agent = small(variant)
    optimizer, schedule = train.make_optimizer(agent, config)
    before = {name: value.clone() for name, value in agent.state_dict().items()}
    for number in range(20):
        both = batches(number)
        agent.train()
        vectors = torch.cat([batch.obs_BTO.flatten(0, 1) for batch in both])
        masks = [nn.functional.pad(batch.mask_BT, (1, 0), value=True).flatten() for batch in both]
        agent.encoder.update_statistics(vectors, torch.cat(masks))
        gradients = mean_gradients(agent, both, config, number)
        optimizer.zero_grad()
        for parameter, gradient in zip(agent.parameters(), gradients):
            parameter.grad = gradient
        nn.utils.clip_grad_norm_([p for p in agent.parameters() if p.grad is not None], config.grad_clip)
        optimizer.step(), schedule.step()
        move_target(agent.target_actor, agent.actor, config.tau)
        move_target(agent.value.target_critics, agent.value.critics, config.tau)
    expected, moved = agent.state_dict(), 0
    for name, value in ours.items():
        if name == "encoder.norm.count":
            value = 2 * value  # each process counts its own vectors
        if not (name.startswith("popart") and variant == "ind_ind"):
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-5)
            moved += not torch.equal(value, before[name])
    assert moved > 40


def mean_gradients(agent, both, config, number) -> list:
    "Of the two batches; PopArt sees the targets of both before either has its loss."
    buffers = {name: value.clone() for name, value in agent.named_buffers()}

    def one(rank: int, pool):
        for name, value in agent.named_buffers():
            value.copy_(buffers[name])
        agent.zero_grad()
        torch.manual_seed(100 * number + rank)
        original, train.ranks.mean = train.ranks.mean, pool
        try:
            states = both[rank].mask_BT.sum().item()
            train.add_gradients(agent, both[rank], config, states, torch.zeros(len(train.SHARES), 20))
        finally:
            train.ranks.mean = original
        return [None if p.grad is None else p.grad.clone() for p in agent.parameters()]

    sums = []
    for rank in range(2):  # for their sums alone
        one(rank, lambda tensor: sums.append(tensor) or tensor)
    pooled = (lambda _: (sums[0] + sums[1]) / 2) if sums else (lambda tensor: tensor)
    first, second = (one(rank, pooled) for rank in range(2))
    return [None if a is None else (a + b) / 2 for a, b in zip(first, second)]


def test_the_program_with_two_processes_trains_saves_and_resumes_as_two(program, tmp_path):
    out = finished(torchrun(program, ["--name", "a", *FLAGS, "--steps", "1600"]))
    folder = tmp_path / "runs" / "a"
    assert out.count("mean of 2 tasks") == 1 and out.count("memory: replay") == 1  # the first one prints
    state = checkpoint.load(folder / "checkpoint.pt")
    assert state["counters"]["steps"] >= 1600 and len(state["processes"]) == 2
    envs = state["config"]["num_envs"]
    assert state["counters"]["steps"] % (2 * envs) == 0
    owns = [checkpoint.load_part(folder / "parts", each["state"]) for each in state["processes"]]
    # Environments, replay and seeds of their own; the same number of updates, each with both batches.
    for part in ("episodes", "envs", "run_rng", "rng"):
        assert str(owns[0][part]) != str(owns[1][part])
    assert owns[0]["replay"]["rng"] != owns[1]["replay"]["rng"]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len({row["updates"] for row in rows if "loss/critic" in row}) == sum(
        "loss/critic" in r for r in rows
    )
    assert json.loads((folder / "versions.json").read_text())["processes"] == 2

    whole = finished(torchrun(program, ["--name", "whole", *FLAGS, "--steps", "2400"]))
    again = finished(torchrun(program, ["--name", "a", "--resume", "--steps", "2400"]))
    assert (
        "mean of 2 tasks" in whole and f"resuming runs/a at env step {state['counters']['steps']:,}" in again
    )
    agents = [checkpoint.load(tmp_path / "runs" / name / "checkpoint.pt")["agent"] for name in ("a", "whole")]
    assert all(torch.equal(agents[0][name], agents[1][name]) for name in agents[0])

    one = [sys.executable, str(program), "--name", "a", "--resume"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(one, capture_output=True, text=True, env=environment, timeout=100, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "saved by 2 process(es) and is resumed by 1" in done.stderr
    assert "torchrun --nproc_per_node 2" in done.stderr


def test_two_launches_that_meet_at_an_address_and_a_signal_to_both(program, tmp_path):
    "As on two machines: one process each. Interrupted, both save, and no process is left."
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launches = []
    for node in range(2):
        launcher = ["--nnodes", "2", "--nproc_per_node", "1", "--node_rank", str(node)]
        launcher += ["--master_addr", "127.0.0.1", "--master_port", str(port)]
        flags = ["--name", "a", *FLAGS, "--steps", "10000000", "--log_every", "5"]
        launches.append(torchrun(program, flags, launcher))
    log = tmp_path / "runs" / "a" / "metrics.jsonl"
    until = time.monotonic() + 120
    while not (log.exists() and log.stat().st_size):
        assert time.monotonic() < until and all(launch.poll() is None for launch in launches)
        time.sleep(0.2)
    for launch in launches:
        launch.send_signal(signal.SIGTERM)
    for launch in launches:
        launch.communicate(timeout=60)
    state = checkpoint.load(tmp_path / "runs" / "a" / "checkpoint.pt")
    assert len(state["processes"]) == 2 and state["counters"]["updates"] > 0


def test_a_mistake_is_told_once_and_ends_both(program):
    process = torchrun(program, ["--name", "a", *FLAGS, "--batch_size", "0"])
    out, _ = process.communicate(timeout=120)
    assert process.returncode != 0 and out.count("error: --batch_size must be at least 1") == 1


def test_alone_nothing_changes_and_nothing_is_started():
    assert (distributed.count(), distributed.rank(), distributed.on_this_machine()) == (1, 0, 1)
    tensor = torch.ones(3)
    assert (
        distributed.mean(tensor) is tensor
        and distributed.largest([1, 0]) == [1, 0]
        and distributed.gathered("a") == ["a"]
    )
    distributed.average_([tensor]), distributed.copy_first_([tensor]), distributed.start(), distributed.stop()
    assert tensor.tolist() == [1, 1, 1] and not torch.distributed.is_initialized()
