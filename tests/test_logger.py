"""runtime/logger.py: rows, resuming, the clock, and signals."""

import json
import os
import signal
import time

import pytest

from runtime.logger import Logger, available_memory, describe_versions


def test_a_resumed_log_is_cut_back_to_the_checkpoint(tmp_path):
    "Also where the checkpoint lies between rows of the same step."
    files = {"config": {"seed": 1}, "versions": {"torch": "x"}}
    log = Logger(tmp_path, files, total_steps=300)
    sizes = []
    for step, updates in ((100, 10), (200, 20), (200, 30), (300, 40)):
        log.write(step, updates, {"loss": 1.0})
        sizes.append(log.sync())
    log.close()
    log = Logger(tmp_path, files, total_steps=300, resume=(sizes[1], 200), earlier_minutes=7.0)
    log.write(200, 31, {"loss": 2.0})
    log.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["updates"] for row in rows] == [10, 20, 31]
    assert rows[-1]["minutes"] >= 7.0
    assert json.loads((tmp_path / "config.json").read_text()) == {"seed": 1}


def test_a_silent_logger_hears_signals_and_writes_nothing(tmp_path, capsys):
    log = Logger(tmp_path / "a", {}, total_steps=100, silent=True)
    log.write(1, 1, {"x": 1.0}), log.say("hello"), log.show(1, lambda: "hello")
    os.kill(os.getpid(), signal.SIGTERM)
    assert log.stop_signal == signal.SIGTERM and log.progress(50) == 0.5
    log.close()
    assert not (tmp_path / "a").exists() and capsys.readouterr() == ("", "")


def test_progress_is_the_greater_share_of_steps_and_time(tmp_path):
    log = Logger(tmp_path, {}, total_steps=100, total_minutes=10.0, earlier_minutes=4.0)
    log.close()
    assert log.progress(10) == pytest.approx(0.4, abs=0.01)
    assert log.progress(90) == 0.9


def test_the_bars_text_is_made_only_when_it_is_shown(tmp_path):
    "It costs means over all tasks, and `show` is called at every step."
    log, made = Logger(tmp_path, {}, total_steps=100), []
    for step in range(1, 60):
        log.show(step, lambda step=step: made.append(step))
    assert made == [1]
    log.show(100, lambda: made.append(100))
    assert made == [1, 100]  # the end is always shown
    log.close()


def test_the_bar_that_stays_at_the_end_shows_the_end(tmp_path, capsys):
    "Into a file the bar is shown every 30 seconds; after Ctrl-C, the last one must not be 30 seconds old."
    log = Logger(tmp_path, {}, total_steps=100)
    for step in range(1, 41):
        log.show(step, lambda step=step: f"{step} steps")
    log.close()
    last = capsys.readouterr().err.replace("\n", "\r").rstrip("\r").split("\r")[-1]
    assert "40%" in last and "40 steps" in last


def test_a_job_is_due_again_an_interval_after_it_was_done(tmp_path):
    log = Logger(tmp_path, {}, total_steps=100)
    log.close()
    assert not log.due("save", 0.001)
    time.sleep(0.1)
    assert log.due("save", 0.001) and log.due("save", 0.001)  # until it is done
    log.done("save")
    assert not log.due("save", 0.001)


def test_the_first_signal_asks_to_stop_and_the_same_again_stops_at_once(tmp_path, capfd):
    "Another signal does not: on one Ctrl-C, torchrun sends SIGTERM after SIGINT."
    before = signal.getsignal(signal.SIGINT)
    log = Logger(tmp_path, {}, total_steps=100)
    os.kill(os.getpid(), signal.SIGINT)
    assert log.stop_signal == signal.SIGINT and "saving a checkpoint" in capfd.readouterr().err
    os.kill(os.getpid(), signal.SIGTERM)
    assert log.stop_signal == signal.SIGINT and "saving" not in capfd.readouterr().err
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    log.close()
    assert signal.getsignal(signal.SIGINT) == before


def test_versions_and_memory(tmp_path):
    found = describe_versions(tmp_path, ["numpy", "no-such-package"])
    assert found["numpy"].count(".") == 2 and found["commit"] == "unknown"
    assert found["no-such-package"] == "not installed"
    assert 10**8 < available_memory() < 10**13


@pytest.mark.parametrize("lost", [1, 7, 60])
def test_a_log_that_was_cut_short_keeps_its_whole_lines(tmp_path, lost):
    log = Logger(tmp_path, {}, total_steps=100)
    for step in (10, 20, 30):
        log.write(step, step, {"x": 1.0})
    size = log.sync()
    log.close()
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-lost])
    Logger(tmp_path, {}, total_steps=100, resume=(size, 30)).close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [10, 20, 30][
        : -1 - lost // 60
    ]
    assert not list(tmp_path.glob("*.tmp"))
