r"""Procgen: 16 games of pixels, each with two thousand levels to train on.

What     one environment for each game, in which `reset` draws a level; the sets of games of the paper's three
         experiments. A rollout plays a level twice, and both attempts count
Why      Procgen chooses levels by itself, and goes on to the next one without being asked; rollouts need the
         same level again
Paper    AMAGO-2 section 4, Figures 6 to 8, appendix B
Bounds   results/procgen-easy_bounds.csv, results/procgen-memory-hard_bounds.csv
Try      python -m suites.procgen
"""

import contextlib
import functools
import io
from collections.abc import Callable

import gymnasium
import numpy as np
from gymnasium import spaces

# The five games of the easy experiment (Figure 6), and all 16 of the memory-hard one (Figure 8): six games have
# the mode "memory", which is hard with a part of the level hidden; the others are played hard.
PROCGEN_MEMORY_GAMES = ("caveflyer", "dodgeball", "heist", "jumper", "maze", "miner")
PROCGEN_HARD_GAMES = "bigfish bossfight chaser climber coinrun fruitbot leaper ninja plunder starpilot"
PROCGEN_EASY = dict.fromkeys(("climber", "coinrun", "jumper", "leaper", "ninja"), "easy")
PROCGEN_MEMORY_HARD = dict.fromkeys(PROCGEN_HARD_GAMES.split(), "hard")
PROCGEN_MEMORY_HARD |= dict.fromkeys(PROCGEN_MEMORY_GAMES, "memory")
# Figures 6 and 7: the easiest game is worth 100 times more, and the one that lasts longest a tenth.
PROCGEN_RESCALED = {"coinrun": 100.0, "climber": 0.1}
# Section 4 says so of the easy mode. DEVIATION: memory-hard has the same.
PROCGEN_LEVELS = {"train": range(2000), "test": range(2000, 2**31 - 1)}


class ProcgenGame(gymnasium.Env):
    """One Procgen game: `reset` draws one of `levels`, or takes options={"level": n}; info names the "level".

    A level is the same whenever it is played. Procgen cannot change it in an environment, so each reset builds
    a new one (0.4 to 2 ms). ValueError for an unknown game, a mode that the game does not have, or a level
    below 0 or above 2**31 - 2; `ResetNeeded` for a step after an episode's end.
    """

    def __init__(self, game: str, mode: str, levels: range = PROCGEN_LEVELS["train"]):
        self.game, self.mode, self.levels, self._env = game, mode, levels, None
        self.observation_space = spaces.Box(0, 255, (64, 64, 3), np.uint8)
        self.action_space = spaces.Discrete(15)
        for level in (levels.start, levels.stop - 1):
            check_procgen(game, mode, level)

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        """First frame of a level."""
        super().reset(seed=seed)
        level = (options or {}).get("level")
        if level is None:
            level = int(self.np_random.integers(self.levels.start, self.levels.stop))
        level = check_procgen(self.game, self.mode, level)
        self.close()
        # One level only, so its random seed has nothing to draw.
        one_level = {"start_level": level, "num_levels": 1, "rand_seed": 0}
        game = {"env_name": self.game, "distribution_mode": self.mode}
        self._env = procgen_class()(1, num_threads=0, **game, **one_level)
        self._frame = self._env.reset()[0][0]
        return self._frame.copy(), {"level": level}

    def step(self, action):
        """One step; a game's own time limit ends an episode as everything else does."""
        if self._env is None:
            raise gymnasium.error.ResetNeeded("the episode is over, or none has begun: call reset() first")
        frames, rewards, overs, _, _ = self._env.step(np.array([action], dtype=np.int32))
        over = bool(overs[0])
        if over:
            # The reward belongs to the last action, but this frame is already the next episode's first. Procgen
            # never draws the result of the last action, so the frame before it is shown again.
            self.close()
        else:
            self._frame = frames[0]
        return self._frame.copy(), float(rewards[0]), over, False, {}

    def close(self) -> None:
        """Free the level."""
        if self._env is not None:
            self._env.close()
            self._env = None


def check_procgen(game: str, mode: str, level) -> int:
    "The level as an int. ValueError where Procgen would end the whole process, or silently do something else."
    if game not in PROCGEN_MEMORY_HARD:
        raise ValueError(f"unknown Procgen game '{game}': it is one of {', '.join(PROCGEN_MEMORY_HARD)}")
    if mode not in ("easy", "hard", "memory"):
        raise ValueError(f"unknown Procgen mode '{mode}': it is easy, hard or memory")
    if mode == "memory" and game not in PROCGEN_MEMORY_GAMES:
        raise ValueError(f"{game} has no memory mode; only {', '.join(PROCGEN_MEMORY_GAMES)} do. Take hard")
    whole = isinstance(level, (int, np.integer)) and not isinstance(level, bool)
    if not whole or not 0 <= level < 2**31 - 1:
        raise ValueError(f"a Procgen level is from 0 to {2**31 - 2}, got {level}")
    return int(level)


@functools.cache
def procgen_class() -> type:
    """Procgen's vector environment, with Gymnasium's `reset` and `step`; ImportError where none is installed.

    Python 3.13 has the package procgen_gym: the same levels, with a few pixels drawn otherwise. Earlier ones have
    procgen, which is freed from its messages and its memory leak here.
    """
    try:
        from procgen_gym import ProcgenVecEnv

        return ProcgenVecEnv
    except ImportError:
        with contextlib.redirect_stderr(io.StringIO()):  # it imports the old gym, which prints an advert
            from procgen import ProcgenGym3Env
    import gym3.libenv

    class OneOpening(gym3.libenv.FFI):
        # gym3 opens its library anew for each environment, and cffi keeps every handle: 11 kB a level, which
        # adds up to gigabytes a run. Opened once, it leaks nothing.
        dlopen = functools.cache(gym3.libenv.FFI.dlopen)

    class ProcgenOfGym3(ProcgenGym3Env):
        def reset(self):
            return self.observe()[1]["rgb"], {}

        def step(self, actions):
            self.act(actions)
            rewards, seen, firsts = self.observe()
            return seen["rgb"], rewards, firsts, np.zeros_like(firsts), {}

    gym3.libenv.FFI = OneOpening
    return ProcgenOfGym3


def procgen_tasks(modes: dict[str, str], split: str = "train") -> dict[str, Callable]:
    """The games of `modes`, {game: mode}, on the levels of a split."""
    procgen_class()  # ImportError here, where the package is missing
    return {g: functools.partial(ProcgenGame, g, mode, PROCGEN_LEVELS[split]) for g, mode in modes.items()}


if __name__ == "__main__":
    for split in PROCGEN_LEVELS:
        game = procgen_tasks(PROCGEN_EASY, split)["coinrun"]()
        for seed in (0, 0, 1):
            frame, info = game.reset(seed=seed)
            print(
                f"coinrun, {split}, seed {seed}: level {info['level']}, frame {frame.shape}, sum {frame.sum()}"
            )
