"""logbook.py: rows, resuming, the clock, and requests to stop."""

import json
import os
import signal
import time

import pytest

from logbook import Logbook, available_memory, describe_versions


def test_a_resumed_log_is_cut_back_to_the_checkpoint(tmp_path):
    log = Logbook(tmp_path, {"seed": 1}, {"torch": "x"}, total_steps=300)
    for step in (100, 200, 300):
        log.write(step, step // 10, {"loss": 1.0})
    log.close()
    log = Logbook(
        tmp_path, {"seed": 1}, {"torch": "x"}, total_steps=300, resume_step=200, earlier_minutes=7.0
    )
    log.write(250, 25, {"loss": 2.0})
    log.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [100, 200, 250]
    assert rows[-1]["minutes"] >= 7.0
    assert json.loads((tmp_path / "config.json").read_text()) == {"seed": 1}


def test_progress_is_the_further_of_steps_and_clock(tmp_path):
    log = Logbook(tmp_path, {}, {}, total_steps=100, total_minutes=10.0, earlier_minutes=4.0)
    log.close()
    assert log.progress(10) == pytest.approx(0.4, abs=0.01)
    assert log.progress(90) == 0.9


def test_what_the_bar_says_is_made_only_when_it_is_shown(tmp_path):
    "It takes means over all tasks, and is asked for at every step."
    log, made = Logbook(tmp_path, {}, {}, total_steps=100), []
    for step in range(1, 60):
        log.show(step, lambda step=step: made.append(step))
    assert made == [1]
    log.show(100, lambda: made.append(100))
    assert made == [1, 100]  # the last one always
    log.close()


def test_due_once_every_so_many_minutes(tmp_path):
    log = Logbook(tmp_path, {}, {}, total_steps=100)
    log.close()
    assert not log.due("save", 0.001)
    time.sleep(0.1)
    assert log.due("save", 0.001) and not log.due("save", 0.001)


def test_the_first_signal_asks_and_the_second_stops_at_once(tmp_path, capsys):
    before = signal.getsignal(signal.SIGINT)
    log = Logbook(tmp_path, {}, {}, total_steps=100)
    os.kill(os.getpid(), signal.SIGINT)
    assert log.stop_signal == signal.SIGINT and "saving a checkpoint" in capsys.readouterr().out
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    log.close()
    assert signal.getsignal(signal.SIGINT) == before


def test_versions_and_memory(tmp_path):
    found = describe_versions(tmp_path, ["numpy", "no-such-package"])
    assert found["numpy"].count(".") == 2 and found["commit"] == "unknown"
    assert found["no-such-package"] == "not installed"
    assert 10**8 < available_memory() < 10**13


def test_a_line_that_a_crash_has_cut_does_not_block_a_resume(tmp_path):
    log = Logbook(tmp_path, {}, {}, total_steps=100)
    for step in (10, 20, 30):
        log.write(step, step, {"x": 1.0})
    log.close()
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text()[:-7])
    Logbook(tmp_path, {}, {}, total_steps=100, resume_step=20).close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [10, 20]
    assert not list(tmp_path.glob("*.tmp"))
