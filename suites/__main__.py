"""List the tasks of benchmarks with their sizes: `python -m suites --list [ENV...]` or `python envs.py --list [ENV...]`."""

import argparse

from gymnasium import spaces

from envs import Actions, MultiTaskEnv, attempt_limit, is_image
from suites import BENCHMARKS, all_tasks


def print_list(env: str) -> None:
    "Every task of a benchmark with its true sizes, and the sizes of the padded whole."
    tasks = all_tasks(env)
    print(f"{'task':<32}{'observation':>12}{'actions':>9}{'longest attempt':>17}")
    for name, make in tasks.items():
        inner = make()
        actions, limit = Actions(inner.action_space), attempt_limit(inner)
        space = inner.observation_space
        size = "x".join(map(str, space.shape)) if is_image(space) else spaces.flatdim(space)
        print(f"{name:<32}{size:>12}{actions.size:>9}{limit or '-':>17}")
        inner.close()
    whole = MultiTaskEnv(tasks)
    slices = ", ".join(f"{name} {s.stop - s.start}" for name, s in whole.layout.items())
    image = f"image {'x'.join(map(str, whole.image_shape))} and " if whole.image_shape else ""
    print(f"{len(tasks)} tasks; together: observation {image}{whole.observation_size} ({slices})")
    whole.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="List the tasks of benchmarks with their sizes.")
    names = f"benchmarks, all unless named: {', '.join(BENCHMARKS)}, gym:ID[,ID...]"
    parser.add_argument("--list", metavar="ENV", nargs="*", required=True, help=names)
    listed = parser.parse_args().list
    try:
        for env in listed or BENCHMARKS:
            if len(listed) != 1:
                print(f"\n{env}:")
            print_list(env)
    except ValueError as error:
        parser.exit(2, f"error: {error}\n")
