r"""Storage cost of frames with frame_store.py: compressed bytes per frame, and windows per second.

    python results/replay_frames.py --random                # all three benchmarks; rewrites replay_frames.csv
    python results/replay_frames.py --run runs/my_run       # frames of a trained policy, on its own tasks

--random steps the simulators with random actions. Each action is held for eight steps on average (`--hold`),
so that the players make progress; `--hold 1` draws a new action at every step. Then frames need more bytes
where the view follows the player (Jumper, Ninja, Coinrun), because the view moves to and fro. The frames of a
trained policy can be larger or smaller; --run measures them. New rows replace the rows of the same benchmark
and policy in the CSV; replay_frames.txt relates all rows to the paper's replays.

    bytes_per_frame     with 32 frames per chunk at level 3, tables included, over all sequences
    compress, decompress            uncompressed MB per second of CPU time on one core
    windows_memory, windows_disk    windows of the benchmark's context per second of CPU time on one core,
                        drawn as the replay draws them; from memory, and from files in the page cache
    game "all"          the mean over games for bytes, one store with all games' frames for windows

A sequence is two attempts, cut after four contexts, as in the replay.
"""

import argparse
import csv
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tqdm import tqdm

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from runtime.frame_store import FrameStore
from suites.procgen import procgen_class

OUT = Path(__file__).with_suffix(".csv")
EASY = ("climber", "coinrun", "jumper", "leaper", "ninja")
MEMORY = ("caveflyer", "dodgeball", "heist", "jumper", "maze", "miner")
HARD = ("bigfish", "bossfight", "chaser", "climber", "coinrun", "fruitbot", "leaper", "ninja", "plunder")
HARD += ("starpilot",)
ATARI = ("BattleZone", "Boxing", "Breakout", "ChopperCommand", "CrazyClimber", "Gopher", "MsPacman", "Pong")
ATARI += ("Qbert", "Seaquest")
# Benchmark: batch, context | Tables 1 and 2; env steps in the replay | Table 1; longest rollout, steps
SETTINGS = {
    "procgen-easy": (24, 128, 18_000_000, 2500),
    "procgen-memory-hard": (16, 768, 80_000_000, 5000),
    "atari": (32, 64, 8_000_000, 100_000),
}


def games_of(benchmark: str) -> list[tuple[str, str]]:
    "The games of a benchmark and their modes."
    if benchmark == "atari":
        return [(game, "v5") for game in ATARI]
    if benchmark == "procgen-easy":
        return [(game, "easy") for game in EASY]
    return sorted([(game, "memory") for game in MEMORY] + [(game, "hard") for game in HARD])


def procgen_steps(game: str, mode: str, hold: float, seed: int, lanes: int = 8) -> Iterator:
    "Yield (frames, whether an episode starts there), one of each per environment, under random actions."
    levels = {"num_levels": 2000, "start_level": 0, "rand_seed": seed}
    env = procgen_class()(lanes, env_name=game, distribution_mode=mode, **levels)
    rng, action_E = np.random.default_rng(seed), np.zeros(lanes, np.int32)
    frames, first_E = env.reset()[0], np.ones(lanes, bool)
    while True:
        yield frames, first_E
        draw_E = rng.random(lanes) < 1 / hold
        action_E = np.where(draw_E, rng.integers(15, size=lanes), action_E).astype(np.int32)
        frames, _, first_E, _, _ = env.step(action_E)


def area_weights(size: int, target: int) -> np.ndarray:
    "Weights (target, size): a target pixel is the mean of the source pixels that it covers."
    edges = np.linspace(0, size, target + 1)
    low, high = (
        np.maximum(edges[:-1, None], np.arange(size)),
        np.minimum(edges[1:, None], np.arange(size) + 1),
    )
    return (np.maximum(high - low, 0) * target / size).astype(np.float32)


