"""Show what the environments look like: every task with its sizes, and a rollout of two attempts."""

import argparse

from envs import Actions, MultiTaskEnv, attempt_limit, feature_count, is_image
from suites import BENCHMARKS, all_tasks, make_env


def print_list(env: str) -> None:
    "Every task of a benchmark with its true sizes."
    tasks = all_tasks(env)
    print(f"{'task':<32}{'observation':>12}{'actions':>9}{'longest attempt':>17}")
    for name, make in tasks.items():
        inner = make()
        actions, limit = Actions(inner.action_space), attempt_limit(inner)
        space = inner.observation_space
        size = "x".join(map(str, space.shape)) if is_image(space) else feature_count(space)
        print(f"{name:<32}{size:>12}{actions.size:>9}{limit or '-':>17}")
        inner.close()
    whole = MultiTaskEnv(tasks)
    slices = ", ".join(f"{name} {s.stop - s.start}" for name, s in whole.layout.items())
    size = sum(s.stop - s.start for s in whole.layout.values())
    image = f"image {'x'.join(map(str, whole.image_shape))} and " if whole.image_shape else ""
    print(f"{len(tasks)} tasks; together: observation {image}{size} ({slices})")
    whole.close()


def example() -> None:
    "A two-attempt rollout in which the answers are right, across its attempt boundary."
    env = make_env("popgym", "RepeatFirstEasy", attempts=2)
    obs, info = env.reset(seed=0)
    print(f"{info['task']}: repeat the first suit that was shown; 51 steps an attempt, +-1/51 each")
    done, t, first = False, 0, int(obs[env.layout["observation"]].argmax())
    while not done:
        if t < 2 or 49 < t < 54:
            parts = {name: obs[s].astype(float).round(3).tolist() for name, s in env.layout.items()}
            print(f"t={t}", " ".join(f"{k} {v if len(v) > 1 else v[0]:}" for k, v in parts.items()))
        obs, _, done, _, info = env.step(first)
        t += 1
        if obs[env.layout["attempt_start"]]:
            first = int(obs[env.layout["observation"]].argmax())
    real = [round(float(r), 3) for r in info["attempt_returns"]]
    print(f"rollout of {info['length']} steps: real returns {real}, counted {info['return']:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Show what the environments look like.")
    parser.add_argument(
        "--list",
        metavar="ENV",
        nargs="*",
        help=f"print every task of benchmarks, all unless named: {', '.join(BENCHMARKS)}, gym:ID[,ID...]",
    )
    listed = parser.parse_args().list
    try:
        for env in (listed or BENCHMARKS) if listed is not None else ():
            print(f"\n{env}:" if len(listed) != 1 else "", end="\n" if len(listed) != 1 else "")
            print_list(env)
        if listed is None:
            example()
    except ValueError as error:
        parser.exit(2, f"error: {error}\n")
