"""runtime/checkpoint.py: nothing is lost, nothing damaged is taken for good, and nothing in a file runs."""

import hashlib
import os
import pickle
import random
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from runtime import checkpoint
from runtime.checkpoint import (
    CheckpointError,
    check_compatible,
    clean_state_dict,
    load,
    rng_state,
    save,
    set_rng_state,
)


@pytest.fixture
def path(tmp_path):
    "A checkpoint that is there already, in a folder of its own."
    path = tmp_path / "runs" / "one" / "checkpoint.pt"
    save(path, {"steps": 1, "w": torch.arange(1000.0)})
    return path


def test_round_trip(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    state = {
        "agent": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "config": {"gammas": (0.1, 0.9), "name": "one", "minutes": None, "symlog": True},
        "replay": {"done": torch.tensor([True, False]), "rng": np.random.default_rng(0).bit_generator.state},
    }
    save(tmp_path / "new" / "folder" / "c.pt", state)
    loaded = load(tmp_path / "new" / "folder" / "c.pt")
    for part in ("agent", "optimizer"):
        torch.testing.assert_close(loaded[part], state[part], rtol=0, atol=0)
    assert loaded["config"] == state["config"] and loaded["replay"]["rng"] == state["replay"]["rng"]
    assert loaded["replay"]["done"].tolist() == [True, False]
    optimizer.load_state_dict(loaded["optimizer"])
    assert os.listdir(tmp_path / "new" / "folder") == ["c.pt"]


def test_other_readers_can_open_it(path):
    assert torch.load(path, weights_only=True)["steps"] == 1


class Crash(BaseException):
    "Not an Exception: as Ctrl-C is not, either."


@pytest.mark.parametrize("where", ["write", "flush to disk", "rename"])
def test_a_crash_in_mid_write_leaves_the_old_file(path, monkeypatch, where):
    before, reached = path.read_bytes(), []

    def crash(*arguments):
        reached.append((path.parent / "checkpoint.pt.writing").stat().st_size)
        raise Crash

    if where == "write":
        real = checkpoint._HashedFile.write

        def write(self, data):
            real(self, data)
            if self.tell() > 4000:
                self.flush()
                crash()

        monkeypatch.setattr(checkpoint._HashedFile, "write", write)
    else:
        monkeypatch.setattr(os, {"flush to disk": "fsync", "rename": "replace"}[where], crash)
    with pytest.raises(BaseException) as caught:
        save(path, {"steps": 2, "w": torch.arange(5000.0)})
    assert isinstance(caught.value, (Crash, RuntimeError))  # torch.save may wrap what its file raises
    monkeypatch.undo()
    assert reached and reached[0] > 4000, "the crash must come after something was written"
    assert path.read_bytes() == before and load(path)["steps"] == 1
    assert os.listdir(path.parent) == ["checkpoint.pt"]
    save(path, {"steps": 3})
    assert load(path)["steps"] == 3


def test_a_killed_process_leaves_the_old_file(path):
    "Nothing can clean up after SIGKILL: the next save takes the leftover's place."
    program = f"""
import os, signal
from runtime import checkpoint
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
checkpoint.save({str(path)!r}, {{"steps": 2}})
"""
    root = Path(checkpoint.__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", program], cwd=root, check=False)
    assert done.returncode == -9
    assert load(path)["steps"] == 1 and len(os.listdir(path.parent)) == 2
    save(path, {"steps": 3})
    assert load(path)["steps"] == 3 and os.listdir(path.parent) == ["checkpoint.pt"]


def test_the_data_is_on_the_disk_before_the_name(path, monkeypatch):
    order = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(number):
        order.append("folder" if stat.S_ISDIR(os.fstat(number).st_mode) else "data")
        real_fsync(number)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", lambda *names: (order.append("rename"), real_replace(*names)))
    save(path, {"steps": 2})
    assert order == ["data", "rename", "folder"]


def test_every_truncation_is_told(path):
    data = path.read_bytes()
    for size in [
        0,
        1,
        7,
        8,
        39,
        40,
        41,
        len(data) // 2,
        len(data) - 41,
        len(data) - 40,
        len(data) - 8,
        len(data) - 1,
    ]:
        path.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match="is damaged") as caught:
            load(path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_every_changed_bit_is_told(path):
    data = path.read_bytes()
    for place in [*range(0, len(data), 97), *range(len(data) - 45, len(data))]:
        damaged = bytearray(data)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="is damaged"):
            load(path)
    path.write_bytes(data)
    assert load(path)["steps"] == 1


def test_missing_file(tmp_path):
    for missing in (tmp_path / "checkpiont.pt", tmp_path):
        with pytest.raises(CheckpointError, match=r"no checkpoint at .*runs/"):
            load(missing)


class Payload:
    "What a hostile file would hold: reading it makes a file."

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return open, (self.marker, "w")


@pytest.mark.parametrize("form", ["zip", "bare pickle", "garbage"])
def test_a_checkpoint_cannot_run_code(tmp_path, form):
    "Even one with a good checksum."
    marker, path = tmp_path / "it_ran", tmp_path / "evil.pt"
    if form == "zip":
        save(path, {"steps": 1, "w": Payload(marker)})
    else:
        data = (
            pickle.dumps({"w": Payload(marker)}, protocol=2) if form == "bare pickle" else b"good day" * 100
        )
        path.write_bytes(data + hashlib.sha256(data).digest() + checkpoint.MAGIC)
    if form == "zip":  # the payload works: without the guard it runs
        torch.load(path, weights_only=False)["w"].close()
        assert marker.exists()
        marker.unlink()
    with pytest.raises(CheckpointError, match="is not plain data, and was not opened") as caught:
        load(path)
    assert not marker.exists()
    assert "\n" not in str(caught.value)


def draw_all():
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(3).tolist()


def test_random_state_round_trip(tmp_path):
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    draw_all()  # leaves a Gaussian of NumPy and of Python in store, which belongs to the state
    save(tmp_path / "c.pt", rng_state())
    first = draw_all()
    assert draw_all() != first
    set_rng_state(load(tmp_path / "c.pt"))
    assert draw_all() == first


def test_random_state_is_a_copy():
    state = rng_state()
    first = [np.random.rand(2000) for _ in range(2)]  # more than the 624 words of its state
    torch.rand(2000)
    set_rng_state(state)
    np.testing.assert_array_equal([np.random.rand(2000) for _ in range(2)], first)


def test_states_of_gpus_that_are_gone_are_left_out(monkeypatch):
    state = rng_state() | {"cuda": [torch.zeros(16, dtype=torch.uint8)] * 2}
    set_on = []
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: set_on.append(device))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    set_rng_state(state)
    assert set_on == []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    set_rng_state(state)
    assert set_on == [0]


