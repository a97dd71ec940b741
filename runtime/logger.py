r"""A run's folder, log, progress bar and clock: everything that a run tells, and keeps under runs/<name>/.

What     `Logger` writes metrics.jsonl and TensorBoard scalars against env steps, shows the bar, knows how
         much of the run is over, and turns Ctrl-C or SIGTERM into a request to stop
Why      whatever a result depends on can be found again, and the training loop stays readable
Paper    none
Folder   config.json, versions.json, metrics.jsonl (one row a line), tensorboard/; the trainer adds
         checkpoint.pt, best.pt, table.txt and curves.png
Copy     this file alone; needs tqdm and tensorboard (with torch)
Try      python logbook.py
"""

import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


class Logger:
    """Opens (or, to resume, continues) the folder of a run.

    Arguments: `folder`; `config` and `versions`, dictionaries that are saved as JSON; `total_steps` and
    `total_minutes` (or None), of which the first to be reached ends the run; `resume`: None for a new run,
    else (bytes of the log, env steps) at the checkpoint, to which the log is cut back so that no row is
    doubled; `earlier_minutes` that the run took before. Where several processes train together, all but one
    are `silent`: they keep time and hear signals, and write nothing.
    """

    def __init__(
        self,
        folder,
        config,
        versions,
        total_steps,
        total_minutes=None,
        resume=None,
        earlier_minutes=0.0,
        silent=False,
    ):
        self.folder, self.silent = Path(folder), silent
        self.total_steps, self.total_minutes = total_steps, total_minutes
        self.earlier_minutes = earlier_minutes
        if not silent:
            self._open(config, versions, resume)
        self.stop_signal = None  # its number, once Ctrl-C or SIGTERM has asked to stop
        self.started, self.shown_at = time.monotonic(), -float("inf")
        self.first_progress = None
        self.last_done = {}
        asked = [signal.SIGINT, signal.SIGTERM]
        # A connection that broke off; under nohup it is ignored, and stays so.
        if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            asked.append(signal.SIGHUP)
        self.handlers = {s: signal.signal(s, self._on_signal) for s in asked}

    def _open(self, config, versions, resume) -> None:
        "Make the folder, cut back the log of a resumed run, and open it."
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "metrics.jsonl"
        if resume is not None and path.exists():
            # Of a log that is shorter than it was, whole lines alone.
            kept, _, _ = path.read_bytes()[: resume[0]].rpartition(b"\n")
            replace(path, kept + b"\n" if kept else b"")
        # A resumed run that fails at once leaves the old ones as they were.
        self.unwritten = {"config": config, "versions": versions}
        if resume is None:
            self._describe()
        # Unbuffered: a row is in the file once it is written, and nothing is left to write where a disk is full.
        self.file = path.open("ab", buffering=0)
        after = None if resume is None else resume[1] + 1  # TensorBoard forgets what it has from here on
        self.board = SummaryWriter(self.folder / "tensorboard", purge_step=after)
        self.bar = tqdm(total=1.0, bar_format="{percentage:3.0f}%|{bar:12}| {desc}", dynamic_ncols=True)

    def _describe(self) -> None:
        "Write what is not written yet of configuration and versions."
        for name, content in self.unwritten.items():
            replace(self.folder / f"{name}.json", json.dumps(content, indent=1).encode() + b"\n")
        self.unwritten = {}

    def _on_signal(self, number, frame) -> None:
        "Stop after the present step; the same signal once more stops at once."
        # Of one Ctrl-C, torchrun passes a SIGTERM on to processes that have had the SIGINT already.
        if self.stop_signal == number:
            raise KeyboardInterrupt
        if not self.stop_signal:
            self.stop_signal = number
            if not self.silent:
                # Not by print, which may be under way; and the same Ctrl-C may have ended who reads it.
                with contextlib.suppress(OSError):
                    os.write(2, b"\nstopping: saving a checkpoint first (once more to stop at once)\n")

    @property
    def minutes(self) -> float:
        """Minutes of the run, those before a resume included."""
        return self.earlier_minutes + (time.monotonic() - self.started) / 60

    def progress(self, steps: int) -> float:
        """Share of the run that is over, by steps or by the clock, whichever is further."""
        by_clock = self.minutes / self.total_minutes if self.total_minutes else 0.0
        return max(steps / self.total_steps, by_clock)

    def due(self, what: str, every_minutes: float) -> bool:
        """True once so many minutes have passed since `done(what)`, or since this process began."""
        return self.minutes - self.last_done.setdefault(what, self.earlier_minutes) >= every_minutes

    def done(self, what: str) -> None:
        """`what` is done, and due again an interval from now: however long it took, the rest has its turn."""
        self.last_done[what] = self.minutes

    def show(self, steps: int, text: Callable[[], str]) -> None:
        """Move the bar, now and then: share done, minutes left, and `text()`, made only when it is shown."""
        if self.silent:
            return
        now, progress = time.monotonic(), min(1.0, self.progress(steps))
        if self.first_progress is None:
            self.first_progress = progress
        # A terminal can be drawn on twice a second; a file would keep every line. The end is always shown, once.
        if now - self.shown_at < (0.5 if sys.stderr.isatty() else 30) and not self.bar.n < progress == 1:
            return
        self.shown_at = now
        done, spent = progress - self.first_progress, (now - self.started) / 60
        left = f"{spent * (1 - progress) / done:.1f}" if done > 0 else "?"
        self.bar.n = progress
        with contextlib.suppress(OSError):  # who watched the bar has gone; the run goes on
            self.bar.set_description_str(f"{left} min left, {text()}")

    def say(self, text: str) -> None:
        """A line of text above the bar."""
        if self.silent:
            return
        with contextlib.suppress(BrokenPipeError):  # who read it has gone: `| tee`, and Ctrl-C
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()

    def write(self, steps: int, updates: int, row: dict[str, float | list[float]]) -> None:
        """One row to metrics.jsonl and TensorBoard. A list is a histogram, and goes to the file alone."""
        if self.silent:
            return
        row = {"step": steps, "updates": updates, "minutes": round(self.minutes, 3)} | row
        line = json.dumps(row).encode() + b"\n"
        while line:  # a disk that is nearly full takes a part of it, and then none
            line = line[self.file.write(line) :]
        for name, value in row.items():
            if not isinstance(value, list):
                self.board.add_scalar(name, value, steps)

    def sync(self) -> int:
        """Bytes of the log so far, which are on the disk when this returns: for the checkpoint."""
        if self.silent:
            return 0
        self._describe()
        os.fsync(self.file.fileno())
        return os.fstat(self.file.fileno()).st_size

    def close(self) -> None:
        """Close the files and give the signals back."""
        with contextlib.ExitStack() as closing:  # each of them, even if another fails on a full disk
            for number, handler in self.handlers.items():
                closing.callback(signal.signal, number, handler)
            if not self.silent:
                closing.enter_context(contextlib.suppress(BrokenPipeError))
                closing.callback(self.bar.close)
                closing.callback(self.file.close)
                closing.callback(self._close_board)

    def _close_board(self) -> None:
        "What is left to write for TensorBoard must not hide the error that ended a run: the same full disk."
        try:
            self.board.close()
        except OSError as error:
            print(f"TensorBoard's file in {self.folder} is not complete: {error}", file=sys.stderr)


