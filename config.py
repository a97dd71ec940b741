r"""Run configuration and command line.

What     `Config`, with the meaning, unit and source of every field; `parse`, which makes a `Config` from a
         command line. An explicit flag beats the scale, which beats the preset (presets.py)
Why      a number and its meaning should be in one place, and an impossible value should be refused at once
Paper    Tables 1 and 2, section 4 and appendix A, as each field says
Try      python train.py --help
"""

import argparse
import dataclasses
import difflib
import importlib
import json
import math
import os
import re
import sys
import time
from pathlib import Path
from typing import Literal

import torch
import tyro

from presets import preset
from runtime import distributed
from suites import all_tasks

ROOT = Path(__file__).resolve().parent


@dataclasses.dataclass(frozen=True)
class Config:
    """Train AMAGO-2. An explicit flag beats the scale, which beats the preset (presets.py)."""

    # The comment of a field, beside or above it, is its help text: meaning, unit | source.
    # OFFICIAL: "authors' script" and "authors' code" are sources of what the paper leaves open.
    # ---- tasks and losses
    env: str = "popgym"  # benchmark, or gym:ID[,ID...] for any Gymnasium ids
    tasks: str | None = None  # comma-separated subset of the benchmark's tasks; default: all
    # attempts at a task in a rollout; in POPGym and gym only the last one earns rewards | section 4
    attempts: int = 2
    max_steps: int | None = None  # limit of a rollout, env steps; the benchmark's own limit also applies
    # clip rewards to [-1, 1], as learned and as seen, not in reported returns | section 4: unclipped
    clip_rewards: bool = False
    store_executed: bool = False  # store the executed valid action, not the chosen one | DEVIATION
    # actor and critic loss, each independent of the scale of returns or dependent on it | Eq. 1 to 4
    variant: Literal["ind_ind", "ind_dep", "dep_ind", "dep_dep"] = "ind_ind"
    # ---- the run
    name: str | None = None  # folder under runs/; default: environment, variant and time
    scale: Literal["auto", "paper", "laptop", "smoke"] = "auto"  # auto: paper on a GPU, laptop on a CPU
    resume: bool = False  # continue runs/<name> from its checkpoint
    init: str | None = None  # checkpoint whose weights the run starts from (fine-tuning)
    seed: int = 0  # seed of weights, environments, replay and exploration
    device: str = "auto"  # auto, cpu, cuda, cuda:1, ...
    threads: int | None = None  # CPU threads of one operation; default: the number of cores
    # auto: bf16 autocast on a GPU, float32 on a CPU | DEVIATION
    precision: Literal["auto", "float32", "bf16"] = "auto"
    steps: int = 100_000_000  # end of the run, env steps over all environments | section 4
    minutes: float | None = None  # end of the run, minutes by the clock
    # ---- data collection
    num_envs: int = 24  # environments stepped together | our choice
    # environments in worker processes, one each; auto: for slow simulators, if there are several cores
    workers: Literal["auto", "processes", "none"] = "auto"
    worker_timeout: float = 300.0  # seconds before a worker without an answer is replaced | our choice
    env_steps_per_update: float = 12.0  # env steps collected per gradient step | authors' script
    epsilon_start: float = 1.0  # share of random actions, initially | authors' script
    epsilon_end: float = 0.05  # share of random actions, at the end of the schedule | authors' script
    # epsilon_start at a rollout's end; None: no change within a rollout | authors' script (Meta-World)
    epsilon_late_start: float | None = None
    epsilon_late_end: float | None = None  # epsilon_end at a rollout's end; None: no change | authors' script
    # length of the schedule, env steps over all environments | authors' script
    epsilon_steps: int = 12_000_000
    segment_length: int = 2000  # longer rollouts are stored in segments of 3/4 to all of this | our choice
    replay_trajectories: int | None = 15_000  # replay capacity, trajectories | Table 1 (POPGym)
    replay_steps: int | None = None  # replay capacity, env steps; give exactly one of the two | Table 1
    replay_ram: float = 8.0  # GB of compressed frames in memory; others go to runs/<name>/frames | our choice
    # ---- learning
    batch_size: int = 24  # sequences in a batch | Table 1
    context: int = 600  # length of the policy's memory, env steps | Table 2 (POPGym)
    learning_rate: float = 1e-4  # of AdamW | Table 1 (POPGym)
    warmup_updates: int = 2000  # linear warm-up of the learning rate, updates | authors' script
    weight_decay: float = 1e-4  # of AdamW | Table 1, "L2 Penalty"
    grad_clip: float = 1.0  # largest norm of the whole gradient | Table 1
    # discounts learned together; the policy of the last one acts | Table 1
    gammas: tuple[float, ...] = (0.1, 0.9, 0.95, 0.97, 0.99, 0.995, 0.999)
    tau: float = 0.003  # target networks move this share of the way each update | Table 1
    n_step: int = 1  # rewards in a target before it bootstraps | section 3: one
    critic_weight: float = 10.0  # lambda: weight of the critic's loss; the actor's is 1 | authors' code
    # rewards are multiplied by this before learning; auto: so that the first rewards have a size of 10 | authors' script
    reward_scale: float | Literal["auto"] = 200.0
    # K: sampled actions in the value of a state, Eq. 4 (and Eq. 2 of dep_ind) | authors' code
    action_samples: int = 3
    # states per chunk of critic work; changes memory, speed and random draws; auto: what a CPU's cache holds, or on a
    # GPU as many as fit its memory | our choice
    chunk: int | Literal["auto"] = "auto"
    # env steps whose activations are in memory together; changes memory, speed, and how often an update draws
    # dropout and makes power iterations; auto: as above | our choice
    steps_per_pass: int | Literal["auto"] = "auto"
    # on a GPU, record what an update and acting launch as CUDA graphs and replay them; its default there | our choice
    capture: bool = False
    compile: bool = False  # let torch.compile make kernels for Transformer and critics | our choice
    augment: bool = False  # random shifts of images in training | appendix A
    # ---- the networks
    # timestep encoder: ff for vectors, impala or nature for images, grid_language for BabyAI | Table 2
    encoder: Literal["ff", "impala", "nature", "grid_language"] = "ff"
    encoder_depths: tuple[int, ...] = (16, 32, 32)  # channels of a CNN's blocks | Table 2
    encoder_hidden: int = 512  # hidden width of the timestep encoder | Table 2
    encoder_dim: int = 200  # output width of the timestep encoder | Table 2
    d_model: int = 256  # Transformer width D | Table 2
    d_ff: int = 1024  # Transformer feed-forward width | Table 2
    layers: int = 3  # Transformer blocks | Table 2
    heads: int = 8  # attention heads H | Table 2
    dropout: float = 0.05  # on embeddings and feed-forward layers | authors' script
    hidden: tuple[int, ...] = (256, 256)  # hidden widths of the actor and critic MLPs | Table 2
    critics: int = 4  # critic ensemble size C | Table 1
    bins: int = 64  # output bins N of the critic | Table 2 (POPGym)
    bin_low: float = -1e5  # lower limit of the bins, scaled returns | appendix A
    bin_high: float = 1e5  # upper limit of the bins, scaled returns | appendix A
    symlog: bool = True  # bins spaced evenly in symlog space (--no-symlog: in returns) | appendix A
    # labels of returns: two-hot, or HL-Gauss, which the paper does not use | Eq. 5, 6
    value_label: Literal["twohot", "hlgauss"] = "twohot"
    popart_beta: float = 5e-4  # step size of PopArt's statistics | authors' code
    prob_low: float = 1e-6  # lower clip of discrete probabilities | authors' script (POPGym)
    prob_high: float = 1.0  # upper clip of discrete probabilities | authors' script (POPGym)
    # ---- reporting
    log_every: int = 50  # updates between rows of metrics.jsonl
    eval_every: float = 5.0  # minutes between evaluations
    eval_episodes: int = 5  # rollouts of each task in an evaluation
    final_episodes: int = 20  # rollouts of each task in the last evaluation
    checkpoint_every: float = 5.0  # minutes between checkpoints


