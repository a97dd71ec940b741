r"""Env steps per second while collecting, the shares of that time, and a plain loop for comparison.

    python benchmarks/rollout.py                                     # all cases: a few minutes
    python benchmarks/rollout.py --cases popgym-8,popgym-64 --seconds 5

What     `train.collect` with an untrained policy, and no updates: the replay fills, and nothing is learned. A case is
         a benchmark with the environments of its laptop scale; POPGym has 8, 64 and 256 of them
Plain    one environment after the other, each with its own policy and memory
Rows     env steps per second: the median over the repeats, and its ratio to the plain loop's. Then shares of the time:
         policy (observations to actions), environments (simulators and their common space), bookkeeping (the
         rest). The loops take turns, so that the load of other programs slows both
"""

import argparse
import contextlib
import io
import math
import signal
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

import numpy as np
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import train
from agent import Policy
from runtime.run import Run

# case -> benchmark, number of environments (None: the scale's), whether the plain loop runs, too
CASES = {
    "popgym-8": ("popgym", 8, True),
    "popgym-64": ("popgym", 64, True),
    "popgym-256": ("popgym", 256, False),
    "metaworld": ("metaworld", None, False),
    "babyai": ("babyai", None, False),
    "procgen-easy": ("procgen-easy", None, False),
    "procgen-memory-hard": ("procgen-memory-hard", None, False),
    "atari": ("atari", None, False),
}


@contextlib.contextmanager
def fresh_run(case: str, *flags: str):
    """A run of the program before its first step, without output, in a temporary folder."""
    env, num_envs, _ = CASES[case]
    flags += ("--num_envs", str(num_envs)) if num_envs else ()
    flags += ("--env", env, "--name", case, "--minutes", "None")
    silence = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        with contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
            run = stack.enter_context(Run(train.parse(flags, Path(folder)), Path(folder)))
            train.set_up(run)
        # Ctrl-C stops a benchmark at once: there is nothing to save.
        for number, handler in run.log.handlers.items():
            signal.signal(number, handler)
        yield run


class PlainLoop:
    """Collecting written plainly, for POPGym, on the environments of a `run` before its first step.

    With a greedy policy and no exploration it fills the replay exactly as `train.collect` does.
    """

    def __init__(self, run):
        self.run, self.envs, count = run, run.envs.envs, run.config.num_envs
        seeds = range(run.config.seed, run.config.seed + count)
        self.policies = [Policy(run.agent, run.config, 1, seed, run.policy.greedy) for seed in seeds]
        self.rollouts = [([obs], []) for obs in run.buffer.newest()["vector"]]  # observations, rewards

    def step(self) -> None:
        """Step each environment once."""
        run, epsilon_E = self.run, self.run.epsilon()
        for e, (env, policy) in enumerate(zip(self.envs, self.policies)):
            obs_T, reward_T = self.rollouts[e]
            action_E = np.array([policy(obs_T[-1])])
            action = train.explore(action_E, epsilon_E[e : e + 1], run.agent, run.rng)[0]
            obs, reward, terminated, truncated, info = env.step(action)
            obs_T.append(obs)
            reward_T.append(reward)
            if terminated or truncated:
                obs_TO = np.stack(obs_T)
                action_T = train.actions_in(obs_TO, run.env, run.agent)
                run.replay.add(obs_TO, action_T, np.array(reward_T), terminated, 0, info["task_id"])
                self.rollouts[e] = ([env.reset()[0]], [])
                policy.reset()
        run.steps += run.config.num_envs


def step_of(run) -> None:
    "One turn of the loop in `train.train`, without what may be due in it."
    run.owes_update(), run.is_over()
    run.is_due("save", math.inf), run.is_due("evaluate", math.inf)
    train.act(run)
    train.collect(run)


def timed(function, spent: dict, name: str):
    "The function; each call adds its seconds to `spent[name]`."

    def call(*arguments):
        start = time.perf_counter()
        result = function(*arguments)
        spent[name] += time.perf_counter() - start
        return result

    return call