# What a result may depend on; a benchmark's package is missing where it cannot be installed.
PACKAGES = ("torch", "numpy", "gymnasium", "zstandard")
PACKAGES += ("popgym", "metaworld", "mujoco", "procgen-mirror", "ale-py", "minigrid")


def hold(folder: Path):
    """Hold a run's folder for this process: the open file `lock` in it, to be closed at the end.

    ValueError, one line, where another process holds it: two that train one run would destroy it. A process that
    ends in any way lets go. Without locks (Windows) nothing is held.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / "lock").open("a+")
    if fcntl is not None:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            raise ValueError(
                f"runs/{folder.name} is being trained by another process (number {file.read().strip() or 'unknown'}): "
                "wait for its end, or end it, or choose another --name"
            ) from error
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def replace(path: Path, content: bytes) -> None:
    """Put `content` in the place of a file's at once: a crash leaves the old or the new, never a part."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def describe_versions(root, packages=PACKAGES) -> dict[str, str]:
    """What else a result depends on: versions of `packages`, Python, machine, and the git commit of `root`."""
    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]
    there = shutil.which("git") is not None
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() if there else ""
    return found | {
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "commit": commit or "unknown",
    }


def available_memory() -> int:
    """Bytes of memory that can still be taken, as the system (and a container's limit) tell."""
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo, group = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
    limit, used = group / "memory.max", group / "memory.current"
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    if limit.exists() and limit.read_text().strip().isdigit():
        free = min(free, int(limit.read_text()) - (int(used.read_text()) if used.exists() else 0))
    return free


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        log = Logger(folder, {"seed": 0}, describe_versions(".", ["torch"]), total_steps=300)
        size = 0
        for step in (100, 200, 300):
            log.show(step, lambda step=step: f"{step} steps")
            log.write(step, step // 10, {"loss": 1 / step})
            size = log.sync() if step == 200 else size
        log.close()
        print((Path(folder) / "metrics.jsonl").read_text(), end="")
        print("resumed from a checkpoint of step 200, the log is cut back to it:")
        log = Logger(folder, {"seed": 0}, {}, total_steps=300, resume=(size, 200))
        log.close()
        print((Path(folder) / "metrics.jsonl").read_text(), end="")
    print(f"memory still free: {available_memory() / 1e9:.1f} GB")