# ------------------------------------------------------------------------------------- the command line


def parse(argv: list[str] | None = None, root: Path = ROOT) -> Config:
    """The configuration for a command line: the preset, overridden by the scale, overridden by flags.

    `argv` is the command line without the program's name (None: the one that was typed). Runs are in
    `root`/runs. Raises ValueError, one line, for an impossible value or a name that exists.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    # The preset and the scale give all other flags their defaults, so these flags are parsed first.
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("env", "scale", "name", "device", "variant"):
        first.add_argument(f"--{flag}", default=None)
    first.add_argument("--resume", action="store_true")
    known, _ = first.parse_known_args(argv)
    defaults = saved_config(known.name, root) if known.resume else None
    device, gpu = known.device or "auto", torch.cuda.is_available()
    if defaults and not known.device and (defaults.device == "cpu" or gpu):
        device = defaults.device  # a resumed run keeps its device if this machine has it
    if device == "auto":
        device = "cuda" if gpu else "cpu"
    if defaults is None:
        env, scale = known.env or Config.env, known.scale or "auto"
        all_tasks(env)  # refuses an unknown environment with a better message than `preset`
        if scale == "auto":
            scale = "paper" if device.startswith("cuda") else "laptop"
            reason = "a GPU is there" if scale == "paper" else "there is no GPU"
            print(f"scale: {scale}, because {reason} (to change it: --scale paper, laptop or smoke)")
        values = preset("gym" if env.startswith("gym:") else env, scale, known.variant or Config.variant)
        capture = device.startswith("cuda") and distributed.local_world_size() == 1
        defaults = Config(**{"env": env, **values, "scale": scale, "capture": capture})
    if known.resume and known.env is None:
        refuse_import(defaults.env, f"runs/{known.name} trains {defaults.env}", f"add --env {defaults.env}")
    config = tyro.cli(Config, args=argv, default=defaults)
    if known.resume:
        for flag in ("seed", "scale", "init"):  # they only decide how a run begins
            was, given = getattr(defaults, flag), getattr(config, flag)
            fixed = given == was or (flag, given) == ("scale", "auto")
            require(fixed, f"--{flag} of a run cannot change on --resume: it was {was}. Leave it out")
    on_gpu = device.startswith("cuda")
    require(
        on_gpu or "--capture" not in argv, "--capture records CUDA graphs: leave it out, or use --device cuda"
    )
    changes = {"device": device, "scale": defaults.scale, "capture": config.capture and on_gpu}
    if config.precision == "auto":
        changes["precision"] = "bf16" if on_gpu else "float32"
    if not config.name:
        stem = re.sub(r"[^\w.-]+", "_", config.env)[:60].strip("_")
        name = f"{stem}_{config.variant}_{config.scale}_{time.strftime('%Y%m%d_%H%M%S')}"
        more = (f"{name}_{number}" for number in range(2, 1000))  # begun in the same second
        changes["name"] = next(n for n in (name, *more) if not (root / "runs" / n).exists())
    config = dataclasses.replace(config, **changes)
    check(config, root)
    return config


def saved_config(name: str | None, root: Path = ROOT) -> Config:
    "The saved configuration of a run to resume. Raises ValueError, one line, if there is none."
    require(bool(name), "--resume needs the run's name: python train.py --name NAME --resume")
    path = root / "runs" / name / "config.json"
    runs = sorted(p.parent.name for p in path.parent.parent.glob("*/config.json"))
    near = difflib.get_close_matches(name, runs, n=3, cutoff=0.0)
    hint = f". Did you mean {', '.join(near)}?" if near else ""
    require(path.exists(), f"no run runs/{name} to resume{hint}")
    try:
        saved = json.loads(path.read_text())
        require(isinstance(saved, dict), "not a configuration")
        saved.pop("found", None)  # which values were found by the run: for figures
        return Config(**{k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()})
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged or from another version of this program: {error}") from error


def find_run(run: str | Path) -> Path:
    """The file or run's folder that `run` names: a path from where one stands, or the name of a run in runs/."""
    # Where one stands, there may be another folder of that name.
    holds_run = lambda path: (
        path.is_file() or any((path / f).exists() for f in ("config.json", "best.pt", "checkpoint.pt"))
    )
    places = (Path(run), Path("runs") / run, ROOT / run, ROOT / "runs" / run)
    return next(filter(holds_run, places), Path(run))


