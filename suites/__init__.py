r"""The benchmarks by name, and the multi-task environment of each.

What     `BENCHMARKS` maps a name to its tasks and to the way a rollout plays them; `make_env` builds the environment
Why      the program and its users choose by name; `MultiTaskEnv` (envs.py) and each benchmark's file stay simple
Paper    AMAGO-2 section 4 and appendix B
Try      python -m suites --list popgym      and      python -m suites.popgym
"""

import difflib
import functools
import math
import re
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

from envs import MultiTaskEnv, Rules
from suites.atari import atari_tasks
from suites.babyai import BABYAI_VOCABULARY, babyai_sets, babyai_tasks
from suites.gym import gym_tasks
from suites.metaworld import metaworld_sets, metaworld_tasks
from suites.popgym import SCALES, popgym_tasks, scales_tasks
from suites.procgen import PROCGEN_EASY, PROCGEN_MEMORY_HARD, PROCGEN_RESCALED, procgen_tasks

# `python -m suites.popgym` runs a file that this one has imported already. Python warns of the second copy, which
# is harmless here.
warnings.filterwarnings("ignore", "'suites", RuntimeWarning, "runpy")


class Benchmark(NamedTuple):
    """A benchmark: its tasks, and the rules by which `MultiTaskEnv` plays them.

    The functions import the benchmark's package when they are called, so nobody needs the packages of the others.
    """

    tasks: Callable  # (split) -> {name: constructor}, all that are played unless some are asked for
    package: str  # to install, in the words of an error
    rules: Rules = Rules()
    # DEVIATION: environment i plays tasks i, i + n, ..., so that each is played about as often | our choice
    spread: bool = False
    slow: bool = False  # a step costs more than handing it to a worker process
    sets: Callable | None = None  # (split) -> {name: {name: constructor}}: names that --tasks also takes
    vocabulary: int | None = None  # number of different tokens, where instructions are seen


# All attempts count, and have the same level, goal or layout.
TWICE = Rules(attempts=2, free_attempts=0, same_variant=True)
# Appendix B: a level is played twice and both attempts count; H = 2500 steps in both together.
PROCGEN = TWICE._replace(mark_attempts=True, max_steps=2500)
EASY = Benchmark(functools.partial(procgen_tasks, PROCGEN_EASY), "procgen (Linux on x86_64 only)", PROCGEN)
HARD = functools.partial(procgen_tasks, PROCGEN_MEMORY_HARD)

BENCHMARKS = {
    # POPGym has no splits: every attempt is a new variant, and evaluation draws others by its own seed.
    "popgym": Benchmark(lambda split: popgym_tasks(), "popgym", Rules(attempts=2)),
    "scales": Benchmark(lambda split: scales_tasks(), "popgym", Rules(reward_factors=SCALES)),
    "metaworld": Benchmark(
        metaworld_tasks, "metaworld", TWICE._replace(attempts=3), slow=True, sets=metaworld_sets
    ),
    "babyai": Benchmark(babyai_tasks, "minigrid", TWICE, sets=babyai_sets, vocabulary=BABYAI_VOCABULARY),
    "procgen-easy": EASY,
    "procgen-easy-rescaled": EASY._replace(rules=PROCGEN._replace(reward_factors=PROCGEN_RESCALED)),
    "procgen-memory-hard": EASY._replace(tasks=HARD, rules=PROCGEN._replace(max_steps=5000)),
    # v5's limit of 108,000 frames, in steps of 4.
    "atari": Benchmark(atari_tasks, "ale-py", Rules(max_steps=27_000), spread=True),
}


def nearest(name: str, names: Sequence[str]) -> str:
    "Up to three of `names` that somebody who typed `name` may have meant."
    same = [n for n in names if re.sub(r"-v\d+$", "", n) == re.sub(r"-v\d+$", "", name)]
    if same:  # only the version differs
        return ", ".join(same)
    inside = [n for n in names if name.lower() in n.lower()]
    return ", ".join((inside or difflib.get_close_matches(name, names, cutoff=0.4) or list(names))[:3])


def all_tasks(env: str, split: str = "train") -> dict[str, Callable]:
    """Every task of a benchmark, or of gym:ID[,ID...], by name. ValueError for an unknown one or split."""
    if split not in ("train", "test"):
        raise ValueError(f"unknown split '{split}': --split is train or test")
    if env.startswith("gym:"):
        return gym_tasks(env.removeprefix("gym:"))
    if env not in BENCHMARKS:
        near = nearest(env, list(BENCHMARKS))
        raise ValueError(f"unknown --env '{env}'. Did you mean {near}, or gym:{env}?")
    try:
        return BENCHMARKS[env].tasks(split)
    except ImportError as error:
        needed = f"--env {env} needs the package {BENCHMARKS[env].package}"
        raise ValueError(f"{needed}: pip install -r requirements.txt") from error


