r"""How long one update takes, against the same mathematics written plainly, in one interleaved run.

    python benchmarks/learner.py                                # all shapes; about a quarter of an hour on 2 cores
    python benchmarks/learner.py --shapes small,laptop --repeats 5

A row a shape and implementation: `plain` (plain.py, float32), `float32` and `bf16` (update.py), and at the laptop shape
`compiled` (float32 with torch.compile, with the seconds that its first update takes). Seconds are
medians over interleaved updates, the ratio is plain's seconds over the row's. Peak memory is that of a process of
its own, everything included. Of the arithmetic, what PyTorch counts (matrix multiplies, convolutions, attention)
is compared with a large matrix multiply measured between the updates, in the same number format.
"""

import argparse
import gc
import os
import re
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from plain import plain_update

from agent import Agent
from config import Config, check_device, prepare_torch
from presets import preset
from replay import Batch
from runtime.captured import compile_networks
from runtime.memory import with_sizes
from train import make_optimizer
from update import update

# Arguments of `Agent` by environment: vector width, actions, discrete, image shape, layout, vocabulary.
SIZES = {
    "popgym": (57, 27, True, None, None),
    "metaworld": (46, 4, False, None, None),
    "procgen-easy": (19, 15, True, (64, 64, 3), None),
    "procgen-memory-hard": (19, 15, True, (64, 64, 3), None),
    "atari": (22, 18, True, (84, 84, 3), None),
    "babyai": (
        172,
        7,
        True,
        None,
        {"observation/grid": slice(4, 151), "observation/tokens": slice(151, 161)},
        31,
    ),
}
# name -> preset, scale, what differs from it. "-cpu": as large as an update of a few seconds on 2 cores allows.
SHAPES = {
    "small": ("popgym", "paper", {"batch_size": 8, "context": 128, "d_model": 128, "d_ff": 512, "layers": 2}),
    "laptop": ("popgym", "laptop", {}),
    "continuous-cpu": ("metaworld", "paper", {"batch_size": 8, "context": 64}),
    "pixels-cpu": ("procgen-easy", "paper", {"batch_size": 4, "context": 32}),
    "popgym-paper": ("popgym", "paper", {}),
    "metaworld-paper": ("metaworld", "paper", {}),
    "procgen-easy-paper": ("procgen-easy", "paper", {}),
}
IMPLEMENTATIONS = ("plain", "float32", "bf16", "compiled")
COMPILED = ("laptop",)  # shapes at which `compiled` runs: there operations are small


def config_of(shape: str, precision: str = "float32", **changes) -> Config:
    """The configuration of a named shape."""
    name, scale, ours = SHAPES[shape]
    values = {"env": name, **preset(name, scale), **ours, "precision": precision, "threads": None, **changes}
    observation_dim, _, _, image_shape = SIZES[name][:4]
    return with_sizes(
        Config(**values), observation_dim, image_shape, torch.device(values.get("device", "cpu"))
    )


def make_batch(config: Config, agent: Agent | None = None, seed: int = 0) -> Batch:
    """A batch of full windows of noise. With an `agent`, discrete actions are its own policy's."""
    observation_dim, action_dim, discrete, image_shape = SIZES[config.env][:4]
    rng, (B, T) = torch.Generator().manual_seed(seed), (config.batch_size, config.context)
    obs_BTO = torch.randn(B, T + 1, observation_dim, generator=rng)
    image_BT = None
    if image_shape:
        image_BT = torch.randint(256, (B, T + 1, *image_shape), generator=rng, dtype=torch.uint8)
    time_BT = torch.arange(T + 1).expand(B, T + 1)
    action_BT = torch.randint(action_dim, (B, T), generator=rng)
    if not discrete:
        action_BT = torch.rand(B, T, action_dim, generator=rng) * 2 - 1
    elif agent is not None:
        with torch.no_grad():
            h_BTD = agent.eval().states(obs_BTO, time_BT, image_BT)[:, :-1]
            action_BT = agent.policy(agent.actor(h_BTD)[..., -1, :]).sample(1, generator=rng)[0].argmax(-1)
    return Batch(
        obs_BTO,
        action_BT,
        reward_BT=torch.randn(B, T, generator=rng),
        done_BT=torch.zeros(B, T, dtype=torch.bool),
        mask_BT=torch.ones(B, T, dtype=torch.bool),
        real_S=torch.arange(B * T),
        weight_S=torch.full((B * T,), 1 / (B * T)),
        lengths=(T,) * B,
        time_BT=time_BT,
        task_B=torch.zeros(B, dtype=torch.long),
        image_BT=image_BT,
    )


