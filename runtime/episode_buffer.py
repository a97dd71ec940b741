r"""The rollouts being lived, one lane an environment, until they are handed to the replay.

What     `EpisodeBuffer` takes a step of all environments at a time, and gives back one lane's trajectory when its
         rollout has ended, or when it has grown to the most steps that the replay takes at once
Why      a trajectory enters the replay whole, with the observation after its last step; rollouts of many
         contexts are cut into segments as they are lived, so that learning need not wait for their end.
         Actions are not kept: the caller reads each from the observation that follows it
Paper    none. DEVIATION: segments of a rollout, drawn uniformly by the replay; the paper stores rollouts whole
Shapes   E environments, T steps of a lane, L the most of them. An observation is a dictionary of its parts:
         a "vector" (O,), and an "image" (H, W, 3) where there are pixels
Use      lanes.append(parts(obs), reward_E)                       # after each step; then, where one is over or full:
         lanes.end(e, parts(final_obs[e]))                        # if it is over
         obs_T, reward_T, time = lanes.segment(e)                 # views: copy what is to be kept
         lanes.start(e, parts(obs), time=0)                       # or, after a cut, time + len(reward_T)
Copy     this file alone; needs numpy and torch
Try      python lanes.py
"""

import numpy as np
import torch

Parts = dict[str, np.ndarray]


def parts(obs) -> Parts:
    """An observation by its parts: a vector alone, or the dictionary of a vector and an image as it is."""
    return obs if isinstance(obs, dict) else {"vector": obs}


class EpisodeBuffer:
    """The rollouts of E environments, each one from its start or last cut to now.

    Arguments: `num_envs` E; `length` L, the most steps in a segment; `spaces` {part: (shape, dtype)} of an
    observation; `rng` staggers the cuts in longer rollouts, so that they do not all come at once, between
    3/4 and all of L; None where every rollout fits whole. `fraction_E` is the trainer's: how much the rollout
    in each lane explores.
    """

    def __init__(self, num_envs: int, length: int, spaces: dict, rng: np.random.Generator | None):
        shape = (num_envs, length + 1)
        self.obs_EL = {name: np.zeros((*shape, *part), dtype) for name, (part, dtype) in spaces.items()}
        self.reward_EL = np.zeros((num_envs, length), dtype=np.float32)
        self.index = np.arange(num_envs)
        self.time_E, self.count_E = np.zeros(num_envs, dtype=int), np.zeros(num_envs, dtype=int)
        self.cut_E, self.fraction_E = np.full(num_envs, length), np.zeros(num_envs)
        self.length, self.rng = length, rng

    def start(self, e: int, obs_E: Parts, time: int) -> None:
        """Begin a segment in lane `e`: its first observation, out of (E, ...), at timestep `time` of its rollout."""
        for name, value_E in obs_E.items():
            self.obs_EL[name][e, 0] = value_E[e]
        self.time_E[e], self.count_E[e] = time, 0
        if self.rng is not None:
            self.cut_E[e] = self.rng.integers(max(1, 3 * self.length // 4), self.length + 1)

    def append(self, obs_E: Parts, reward_E: np.ndarray) -> None:
        """One more step in every lane: the observations (E, ...) it led to, and its rewards (E,)."""
        self.reward_EL[self.index, self.count_E] = reward_E
        self.count_E += 1
        for name, value_E in obs_E.items():
            self.obs_EL[name][self.index, self.count_E] = value_E

    def end(self, e: int, obs: Parts) -> None:
        """Replace the newest observation of lane `e` by `obs`, that lane's alone: where a rollout ends, the vector
        environment has returned the next one's first in its place, and `append` has taken that."""
        for name, value in obs.items():
            self.obs_EL[name][e, self.count_E[e]] = value

    def newest(self) -> Parts:
        """The newest observation of each lane, (E, ...)."""
        return {name: value_EL[self.index, self.count_E] for name, value_EL in self.obs_EL.items()}

    def full(self) -> np.ndarray:
        """Where a segment is as long as it may get, (E,)."""
        return self.count_E >= self.cut_E

    def segment(self, e: int) -> tuple[Parts, np.ndarray, int]:
        """What lane `e` holds: observations (T+1, ...), rewards (T,), timestep of the first. Views, not copies."""
        count = self.count_E[e]
        obs_T = {name: value_EL[e, : count + 1] for name, value_EL in self.obs_EL.items()}
        return obs_T, self.reward_EL[e, :count], int(self.time_E[e])

    def state_dict(self) -> dict:
        """What all lanes hold, one behind another, as plain data: tensors, for a checkpoint."""
        held = [(e, slice(count)) for e, count in enumerate(self.count_E)]
        seen = [(e, slice(count + 1)) for e, count in enumerate(self.count_E)]
        state = {name: getattr(self, f"{name}_E") for name in ("time", "count", "cut", "fraction")}
        state["reward"] = np.concatenate([self.reward_EL[part] for part in held])
        for name, value_EL in self.obs_EL.items():
            state[f"obs/{name}"] = np.concatenate([value_EL[part] for part in seen])
        return {name: torch.from_numpy(value.copy()) for name, value in state.items()}

    def load_state_dict(self, state: dict) -> None:
        """Hold what the lanes held whose `state_dict` this is. `rng`'s state is the caller's to save."""
        for name in ("time", "count", "cut", "fraction"):
            getattr(self, f"{name}_E")[:] = state[name].numpy()
        ends_E = self.count_E.cumsum()
        for e, (end, count) in enumerate(zip(ends_E, self.count_E)):
            self.reward_EL[e, :count] = state["reward"][end - count : end].numpy()
            # One more observation than steps in every lane.
            first = end - count + e
            for name, value_EL in self.obs_EL.items():
                value_EL[e, : count + 1] = state[f"obs/{name}"][first : first + count + 1].numpy()


if __name__ == "__main__":
    lanes = EpisodeBuffer(num_envs=2, length=3, spaces={"vector": ((1,), np.float32)}, rng=None)
    for e in range(2):
        lanes.start(e, parts(np.zeros((2, 1))), time=0)
    for step in range(1, 4):
        lanes.append(parts(np.full((2, 1), float(step))), np.full(2, step / 10))
        if step == 2:
            lanes.start(1, parts(np.zeros((2, 1))), time=0)  # the second environment begins a new rollout
        print(f"step {step}: steps held {lanes.count_E.tolist()}, full {lanes.full().tolist()}")

    def show(what: str) -> None:
        "Lane 0."
        obs, reward_T, time = lanes.segment(0)
        rewards = [f"{r:.1f}" for r in reward_T]
        print(f"{what}: observations {obs['vector'][:, 0].tolist()}, rewards {rewards}, from time {time}")

    show("lane 0")
    lanes.start(0, parts(np.full((2, 1), 3.0)), time=3)
    lanes.append(parts(np.full((2, 1), 4.0)), np.full(2, 0.4))
    show("cut and gone on")
