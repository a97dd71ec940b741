r"""Atari: the ten games of Figure 9, one attempt each, with all 18 actions.

What     one environment for each game, as ALE/GAME-v5 has it, with frames of 84 x 84 in colour. Of several
         environments, each plays its own games, so that all are played equally often
Why      long games with raw rewards that differ by orders of magnitude from game to game
Paper    AMAGO-2 section 4, Figure 9, appendix B
Shapes   H, W an image's height and width, C its channels
Bounds   results/atari_bounds.csv, published scores of random and human play
Try      python -m suites.atari
"""

import functools
from collections.abc import Callable

import gymnasium
import numpy as np
from gymnasium import spaces

ATARI_GAMES = "Pong Boxing Breakout Gopher MsPacman ChopperCommand CrazyClimber BattleZone Qbert Seaquest"


class AtariGame(gymnasium.Env):
    """ALE/`game`-v5 in RGB at 84 x 84, with all 18 actions: no frame stack, no greyscale, raw rewards.

    OFFICIAL  v5's own frame skip of 4 (the authors' script skips 5), and its sticky actions: each frame repeats
    the last action with p = 0.25. v5's limit of 108,000 frames is the benchmark's `max_steps`, so that it
    truncates a rollout. `reset(seed=...)` loads the game anew, in about 90 ms, because nothing else seeds the
    sticky actions. The game is made at the first reset, because most environments play only some of the games.
    """

    def __init__(self, game: str):
        self.game, self._env = game, None
        self.observation_space = spaces.Box(0, 255, (84, 84, 3), np.uint8)
        self.action_space = spaces.Discrete(18)

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        """First frame of a game."""
        super().reset(seed=seed)
        if self._env is None:
            register_atari()
            settings = {"full_action_space": True, "max_num_frames_per_episode": None}
            make = functools.partial(gymnasium.make, disable_env_checker=True)
            self._env = make(f"ALE/{self.game}-v5", **settings).unwrapped
            self._shrink = area_resizer(self._env.observation_space.shape, 84, 84)
        return self._shrink(self._env.reset(seed=seed)[0]), {}

    def step(self, action):
        """One step, four frames of the game."""
        frame, reward, terminated, truncated, _ = self._env.step(action)
        return self._shrink(frame), float(reward), terminated, truncated, {}

    def close(self) -> None:
        """Free the game."""
        if self._env is not None:
            self._env.close()
            self._env = None


def area_weights(size: int, smaller: int) -> tuple[np.ndarray, np.ndarray]:
    """The pixels, of `size`, that make up each of `smaller` ones, and their shares: two (K, smaller) integer arrays.

    Shares are multiplied by a number that makes them whole, so that sums of them are exact.
    """
    first, end = np.arange(smaller) * size, np.arange(1, smaller + 1) * size  # in `smaller`ths of a pixel
    index = first // smaller + np.arange(-(-size // smaller) + 1)[:, None]
    share = np.minimum(end, (index + 1) * smaller) - np.maximum(first, index * smaller)
    share = np.maximum(share, 0)  # a pixel that a wider neighbour needs and this one does not
    used = share.any(axis=1)
    return np.minimum(index, size - 1)[used], share[used] // np.gcd.reduce(share, axis=None)


@functools.cache
def area_resizer(shape: tuple[int, int, int], height: int, width: int) -> Callable:
    """A function from uint8 images of `shape` (H, W, C) to (height, width, C): means over areas, rounded exactly.

    All arithmetic is in integers. It takes 0.12 ms for an Atari frame; a step of a game takes 0.3.
    """
    H, W, C = shape
    rows, row_share = area_weights(H, height)
    columns, column_share = area_weights(W, width)
    # The channels of a row lie in one line, because NumPy gathers single numbers faster than groups of three.
    columns = (columns[:, :, None] * C + np.arange(C)).reshape(len(columns), width * C)
    total = int(row_share[:, 0].sum() * column_share[:, 0].sum())
    dtype = np.uint16 if 256 * total < 2**16 else np.uint32
    row_share = row_share.astype(dtype)[:, :, None]
    column_share = column_share.astype(dtype).repeat(C, axis=1)

    def resize(image):
        lines = image.reshape(H, W * C).astype(dtype)
        rows_sum = np.zeros((height, W * C), dtype)
        for index, share in zip(rows, row_share):
            rows_sum += lines[index] * share
        # Integer division rounds down; adding half of the divisor first makes it round to nearest.
        sums = np.full((height, width * C), total // 2, dtype)
        for index, share in zip(columns, column_share):
            sums += rows_sum[:, index] * share
        return (sums // dtype(total)).astype(np.uint8).reshape(height, width, C)

    return resize


def register_atari() -> None:
    "Register ids that begin with ALE/ with Gymnasium, in this process."
    import ale_py

    gymnasium.register_envs(ale_py)
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # no banner from each process


def atari_tasks(split: str = "train") -> dict[str, Callable]:
    """The ten games, in both splits: there are no others to test on."""
    register_atari()
    return {game: functools.partial(AtariGame, game) for game in ATARI_GAMES.split()}


if __name__ == "__main__":
    two = area_resizer((1, 3, 1), 1, 2)(np.array([[[0], [90], [30]]], dtype=np.uint8)).ravel()
    print(f"pixels 0 90 30 as two: {two}, by hand (0 + 90/2) / 1.5 = 30 and (90/2 + 30) / 1.5 = 50")
    game, plays = atari_tasks()["Breakout"](), []
    for seed in (0, 0, 1):
        game.reset(seed=seed)
        plays.append(np.array([game.step(3 - t % 3)[0] for t in range(60)]))
        differing = (plays[-1] != plays[0]).sum()
        print(f"Breakout, seed {seed}: {differing} of {plays[0].size} numbers differ from the first play")