def atari_steps(game: str, hold: float, seed: int, lanes: int = 2) -> Iterator:
    "As `procgen_steps`, for an Atari game."
    import ale_py
    import gymnasium

    gymnasium.register_envs(ale_py)
    envs = [gymnasium.make(f"ALE/{game}-v5", full_action_space=True) for _ in range(lanes)]
    rows, columns = area_weights(210, 84), area_weights(160, 84)
    rng, action_E = np.random.default_rng(seed), np.zeros(lanes, int)

    def shrink(frame: np.ndarray) -> np.ndarray:
        return np.rint(np.einsum("hi,wj,ijc->hwc", rows, columns, frame, optimize=True)).astype(np.uint8)

    frames = [shrink(env.reset(seed=seed + e)[0]) for e, env in enumerate(envs)]
    first_E = np.ones(lanes, bool)
    while True:
        yield np.stack(frames), first_E.copy()
        draw_E = rng.random(lanes) < 1 / hold
        action_E = np.where(draw_E, rng.integers(18, size=lanes), action_E)
        for e, env in enumerate(envs):
            frame, _, terminated, truncated, _ = env.step(int(action_E[e]))
            first_E[e] = terminated or truncated
            frames[e] = shrink(env.reset()[0] if first_E[e] else frame)


def random_sequences(
    benchmark: str, game: str, mode: str, count: int, hold: float, seed: int
) -> list[np.ndarray]:
    "About `count` frames, in sequences as in the replay."
    _, context, _, longest = SETTINGS[benchmark]
    steps = atari_steps(game, hold, seed) if benchmark == "atari" else procgen_steps(game, mode, hold, seed)
    attempts, done, held = (1 if benchmark == "atari" else 2), [], 0
    lanes = played = None
    for frame_E, first_E in steps:
        if lanes is None:
            lanes, played = [[] for _ in first_E], np.zeros(len(first_E), int)
        played += first_E
        for e, lane in enumerate(lanes):
            if lane and (played[e] > attempts or len(lane) >= min(longest, 4 * context)):
                done.append(np.stack(lane))
                held += len(lane)
                lane.clear()
                played[e] = max(1, played[e] % (attempts + 1))
            lane.append(frame_E[e])
        if held >= count:
            return done


def trained_sequences(policy, game: str, count: int, seed: int) -> list[np.ndarray]:
    "About `count` frames of a policy's rollouts in one task, in sequences of up to four contexts."
    env, done, held, rollout = policy.make_env(), [], 0, 0
    while held < count:
        obs, _ = env.reset(seed=seed + rollout, options={"task": game})
        policy.reset()
        frames, over, rollout = [obs["image"].copy()], False, rollout + 1
        while not over and held + len(frames) < 2 * count:
            obs, _, terminated, truncated, _ = env.step(policy(obs))
            over = terminated or truncated
            frames.append(obs["image"].copy())
        length = 4 * policy.config.context
        done += [np.stack(frames[i : i + length + 1]) for i in range(0, max(1, len(frames) - 1), length)]
        held += len(frames)
    return done


def timed(store: FrameStore, handles: list[tuple[int, int]], context: int, seconds: float) -> float:
    "Windows per second, with sequences and starts drawn as in the replay."
    rng, windows = np.random.default_rng(0), 0
    out = np.empty((context + 1, *store.frame_shape), np.uint8)
    begin = time.process_time()
    while time.process_time() - begin < seconds:
        handle, frames = handles[rng.integers(len(handles))]
        count = min(frames, context + 1)
        store.read(handle, int(rng.integers(frames - count + 1)), count, out[:count])
        windows += 1
    return windows / (time.process_time() - begin)


def measure(sequences: list[np.ndarray], context: int, seconds: float) -> dict:
    "Bytes, speeds and windows of the frames of one game or of all games."
    shape, raw = sequences[0].shape[1:], sum(s.nbytes for s in sequences)
    store = FrameStore(shape)
    begin = time.process_time()
    handles = [(store.add(s), len(s)) for s in sequences]
    compress = raw / (time.process_time() - begin)
    begin = time.process_time()
    for (handle, frames), sequence in zip(handles, sequences):
        if not np.array_equal(store.read(handle, 0, frames), sequence):
            raise AssertionError("frames do not come back as they went in")
    begin = time.process_time()
    for handle, frames in handles:
        store.read(handle, 0, frames)
    decompress = raw / (time.process_time() - begin)
    with tempfile.TemporaryDirectory(dir=OUT.parent) as folder:
        spilled = FrameStore(shape, folder=folder)
        there = [(spilled.add(s), len(s)) for s in sequences]
        for block in spilled._blocks:  # all blocks, whatever the memory budget
            spilled._spill(block)
        frames = sum(len(s) for s in sequences)
        row = {
            "frames": frames,
            "sequences": len(sequences),
            "bytes_per_frame": round(store.ram_used / frames),
            "ratio": round(raw / store.ram_used, 1),
            "compress_mb_s": round(compress / 1e6),
            "decompress_mb_s": round(decompress / 1e6),
            "windows_memory": round(timed(store, handles, context, seconds)),
            "windows_disk": round(timed(spilled, there, context, seconds)),
        }
        spilled.close()
    return row


