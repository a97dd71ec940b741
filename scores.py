r"""What a return is worth: the score between a random policy and the best known return, as a table.

What     score = (return - random) / (best - random), task by task, and the table that a run ends with
Why      raw returns of different tasks cannot be averaged: a random cart-pole earns .1, a random card -.9
Paper    AMAGO-2 section 4 normalises between a random policy and single-task experts. DEVIATION: ours takes
         scripted oracles that see the hidden state (results/popgym_bounds.py), an upper bound; scores here
         are therefore lower than the paper's for the same return
Shapes   none; a row of the table is a dictionary
Copy     this file alone, and a CSV with the columns task, random_mean, best_mean; needs numpy
Try      python scores.py
"""

import csv
from pathlib import Path

import numpy as np

RESULTS = Path(__file__).resolve().parent / "results"


def load_bounds(env: str) -> dict[str, tuple[float, float]]:
    """Measured (random, best) return of each task of a benchmark; {} where none were measured."""
    # The rescaled tasks are POPGym's own, and their returns are reported in the tasks' own scale.
    path = RESULTS / f"{'popgym' if env == 'scales' else env}_bounds.csv"
    if not path.exists():
        return {}
    with open(path) as file:
        return {r["task"]: (float(r["random_mean"]), float(r["best_mean"])) for r in csv.DictReader(file)}


def score_rows(returns: dict[str, list[float]], bounds: dict[str, tuple[float, float]]) -> list[dict]:
    """A row a task from its returns: mean, standard error, bounds, score. None where no bounds are known."""
    rows = []
    for task, values in returns.items():
        mean = float(np.mean(values))
        error = float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float("nan")
        low, high = bounds.get(task, (None, None))
        # score = (return - random) / (best - random): 0 is a random policy, 1 the best known or provable
        score = None if low is None else (mean - low) / (high - low)
        rows.append(
            {"task": task, "episodes": len(values), "return": mean, "standard_error": error}
            | {"random": low, "best": high, "score": score}
        )
    return rows


def mean_scores(rows: list[dict]) -> tuple[float, float | None]:
    """Mean return and mean score over tasks; the score is None unless every task has bounds."""
    scores = [row["score"] for row in rows]
    return float(np.mean([row["return"] for row in rows])), None if None in scores else float(np.mean(scores))


def format_table(rows: list[dict]) -> str:
    """The rows of `score_rows` as text, with the means over tasks below."""

    def cells(*values):
        return "".join(f"{'-' if v is None else format(v, '.3f'):>9}" for v in values)

    lines = [f"{'task':<32}{'return':>9}{'+-':>9}{'random':>9}{'best':>9}{'score':>9}"]
    for r in rows:
        lines.append(
            f"{r['task']:<32}" + cells(r["return"], r["standard_error"], r["random"], r["best"], r["score"])
        )
    mean, score = mean_scores(rows)
    lines.append(f"{f'mean of {len(rows)} tasks':<32}{cells(mean)}{'':27}{cells(score)}")
    return "\n".join(lines)


if __name__ == "__main__":
    bounds = {"RepeatFirstEasy": (-0.5, 1.0), "HigherLowerEasy": (0.0, 0.5)}
    print("two tasks, random returns -0.5 and 0, best 1 and 0.5; three rollouts of each")
    print(
        format_table(
            score_rows({"RepeatFirstEasy": [0.2, 0.3, 0.1], "HigherLowerEasy": [0.5, 0.4, 0.3]}, bounds)
        )
    )
    print("by hand: (0.2 + 0.5) / 1.5 = 0.467 and 0.4 / 0.5 = 0.8, their mean 0.633")
