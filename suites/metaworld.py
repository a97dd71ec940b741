r"""Meta-World: 50 robot-arm tasks, and the sets ML10, ML25 and ML45.

What     one environment for each task, and the tasks of each set by split. The goal is hidden; it is the same
         in all attempts of a rollout, and all of these count
Why      the agent must find the goal by its rewards, and use it again in the next attempt
Paper    AMAGO-2 section 4 and appendix B (ML45)
Bounds   none measured; reports show success instead
Try      python -m suites.metaworld
"""

import ctypes.util
import functools
import multiprocessing
import os
import pickle
from collections.abc import Callable

import gymnasium
import numpy as np
from gymnasium import spaces

from envs import first_line


class MetaWorldTask(gymnasium.Env):
    """One Meta-World task: `reset(seed=...)` picks one of its split's 50 goals, which the observation hides.

    A task costs nothing until it is played. Then it takes a simulator from `IDLE_SIMULATORS`, and puts it back
    when the attempt ends. `step`'s info reports "success". Attempts are truncated after 500 steps.
    """

    max_episode_length = 500
    observation_space = spaces.Box(-np.inf, np.inf, (39,), np.float32)
    action_space = spaces.Box(-1, 1, (4,), np.float32)

    def __init__(self, name: str, split: str):
        self.name, self.split, self._simulator = name, split, None

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        import metaworld

        super().reset(seed=seed)
        goals = metaworld_goals(self.name)[self.split]
        if self._simulator is None:
            self._simulator = take_simulator(self.name)
        goal = goals[self.np_random.integers(len(goals))]
        # The simulator's own reset ignores seeds; `set_task` is the benchmark's way to choose a goal.
        data = {"env_cls": type(self._simulator), "rand_vec": goal, "partially_observable": True}
        self._simulator.set_task(metaworld.Task(self.name, pickle.dumps(data)))
        return self._simulator.reset()[0].astype(np.float32), {}

    def step(self, action):
        obs, reward, _, truncated, info = self._simulator.step(action)
        if truncated:
            self.close()
        return obs.astype(np.float32), float(reward), False, truncated, {"success": bool(info["success"])}

    def render(self):
        "The picture, turned by 180 degrees: this camera hangs upside down. ValueError without OpenGL."
        # Without a display, the library that is tried first fails and leaves a traceback at the program's end. Only
        # now, because mujoco cannot be imported with MUJOCO_GL=egl where there is no EGL.
        if {"DISPLAY", "MUJOCO_GL"}.isdisjoint(os.environ) and ctypes.util.find_library("EGL"):
            os.environ["MUJOCO_GL"] = "egl"
        try:
            return self._simulator.render()[::-1, ::-1]
        except Exception as error:  # each OpenGL library raises its own
            raise ValueError(
                "cannot draw Meta-World: no display, and no EGL or OSMesa instead of one "
                f"(apt-get install libegl1; MUJOCO_GL=egl): {first_line(error)}"
            ) from error

    def close(self):
        if self._simulator is not None:
            leave_simulator(self.name, self._simulator)
            self._simulator = None


# Simulators that nobody plays, (task, simulator), oldest first. Making one takes 0.15 s, as long as 300 steps,
# and keeping one takes 22 MB: 24 environments with 45 simulators each would fill 24 GB. A used simulator
# plays exactly as a new one; a test compares them bit by bit.
IDLE_SIMULATORS: list = []


def take_simulator(name: str) -> gymnasium.Env:
    "An idle simulator of this task, or else a new one."
    for i in reversed(range(len(IDLE_SIMULATORS))):
        if IDLE_SIMULATORS[i][0] == name:
            return IDLE_SIMULATORS.pop(i)[1]
    import metaworld

    # DEVIATION: the present version of the tasks, v3.
    # Drawing, and with it the display, is set up only when `render` is called.
    drawing = {"render_mode": "rgb_array", "camera_name": "corner2", "width": 240, "height": 240}
    return metaworld.ALL_V3_ENVIRONMENTS[name](**drawing)


def leave_simulator(name: str, simulator: gymnasium.Env) -> None:
    "Keep a simulator for the next player of this task. At most 50 are kept, and 8 in each worker process."
    IDLE_SIMULATORS.append((name, simulator))
    if len(IDLE_SIMULATORS) > (50 if multiprocessing.parent_process() is None else 8):
        IDLE_SIMULATORS.pop(0)[1].close()


@functools.cache
def metaworld_goals(name: str) -> dict[str, np.ndarray]:
    """{"train": (50, n), "test": (50, n)}: a task's goals, n = 3, or 6 where an object's place varies too.

    They equal those of `metaworld.ML1(name, seed=0)`, and are drawn when a task is first played, in 0.06 s.
    (The benchmark's own constructors also simulate the arm's way to its start for each goal, which changes no
    goal: `ML45()` takes 25 s.) Raises ValueError if training and test share a goal.
    """
    simulator, goals, state = take_simulator(name), {}, np.random.get_state()
    simulator._freeze_rand_vec, simulator._set_task_called = False, True
    simulator._reset_hand = functools.partial(simulator._reset_hand, steps=1)
    try:
        for seed, split in enumerate(("train", "test")):
            np.random.seed(seed)
            goals[split] = np.array([(simulator.reset(), simulator._last_rand_vec)[1] for _ in range(50)])
    finally:
        np.random.set_state(state)
    del simulator._reset_hand
    leave_simulator(name, simulator)
    if (goals["train"][:, None] == goals["test"]).all(-1).any():
        raise ValueError(f"{name}: a goal of the test split is also a training goal")
    return goals


def metaworld_sets(split: str) -> dict[str, dict[str, Callable]]:
    """The 50 tasks and the sets ML10, ML25 and ML45, by name: {name: {task: constructor}}.

    The test split of a set holds its held-out tasks, and its training tasks with goals that training never uses.
    """
    import metaworld

    names, sets = metaworld.env_dict, {name: [name] for name in metaworld.ALL_V3_ENVIRONMENTS}
    for ml, parts in (("ML10", names.ML10_V3), ("ML25", names.ML25_V3), ("ML45", names.ML45_V3)):
        sets[ml] = [*parts["train"], *(parts["test"] if split == "test" else ())]
    return {ml: {n: functools.partial(MetaWorldTask, n, split) for n in tasks} for ml, tasks in sets.items()}


def metaworld_tasks(split: str) -> dict[str, Callable]:
    """The tasks of ML45: 45 to train on, and 5 more in the test split."""
    return metaworld_sets(split)["ML45"]


if __name__ == "__main__":
    print({name: len(tasks) for name, tasks in metaworld_sets("test").items() if name.startswith("ML")})
    task = MetaWorldTask("reach-v3", "train")
    for seed in (0, 0, 1):
        shown = task.reset(seed=seed)[0][-3:]
        print(f"reach-v3, seed {seed}: the goal is {task._simulator._target_pos.round(3)}, shown as {shown}")
