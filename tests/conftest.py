"""What the tests share: one thread an operation, a folder for their runs, and one trained run to look at."""

import fcntl
import os
import shutil
import sys
from pathlib import Path

# The tests' tensors are small, and two threads only wait for each other. Said before torch is imported, so that
# processes which tests start do the same.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import pretend_gpu

import train
from plots import runs as curves

torch.set_num_threads(1)
pretend_gpu.register()  # before the first backward pass, which counts the kinds of devices
TRAINED = ["--env", "popgym", "--tasks", "RepeatFirstEasy", "--attempts", "1", "--variant", "ind_ind"]
TRAINED += ["--scale", "smoke", "--steps", "1500", "--device", "cpu", "--log_every", "15"]


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """The folder of a test's runs. Their curves are not drawn: that takes longer than so short a run."""
    monkeypatch.setattr(train, "ROOT", tmp_path)
    monkeypatch.setattr(curves, "plot_run", lambda folder: folder / "curves.png")
    return tmp_path / "runs"


@pytest.fixture
def draws(runs, monkeypatch, plot_run=curves.plot_run):
    "The curves of this test's runs are drawn after all."
    monkeypatch.setattr(curves, "plot_run", plot_run)


@pytest.fixture(scope="session")
def trained(tmp_path_factory, worker_id) -> tuple[Path, str]:
    """(folder of runs, name) of a finished run of train.py with the flags TRAINED, to read and not to change.

    One for all tests: workers of pytest-xdist share it, and the first that asks trains it.
    """
    root = tmp_path_factory.getbasetemp()
    root = root if worker_id == "master" else root.parent
    with (root / "trained.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = root / "trained" / "runs"
        if not (folder / "a" / "table.txt").exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a worker whose training failed
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(train, "ROOT", folder.parent)
                train.main([*TRAINED, "--name", "a"])
    return folder, "a"


@pytest.fixture
def trained_copy(trained, runs) -> Path:
    """The folder of a copy of that run among the test's own runs, named a: to resume, to change, to damage."""
    folder, name = trained
    return Path(shutil.copytree(folder / name, runs / "a"))