def report(rows: list[dict]) -> str:
    "The table, and the sizes and times of the paper's replays."
    columns = ("policy", "game", "mode", "bytes_per_frame", "ratio", "compress_mb_s", "decompress_mb_s")
    columns += ("windows_memory", "windows_disk")
    lines = []
    for benchmark, (batch, context, steps, _) in SETTINGS.items():
        inside = [row for row in rows if row["benchmark"] == benchmark]
        if not inside:
            continue
        lines += [f"{benchmark}: windows of {context} steps", " ".join(f"{c:>16}" for c in columns)]
        lines += [" ".join(f"{row[c]!s:>16}" for c in columns) for row in inside]
        for row in (row for row in inside if row["game"] == "all"):
            games = [r for r in inside if r["policy"] == row["policy"] and r["game"] != "all"]
            worst = max(games, key=lambda r: int(r["bytes_per_frame"]))
            size = steps * int(row["bytes_per_frame"]) / 1e9
            lines.append(
                f"{row['policy']}: {steps / 1e6:.0f} million frames come to {size:.0f} GB; all of them "
                f"{worst['game']}, {steps * int(worst['bytes_per_frame']) / 1e9:.0f} GB; a batch of {batch} "
                f"takes {1000 * batch / float(row['windows_memory']):.0f} ms from memory, "
                f"{1000 * batch / float(row['windows_disk']):.0f} ms from files in the page cache"
            )
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    "Measure, merge the rows into the CSV, write and print the report."
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--random", action="store_true", help="random actions on the bare simulators")
    which.add_argument("--run", help="a folder under runs/, whose policy plays")
    parser.add_argument("--benchmarks", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--frames", type=int, default=10_000, help="of each game")
    parser.add_argument(
        "--hold", type=float, default=8.0, help="steps that a random action is held, on average"
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="of each timing")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    policy, benchmarks = None, options.benchmarks
    if options.run:
        import train

        policy = train.load(options.run, seed=options.seed)
        benchmark = policy.config.env.removesuffix("-rescaled")
        if benchmark not in SETTINGS:
            parser.error(f"{options.run} is a run on {policy.config.env}, which has no frames")
        benchmarks = [benchmark]
        chosen = {benchmark: [(task, "") for task in policy.make_env().tasks]}
        name = f"{Path(options.run).name}, trained"
    else:
        chosen = {benchmark: games_of(benchmark) for benchmark in benchmarks}
        name = f"random, held {options.hold:g}"

    rows = []
    for benchmark in benchmarks:
        context, everything, measured = SETTINGS[benchmark][1], [], []
        for game, mode in tqdm(chosen[benchmark], desc=benchmark, disable=None):
            if policy:
                sequences = trained_sequences(policy, game, options.frames, options.seed)
            else:
                sequences = random_sequences(
                    benchmark, game, mode, options.frames, options.hold, options.seed
                )
            head = {"benchmark": benchmark, "policy": name, "game": game, "mode": mode}
            measured.append(head | measure(sequences, context, options.seconds))
            everything += sequences
        mean = {"bytes_per_frame": round(np.mean([row["bytes_per_frame"] for row in measured]))}
        head = {"benchmark": benchmark, "policy": name, "game": "all", "mode": ""}
        rows += [*measured, head | measure(everything, context, options.seconds) | mean]

    new = {(row["benchmark"], row["policy"]) for row in rows}
    kept = []
    if OUT.exists():
        with open(OUT, newline="") as file:
            kept = [row for row in csv.DictReader(file) if (row["benchmark"], row["policy"]) not in new]
    order = list(SETTINGS)
    rows = sorted([*kept, *rows], key=lambda row: (order.index(row["benchmark"]), row["policy"]))
    with open(OUT, "w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    text = report(rows)
    OUT.with_suffix(".txt").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
