r"""The benchmarks by name, and the multi-task environment of each.

What     `BENCHMARKS` maps a name to its tasks and to how a rollout plays them; `make_env` builds it
Try      python -m suites --list popgym
"""

import difflib
import functools
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import gymnasium
from gymnasium import spaces

from envs import Actions, MultiTaskEnv, feature_count, first_line, nearest
from suites.simulators import (
    BABYAI_VOCABULARY,
    PROCGEN_EASY,
    PROCGEN_MEMORY_HARD,
    PROCGEN_RESCALED,
    SPLITS,
    atari_tasks,
    babyai_sets,
    metaworld_sets,
    procgen_tasks,
)


@functools.cache
def popgym_tasks() -> dict[str, Callable]:
    """The 27 POPGym tasks of appendix B: discrete actions, actions and observations below 30 wide.

    Built from the classes: `gymnasium.make` and `Flatten` do not work together there. Raises ValueError
    if the package is missing or holds other tasks than the 27.
    """
    try:
        import popgym.envs
    except ImportError as error:
        raise ValueError("--env popgym needs the popgym package: pip install -r requirements.txt") from error
    tasks = {}
    for make in popgym.envs.ALL:
        env = make()
        discrete = not isinstance(env.action_space, spaces.Box)
        if discrete and Actions(env.action_space).size < 30 and feature_count(env.observation_space) < 30:
            tasks[make.__name__] = make
    if len(tasks) != 27:
        raise ValueError(f"{len(tasks)} POPGym tasks, not the paper's 27: pip install -r requirements.txt")
    return tasks


# The paper's experiment with rescaled Procgen rewards (Figures 6 and 7) in miniature: four tasks that a CPU
# learns within minutes. As there, the easiest is worth 100 times more, and one of those that last longest a tenth.
SCALES = {
    "RepeatFirstEasy": 100.0,
    "HigherLowerEasy": 1.0,
    "NoisyPositionOnlyCartPoleEasy": 1.0,
    "VelocityOnlyCartPoleEasy": 0.1,
}


def scales_tasks() -> dict[str, Callable]:
    """The four POPGym tasks of the experiment with rescaled rewards, by name."""
    tasks = popgym_tasks()
    return {name: tasks[name] for name in SCALES}


def gym_tasks(ids: str) -> dict[str, Callable]:
    """Tasks from comma-separated Gymnasium ids with vector observations. One-line ValueErrors for the rest."""
    tasks = {}
    for name in split_names(ids):
        try:
            env = gymnasium.make(name)
        except (gymnasium.error.Error, ImportError) as error:
            near = difflib.get_close_matches(name, gymnasium.registry, n=3)
            if name not in gymnasium.registry and near:
                raise ValueError(f"unknown Gymnasium id '{name}'. Did you mean {', '.join(near)}?") from error
            raise ValueError(f"cannot make Gymnasium id '{name}': {first_line(error)}") from error
        space = env.observation_space
        if isinstance(space, spaces.Box) and len(space.shape) >= 2:
            raise ValueError(
                f"{name} has image observations {space.shape}; --env gym: takes vectors. "
                "Wrap it in an environment of your own that turns them into a vector"
            )
        try:
            feature_count(space)
            Actions(env.action_space)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        env.close()
        tasks[name] = functools.partial(gymnasium.make, name)
    if not tasks:
        raise ValueError("--env gym: needs at least one id, for example --env gym:CartPole-v1,Acrobot-v1")
    return tasks


class Benchmark(NamedTuple):
    """What a benchmark is: its tasks, and how a rollout of `MultiTaskEnv` plays them.

    The functions import the benchmark's package, so that nobody needs the packages of the others.
    """

    tasks: Callable  # (split) -> {name: constructor}, all that are played unless some are asked for
    attempts: int = 1  # plays in a rollout
    reward_factors: dict[str, float] | None = None  # of tasks whose rewards are rescaled
    same_variant: bool = False  # the same level, goal or layout in all attempts of a rollout
    mark_attempts: bool = False  # a black box in the corner of all attempts but the first
    max_steps: int | None = None  # of a rollout
    free_attempts: int | None = None  # that do not count; None: all but the last
    spread: bool = False  # each of several environments plays its own tasks, so that all are played as often
    slow: bool = False  # a step costs more than handing it to a worker process
    vocabulary: int | None = None  # of its instructions, in tokens
    sets: Callable | None = None  # (split) -> {name: {name: constructor}}, what else can be asked for


ALIKE = {"free_attempts": 0, "same_variant": True}  # all attempts count, and are at the same thing
# Appendix B: a level is played twice and both attempts count; H = 2500 steps in both together.
PROCGEN = Benchmark(
    functools.partial(procgen_tasks, PROCGEN_EASY), attempts=2, mark_attempts=True, max_steps=2500, **ALIKE
)

