r"""A run's folder, log, progress bar and clock: everything that a run tells, and keeps under runs/<name>/.

What     `Logbook` writes metrics.jsonl and TensorBoard scalars against env steps, shows the bar, knows how
         much of the run is over, and turns Ctrl-C or SIGTERM into a request to stop
Why      whatever a result depends on can be found again, and the training loop stays readable
Paper    none
Folder   config.json, versions.json, metrics.jsonl (one row a line), tensorboard/; the trainer adds
         checkpoint.pt, best.pt, table.txt and curves.png
Copy     this file alone; needs tqdm and tensorboard (with torch)
Try      python logbook.py
"""

import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


class Logbook:
    """Opens (or, to resume, continues) the folder of a run.

    Arguments: `folder`; `config` and `versions`, dictionaries that are saved as JSON; `total_steps` and
    `total_minutes` (or None), of which the first to be reached ends the run; `resume_step`: None for a new
    run, else the env step of the checkpoint, to which the log is cut back so that no row is doubled;
    `earlier_minutes` that the run took before.
    """

    def __init__(
        self, folder, config, versions, total_steps, total_minutes=None, resume_step=None, earlier_minutes=0.0
    ):
        self.folder = Path(folder)
        self.total_steps, self.total_minutes, self.earlier_minutes = (
            total_steps,
            total_minutes,
            earlier_minutes,
        )
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "metrics.jsonl"
        if resume_step is not None and path.exists():
            # A last line that a crash has cut is not complete, and later than the checkpoint.
            lines = [line for line in path.read_text().splitlines() if line.endswith("}")]
            replace(path, "".join(line + "\n" for line in lines if json.loads(line)["step"] <= resume_step))
        for name, content in (("config", config), ("versions", versions)):
            replace(self.folder / f"{name}.json", json.dumps(content, indent=1) + "\n")
        self.file = path.open("a")
        self.board = SummaryWriter(self.folder / "tensorboard", purge_step=resume_step)
        self.stop_signal = None  # its number, once Ctrl-C or SIGTERM has asked to stop
        self.started, self.shown_at = time.monotonic(), -float("inf")
        self.first_progress = None
        self.last_done = {}
        self.bar = tqdm(total=1.0, bar_format="{percentage:3.0f}%|{bar:12}| {desc}", dynamic_ncols=True)
        self.handlers = {s: signal.signal(s, self._on_signal) for s in (signal.SIGINT, signal.SIGTERM)}

    def _on_signal(self, number, frame) -> None:
        "Stop after the present step; a second signal stops at once."
        if self.stop_signal:
            raise KeyboardInterrupt
        self.stop_signal = number
        self.say("stopping: saving a checkpoint first (once more to stop at once)")

    @property
    def minutes(self) -> float:
        """Minutes of the run, those before a resume included."""
        return self.earlier_minutes + (time.monotonic() - self.started) / 60

    def progress(self, steps: int) -> float:
        """Share of the run that is over, by steps or by the clock, whichever is further."""
        by_clock = self.minutes / self.total_minutes if self.total_minutes else 0.0
        return max(steps / self.total_steps, by_clock)

    def due(self, what: str, every_minutes: float) -> bool:
        """True once every so many minutes, counted for each `what` from the start of this process."""
        last = self.last_done.setdefault(what, self.earlier_minutes)
        if self.minutes - last < every_minutes:
            return False
        self.last_done[what] = self.minutes
        return True

    def show(self, steps: int, text: Callable[[], str]) -> None:
        """Move the bar, now and then: share done, minutes left, and `text()`, made only when it is shown."""
        now, progress = time.monotonic(), min(1.0, self.progress(steps))
        if self.first_progress is None:
            self.first_progress = progress
        # A terminal can be drawn on twice a second; a file would keep every line.
        if now - self.shown_at < (0.5 if sys.stderr.isatty() else 30) and progress < 1:
            return
        self.shown_at = now
        done, spent = progress - self.first_progress, (now - self.started) / 60
        left = f"{spent * (1 - progress) / done:.1f}" if done > 0 else "?"
        self.bar.n = progress
        self.bar.set_description_str(f"{left} min left, {text()}")

    def say(self, text: str) -> None:
        """A line of text above the bar."""
        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()

    def write(self, steps: int, updates: int, row: dict[str, float | list[float]]) -> None:
        """One row to metrics.jsonl and TensorBoard. A list is a histogram, and goes to the file alone."""
        row = {"step": steps, "updates": updates, "minutes": round(self.minutes, 3)} | row
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()
        for name, value in row.items():
            if not isinstance(value, list):
                self.board.add_scalar(name, value, steps)

    def close(self) -> None:
        """Close the files and give the signals back."""
        self.bar.close()
        self.file.close()
        self.board.close()
        for number, handler in self.handlers.items():
            signal.signal(number, handler)


# What a result may depend on; a benchmark's package is missing where it cannot be installed.
PACKAGES = ("torch", "numpy", "gymnasium", "zstandard")
PACKAGES += ("popgym", "metaworld", "mujoco", "procgen-mirror", "ale-py", "minigrid")


def replace(path: Path, text: str) -> None:
    """Put `text` in the place of a file's content at once: a crash leaves the old or the new, never a part."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
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
    commit = subprocess.run(git, capture_output=True, text=True, check=False)
    return found | {
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "commit": commit.stdout.strip() or "unknown",
    }


def available_memory() -> int:
    """Bytes of memory that can still be taken, as the system (and a container's limit) tell."""
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo, limit = Path("/proc/meminfo"), Path("/sys/fs/cgroup/memory.max")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    if limit.exists() and limit.read_text().strip().isdigit():
        free = min(free, int(limit.read_text()))
    return free


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        log = Logbook(folder, {"seed": 0}, describe_versions(".", ["torch"]), total_steps=300)
        for step in (100, 200, 300):
            log.show(step, lambda step=step: f"{step} steps")
            log.write(step, step // 10, {"loss": 1 / step})
        log.close()
        print((Path(folder) / "metrics.jsonl").read_text(), end="")
        print("resumed from a checkpoint of step 200, the log is cut back to it:")
        log = Logbook(folder, {"seed": 0}, {}, total_steps=300, resume_step=200)
        log.close()
        print((Path(folder) / "metrics.jsonl").read_text(), end="")
    print(f"memory still free: {available_memory() / 1e9:.1f} GB")
