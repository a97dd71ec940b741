r"""POPGym: 27 small tasks of memory, and `scales`, four of them with rescaled rewards.

What     the tasks of appendix B, from POPGym's own classes. A rollout is two attempts at new variants of a
         task, of which the second counts
Why      the current observation is never enough: cards are shown once, cart-poles hide their speed, and mines
         must be remembered
Paper    AMAGO-2 section 4 and appendix B; `scales` is Figures 6 and 7 in miniature
Bounds   results/popgym_bounds.csv, measured by results/popgym_bounds.py
Try      python -m suites.popgym
"""

import functools
from collections.abc import Callable

import gymnasium
from gymnasium import spaces

from envs import Actions, MultiTaskEnv

# The paper's experiment with rescaled Procgen rewards (Figures 6 and 7), on four tasks that a CPU learns within
# minutes. As there, the easiest is worth 100 times more, and one of those that last longest a tenth.
SCALES = {
    "RepeatFirstEasy": 100.0,
    "HigherLowerEasy": 1.0,
    "NoisyPositionOnlyCartPoleEasy": 1.0,
    "VelocityOnlyCartPoleEasy": 0.1,
}


def popgym_task(make: Callable) -> gymnasium.Env:
    "An environment of a POPGym class, with a limit on its steps as `max_episode_length`."
    env = make()
    # Card games have no such number: each step but the first deals one card of the deck.
    if hasattr(env, "deck") and not hasattr(env, "max_episode_length"):
        env.max_episode_length = int(env.deck.num_cards) - 1
    return env


@functools.cache
def popgym_tasks() -> dict[str, Callable]:
    """The 27 tasks of appendix B: discrete actions, actions and observations below 30 wide. ValueError for others.

    Built from the classes, because `gymnasium.make` and `Flatten` do not work together there.
    """
    import popgym.envs

    tasks = {}
    for make in popgym.envs.ALL:
        env = make()
        discrete = not isinstance(env.action_space, spaces.Box)
        if discrete and Actions(env.action_space).size < 30 and spaces.flatdim(env.observation_space) < 30:
            tasks[make.__name__] = functools.partial(popgym_task, make)
    if len(tasks) != 27:
        raise ValueError(f"{len(tasks)} POPGym tasks, not the paper's 27: pip install -r requirements.txt")
    return tasks


def scales_tasks() -> dict[str, Callable]:
    """The four tasks of the experiment with rescaled rewards."""
    return {name: popgym_tasks()[name] for name in SCALES}


if __name__ == "__main__":
    env = MultiTaskEnv({"RepeatFirstEasy": popgym_tasks()["RepeatFirstEasy"]}, attempts=2)
    print("Repeat the first suit: 51 steps an attempt, +-1/51 each. Around the boundary of the attempts:")
    obs, done, t = env.reset(seed=0)[0], False, 0
    while not done:
        seen = {name: obs[s].astype(float).round(3).tolist() for name, s in env.layout.items()}
        if seen["attempt_start"] == [1]:
            answer = seen["observation"].index(1)
        if t < 2 or 49 < t < 54:
            print(f"t={t}", " ".join(f"{name} {v if len(v) > 1 else v[0]}" for name, v in seen.items()))
        (obs, _, done, _, info), t = env.step(answer), t + 1
    print(f"{t} steps: real returns {info['attempt_returns'].round(3)}, counted {info['return']:.3f}")