class TimedPolicy:
    """A policy that adds its seconds to `spent["policy"]`."""

    def __init__(self, policy: Policy, spent: dict):
        self.call, self.reset = timed(policy, spent, "policy"), timed(policy.reset, spent, "policy")

    def __call__(self, obs):
        return self.call(obs)


def rate(step, env_steps: int, seconds: float) -> float:
    "Env steps per second of `step()`, which takes `env_steps` at a time, over about `seconds`."
    start, count, spent = time.perf_counter(), 0, 0.0
    while spent < seconds:
        step()
        count, spent = count + 1, time.perf_counter() - start
    return count * env_steps / spent


def rows(
    cases: list[str] | None = None,
    seconds: float = 2.0,
    repeats: int = 5,
    warmup: int | None = None,
    scale: str = "laptop",
    device: str = "cpu",
) -> list[dict]:
    """The table: a rate and three shares for each case. Each loop takes `seconds` in each of `repeats`.

    `warmup` steps come first (default: the context, so that all memories are full). ValueError for an unknown case.
    """
    cases = list(CASES) if cases is None else cases
    for case in cases:
        if case not in CASES:
            raise ValueError(f"unknown case '{case}': choose from {', '.join(CASES)}")
    table, flags = [], ("--scale", scale, "--device", device)
    with tqdm(total=len(cases) * repeats, desc="rollout", disable=None) as bar:
        for case in cases:
            bar.set_postfix_str(case)
            with contextlib.ExitStack() as stack:
                run = stack.enter_context(fresh_run(case, *flags))
                plain = PlainLoop(stack.enter_context(fresh_run(case, *flags))) if CASES[case][2] else None
                for _ in range(run.config.context if warmup is None else warmup):
                    step_of(run)
                    if plain:
                        plain.step()
                spent, rates, plain_rates, num_envs = defaultdict(float), [], [], run.config.num_envs
                run.policy = TimedPolicy(run.policy, spent)
                run.envs.step = timed(run.envs.step, spent, "environments")
                step = timed(lambda run=run: step_of(run), spent, "all")
                for _ in range(repeats):
                    rates.append(rate(step, num_envs, seconds))
                    if plain:
                        plain_rates.append(rate(plain.step, num_envs, seconds))
                    bar.update()
            table.append(row(case, "env steps", median(rates), "1/s", median(plain_rates) if plain else None))
            spent["bookkeeping"] = spent["all"] - spent["policy"] - spent["environments"]
            for part in ("policy", "environments", "bookkeeping"):
                table.append(row(case, part, spent[part] / spent["all"], "of the time"))
    return table


def row(case: str, what: str, value: float, unit: str, plain: float | None = None) -> dict:
    "A row of the table."
    ratio = None if plain is None else value / plain
    return {
        "benchmark": "rollout",
        "case": case,
        "what": what,
        "value": value,
        "unit": unit,
        "plain": plain,
        "ratio": ratio,
    }


def main(argv: list[str] | None = None) -> list[dict]:
    """Print and return the table for the cases on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated: " + ", ".join(CASES))
    parser.add_argument("--seconds", type=float, default=2.0, help="for each loop in each repeat")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warmup", type=int, help="steps before the measurement; default: the context")
    parser.add_argument("--scale", default="laptop", choices=("paper", "laptop", "smoke"))
    parser.add_argument("--device", default="cpu")
    options = vars(parser.parse_args(argv))
    table = rows(options.pop("cases").split(","), **options)
    for line in table:
        ratio = "" if line["ratio"] is None else f"{line['ratio']:>8.2f}x of plain {line['plain']:,.0f}"
        value = f"{line['value']:,.0f}" if line["unit"] == "1/s" else f"{line['value']:.3f}"
        print(f"{line['case']:<22}{line['what']:<14}{value:>10} {line['unit']:<12}{ratio}")
    return table


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
