r"""Bounds of POPGym returns: the return of a random policy, and the best known or provable return.

    python results/popgym_bounds.py            # rewrites results/popgym_bounds.csv; a minute on one core

Returns are those of one attempt. The random policy draws uniformly from a task's own actions. In the 27-task
environment a uniform draw over the padded actions is equivalent, because an invalid action is replaced
uniformly. The best returns are from oracles that see the hidden state:

    exact      every episode had the same return, and the task has no higher one. Cards are repeated, counted
               or recited backwards, mines are avoided, poles are balanced to the last step. An agent's first
               square in MineSweeper is a guess, so its mean return is lower
    estimated  a mean over episodes. In HigherLower the oracle bets on the larger part of the remaining deck,
               the best choice with perfect memory. In MultiarmedBandit it always chooses the best arm; an
               agent has to find that arm first, so no agent reaches this return
"""

import argparse
import csv
import sys
from pathlib import Path

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from envs import Actions
from suites import task_family
from suites.popgym import popgym_tasks

OUT = Path(__file__).with_suffix(".csv")


def recite(env):
    "Autoencode: the last card in hand, once all cards were shown."
    return int(env.deck.suits_idx[env.deck["system"][-1]])


def previous(env):
    "RepeatPrevious: the card k steps earlier, if there is one."
    enough = env.deck.hand_size("player") >= env.k
    return int(env.deck.suits_idx[env.deck["player"][-env.k]]) if enough else 0


def count_cards(env):
    "HigherLower: 0 bets on higher, 1 on lower. A tie pays nothing."
    left = 4 * env.num_decks - env.state.astype(int)
    card = int(env.deck.show("player", ["ranks_idx"]).item())
    return 0 if left[card + 1 :].sum() >= left[:card].sum() else 1


def balance(env):
    "Cart-poles: push to the side to which the pole is falling, with a correction for the cart's drift."
    x, x_speed, angle, angle_speed = env.unwrapped.state
    return int(angle + 0.25 * angle_speed + 0.02 * x + 0.05 * x_speed > 0)


def avoid_mines(env):
    "MineSweeper: the number of the first square without a mine that is still covered."
    return int(np.flatnonzero(env.hidden_grid.ravel() == 0)[0])


# Family: the action with the best return, given the simulator.
ORACLES = {
    "Autoencode": recite,
    "RepeatPrevious": previous,
    "RepeatFirst": lambda env: int(env.card),
    "CountRecall": lambda env: int(env.counts[env.query]),
    "HigherLower": count_cards,
    "MultiarmedBandit": lambda env: int(np.argmax(env.bandits)),
    "PositionOnlyCartPole": balance,
    "VelocityOnlyCartPole": balance,
    "NoisyPositionOnlyCartPole": balance,
    "MineSweeper": avoid_mines,
}
HOW = {
    "Autoencode": "recites the cards in hand from the last to the first",
    "RepeatPrevious": "names the suit k cards back",
    "RepeatFirst": "names the first suit",
    "CountRecall": "names the true count",
    "HigherLower": "bets by the cards left in the deck as perfect memory could",
    "MultiarmedBandit": "knows the best arm from the start",
    "PositionOnlyCartPole": "linear feedback on the true state",
    "VelocityOnlyCartPole": "linear feedback on the true state",
    "NoisyPositionOnlyCartPole": "linear feedback on the true state",
    "MineSweeper": "sees the mines",
}
ESTIMATED = {"HigherLower", "MultiarmedBandit"}


def play(make, choose, episodes: int, seed: int) -> np.ndarray:
    """Returns (episodes,) of a task under `choose(env)`, episode i seeded with `seed` + i."""
    env, returns = make(), np.zeros(episodes)
    to_task = Actions(env.action_space).to_task
    for i in range(episodes):
        env.reset(seed=seed + i)
        done = False
        while not done:
            _, reward, terminated, truncated, _ = env.step(to_task(choose(env)))
            returns[i] += reward
            done = terminated or truncated
    return returns


def measure(task: str, make, random_episodes: int, best_episodes: int, seed: int = 10**6) -> dict:
    """Measure a task: one row of the table."""
    rng, size = np.random.default_rng(seed), Actions(make().action_space).size
    low = play(make, lambda env: int(rng.integers(size)), random_episodes, seed)
    family = task_family(task)
    high = play(make, ORACLES[family], best_episodes, seed)
    # Exact returns can still differ in their last digits: they are sums of many thirds or fifty-firsts.
    exact = family not in ESTIMATED and np.ptp(high) < 1e-6
    return {
        "task": task,
        "random_mean": round(low.mean(), 5),
        "random_se": round(low.std(ddof=1) / len(low) ** 0.5, 5),
        "random_episodes": len(low),
        "best_mean": round(high.mean(), 5),
        "best_se": round(high.std(ddof=1) / len(high) ** 0.5, 5),
        "best_episodes": len(high),
        "best_kind": "exact" if exact else "estimated",
        "best_how": HOW[family],
    }


def main() -> None:
    """Measure all 27 tasks and write the table."""
    parser = argparse.ArgumentParser(description="Measure random and best returns of the 27 POPGym tasks.")
    parser.add_argument("--random_episodes", type=int, default=1000)
    parser.add_argument(
        "--best_episodes", type=int, default=200, help="of the exact tasks; estimated ones take 5 times"
    )
    options = parser.parse_args()
    rows = []
    for task, make in tqdm(popgym_tasks().items(), unit="task"):
        more = 5 if task_family(task) in ESTIMATED else 1
        rows.append(measure(task, make, options.random_episodes, options.best_episodes * more))
    with OUT.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(f"written: {OUT}")


if __name__ == "__main__":
    main()
