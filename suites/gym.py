r"""Gymnasium ids as tasks: --env gym:CartPole-v1,Acrobot-v1, your own registered ones included.

What     tasks from ids with vector observations, one attempt a rollout. MiniGrid's ids are seen as numbers: the
         grid in view, the instruction's tokens, the direction
Why      the shortest way to an environment of your own
Paper    none: our addition
Bounds   none
Try      python -m suites.gym
"""

import contextlib
import functools
import importlib.util
from collections.abc import Callable

import gymnasium
from gymnasium import spaces

from envs import FAULTS, Actions, MultiTaskEnv, first_line, flattener
from suites.babyai import BABYAI_LENGTH, BABYAI_VOCABULARY, babyai_tokens

LARGEST = 2**20  # numbers of an observation, or actions: more would not fit into memory as one-hot vectors


class MiniGridTask(gymnasium.ObservationWrapper):
    """A MiniGrid environment whose grid in view and instruction are discrete numbers."""

    def __init__(self, env: gymnasium.Env):
        super().__init__(env)
        seen, codes = env.observation_space, (11, 6, 4)  # objects, colours, states | minigrid
        height, width, _ = seen["image"].shape
        self.observation_space = spaces.Dict(
            {
                "direction": seen["direction"],
                "grid": spaces.MultiDiscrete([[codes] * width] * height),
                "tokens": spaces.MultiDiscrete([BABYAI_VOCABULARY] * BABYAI_LENGTH),
            }
        )

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        with contextlib.redirect_stdout(None):  # MiniGrid prints each layout that it rejects
            return super().reset(seed=seed, options=options)

    def observation(self, observation: dict) -> dict:
        grid, tokens = observation["image"].astype(int), babyai_tokens(observation["mission"]).astype(int)
        return {"direction": observation["direction"], "grid": grid, "tokens": tokens}


def make_gym_task(name: str) -> gymnasium.Env:
    """A Gymnasium id's environment; see `MiniGridTask` for MiniGrid's."""
    if name.startswith(("MiniGrid-", "BabyAI-")) and importlib.util.find_spec("minigrid"):
        import minigrid  # noqa: F401  it registers its ids

    env = gymnasium.make(name)
    space = env.observation_space
    is_minigrid = isinstance(space, spaces.Dict) and set(space) == {"direction", "image", "mission"}
    return MiniGridTask(env) if is_minigrid else env


def check_spaces(env: gymnasium.Env) -> None:
    "ValueError for spaces that do not become a vector of observations and a vector or number of an action."
    seen, played = env.observation_space, env.action_space
    shape = seen.shape or ()
    if isinstance(seen, spaces.Box) and len(shape) > 1:
        hint = "wrap it in gymnasium.wrappers.FlattenObservation, in an environment that you register"
        raise ValueError(f"it has image observations {shape}, and --env gym: takes vectors: {hint}")
    if isinstance(seen, spaces.Dict) and len(set(map(str, seen))) < len(seen):
        raise ValueError(f"two parts of its observation look alike: {', '.join(map(repr, seen))}: rename one")
    for kind, size in (("observation", spaces.flatdim(seen)), ("action", Actions(played).size)):
        if size > LARGEST:
            hint = "wrap it in an environment of your own with fewer"
            raise ValueError(f"its {kind} needs {size:,} numbers, and {LARGEST:,} are the most: {hint}")
    flattener(seen)


def gym_tasks(ids: str) -> dict[str, Callable]:
    """Tasks from comma-separated Gymnasium ids with vector observations. One-line ValueErrors for the rest."""
    tasks = {}
    for name in filter(None, map(str.strip, ids.split(","))):
        try:
            env = make_gym_task(name)
            check_spaces(env)
            env.close()
        except FAULTS as error:  # also a constructor's own mistakes
            told = isinstance(error, (ValueError, gymnasium.error.Error))  # in words that say enough
            fault = first_line(error) if told else f"{type(error).__name__}: {first_line(error)}"
            if isinstance(error, ModuleNotFoundError):
                missing = error.name or name.split(":")[0]
                fault = f"there is no module {missing}: place {missing}.py beside train.py, or set PYTHONPATH"
            elif "ALE/" in name:
                fault += ". Atari's games are --env atari"
            raise ValueError(f"cannot make Gymnasium id '{name}' a task: {fault}") from error
        tasks[name] = functools.partial(make_gym_task, name)
    if not tasks:
        raise ValueError("--env gym: needs at least one id, for example --env gym:CartPole-v1,Acrobot-v1")
    return tasks


if __name__ == "__main__":
    env = MultiTaskEnv(gym_tasks("CartPole-v1,Acrobot-v1"))
    print("CartPole has 4 features and 2 actions, Acrobot 6 and 3; together:")
    print({name: s.stop - s.start for name, s in env.layout.items()})
    for task in env.tasks:
        obs, _ = env.reset(seed=0, options={"task": task})
        print(f"{task}: {obs[env.layout['observation']].round(3)}")
