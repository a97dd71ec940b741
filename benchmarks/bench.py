r"""The benchmarks of rollout, replay and learner in one table, results/bench.csv, with the machine's description.

make bench                       # about 20 minutes on 2 cores; run nothing else meanwhile
python benchmarks/bench.py --quick
"""

import argparse
import csv
import importlib.util
import platform
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from runtime.logger import available_memory, describe_versions

# Mean entropy, in nats, of a policy trained for an hour at laptop scale on all of POPGym: 0.65 to 0.77 in
# results/popgym_laptop_again.txt.
TRAINED_ENTROPY = 0.75
FIELDS = ("benchmark", "case", "what", "value", "unit", "plain", "ratio")
PARTS = {
    "rollout": [],
    "replay": [],
    "learner, one thread": ["--shapes", "small,laptop", "--entropy", str(TRAINED_ENTROPY), "--threads", "1"],
    "learner": ["--entropy", str(TRAINED_ENTROPY)],
    "learner, untrained": ["--shapes", "popgym-paper", "--no_memory"],  # the entropy of a fresh policy
}
QUICK = {
    "learner": ["--shapes", "laptop", "--repeats", "1", "--no_memory", "--threads", "1"],
    "rollout": ["--cases", "popgym-8", "--seconds", "0.2"],
}
QUICK["replay"] = ["--cases", "vectors-laptop", "--seconds", "0.2"]


def processor() -> str:
    "The processor's name, if the system knows it."
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown processor"


def load(name: str):
    "Import a benchmark of this folder by its path: benchmarks/replay.py has the name of the project's replay.py."
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(argv=None) -> list[dict]:
    """Run all benchmarks, write the table, and return its rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="a few cases of seconds each, to see that it runs"
    )
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "bench.csv")
    arguments = parser.parse_args(argv)
    if arguments.quick and arguments.output == ROOT / "results" / "bench.csv":
        arguments.output = ROOT / "results" / "bench_quick.csv"  # keep the numbers that the README cites
    partial = arguments.output.with_suffix(".partial")
    versions = describe_versions(ROOT)
    machine = f"{processor()}, {versions['machine']}, {available_memory() / 1e9:.0f} GB of memory free"
    table = []
    for part, flags in (QUICK if arguments.quick else PARTS).items():
        name = part.split(",")[0]
        print(f"\n{part}: python benchmarks/{name}.py {' '.join(flags)}", flush=True)
        table += [{**row, "benchmark": part} for row in load(name).main(flags)]
        # Written after each part, so that an interruption loses only one; renamed at the end.
        with partial.open("w", newline="") as file:
            file.write(f"# {machine}; torch {versions['torch']}; commit {versions['commit']}\n")
            writer = csv.DictWriter(file, FIELDS)
            writer.writeheader()
            writer.writerows(table)
    partial.replace(arguments.output)
    print(f"wrote {arguments.output}")
    return table


if __name__ == "__main__":
    main()
