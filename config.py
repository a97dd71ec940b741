r"""What a run can be told: the configuration, field by field, and the command line that fills it.

What     `Config`, whose comments say meaning, unit and source of every field; `parse` makes one of a command
         line: an explicit flag beats the scale, which beats the preset (presets.py)
Why      whoever changes a number should find it with its meaning, and be told at once what cannot be
Paper    Tables 1 and 2, section 4, appendix A: field by field
Try      python train.py --help
"""

import argparse
import dataclasses
import difflib
import json
import math
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

    # ---- what to train on
    env: str = "popgym"  # benchmark, or gym:ID[,ID...] for any Gymnasium ids
    tasks: str | None = None  # comma-separated subset of the benchmark's tasks; default all
    # plays of a task in a rollout; POPGym, gym: only the last counts, elsewhere all | section 4
    attempts: int = 2
    max_steps: int | None = None  # cap on a rollout, env steps, below the benchmark's own
    clip_rewards: bool = False  # to [-1, 1] while training | section 4: unclipped
    store_executed: bool = False  # store the valid action carried out, not the one chosen | DEVIATION
    # actor and critic loss, each independent of the scale of returns or dependent on it | Eq. 1 to 4
    variant: Literal["ind_ind", "ind_dep", "dep_ind", "dep_dep"] = "ind_ind"
    # ---- the run
    name: str | None = None  # folder under runs/; default: environment, variant and time
    scale: Literal["auto", "paper", "laptop", "smoke"] = "auto"  # auto: paper on a GPU, laptop on a CPU
    resume: bool = False  # continue runs/<name> from its checkpoint
    init: str | None = None  # start from the weights of this checkpoint (fine-tuning)
    seed: int = 0  # of everything: weights, environments, replay, exploration
    device: str = "auto"  # auto, cpu, cuda, cuda:1, ...
    threads: int | None = None  # CPU threads of one operation; default: as many as there are cores
    precision: Literal["auto", "float32", "bf16"] = "auto"  # auto: bf16 autocast on a GPU, float32 on a CPU
    steps: int = 100_000_000  # stop after this many env steps, over all environments | section 4
    minutes: float | None = None  # or after this many minutes by the clock
    # ---- collecting
    num_envs: int = 24  # environments stepped together | our choice
    # step environments in worker processes, one each; auto: where a simulator is slow and there are cores
    workers: Literal["auto", "processes", "none"] = "auto"
    # seconds after which a worker that does not answer is replaced | our choice
    worker_timeout: float = 300.0
    env_steps_per_update: float = 12.0  # env steps collected for each gradient step | authors' script
    epsilon_start: float = 1.0  # share of random actions at the start | authors' script
    epsilon_end: float = 0.05  # and at the end of the schedule | authors' script
    epsilon_late_start: float | None = None  # the same two at a rollout's end; None: it stays as it is
    epsilon_late_end: float | None = None  # | authors' script (Meta-World)
    epsilon_steps: int = 1_000_000  # length of the schedule, in steps of each environment | authors' script
    segment_length: int = 2000  # longer rollouts are stored in segments of 3/4 to all of this | our choice
    replay_trajectories: int | None = 15_000  # replay capacity in trajectories | Table 1 (POPGym)
    replay_steps: int | None = None  # or in env steps; exactly one of the two
    replay_ram: float = (
        8.0  # GB of compressed frames in memory; more spill to runs/<name>/frames | our choice
    )
    # ---- learning
    batch_size: int = 24  # sequences in a batch | Table 1
    context: int = 600  # env steps the policy can look back | Table 2 (POPGym)
    learning_rate: float = 1e-4  # AdamW | Table 1 (POPGym)
    warmup_updates: int = 2000  # linear warm-up of the learning rate | authors' script
    weight_decay: float = 1e-4  # AdamW | Table 1, "L2 Penalty"
    grad_clip: float = 1.0  # norm of the whole gradient | Table 1
    gammas: tuple[float, ...] = (0.1, 0.9, 0.95, 0.97, 0.99, 0.995, 0.999)  # the last one acts | Table 1
    tau: float = 0.003  # target networks move this share of the way each update | Table 1
    n_step: int = 1  # rewards summed before a target bootstraps | section 3: one
    critic_weight: float = 10.0  # lambda: weight of the critic's loss beside the actor's | authors' code
    reward_scale: float = 200.0  # rewards are multiplied by this before learning | authors' script
    action_samples: int = 3  # K: samples behind the value of a state, Eq. 4 | authors' code
    chunk: int = 256  # states per chunk of critic work; changes memory and speed, not results | our choice
    # env steps whose activations exist at a time; changes memory and speed, not results | our choice
    steps_per_pass: int = 2048
    augment: bool = False  # random shifts of pixels while training | appendix A
    # ---- the networks
    # timestep encoder: ff for vectors, impala or nature for pixels, grid_language for BabyAI | Table 2
    encoder: Literal["ff", "impala", "nature", "grid_language"] = "ff"
    encoder_depths: tuple[int, ...] = (16, 32, 32)  # channels of a CNN's blocks | Table 2
    encoder_hidden: int = 512  # timestep encoder, hidden width | Table 2
    encoder_dim: int = 200  # timestep encoder, output width | Table 2
    d_model: int = 256  # Transformer width D | Table 2
    d_ff: int = 1024  # Transformer feed-forward width | Table 2
    layers: int = 3  # Transformer blocks | Table 2
    heads: int = 8  # attention heads H | Table 2
    dropout: float = 0.05  # on embeddings and feed-forward | authors' script
    hidden: tuple[int, ...] = (256, 256)  # actor and critic MLPs | Table 2
    critics: int = 4  # critic ensemble C | Table 1
    bins: int = 64  # critic output bins N | Table 2 (POPGym)
    bin_low: float = -1e5  # limits of the bins, in scaled returns | appendix A
    bin_high: float = 1e5  # upper limit | appendix A
    symlog: bool = True  # bins spaced evenly in symlog space (--no-symlog: in returns) | appendix A
    value_label: Literal["twohot", "hlgauss"] = "twohot"  # labels | Eq. 5, 6; HL-Gauss is not the paper's
    popart_beta: float = 5e-4  # step size of PopArt's statistics | authors' code
    prob_low: float = (
        1e-6  # discrete policies: probabilities are clipped from below | our choice (27 actions)
    )
    prob_high: float = 1.0  # and from above
    # ---- reporting
    log_every: int = 50  # updates between rows of metrics.jsonl
    eval_every: float = 5.0  # minutes between evaluations
    eval_episodes: int = 5  # rollouts of each task in an evaluation
    final_episodes: int = 20  # rollouts of each task in the last evaluation
    checkpoint_every: float = 5.0  # minutes between checkpoints


