r"""Speed of the replay: windows drawn and env steps added per second, against a plain list, interleaved.

    python benchmarks/replay.py                                      # all cases: a minute or two
    python benchmarks/replay.py --cases vectors-paper --seconds 5

What     `Replay.sample` and `Replay.add` with batches, windows, widths and lengths of the paper's settings or of
         the laptop scale. Frames come from random play; an untrained policy's compress about as well
Plain    a list of trajectories, frames uncompressed; windows are sliced out of it and padded. It saves the time of
         compression and takes more memory: a row compares the bytes of a frame
Rows     windows drawn and env steps added per second, medians of the repeats, and their ratio to the plain list's;
         then the bytes that a frame takes
"""

import argparse
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from presets import preset
from replay import Batch, Replay
from runtime.frame_store import FrameStore
from suites import make_env

# case -> preset, scale
CASES = {
    "vectors-laptop": ("popgym", "laptop"),
    "vectors-paper": ("popgym", "paper"),
    "frames-laptop": ("procgen-easy", "laptop"),
    "frames-paper": ("procgen-easy", "paper"),
}
WIDTH = 57  # of POPGym's observations; beside frames the vector is narrower, and its cost does not matter


class PlainList:
    """The plain replay: a list of trajectories; windows are sliced out of them and padded to the longest."""

    def __init__(self, capacity: int, seed: int = 0):
        self.held, self.capacity, self.rng = [], capacity, np.random.default_rng(seed)

    def add(self, *trajectory, image=None) -> None:
        """As `Replay.add`, without its checks."""
        arrays = (None if array is None else array.copy() for array in (*trajectory[:3], image))
        self.held.append((*arrays, *trajectory[3:]))
        if len(self.held) > self.capacity:
            self.held.pop(0)

    def sample(self, batch: int, context: int) -> Batch:
        """As `Replay.sample`, and the same windows from the same seed."""
        chosen = [self.held[i] for i in self.rng.integers(len(self.held), size=batch)]
        length_B = np.array([len(reward_T) for _, _, reward_T, *_ in chosen])
        window_B = np.minimum(length_B, context)
        offset_B, windows = self.rng.integers(length_B - window_B + 1), []
        for (obs_TO, action_T, reward_T, image_T, terminated, start, _), i, n in zip(
            chosen, offset_B, window_B
        ):
            done_T, mask_T, time_T = np.zeros(n, bool), np.ones(n, bool), start + np.arange(i, i + n + 1)
            done_T[-1] = terminated and i + n == len(reward_T)
            parts = (obs_TO[i : i + n + 1], action_T[i : i + n], reward_T[i : i + n], done_T, mask_T, time_T)
            windows.append(parts if image_T is None else (*parts, image_T[i : i + n + 1]))
        order = sorted(range(batch), key=lambda b: -window_B[b])  # stable, as Python's sort is
        windows, tasks = [windows[b] for b in order], [chosen[b][-1] for b in order]
        padded = [
            pad_sequence([*map(torch.from_numpy, part_B)], batch_first=True) for part_B in zip(*windows)
        ]
        real_S = padded[4].flatten().nonzero().flatten()
        lengths = tuple(window_B[order].tolist())
        weight_S = torch.full((len(real_S),), 1 / len(real_S))
        return Batch(*padded[:5], real_S, weight_S, lengths, padded[5], torch.tensor(tasks), *padded[6:])


