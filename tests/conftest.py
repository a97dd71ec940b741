"""One thread an operation: the tests' tensors are small, and two threads only wait for each other."""

import pytest
import torch

import train

torch.set_num_threads(1)


@pytest.fixture
def runs(tmp_path, monkeypatch):
    "Runs of the tests go to a folder of their own."
    monkeypatch.setattr(train, "ROOT", tmp_path)
    return tmp_path / "runs"