def shown(path: str | Path) -> str:
    """A path as one can type it: relative to where one stands if it lies below, else absolute."""
    path, here = Path(path).resolve(), Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def prepare_torch(threads: int | None) -> None:
    """Settings of PyTorch for a whole process: `threads` of one operation, at most one for each core; precision."""
    if threads:  # more than there are cores would end the process
        torch.set_num_threads(min(threads, os.cpu_count() or 1))
    if torch.cuda.is_available():  # TF32 for what autocast leaves in float32, in multiplies and convolutions
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True


def require(condition: bool, message: str) -> None:
    "Raise ValueError with a message of one line unless the condition holds."
    if not condition:
        raise ValueError(message)


# Limits of single fields: a test of the value, the test in words, the fields. None, "not set", always passes.
# Whole numbers have their limit in `check`.
LIMITS = (
    (lambda v: v > 0, "must be above 0", "grad_clip reward_scale replay_ram worker_timeout minutes"),
    (lambda v: v > 0, "must be above 0", "env_steps_per_update"),
    (lambda v: v >= 1, "must be at least 1", "chunk steps_per_pass"),
    (lambda v: v >= 0.001, "must be at least 0.001 minutes", "eval_every checkpoint_every"),
    (lambda v: v >= 0, "must be 0 or more", "learning_rate weight_decay critic_weight warmup_updates seed"),
    (lambda v: 0 <= v <= 1, "must lie between 0 and 1", "tau epsilon_start epsilon_end prob_low prob_high"),
    (lambda v: 0 <= v <= 1, "must lie between 0 and 1", "epsilon_late_start epsilon_late_end"),
    (lambda v: 0 < v <= 1, "must be above 0 and at most 1", "popart_beta"),
    (lambda v: 0 <= v < 1, "must lie in [0, 1)", "dropout"),
    (lambda v: v and 0 <= min(v) <= max(v) < 1, "takes one or more discounts in [0, 1)", "gammas"),
    (lambda v: v and min(v) >= 1, "takes one or more widths of at least 1", "hidden encoder_depths"),
)


