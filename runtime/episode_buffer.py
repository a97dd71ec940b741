r"""Episodes in progress, kept until they are handed to the replay.

What     `EpisodeBuffer` takes a step of all environments at a time. It returns the segment of one environment when
         its rollout has ended, or when the segment has reached the length at which it is cut
Why      a segment enters the replay whole, with the observation after its last step. Rollouts of many contexts
         are cut into segments on the way, so that learning need not wait for their end. Actions are not kept:
         the caller reads each from the observation that follows it
Paper    none. OFFICIAL: segments of a rollout, drawn uniformly by the replay, as in the authors' scripts
Shapes   E environments, T steps of a segment, L the most of them. An observation is a dictionary of its parts:
         a "vector" (O,), and an "image" (H, W, 3) where there are pixels
Use      buffer.append(parts(obs), reward_E)                  # after each step; then for each e that ended or is full:
         buffer.end(e, parts(final_obs[e]))                   # if its rollout has ended
         obs_T, reward_T, time = buffer.segment(e)            # views: copy them to keep them
         buffer.start(e, parts(obs), time=0)                  # or, after a cut, time + len(reward_T)
Copy     this file alone; needs numpy and torch
"""

import numpy as np
import torch

Parts = dict[str, np.ndarray]


def parts(obs) -> Parts:
    """An observation as a dictionary: {"vector": obs}, unless it is a dictionary of vector and image already."""
    return obs if isinstance(obs, dict) else {"vector": obs}


class EpisodeBuffer:
    """One segment for each of E environments: its rollout since it started, or since the last cut.

    Arguments: `num_envs` E; `length` L, the most steps in a segment; `spaces` {part: (shape, dtype)} of an
    observation; `rng`, or None if every rollout fits whole. With `rng`, each segment is cut at a length drawn
    between 3/4 and all of L, so that the cuts of all environments do not come at once. `fraction_E` is not
    used here: the trainer keeps in it how much each rollout explores.
    """

    def __init__(self, num_envs: int, length: int, spaces: dict, rng: np.random.Generator | None):
        zeros = lambda shape, dtype: np.zeros((num_envs, length + 1, *shape), dtype)
        self.obs_EL = {name: zeros(*space) for name, space in spaces.items()}
        self.reward_EL = np.zeros((num_envs, length), dtype=np.float32)
        self.index = np.arange(num_envs)
        # Timestep of a segment's first observation in its rollout, steps held, length at which it is cut.
        self.time_E, self.count_E = np.zeros(num_envs, dtype=int), np.zeros(num_envs, dtype=int)
        self.cut_E, self.fraction_E = np.full(num_envs, length), np.zeros(num_envs)
        self.length, self.rng = length, rng

    def start(self, e: int, obs_E: Parts, time: int) -> None:
        """Start a segment of environment `e` with its observation in `obs_E` (E, ...), at `time` of its rollout."""
        for name, value_E in obs_E.items():
            self.obs_EL[name][e, 0] = value_E[e]
        self.time_E[e], self.count_E[e] = time, 0
        if self.rng is not None:
            self.cut_E[e] = self.rng.integers(max(1, 3 * self.length // 4), self.length + 1)

    def append(self, obs_E: Parts, reward_E: np.ndarray) -> None:
        """Add one step of every environment: its reward (E,) and the observation (E, ...) after it."""
        self.reward_EL[self.index, self.count_E] = reward_E
        self.count_E += 1
        for name, value_E in obs_E.items():
            self.obs_EL[name][self.index, self.count_E] = value_E

    def end(self, e: int, obs: Parts) -> None:
        """Replace the newest observation of environment `e` by `obs` (...), the last one of its rollout.

        When a rollout ends, the vector environment already returns the first observation of the next one, and
        `append` has stored that.
        """
        for name, value in obs.items():
            self.obs_EL[name][e, self.count_E[e]] = value

    def newest(self) -> Parts:
        """The newest observation of each environment, (E, ...)."""
        return {name: value_EL[self.index, self.count_E] for name, value_EL in self.obs_EL.items()}

    def full(self) -> np.ndarray:
        """(E,) bool: has the segment reached the length at which it is cut?"""
        return self.count_E >= self.cut_E

    def segment(self, e: int) -> tuple[Parts, np.ndarray, int]:
        """Observations (T+1, ...), rewards (T,) and first timestep of environment `e`'s segment. Views, no copies."""
        count = self.count_E[e]
        obs_T = {name: value_EL[e, : count + 1] for name, value_EL in self.obs_EL.items()}
        return obs_T, self.reward_EL[e, :count], int(self.time_E[e])

    def state_dict(self) -> dict:
        """All segments, one behind another, as tensors for a checkpoint (copies)."""
        state = {name: getattr(self, f"{name}_E") for name in ("time", "count", "cut", "fraction")}
        segments = [self.segment(e) for e in self.index]
        state["reward"] = np.concatenate([reward_T for _, reward_T, _ in segments])
        for name in self.obs_EL:
            state[f"obs/{name}"] = np.concatenate([obs_T[name] for obs_T, _, _ in segments])
        return {name: torch.from_numpy(value.copy()) for name, value in state.items()}

    def load_state_dict(self, state: dict) -> None:
        """Restore the segments of a `state_dict`, in place. The caller saves the state of `rng`."""
        for name in ("time", "count", "cut", "fraction"):
            getattr(self, f"{name}_E")[:] = state[name].numpy()
        counts = self.count_E.tolist()
        for e, reward_T in enumerate(state["reward"].split(counts)):
            self.reward_EL[e, : counts[e]] = reward_T.numpy()
        # A segment has one observation more than steps.
        for name, value_EL in self.obs_EL.items():
            for e, obs_T in enumerate(state[f"obs/{name}"].split([count + 1 for count in counts])):
                value_EL[e, : counts[e] + 1] = obs_T.numpy()