def split_names(names: str | Sequence[str]) -> list[str]:
    "Names from a comma-separated string, or from a list of them."
    names = names.split(",") if isinstance(names, str) else names
    return [name.strip() for name in names if name.strip()]


def choose_tasks(env: str, tasks: str | Sequence[str] | None, split: str = "train") -> dict[str, Callable]:
    """The subset `tasks` of a benchmark (None: all of it). ValueError names the nearest tasks.

    The name of a set (ML10) stands for its tasks.
    """
    every = all_tasks(env, split)
    if tasks is None:
        return every
    sets = {name: {name: make} for name, make in every.items()}
    if env in BENCHMARKS and BENCHMARKS[env].sets:
        sets |= BENCHMARKS[env].sets(split)
    chosen = {}
    for name in split_names(tasks):
        if name not in sets:
            near = f"Did you mean {nearest(name, list(sets))}?  (python envs.py --list {env})"
            raise ValueError(f"unknown task '{name}' for --env {env}. {near}")
        chosen |= sets[name]
    if not chosen:
        raise ValueError(f"--tasks names no task  (python envs.py --list {env})")
    return chosen


def held_out_tasks(env: str, tasks: str | Sequence[str] | None = None) -> list[str]:
    """Tasks of the test split that training never plays; the others of that split differ in their variants.

    `tasks` is the choice of training, as for `make_env`. Empty where a benchmark holds out no tasks.
    """
    train = choose_tasks(env, tasks, "train")
    return [name for name in choose_tasks(env, tasks, "test") if name not in train]


def task_family(name: str) -> str:
    """A task's name without its difficulty: RepeatFirstEasy -> RepeatFirst."""
    return re.sub("(Easy|Medium|Hard)$", "", name)


def make_env(
    env: str,
    tasks: str | Sequence[str] | None = None,
    attempts: int | None = None,
    store_executed: bool = False,
    split: str = "train",
    max_steps: int | None = None,
    clip_rewards: bool = False,
    index: tuple[int, int] = (0, 1),
    longest: int | None = None,
) -> MultiTaskEnv:
    """A multi-task environment: `env` is a benchmark's name or gym:ID[,ID...]; `tasks` a subset of it.

    `attempts` is the benchmark's own (`BENCHMARKS`) unless given, and 1 for gym:. `split` is train or test:
    other tasks, levels, goals or layouts, where a benchmark has them. `index` (i, n) says that this is
    environment i of n, which play different tasks where the benchmark spreads them (Atari). `longest`
    limits a rollout's env steps where nothing else does. Raises ValueError, one line, for anything that cannot be
    built.
    """
    chosen = choose_tasks(env, tasks, split)
    benchmark = BENCHMARKS.get(env, Benchmark(gym_tasks, "gymnasium", Rules(task_truncates=True)))
    rules = benchmark.rules._replace(store_executed=store_executed, clip_rewards=clip_rewards)
    rules = rules._replace(attempts=rules.attempts if attempts is None else attempts)
    if max_steps is not None:
        rules = rules._replace(max_steps=min(max_steps, rules.max_steps or max_steps))
    if benchmark.spread:
        # Of 24 environments and ten games, 20 to 23 play games 0 to 3 again; of four, the first plays 0, 4 and 8.
        rules = rules._replace(drawn=range(index[0] % len(chosen), len(chosen), index[1]))
    env = MultiTaskEnv(chosen, rules)
    if longest and endless(env, max_steps):
        env.rules = env.rules._replace(max_steps=longest)
    return env


FAR = 100_000  # env steps: more than any benchmark's rollout has


def endless(env: MultiTaskEnv, max_steps: int | None) -> bool:
    """Whether rollouts of `env` may go on for longer than an evaluation can wait for: no limit, or one beyond FAR."""
    return max_steps is None and (env.max_rollout_length or math.inf) > FAR


def env_arguments(config) -> dict:
    "The fields of a configuration that `make_env` takes."
    names = ("env", "tasks", "attempts", "store_executed", "clip_rewards", "max_steps")
    return {name: getattr(config, name) for name in names}
