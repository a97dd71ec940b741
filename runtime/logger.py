r"""A run's folder, log, progress bar and clock, and its answer to Ctrl-C.

What     `Logger` writes metrics.jsonl and TensorBoard scalars against env steps, shows the bar, measures which
         share of the run is over, and turns Ctrl-C or SIGTERM into a request to stop
Why      everything that a result depends on can be found again, and the training loop stays readable
Paper    none
Folder   config.json, versions.json, metrics.jsonl (one row a line), tensorboard/ and lock are written here;
         checkpoint.pt, best.pt, table.txt and curves.png elsewhere
Copy     this file alone; needs tqdm and tensorboard (with torch)
"""

import contextlib
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

try:
    import fcntl
except ImportError:  # on Windows, where nothing keeps two processes from training one run
    fcntl = None


class Logger:
    """Opens the folder of a run, or continues it.

    `files` are dictionaries that are saved as JSON: {"config": ...} as config.json. The run ends after `total_steps`
    env steps or `total_minutes` (None: no limit), whichever comes first. To resume, `resume` is (bytes of the log,
    env steps) at the checkpoint and `earlier_minutes` the time until then: the log is cut back to the checkpoint, so
    that no row appears twice. With several processes, all but one are `silent`: they keep time and receive signals,
    but write nothing.
    """

    def __init__(
        self, folder, files, total_steps, total_minutes=None, resume=None, earlier_minutes=0.0, silent=False
    ):
        self.folder, self.silent, self.unsaved = Path(folder), silent, files
        self.total_steps, self.total_minutes = total_steps, total_minutes
        self.started, self.earlier_minutes = time.monotonic(), earlier_minutes
        self.last_done, self.shown_at, self.text = {}, -float("inf"), str
        if not silent:
            self._open(resume)
        self.stop_signal = None  # its number, once Ctrl-C or SIGTERM has come
        signals = [signal.SIGINT, signal.SIGTERM]
        # SIGHUP comes when a connection breaks. nohup ignores it, and so does the run then. (Windows has none.)
        if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            signals.append(signal.SIGHUP)
        self.handlers = {number: signal.signal(number, self._on_signal) for number in signals}

    def _open(self, resume) -> None:
        "Make the folder, cut the log back to the checkpoint, and open it."
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "metrics.jsonl"
        if resume is not None and path.exists():
            # The log may be shorter than at the checkpoint and end within a line: keep whole lines.
            whole_lines, newline, _ = path.read_bytes()[: resume[0]].rpartition(b"\n")
            replace_file(path, whole_lines + newline)
        # A resumed run saves them at its first checkpoint: one that fails at once leaves the old files unchanged.
        if resume is None:
            self.save_files()
        # Unbuffered, so that a row is in the file once it is written, also where the disk is full later.
        self.file = path.open("ab", buffering=0)
        steps = -1 if resume is None else resume[1]
        # TensorBoard forgets everything from `purge_step` on.
        self.board = SummaryWriter(self.folder / "tensorboard", purge_step=steps + 1)
        form = "{percentage:3.0f}%|{bar:12}| {remaining} left, {desc}"
        initial = min(1.0, self.progress(steps))  # a run that had ended may be resumed
        self.bar = tqdm(total=1.0, initial=initial, bar_format=form, dynamic_ncols=True)

    def save_files(self) -> None:
        """Save the dictionaries that are not saved yet as JSON; only the first process has any to save."""
        if self.silent:
            return
        for name, content in self.unsaved.items():
            replace_file(self.folder / f"{name}.json", json.dumps(content, indent=1).encode() + b"\n")
        self.unsaved = {}

    def _on_signal(self, number, frame) -> None:
        "The first signal asks to stop after the present step; the same signal again stops at once."
        # On Ctrl-C, torchrun also sends SIGTERM to processes that have received SIGINT: not a second request.
        if self.stop_signal == number:
            raise KeyboardInterrupt
        first, self.stop_signal = not self.stop_signal, self.stop_signal or number
        if first and not self.silent:
            # os.write, because a print may be in progress. The same Ctrl-C may have ended the reader of stderr.
            with contextlib.suppress(OSError):
                os.write(2, b"\nstopping: saving a checkpoint first (again to stop at once)\n")

    @property
    def minutes(self) -> float:
        """Minutes of the run, including those before it was resumed."""
        return self.earlier_minutes + (time.monotonic() - self.started) / 60

    def progress(self, steps: int) -> float:
        """Share of the run that is over, by steps or by time, whichever is greater."""
        by_time = self.minutes / self.total_minutes if self.total_minutes else 0.0
        return max(steps / self.total_steps, by_time)

    def due(self, job: str, every_minutes: float) -> bool:
        """Whether `every_minutes` have passed since `done(job)`, or since this process started."""
        return self.minutes - self.last_done.setdefault(job, self.earlier_minutes) >= every_minutes

    def done(self, job: str) -> None:
        """`job` is done. Its interval starts at its end: a long job leaves as much time for the rest as a short one."""
        self.last_done[job] = self.minutes

    def show(self, steps: int, text: Callable[[], str]) -> None:
        """Update the bar now and then: share done, minutes left, and `text()`, which is called only then."""
        if self.silent:
            return
        now, progress = time.monotonic(), min(1.0, self.progress(steps))
        ends, self.bar.n, self.text = self.bar.n < progress == 1, progress, text
        # Twice a second on a terminal; seldom in a file, which keeps every line. The end is always shown, once.
        interval = 0.5 if sys.stderr.isatty() else 30
        if now - self.shown_at < interval and not ends:
            return
        self.shown_at = now
        with contextlib.suppress(OSError):  # stderr was closed; keep training
            self.bar.set_description_str(text())

    def say(self, text: str) -> None:
        """Print `text` above the bar."""
        if not self.silent:
            with contextlib.suppress(BrokenPipeError):  # stdout was closed, as `| tee` is by Ctrl-C
                tqdm.write(text, file=sys.stdout)
                sys.stdout.flush()

    def write(self, steps: int, updates: int, row: dict[str, float | list[float]]) -> None:
        """Write one row to metrics.jsonl and TensorBoard. A list is a histogram, for the file only."""
        if self.silent:
            return
        row = {"step": steps, "updates": updates, "minutes": round(self.minutes, 3)} | row
        line = json.dumps(row).encode() + b"\n"
        while line:  # a nearly full disk takes a part of it, and raises OSError at the next
            line = line[self.file.write(line) :]
        for name, value in row.items():
            if not isinstance(value, list):
                self.board.add_scalar(name, value, steps)

    def sync(self) -> int:
        """Force the log to the disk; returns its size in bytes, for the checkpoint. Not for silent loggers."""
        self.save_files()
        os.fsync(self.file.fileno())
        return os.fstat(self.file.fileno()).st_size

    def close(self) -> None:
        """Close the files and restore the signal handlers."""
        with contextlib.ExitStack() as closing:  # all of them, even if one fails on a full disk
            for number, handler in self.handlers.items():
                closing.callback(signal.signal, number, handler)
            if not self.silent:
                closing.enter_context(contextlib.suppress(BrokenPipeError))
                closing.callback(self.bar.close)
                # Closing the bar shows it once more: as it stands, not as it was shown last.
                self.bar.set_description_str(self.text(), refresh=False)
                closing.callback(self.file.close)
                closing.callback(self._close_board)

    def _close_board(self) -> None:
        "TensorBoard's last rows may meet the full disk that ended the run: do not hide that error by another."
        try:
            self.board.close()
        except OSError as error:
            print(f"TensorBoard's file in {self.folder} is incomplete: {error}", file=sys.stderr)