def make_trajectories(case: str, count: int, longest: int | None = None) -> list[tuple]:
    """Arguments of `count` calls of `Replay.add`: noise, and the frames of random play where there are any.

    Lengths are uniform between half of the longest, which is the case's unless given, and all of it.
    """
    name, scale = CASES[case]
    values, rng = preset(name, scale), np.random.default_rng(0)
    longest, trajectories = longest or values["segment_length"], []
    frames = random_frames(name) if name != "popgym" else None
    for task in range(count):
        T = int(rng.integers(longest // 2, longest + 1))
        obs_TO = rng.standard_normal((T + 1, WIDTH)).astype(np.float32)
        action_T, reward_T = rng.integers(15, size=T), rng.standard_normal(T).astype(np.float32)
        image_T = None if frames is None else np.stack([next(frames) for _ in range(T + 1)])
        trajectories.append((obs_TO, action_T, reward_T, bool(task % 2), 0, task, image_T))
    return trajectories


def random_frames(env: str):
    "Endless frames of random play."
    env = make_env(env)
    env.action_space.seed(0)
    obs, _ = env.reset(seed=0)
    while True:
        yield obs["image"]
        obs, _, terminated, truncated, _ = env.step(env.action_space.sample())
        if terminated or truncated:
            obs, _ = env.reset()


def make_replay(trajectories: list[tuple]) -> Replay:
    "An empty replay that has room for them all, and no more."
    image = trajectories[0][-1]
    return Replay(
        observation_dim=WIDTH,
        action_shape=(),
        action_dtype=np.int64,
        max_length=max(len(reward_T) for _, _, reward_T, *_ in trajectories),
        capacity_trajectories=len(trajectories),
        frames=None if image is None else FrameStore(image.shape[1:]),
    )


def fill(store, trajectories: list[tuple]) -> None:
    "Add them all."
    for *arguments, image in trajectories:
        store.add(*arguments, image=image)


def rate(work, amount: int, seconds: float) -> float:
    "Amount of work per second: `work()` does `amount`, and is repeated for about so many seconds."
    start, count, spent = time.perf_counter(), 0, 0.0
    while spent < seconds:
        work()
        count, spent = count + 1, time.perf_counter() - start
    return count * amount / spent


def rows(
    cases: list[str] | None = None,
    seconds: float = 2.0,
    repeats: int = 5,
    count: int = 32,
    longest: int | None = None,
) -> list[dict]:
    """The table's rows. `seconds` for each store in each of `repeats`; `count` trajectories of at most `longest` steps.

    To be called with one torch thread, as in `main`. ValueError for an unknown case.
    """
    cases = list(CASES) if cases is None else cases
    for case in cases:
        if case not in CASES:
            raise ValueError(f"unknown case '{case}': choose from {', '.join(CASES)}")
    table = []
    with tqdm(total=len(cases) * (repeats + 1), desc="replay", disable=None) as bar:
        for case in cases:
            bar.set_postfix_str(case)
            values, trajectories = preset(*CASES[case]), make_trajectories(case, count, longest)
            stores = (make_replay(trajectories), PlainList(count))
            for store in stores:
                fill(store, trajectories)
            drawn, added, steps = ([], []), ([], []), stores[0].num_steps
            batch, frames = (values["batch_size"], values["context"]), stores[0].frames
            frame_bytes = None if frames is None else frames.ram_used / (steps + count)
            bar.update()
            for _ in range(repeats):
                for store, windows, adding in zip(stores, drawn, added):
                    windows.append(rate(partial(store.sample, *batch), batch[0], seconds))
                    # Both are full: each new trajectory replaces the oldest.
                    adding.append(rate(partial(fill, store, trajectories), steps, seconds / 4))
                bar.update()
            table.append(row(case, "windows", "1/s", *map(median, drawn)))
            table.append(row(case, "steps added", "1/s", *map(median, added)))
            if frames is not None:
                table.append(row(case, "bytes a frame", "B", frame_bytes, trajectories[0][-1][0].nbytes))
    return table


def row(case: str, what: str, unit: str, value: float, plain: float) -> dict:
    "A row of the table. The ratio of bytes is inverted, so that more than 1 is better everywhere."
    ratio = plain / value if unit == "B" else value / plain
    return {
        "benchmark": "replay",
        "case": case,
        "what": what,
        "value": value,
        "unit": unit,
        "plain": plain,
        "ratio": ratio,
    }


def main(argv: list[str] | None = None) -> list[dict]:
    """Print the table of the cases that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated: " + ", ".join(CASES))
    parser.add_argument("--seconds", type=float, default=2.0, help="of each store in each repeat")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--count", type=int, default=32, help="trajectories held")
    parser.add_argument("--longest", type=int, help="steps of a trajectory; default: as the preset has it")
    options = vars(parser.parse_args(argv))
    # The replay uses one thread; the plain list's padding would use all of them, without being faster.
    torch.set_num_threads(1)
    table = rows(options.pop("cases").split(","), **options)
    for line in table:
        plain = f"{line['ratio']:>8.2f}x of plain {line['plain']:,.0f}"
        print(f"{line['case']:<18}{line['what']:<15}{line['value']:>12,.0f} {line['unit']:<5}{plain}")
    return table


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
