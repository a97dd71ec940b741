"""Memory that does not grow: the script under benchmarks/, shortened."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SPEC = importlib.util.spec_from_file_location("benchmarks_memory", ROOT / "benchmarks" / "memory.py")
memory = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(memory)


def test_a_run_and_changes_of_level_do_not_grow(capsys):
    assert memory.main(["--steps", "12000", "--levels", "100"]) == 0
    assert "growth after the first quarter" in capsys.readouterr().out


def test_what_grows_is_told(monkeypatch, capsys):
    "A leak of 50 kB a step, as if an environment kept its frames."
    leak, original = [], memory.train.collect
    monkeypatch.setattr(
        memory.train, "collect", lambda run: (leak.append(b"x" * 200_000 + bytes(len(leak))), original(run))
    )
    assert memory.main(["--steps", "6000", "--levels", "0"]) == 1