# ------------------------------------------------------------------------------------- the command line


def parse(argv: list[str] | None = None, root: Path = ROOT) -> Config:
    """The configuration that `argv` asks for: preset, then scale, then explicit flags.

    Runs lie under `root`/runs. ValueError, one line, for what cannot be or a name that is taken.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    # Which preset and scale are the defaults of all other flags has to be known before they are parsed.
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("env", "scale", "name", "device", "variant"):
        first.add_argument(f"--{flag}", default=None)
    first.add_argument("--resume", action="store_true")
    known, _ = first.parse_known_args(argv)
    defaults, device = saved_config(known.name, root) if known.resume else None, known.device or "auto"
    if defaults and not known.device and (defaults.device == "cpu" or torch.cuda.is_available()):
        device = defaults.device  # a run stays where it was, if that is there
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if defaults is None:
        env = known.env or Config.env
        all_tasks(env)  # says what is wrong with the name before a preset is looked up by it
        scale = known.scale or "auto"
        if scale == "auto":
            scale = "paper" if device.startswith("cuda") else "laptop"
            reason = "a GPU is there" if scale == "paper" else "there is no GPU"
            print(f"scale: {scale}, because {reason} (--scale paper, laptop or smoke overrides)")
        values = preset("gym" if env.startswith("gym:") else env, scale, known.variant or Config.variant)
        defaults = Config(**{"env": env, **values, "scale": scale})
    if known.resume and known.env is None:
        refuse_import(defaults.env, f"runs/{known.name} trains {defaults.env}", f"add --env {defaults.env}")
    config = tyro.cli(Config, args=argv, default=defaults)
    replacing = {"device": device, "scale": defaults.scale}
    if config.precision == "auto":
        replacing["precision"] = "bf16" if device.startswith("cuda") else "float32"
    if not config.name:
        stem = config.env.replace(":", "_").replace(",", "_")
        replacing["name"] = f"{stem}_{config.variant}_{config.scale}_{time.strftime('%Y%m%d_%H%M%S')}"
    config = dataclasses.replace(config, **replacing)
    check(config, root)
    return config


def saved_config(name: str | None, root: Path = ROOT) -> Config:
    "The configuration of a run to be resumed."
    if not name:
        raise ValueError("--resume needs the run's name: python train.py --name NAME --resume")
    path = root / "runs" / name / "config.json"
    if not path.exists():
        runs = sorted(p.parent.name for p in path.parent.parent.glob("*/config.json"))
        near = difflib.get_close_matches(name, runs, n=3, cutoff=0.0)
        raise ValueError(
            f"no run runs/{name} to resume" + (f". Did you mean {', '.join(near)}?" if near else "")
        )
    try:
        saved = json.loads(path.read_text())
        if not isinstance(saved, dict):
            raise TypeError("not a configuration")
        return Config(**{k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()})
    except (json.JSONDecodeError, UnicodeDecodeError, TypeError) as error:
        raise ValueError(f"{path} is damaged, or of another version of this program: {error}") from error


def check(config: Config, root: Path = ROOT) -> None:
    "ValueError, one line, for a configuration that cannot be."
    c, folder = config, root / "runs" / config.name
    left = ("config.json", "checkpoint.pt", "previous.pt", "metrics.jsonl")
    if not c.resume and any((folder / name).exists() for name in left):
        raise ValueError(f"runs/{c.name} exists: choose another --name, or add --resume to go on with it")
    for field, value in dataclasses.asdict(c).items():
        if any(
            isinstance(v, float) and not math.isfinite(v)
            for v in (value if isinstance(value, tuple) else (value,))
        ):
            raise ValueError(f"--{field} must be a finite number, got {value}")
    at_least_1 = (
        "steps num_envs batch_size context chunk segment_length action_samples steps_per_pass n_step layers"
    )
    at_least_1 += (
        " heads critics encoder_hidden encoder_dim d_model d_ff bins epsilon_steps log_every eval_episodes"
    )
    for field in (at_least_1 + " final_episodes").split():
        if getattr(c, field) < 1:
            raise ValueError(f"--{field} must be at least 1, got {getattr(c, field)}")
    for field in ("max_steps", "threads", "replay_steps", "replay_trajectories"):
        if getattr(c, field) is not None and getattr(c, field) < 1:
            raise ValueError(f"--{field} must be at least 1, or None, got {getattr(c, field)}")
    if (c.replay_steps is None) == (c.replay_trajectories is None):
        raise ValueError("give exactly one of --replay_trajectories and --replay_steps (the other as None)")
    held = (c.replay_trajectories or c.replay_steps // c.segment_length) // distributed.world_size()
    if held < c.batch_size:
        raise ValueError(
            f"the replay (of one process) may hold no more than {held} segments, and a batch takes {c.batch_size}: raise "
            f"--replay_trajectories or --replay_steps, or lower --batch_size or --segment_length"
        )
    if c.d_model % c.heads:
        raise ValueError(f"--d_model {c.d_model} must be a multiple of --heads {c.heads}")
    for field in (
        "grad_clip",
        "reward_scale",
        "replay_ram",
        "worker_timeout",
        "env_steps_per_update",
    ):
        if getattr(c, field) <= 0:
            raise ValueError(f"--{field} must be above 0, got {getattr(c, field)}")
    for field in ("eval_every", "checkpoint_every"):
        if getattr(c, field) < 0.001:
            raise ValueError(f"--{field} must be at least 0.001 minutes, got {getattr(c, field)}")
    for field in ("learning_rate", "weight_decay", "critic_weight", "warmup_updates"):
        if getattr(c, field) < 0:
            raise ValueError(f"--{field} must be 0 or more, got {getattr(c, field)}")
    for field in ("tau", "epsilon_start", "epsilon_end", "prob_low", "prob_high"):
        if not 0 <= getattr(c, field) <= 1:
            raise ValueError(f"--{field} must lie between 0 and 1, got {getattr(c, field)}")
    if not c.gammas or not all(0 <= g < 1 for g in c.gammas):
        raise ValueError(f"--gammas takes one or more discounts in [0, 1), got {list(c.gammas)}")
    if (c.epsilon_late_start is None) != (c.epsilon_late_end is None):
        raise ValueError("--epsilon_late_start and --epsilon_late_end go together: give both or neither")
    if not 0 < c.popart_beta <= 1:
        raise ValueError(f"--popart_beta must be above 0 and at most 1, got {c.popart_beta}")
    if not c.bin_low < c.bin_high:
        raise ValueError(f"--bin_low {c.bin_low} must lie below --bin_high {c.bin_high}")
    if c.seed < 0:
        raise ValueError(f"--seed must be 0 or more, got {c.seed}")
    if not 0 <= c.dropout < 1:
        raise ValueError(f"--dropout must lie in [0, 1), got {c.dropout}")
    if not c.prob_low < c.prob_high:
        raise ValueError(f"--prob_low {c.prob_low} must lie below --prob_high {c.prob_high}")
    if not c.hidden or not c.encoder_depths or min(*c.hidden, *c.encoder_depths) < 1:
        raise ValueError("--hidden and --encoder_depths take one or more widths of at least 1")
    if c.minutes is not None and c.minutes <= 0:
        raise ValueError(f"--minutes must be above 0, got {c.minutes}")
    if c.name != Path(c.name).name or c.name in (".", ".."):
        raise ValueError(f"--name is a folder's name under runs/, without slashes, got {c.name}")
    check_device(c.device)


def refuse_import(env: str, where: str, remedy: str) -> None:
    """ValueError, one line, if `env`, read from a file, names a module that would be imported, and run.

    Gymnasium imports what stands before the colon of an id like my_envs:Echo-v0. Typed by the user that is
    wanted; in a file from someone else it would be a way to run code.
    """
    modules = [name.strip().partition(":")[0] for name in env.removeprefix("gym:").split(",") if ":" in name]
    foreign = [module for module in modules if module not in sys.modules]
    if env.startswith("gym:") and foreign:
        raise ValueError(
            f"{where}, which would import and run the module {foreign[0]}: if you trust it, {remedy}"
        )


def check_device(device: str) -> None:
    """ValueError, one line, for a device that is not known or not there."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ValueError(f"--device {device} is not known here: say auto, cpu, cuda or cuda:1")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {device}, but no GPU is there: leave it out, or say --device cpu")
    gpus, processes = torch.cuda.device_count(), distributed.local_world_size()
    if device.startswith("cuda:") and (processes > 1 or int(device[5:]) >= gpus):
        raise ValueError(
            f"--device {device}, with {gpus} GPU(s) and {processes} process(es): say --device cuda"
        )
    if device == "cuda" and processes > max(1, gpus):
        raise ValueError(f"{processes} processes on {gpus} GPU(s): --nproc_per_node {gpus}, or --device cpu")
