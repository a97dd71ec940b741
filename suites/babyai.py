r"""BabyAI: grid worlds with an instruction in words; 50 tasks to train on and 18 held out.

What     one environment for each task: the grid in view, the instruction as tokens, the direction. The layout
         is the same in both attempts of a rollout, and both count
Why      the agent must link words to objects, and remember in the second attempt where they were
Paper    AMAGO-2 section 4 and appendix B
Bounds   none measured; reports show success instead
Try      python -m suites.babyai
"""

import contextlib
import functools
import re
from collections.abc import Callable

import gymnasium
import numpy as np
from gymnasium import spaces

# The 68 of Minigrid's 96 BabyAI tasks that need no sequences of instructions and do not ask to put one object
# next to another: 50 to train on, 18 held out. Versions are -v0 where none is given.
BABYAI_TRAIN = """
    BlockedUnlockPickup FindObjS6 FindObjS7 GoTo GoToDoor GoToImpUnlock GoToLocal GoToLocalS7N5 GoToLocalS8N4
    GoToLocalS8N5 GoToLocalS8N6 GoToObjDoor GoToObjMaze GoToObjMazeOpen GoToObjMazeS4 GoToObjMazeS4R2
    GoToObjMazeS5 GoToObjMazeS6 GoToObjS6-v1 GoToOpen GoToRedBall GoToRedBallNoDists GoToRedBlueBall
    KeyCorridor KeyCorridorS3R1 KeyCorridorS3R2 KeyCorridorS3R3 KeyCorridorS4R3 KeyCorridorS5R3 KeyInBox
    OneRoomS12 OneRoomS16 OneRoomS20 OneRoomS8 Open OpenDoor OpenDoorColor OpenDoorDebug OpenRedBlueDoors
    OpenRedDoor Pickup PickupAbove PickupDist PickupDistDebug PickupLoc UnblockPickup Unlock UnlockLocal
    UnlockPickup UnlockToUnlock
"""
BABYAI_HELD_OUT = """
    GoToRedBallGrey GoToObj GoToObjS4 GoToLocalS5N2 GoToLocalS6N2 GoToLocalS6N3 GoToLocalS6N4 GoToLocalS7N4
    GoToLocalS8N2 GoToLocalS8N3 GoToLocalS8N7 GoToObjMazeS7 OpenDoorLoc UnlockLocalDist UnlockPickupDist
    ActionObjDoor FindObjS5 KeyCorridorS6R3
"""

# Every word of these tasks' instructions: the paper's 29 tokens, numbered from 2. Token 0 is padding, 1 an
# unknown word. The list is fixed here, not collected in play, so that all processes and checkpoints agree.
BABYAI_WORDS = """
    , a ball behind blue box door front go green grey in key left object of on open pick purple red right the
    then to up yellow you your
"""
BABYAI_TOKENS = {word: token for token, word in enumerate(BABYAI_WORDS.split(), start=2)}
BABYAI_VOCABULARY = 2 + len(BABYAI_TOKENS)
BABYAI_LAYOUTS = 5000  # of each task in training | OFFICIAL: authors' script; the paper prints no number
BABYAI_LENGTH = 10  # tokens of the longest: open the red door, then open the blue door


def babyai_tokens(instruction: str) -> np.ndarray:
    """An instruction as (BABYAI_LENGTH,) tokens, padded with 0. ValueError for a longer one."""
    words = re.findall(r"\w+|,", instruction)
    if len(words) > BABYAI_LENGTH:
        raise ValueError(f"an instruction of more than {BABYAI_LENGTH} tokens: '{instruction}'")
    tokens = np.zeros(BABYAI_LENGTH, dtype=np.uint8)
    tokens[: len(words)] = [BABYAI_TOKENS.get(word, 1) for word in words]
    return tokens


class BabyAITask(gymnasium.Env):
    """One BabyAI task as numbers: the grid in view, the instruction's tokens, the direction.

    `reset(seed=...)` decides the layout: one of 5,000 even seeds of Minigrid's in the train split, any odd one in
    the test split. (The smallest rooms have so few layouts that two seeds may draw the same one.) `step`'s info
    reports "success": BabyAI pays a reward only at the end of a solved attempt, and more if it comes earlier.
    """

    observation_space = spaces.Dict(
        [
            ("grid", spaces.Box(0, 255, (7, 7, 3), np.uint8)),
            ("tokens", spaces.Box(0, BABYAI_VOCABULARY - 1, (BABYAI_LENGTH,), np.uint8)),
            ("direction", spaces.Discrete(4)),
        ]
    )
    action_space = spaces.Discrete(7)

    def __init__(self, name: str, split: str):
        self.name, self.odd = name, split == "test"
        self.max_episode_length = babyai_limit(name)

    @functools.cached_property
    def game(self) -> gymnasium.Env:
        "Minigrid's own environment, made when the task is first played."
        return gymnasium.make(self.name, disable_env_checker=True).unwrapped

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        super().reset(seed=seed)
        layout = 2 * int(self.np_random.integers(2**31 if self.odd else BABYAI_LAYOUTS)) + self.odd
        # Minigrid prints each layout that it rejects. Without stdout, print() does nothing; errors still rise.
        with contextlib.redirect_stdout(None):
            obs, _ = self.game.reset(seed=layout)
        self.tokens = babyai_tokens(obs["mission"])
        return self._see(obs), {}

    def step(self, action):
        obs, reward, terminated, truncated, _ = self.game.step(action)
        return self._see(obs), float(reward), terminated, truncated, {"success": reward > 0}

    def render(self):
        return self.game.get_frame(tile_size=16)

    def _see(self, obs: dict) -> dict:
        return {"grid": obs["image"], "tokens": self.tokens, "direction": obs["direction"]}


@functools.cache
def babyai_limit(name: str) -> int:
    "The most steps of an attempt. Minigrid computes it from the layout's size, which a task never changes."
    with contextlib.redirect_stdout(None):
        game = gymnasium.make(name, disable_env_checker=True).unwrapped
        game.reset(seed=0)
    return int(game.max_steps)


def babyai_sets(split: str) -> dict[str, dict[str, Callable]]:
    """The 68 tasks by name, and the set "BabyAI" of those that a split plays: 50 in train, all in test."""
    import minigrid  # noqa: F401  it registers its tasks

    train, held_out = (
        [f"BabyAI-{name}" if re.search(r"-v\d$", name) else f"BabyAI-{name}-v0" for name in names.split()]
        for names in (BABYAI_TRAIN, BABYAI_HELD_OUT)
    )
    every = train + held_out
    missing = [name for name in every if name not in gymnasium.registry]
    if missing:
        raise ValueError(f"this minigrid has no {', '.join(missing)}: pip install -r requirements.txt")
    sets = {name: [name] for name in every} | {"BabyAI": every if split == "test" else train}
    return {s: {n: functools.partial(BabyAITask, n, split) for n in tasks} for s, tasks in sets.items()}


def babyai_tasks(split: str) -> dict[str, Callable]:
    """The tasks that a split plays: 50 in train, all 68 in test."""
    return babyai_sets(split)["BabyAI"]


if __name__ == "__main__":
    print({name: len(babyai_tasks(name)) for name in ("train", "test")}, "tasks")
    print(f"open the red door -> {babyai_tokens('open the red door')}, by hand: 19 24 22 8")
    task = BabyAITask("BabyAI-GoToLocal-v0", "train")
    for seed in (0, 0, 1):
        seen = task.reset(seed=seed)[0]
        print(f"{task.name}, seed {seed}: {task.game.mission}; grid {seen['grid'].sum(axis=(0, 1))}")