def check(config: Config, root: Path = ROOT) -> None:
    "Raise ValueError, one line, for a configuration that cannot run."
    c, files = config, ("config.json", "checkpoint.pt", "previous.pt", "metrics.jsonl")
    plain_name = c.name == Path(c.name).name and c.name not in (".", "..")
    require(plain_name, f"--name is the name of a folder in runs/, without slashes, got {c.name}")
    is_new = not any((root / "runs" / c.name / file).exists() for file in files)
    require(is_new or c.resume, f"runs/{c.name} exists: choose another --name, or continue it with --resume")
    for field in dataclasses.fields(c):
        name, value = field.name, getattr(c, field.name)
        numbers = [v for v in (value if isinstance(value, tuple) else (value,)) if isinstance(v, float)]
        require(all(map(math.isfinite, numbers)), f"--{name} must be a finite number, got {value}")
        # Counts and sizes start at 1; None is "not set".
        is_count = field.type in (int, int | None) and name not in ("seed", "warmup_updates")
        require(not is_count or value is None or value >= 1, f"--{name} must be at least 1, got {value}")
    for holds, words, fields in LIMITS:
        for field in fields.split():
            value = getattr(c, field)
            require(value in (None, "auto") or holds(value), f"--{field} {words}, got {value}")
    one_limit = (c.replay_steps is None) != (c.replay_trajectories is None)
    require(one_limit, "give exactly one of --replay_trajectories and --replay_steps, and None for the other")
    held = (c.replay_trajectories or c.replay_steps // c.segment_length) // distributed.world_size()
    few = f"the replay of a process may hold no more than {held} segments, and a batch takes {c.batch_size}"
    advice = "raise --replay_trajectories or --replay_steps, or lower --batch_size or --segment_length"
    require(held >= c.batch_size, f"{few}: {advice}")
    require(c.d_model % c.heads == 0, f"--d_model {c.d_model} must be a multiple of --heads {c.heads}")
    paired = (c.epsilon_late_start is None) == (c.epsilon_late_end is None)
    require(paired, "--epsilon_late_start and --epsilon_late_end belong together: give both or neither")
    for name, low, high in (("bin", c.bin_low, c.bin_high), ("prob", c.prob_low, c.prob_high)):
        require(low < high, f"--{name}_low {low} must lie below --{name}_high {high}")
    check_device(c.device)


def own_modules(env: str) -> list[str]:
    "The modules that `env`, gym:MODULE:ID[,...], names."
    names = env.removeprefix("gym:").split(",") if env.startswith("gym:") else []
    return [name.strip().partition(":")[0] for name in names if ":" in name]


def import_modules(env: str | None) -> None:
    """Import the modules that a typed --env gym:MODULE:ID names. ValueError, one line, for one that does not import."""
    for module in own_modules(env or ""):
        try:
            importlib.import_module(module)
        except Exception as error:
            line = f"--env {env}: the module {module} does not import: {type(error).__name__}: {error}"
            raise ValueError(" ".join(line.split())) from error


def refuse_import(env: str, where: str, remedy: str) -> None:
    """Raise ValueError, one line, if `env` names a module that is not imported yet.

    For environments that were read from a file. Gymnasium imports the module before the colon of an id like
    my_envs:Echo-v0. A user who types the id wants that; a file from someone else could run any code.
    """
    foreign = [module for module in own_modules(env) if module not in sys.modules]
    would = f"which would import and run the module {', '.join(foreign)}: if you trust it, {remedy}"
    require(not foreign, f"{where}, {would}")


def check_device(device: str) -> None:
    """Raise ValueError, one line, for a device that is unknown or that this machine does not have."""
    known = re.fullmatch(r"cpu|cuda(:\d+)?", device) is not None
    require(known, f"--device {device} is not known here: use auto, cpu, cuda or cuda:1")
    available = device == "cpu" or torch.cuda.is_available()
    require(available, f"--device {device}, but no GPU is there: leave it out, or use --device cpu")
    gpus, processes = torch.cuda.device_count(), distributed.local_world_size()
    fits = not device.startswith("cuda:") or (processes == 1 and int(device[5:]) < gpus)
    require(fits, f"--device {device}, with {gpus} GPU(s) and {processes} process(es): use --device cuda")
    fits = device != "cuda" or processes <= max(1, gpus)
    require(fits, f"{processes} processes on {gpus} GPU(s): use --nproc_per_node {gpus}, or --device cpu")