BENCHMARKS = {
    # POPGym has no splits: every attempt is a new variant, and evaluation draws others by its own seed.
    "popgym": Benchmark(lambda split: popgym_tasks(), attempts=2),
    "scales": Benchmark(lambda split: scales_tasks(), attempts=1, reward_factors=SCALES),
    "metaworld": Benchmark(
        lambda split: metaworld_sets(split)["ML45"], attempts=3, slow=True, sets=metaworld_sets, **ALIKE
    ),
    "babyai": Benchmark(
        lambda split: babyai_sets(split)["BabyAI"],
        attempts=2,
        sets=babyai_sets,
        vocabulary=BABYAI_VOCABULARY,
        **ALIKE,
    ),
    "procgen-easy": PROCGEN,
    "procgen-easy-rescaled": PROCGEN._replace(reward_factors=PROCGEN_RESCALED),
    "procgen-memory-hard": PROCGEN._replace(
        tasks=functools.partial(procgen_tasks, PROCGEN_MEMORY_HARD), max_steps=5000
    ),
    # One attempt; v5's limit of 108,000 frames in steps of 4.
    "atari": Benchmark(atari_tasks, max_steps=27_000, spread=True),
}


def all_tasks(env: str, split: str = "train") -> dict[str, Callable]:
    """Every task of a benchmark, or of gym:ID[,ID...], by name. ValueError for an unknown one or split."""
    if split not in SPLITS:
        raise ValueError(f"unknown split '{split}': --split is train or test")
    if env.startswith("gym:"):
        return gym_tasks(env.removeprefix("gym:"))
    if env not in BENCHMARKS:
        near = difflib.get_close_matches(env, BENCHMARKS, n=1, cutoff=0.0)
        raise ValueError(f"unknown --env '{env}'. Did you mean {near[0]}, or gym:{env}?")
    return BENCHMARKS[env].tasks(split)


def split_names(names: str | Sequence[str]) -> list[str]:
    "Names from a comma-separated string, or from a list of them."
    names = names.split(",") if isinstance(names, str) else names
    return [name.strip() for name in names if name.strip()]


def choose_tasks(env: str, tasks: str | Sequence[str] | None, split: str = "train") -> dict[str, Callable]:
    """The subset `tasks` of a benchmark (None: all of it). ValueError names the nearest tasks.

    A benchmark's named sets (ML10) stand for their tasks.
    """
    every = all_tasks(env, split)
    if tasks is None:
        return every
    sets = {name: {name: make} for name, make in every.items()}
    if env in BENCHMARKS and BENCHMARKS[env].sets:
        sets |= BENCHMARKS[env].sets(split)
    names, chosen = split_names(tasks), {}
    for name in names:
        if name not in sets:
            raise ValueError(
                f"unknown task '{name}' for --env {env}. Did you mean {nearest(name, list(sets))}?  "
                f"(python envs.py --list {env})"
            )
        chosen |= sets[name]
    if not chosen:
        raise ValueError(f"--tasks names no task  (python envs.py --list {env})")
    return chosen


def held_out_tasks(env: str, tasks: str | Sequence[str] | None = None) -> list[str]:
    """Tasks of the test split that training never plays; the others of that split differ in their variants.

    `tasks` is what was trained on, as for `make_env`. Empty where a benchmark holds out no tasks.
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
    lane: tuple[int, int] = (0, 1),
) -> MultiTaskEnv:
    """A multi-task environment: `env` is a benchmark's name or gym:ID[,ID...]; `tasks` a subset of it.

    `attempts` is the benchmark's own (`BENCHMARKS`) unless given, and 1 for gym:. `split` is train or test:
    other tasks, levels, goals or layouts, where a benchmark has them. `lane` (i, n) says that this is
    environment i of n, which play different tasks where the benchmark spreads them (Atari). Raises
    ValueError, one line, for anything that cannot be built.
    """
    chosen = choose_tasks(env, tasks, split)
    benchmark = BENCHMARKS.get(env, Benchmark(None))
    # Of 24 environments and ten games, 20 to 23 play games 0 to 3 again; of four, the first plays 0, 4 and 8.
    spread = range(lane[0] % len(chosen), len(chosen), lane[1])
    return MultiTaskEnv(
        chosen,
        benchmark.attempts if attempts is None else attempts,
        store_executed,
        free_attempts=benchmark.free_attempts,
        max_steps=min((n for n in (benchmark.max_steps, max_steps) if n is not None), default=None),
        reward_factors=benchmark.reward_factors,
        same_variant=benchmark.same_variant,
        mark_attempts=benchmark.mark_attempts,
        clip_rewards=clip_rewards,
        drawn=spread if benchmark.spread else None,
    )