def test_names_without_wrappers():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.module = nn.Linear(2, 2), nn.Linear(2, 2)

    plain = Model()
    names = set(plain.state_dict())
    whole, part = torch.compile(Model()), Model()
    part.encoder = torch.compile(part.encoder)
    assert names.isdisjoint(whole.state_dict()) and names != set(part.state_dict())
    parallel = {f"module.{name}": value for name, value in part.state_dict().items()}
    for wrapped in (whole.state_dict(), part.state_dict(), parallel, plain.state_dict()):
        assert set(clean_state_dict(wrapped)) == names
    plain.load_state_dict(clean_state_dict(whole.state_dict()))
    torch.testing.assert_close(plain.encoder.weight, whole._orig_mod.encoder.weight)
    assert clean_state_dict({}) == {}


def test_another_configuration_is_named():
    saved = {"d_model": 64, "bins": 32, "gammas": (0.1, 0.9), "seed": 0}
    check_compatible(saved, saved | {"seed": 1}, ["d_model", "bins", "gammas"])
    with pytest.raises(ValueError) as caught:
        check_compatible(
            saved, saved | {"d_model": 256, "gammas": (0.1, 0.99), "seed": 1}, ["d_model", "bins", "gammas"]
        )
    message = str(caught.value)
    assert "from another configuration: d_model was 64 and is now 256; " in message
    assert "gammas was (0.1, 0.9) and is now (0.1, 0.99)" in message
    assert "bins" not in message and "seed" not in message and "\n" not in message
    with pytest.raises(ValueError, match="heads was None and is now 4"):  # from before there was one
        check_compatible(saved, saved | {"heads": 4}, ["heads"])
