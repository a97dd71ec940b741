r"""The rollouts being lived, one lane an environment, until they are handed to the replay.

What     `Lanes` takes a step of all environments at a time, and gives back one lane's trajectory when its
         rollout has ended, or when it has grown to the most steps that the replay takes at once
Why      a trajectory enters the replay whole, with the observation after its last step; rollouts of many
         contexts are cut into segments as they are lived, so that learning need not wait for their end
Paper    none: our choice
Shapes   E environments, T steps of a lane, L the most of them, O observation
Copy     this file alone; needs numpy
Try      python lanes.py
"""

import numpy as np


class Lanes:
    """The rollouts of E environments, each one from its start or last cut to now.

    Arguments: `num_envs` E; `length` L, the most steps in a segment; `observation_dim` O; `rng` staggers the
    cuts in longer rollouts, so that they do not all come at once, between 3/4 and all of L; None where every
    rollout fits whole. `epsilon_E` is the trainer's: the exploration of the rollout in each lane.
    """

    def __init__(self, num_envs: int, length: int, observation_dim: int, rng: np.random.Generator | None):
        self.obs_ELO = np.zeros((num_envs, length + 1, observation_dim), dtype=np.float32)
        self.reward_EL = np.zeros((num_envs, length), dtype=np.float32)
        self.index = np.arange(num_envs)
        self.time_E, self.count_E = np.zeros(num_envs, dtype=int), np.zeros(num_envs, dtype=int)
        self.cut_E, self.epsilon_E = np.full(num_envs, length), np.zeros(num_envs)
        self.length, self.rng = length, rng

    def start(self, e: int, obs_O: np.ndarray, time: int) -> None:
        """Begin a segment in lane `e`: its first observation (O,), at timestep `time` of its rollout."""
        self.obs_ELO[e, 0] = obs_O
        self.time_E[e], self.count_E[e] = time, 0
        if self.rng is not None:
            self.cut_E[e] = self.rng.integers(max(1, 3 * self.length // 4), self.length + 1)

    def append(self, obs_EO: np.ndarray, reward_E: np.ndarray) -> None:
        """One more step in every lane: the observations (E, O) it led to, and its rewards (E,)."""
        self.reward_EL[self.index, self.count_E] = reward_E
        self.count_E += 1
        self.obs_ELO[self.index, self.count_E] = obs_EO

    @property
    def obs_EO(self) -> np.ndarray:
        """The newest observation of each lane, (E, O)."""
        return self.obs_ELO[self.index, self.count_E]

    def full(self) -> np.ndarray:
        """Where a segment is as long as it may get, (E,)."""
        return self.count_E >= self.cut_E

    def segment(self, e: int) -> tuple[np.ndarray, np.ndarray, int]:
        """What lane `e` holds: observations (T+1, O), rewards (T,) and the timestep of the first. Views, not copies."""
        count = self.count_E[e]
        return self.obs_ELO[e, : count + 1], self.reward_EL[e, :count], int(self.time_E[e])


if __name__ == "__main__":
    lanes = Lanes(num_envs=2, length=3, observation_dim=1, rng=None)
    for e in range(2):
        lanes.start(e, np.zeros(1), time=0)
    for step in range(1, 4):
        lanes.append(np.full((2, 1), float(step)), np.full(2, step / 10))
        if step == 2:
            lanes.start(1, np.zeros(1), time=0)  # the second environment begins a new rollout
        print(f"step {step}: steps held {lanes.count_E.tolist()}, full {lanes.full().tolist()}")
    obs_TO, reward_T, time = lanes.segment(0)
    print(
        f"lane 0: observations {obs_TO[:, 0].tolist()}, rewards {[f'{r:.1f}' for r in reward_T]}, from time {time}"
    )
    lanes.start(0, obs_TO[-1], time=3)
    lanes.append(np.full((2, 1), 4.0), np.full(2, 0.4))
    obs_TO, reward_T, time = lanes.segment(0)
    print(
        f"cut and gone on: observations {obs_TO[:, 0].tolist()}, rewards {[f'{r:.1f}' for r in reward_T]}, from time {time}"
    )
