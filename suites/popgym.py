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

from gymnasium import spaces

from envs import Actions, MultiTaskEnv, feature_count

# The paper's experiment with rescaled Procgen rewards (Figures 6 and 7), on four tasks that a CPU learns within
# minutes. As there, the easiest is worth 100 times more, and one of those that last longest a tenth.
SCALES = {
    "RepeatFirstEasy": 100.0,
    "HigherLowerEasy": 1.0,
    "NoisyPositionOnlyCartPoleEasy": 1.0,
    "VelocityOnlyCartPoleEasy": 0.1,
}


@functools.cache
def popgym_tasks() -> dict[str, Callable]:
    """The 27 POPGym tasks of appendix B: discrete actions, actions and observations below 30 wide.

    Built from the classes, because `gymnasium.make` and `Flatten` do not work together there. Raises ValueError
    if the package is missing or if it holds other tasks than the 27.
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


def scales_tasks() -> dict[str, Callable]:
    """The four tasks of the experiment with rescaled rewards."""
    return {name: popgym_tasks()[name] for name in SCALES}


if __name__ == "__main__":
    # A rollout of two attempts with right answers, printed around the attempt boundary.
    env = MultiTaskEnv({"RepeatFirstEasy": popgym_tasks()["RepeatFirstEasy"]}, attempts=2)
    obs, info = env.reset(seed=0)
    print(f"{info['task']}: repeat the first suit that was shown; 51 steps an attempt, +-1/51 each")
    done, t, answer = False, 0, 0
    while not done:
        parts = {name: obs[s].astype(float).round(3).tolist() for name, s in env.layout.items()}
        if parts["attempt_start"] == [1]:
            answer = parts["observation"].index(1)
        if t < 2 or 49 < t < 54:
            print(f"t={t}", " ".join(f"{k} {v if len(v) > 1 else v[0]}" for k, v in parts.items()))
        obs, _, done, _, info = env.step(answer)
        t += 1
    real = [round(float(r), 3) for r in info["attempt_returns"]]
    print(f"rollout of {info['length']} steps: real returns {real}, counted {info['return']:.3f}")