@torch.no_grad()
def sharpen(agent: Agent, batch: Batch, entropy: float) -> float:
    """Scale the actors' last layer until the mean entropy of discrete policies is `entropy` nats; returns it."""
    h_BTD = agent.eval().states(batch.obs_BTO, batch.time_BT, batch.image_BT)[:, :-1]
    low, high, reached = 0.0, 1e4, None
    for _ in range(40):
        middle = (low + high) / 2
        features = agent.actor(h_BTD) * middle
        reached = agent.policy(features).entropy().mean().item()
        low, high = (middle, high) if reached > entropy else (low, middle)
    for actor in (agent.actor, agent.target_actor):
        actor.layers[-1].weight.mul_(middle)
        actor.layers[-1].bias.mul_(middle)
    return reached


def make_learner(shape: str, implementation: str, entropy: float | None, device: str):
    """A function that makes one update, and the configuration. One seed: all start from the same weights."""
    config = config_of(shape, "bf16" if implementation == "bf16" else "float32", device=device)
    torch.manual_seed(0)
    agent = Agent(config, *SIZES[config.env])
    discrete = SIZES[config.env][2]
    if discrete and entropy is not None:
        sharpen(agent, make_batch(config), entropy)
    batch = make_batch(config, agent if discrete else None)
    agent, batch = agent.to(device), batch.to(device)
    optimizer, schedule = make_optimizer(agent, config)
    if implementation == "compiled":
        compile_networks(agent)
    step = plain_update if implementation == "plain" else update
    return lambda: step(agent, optimizer, schedule, batch, config), config


def seconds_of(work, device: str) -> float:
    "How long `work()` takes."
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def multiply_rate(dtype, device: str) -> float:
    """FLOP/s of one large square matrix multiply, best of 5: 2048 wide, or the first size that takes 50 ms."""
    # A CPU without bf16 instructions takes a thousand times as long as one that has them.
    for size in (256, 512, 1024, 2048):
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        if seconds_of(lambda: a @ b, device) > 0.05:  # noqa: B023
            break
    return 2 * size**3 / min(seconds_of(lambda: a @ b, device) for _ in range(5))


