r"""Gymnasium ids as tasks: --env gym:CartPole-v1,Acrobot-v1, your own registered ones included.

What     tasks from ids with vector observations, one attempt a rollout
Why      the shortest way to an environment of your own
Paper    none: our addition
Bounds   none
Try      python -m suites.gym
"""

import functools
from collections.abc import Callable

import gymnasium

from envs import Actions, MultiTaskEnv, first_line, flattener


def gym_tasks(ids: str) -> dict[str, Callable]:
    """Tasks from comma-separated Gymnasium ids with vector observations. One-line ValueErrors for the rest."""
    tasks = {}
    for name in filter(None, map(str.strip, ids.split(","))):
        try:
            env = gymnasium.make(name)
            flattener(env.observation_space), Actions(env.action_space)
        except (gymnasium.error.Error, ImportError, ValueError) as error:
            raise ValueError(f"cannot make Gymnasium id '{name}' a task: {first_line(error)}") from error
        shape = env.observation_space.shape or ()
        if len(shape) > 1:
            hint = "Wrap it in an environment of your own that turns them into a vector"
            raise ValueError(f"{name} has image observations {shape}; --env gym: takes vectors. {hint}")
        env.close()
        tasks[name] = functools.partial(gymnasium.make, name)
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