def lock_folder(folder: Path):
    """Lock a run's folder for this process; returns the open file `lock`, to be closed at the end.

    Raises ValueError where another process has locked it, since two would destroy each other's files. The lock ends
    with the process, however that ends.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / "lock").open("a+")
    try:
        if fcntl:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        owner = file.read().strip() or "unknown"
        raise ValueError(
            f"runs/{folder.name} is being trained by another process (number {owner}): wait until it ends, end it, "
            "or choose another --name"
        ) from error
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file's content in one step: after a crash it is the old or the new, never a part."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


# Packages that a result may depend on; a benchmark's package may not be installed.
PACKAGES = ("torch", "numpy", "gymnasium", "zstandard")
PACKAGES += ("popgym", "metaworld", "mujoco", "procgen-mirror", "procgen-gym", "ale-py", "minigrid")


def describe_versions(folder=Path(__file__).parent, packages=PACKAGES) -> dict[str, str]:
    """Versions of `packages` and Python, the machine, and the git commit of the repository around `folder`."""
    found, commit = dict.fromkeys(packages, "not installed"), ""
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    git = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40"]
    with contextlib.suppress(OSError):  # git is not installed
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    return found | {"python": platform.python_version(), "machine": machine, "commit": commit or "unknown"}


def available_memory() -> int:
    """Bytes of memory that are free, within a container's limit if there is one; beyond any need where it is unknown."""
    if not hasattr(os, "sysconf"):  # Windows
        return sys.maxsize
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo, group = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
    limit, used = group / "memory.max", group / "memory.current"
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    if limit.exists() and limit.read_text().strip().isdigit():
        free = min(free, int(limit.read_text()) - (int(used.read_text()) if used.exists() else 0))
    return free