def peak_memory(shape: str, implementation: str, entropy, threads: int, device: str) -> float:
    """Peak memory of two updates in a process of their own, bytes: resident, or the GPU's."""
    command = [sys.executable, __file__, "--memory_of", implementation, "--shapes", shape]
    command += ["--threads", str(threads), "--device", device]
    command += ["--entropy", str(entropy)] if entropy is not None else []
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def peak_resident() -> int:
    "The most memory that this process has held so far, bytes."
    # Not getrusage: its maximum outlives exec, so that a child starts with its parent's. Linux has the real one.
    status = Path("/proc/self/status")
    if status.exists():
        return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def rows(
    shapes: list[str],
    repeats: int = 3,
    entropy: float | None = None,
    implementations=IMPLEMENTATIONS,
    memory: bool = True,
    device: str = "cpu",
) -> list[dict]:
    """The table: a row for each shape and measured quantity of an implementation. Entropies are in nats."""
    table, threads = [], torch.get_num_threads()
    total = len(shapes) * len(implementations) * (repeats + 1)
    with tqdm(total=total, desc="learner", unit="update", disable=None) as bar:
        for shape in shapes:
            names = [name for name in implementations if name != "compiled" or shape in COMPILED]
            learners = {name: make_learner(shape, name, entropy, device)[0] for name in names}
            flops, times, rates = {}, {name: [] for name in learners}, {"float32": [], "bf16": []}
            for name, learner in learners.items():  # the first update warms up
                with FlopCounterMode(display=False) as counter:
                    first = seconds_of(learner, device)
                flops[name] = counter.get_total_flops()
                if name == "compiled":
                    table.append(row(f"{shape} {name}", "first update", first, "s"))
                bar.update()
            for _ in range(repeats):
                rates["float32"].append(multiply_rate(torch.float32, device))
                rates["bf16"].append(multiply_rate(torch.bfloat16, device))
                for name, learner in learners.items():
                    times[name].append(seconds_of(learner, device))
                    bar.update()
            del learners, learner
            gc.collect()
            medians = {name: statistics.median(values) for name, values in times.items()}
            for name in names:
                rate = statistics.median(rates["bf16" if name == "bf16" else "float32"])
                reached = flops[name] / medians[name]
                plain = medians.get("plain")
                case = f"{shape} {name}"
                table += [
                    row(case, "update", medians[name], "s", plain, plain and plain / medians[name]),
                    row(case, "arithmetic", flops[name] / 1e9, "GFLOP"),
                    row(case, "rate", reached / 1e9, "GFLOP/s"),
                    row(case, "share of a multiply", reached / rate, ""),
                ]
            if memory:
                peaks = {n: peak_memory(shape, n, entropy, threads, device) for n in names}
                plain = peaks.get("plain")
                for name, peak in peaks.items():
                    ratio = plain and plain / peak
                    table.append(
                        row(f"{shape} {name}", "peak memory", peak / 1e9, "GB", plain and plain / 1e9, ratio)
                    )
    return table


def row(case: str, what: str, value: float, unit: str, plain=None, ratio=None) -> dict:
    "A line of the table, and of results/bench.csv."
    quantities = {"what": what, "value": value, "unit": unit, "plain": plain, "ratio": ratio}
    return {"benchmark": "learner", "case": case, **quantities}


def main(argv=None) -> list[dict]:
    """Print the table of the shapes that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default=",".join(SHAPES), help="comma-separated: " + ", ".join(SHAPES))
    parser.add_argument("--implementations", default=",".join(IMPLEMENTATIONS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--entropy", type=float, help="of discrete policies, nats; default: of untrained ones"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--no_memory", action="store_true")
    parser.add_argument("--memory_of", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    prepare_torch(arguments.threads)
    shapes, implementations = arguments.shapes.split(","), arguments.implementations.split(",")
    for flag, names, known in (
        ("shapes", shapes, SHAPES),
        ("implementations", implementations, IMPLEMENTATIONS),
    ):
        if unknown := [name for name in names if name not in known]:
            raise ValueError(f"--{flag}: unknown {', '.join(unknown)!r}; there are {', '.join(known)}")
    check_device(arguments.device)
    if arguments.memory_of:
        learner, _ = make_learner(shapes[0], arguments.memory_of, arguments.entropy, arguments.device)
        learner(), learner()
        on_gpu = arguments.device.startswith("cuda")
        print(torch.cuda.max_memory_allocated() if on_gpu else peak_resident())
        return []
    table = rows(
        shapes,
        arguments.repeats,
        arguments.entropy,
        implementations,
        not arguments.no_memory,
        arguments.device,
    )
    for line in table:
        ratio = f"{line['ratio']:6.2f}x" if line["ratio"] else ""
        print(f"{line['case']:<28}{line['what']:<22}{line['value']:>12.4g} {line['unit']:<8}{ratio}")
    return table


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
