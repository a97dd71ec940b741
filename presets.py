r"""Presets: the paper's Tables 1 and 2 as data, with smaller versions for a CPU.

What     `preset(name, scale)` returns the settings of an experiment in the paper, field name -> value; a
         smaller scale overrides some of them
Why      a number that decides a result should stand in one place, with its source
Paper    AMAGO-2 (arXiv 2411.11188), appendix A, Tables 1 and 2. "Authors' script" marks settings that are not
         in the paper but in the authors' training scripts
Notes    An explicit flag beats the scale, which beats the preset. `preset` applies the scale to the preset;
         the command line (config.py) applies the flags, and has the settings that no preset changes.
         Scales. paper: the column as printed, meant for a GPU. laptop: learns easy tasks within half an hour
         on a CPU, with a smaller network and fewer updates. smoke: tests a run in two minutes.
Use      values = preset("popgym", "laptop"); values["d_model"]      # also "paper" and "smoke"
Copy     this file alone; needs only Python
Try      python presets.py      and, for another column,      python presets.py atari
"""

# The two tables as printed, one row per line. A row with the same value in all columns has it once.
COLUMNS = ("metaworld", "popgym", "procgen-easy", "procgen-memory-hard", "atari", "babyai")
TABLE_1 = {
    "learning_rate": (5e-4, 1e-4, 1e-4, 1e-4, 1e-4, 1e-4),  # of AdamW, after the warm-up
    "batch_size": (24, 24, 24, 16, 32, 24),  # sequences in a batch
    "replay_steps": (8_000_000, None, 18_000_000, 80_000_000, 8_000_000, 10_000_000),  # capacity, env steps
    "replay_trajectories": (None, 15_000, None, None, None, None),  # or in full trajectories
    "weight_decay": (1e-4, 1e-4, 5e-3, 5e-3, 5e-3, 1e-3),  # of AdamW; the table says "L2 Penalty"
    "grad_clip": (2.0, 1.0, 1.0, 1.0, 1.0, 1.0),  # largest norm of the whole gradient
    "gammas": (0.1, 0.9, 0.95, 0.97, 0.99, 0.995, 0.999),  # discounts learned; the last acts
    "critics": 4,  # critic ensemble size
    "tau": 0.003,  # target networks move this share of the way each update
}
# The row of the timestep encoder has three parts: kind, feed-forward widths, and depths of a CNN's blocks.
# None: the paper prints no value; `BEYOND` has one.
SMALL_CNN, LARGE_CNN = (16, 32, 32), (20, 36, 64)
TABLE_2 = {
    "encoder": ("ff", "ff", "impala", "impala", "impala", "grid_language"),
    "encoder_hidden": (512, 512, None, None, None, None),
    "encoder_dim": (256, 200, None, None, None, None),
    "encoder_depths": (None, None, SMALL_CNN, LARGE_CNN, SMALL_CNN, None),
    "d_model": (320, 256, 512, 512, 256, 256),  # Transformer, width
    "d_ff": (1280, 1024, 2048, 2048, 1024, 1024),  # Transformer, feed-forward width
    "layers": (3, 3, 3, 6, 3, 4),  # Transformer, blocks
    "heads": (8, 8, 8, 8, 8, 8),  # Transformer, attention heads
    "context": (256, 600, 128, 768, 64, 512),  # length of the policy's memory, env steps
    "hidden": (256, 256),  # hidden widths of the actor and critic MLPs
    "bins": (128, 64, 128, 128, 128, 32),  # output bins of the critic
}

# Settings of all benchmarks where the tables print none: meaning, unit | source. A setting that no benchmark
# and no scale changes is in config.py alone.
BEYOND = {
    # ---- networks
    # The tables print no widths after a CNN. With these, memory-hard has 21.6 M parameters; in the paper 24 M.
    "encoder_hidden": 256,  # hidden width of the timestep encoder | our choice
    "encoder_dim": 256,  # output width of the timestep encoder | our choice
    "encoder_depths": SMALL_CNN,  # channels of a CNN's blocks; encoders without a CNN do not use it
    "dropout": 0.05,  # on embeddings and feed-forward layers | authors' script
    "prob_low": 0.001,  # lower clip of discrete probabilities | authors' code
    "prob_high": 0.99,  # upper clip of discrete probabilities | authors' code
    # ---- learning
    "reward_scale": 1.0,  # rewards are multiplied by this before learning | authors' script
    "warmup_updates": 500,  # linear warm-up of the learning rate, updates | authors' script
    "augment": False,  # random shifts of images in training | appendix A, Procgen and Atari
    # ---- collecting
    "replay_steps": None,  # the tables give one of the two limits, and the other is None
    "replay_trajectories": None,
    "attempts": 1,  # attempts at a task in a rollout | section 4
    "max_steps": None,  # extra limit of a rollout, env steps | our choice, smoke scale
    "store_executed": False,  # store the executed valid action, not the chosen one | our choice
    "num_envs": 24,  # environments stepped together | DEVIATION: the authors' script has 12
    "env_steps_per_update": 12.0,  # env steps per gradient step | authors' script (unchecked: memory-hard)
    "epsilon_start": 1.0,  # exploration noise, initially | authors' script
    "epsilon_end": 0.05,  # exploration noise, at the end of the schedule | authors' script
    "epsilon_late_start": None,  # epsilon_start at a rollout's end, if different | authors' script
    "epsilon_late_end": None,  # epsilon_end at a rollout's end, if different | authors' script
    # 1 M steps of each of the authors' 12 environments (BabyAI 0.5 M, Meta-World 2 M).
    "epsilon_steps": 12_000_000,  # length of the schedule, env steps over all environments | authors' script
    "segment_length": 2000,  # longer rollouts are stored in segments of 3/4 to all of this | our choice
    "threads": None,  # CPU threads of one operation; None: the number of cores | our choice
    # ---- length of a run, reporting
    "steps": 100_000_000,  # end of the run, env steps | section 4 (Atari and BabyAI: our choice)
    "minutes": None,  # end of the run, minutes by the clock | our choice
    "log_every": 50,  # updates between rows of the log | our choice
    "eval_episodes": 5,  # rollouts of each task in an evaluation | our choice
    "final_episodes": 20,  # rollouts of each task in the last evaluation | our choice
}

# Settings of single benchmarks. Reward multipliers, warm-ups and exploration: authors' scripts. Attempts and
# steps: section 4. Segments of 4 contexts (POPGym: whole rollouts): our choice.
PIXELS = {"reward_scale": 10.0, "augment": True}
ONLY = {
    "metaworld": {"attempts": 3, "segment_length": 1024, "epsilon_steps": 24_000_000}
    | {"epsilon_late_start": 0.8, "epsilon_late_end": 0.01},
    # OFFICIAL: with 27 actions, the usual clip to [0.001, 0.99] would make 2.6% of a sharp policy's actions random.
    "popgym": {"attempts": 2, "prob_low": 1e-6, "prob_high": 1.0}
    | {"reward_scale": 200.0, "warmup_updates": 2000},
    "procgen-easy": PIXELS | {"attempts": 2, "segment_length": 512, "steps": 275_000_000},
    "procgen-memory-hard": PIXELS | {"attempts": 2, "segment_length": 3072, "steps": 2_700_000_000},
    "atari": PIXELS | {"segment_length": 256},
    "babyai": {"attempts": 2, "segment_length": 2048, "epsilon_steps": 6_000_000, "reward_scale": 1000.0},
}


def column(name: str) -> dict:
    """A benchmark's column of the two tables and its other settings: field name -> value."""
    at = COLUMNS.index(name)
    in_columns = lambda value: isinstance(value, tuple) and len(value) == len(COLUMNS)
    printed = {f: v[at] if in_columns(v) else v for f, v in (TABLE_1 | TABLE_2).items()}
    return BEYOND | {f: v for f, v in printed.items() if v is not None} | ONLY[name]


# Half an hour on a CPU is a small fraction of the paper's computation. A narrow network with few discounts
# leaves time for enough updates; the learning rate and the speed of the target networks are higher to match.
LAPTOP = (
    {"d_model": 64, "d_ff": 256, "layers": 2, "heads": 4, "context": 128, "dropout": 0.0}
    | {"encoder_hidden": 128, "encoder_dim": 64, "hidden": (64, 64), "critics": 2, "bins": 32}
    | {"gammas": (0.1, 0.9, 0.99), "tau": 0.01}
    | {"learning_rate": 5e-4, "warmup_updates": 100, "weight_decay": 1e-4}
    | {"num_envs": 64, "env_steps_per_update": 256.0, "epsilon_steps": 1_920_000, "minutes": 30.0}
    # A second thread makes operations of this size little faster, and slower when another program uses
    # its core.
    | {"threads": 1}
)
# Images are most of the cost of an update, so the CNN is small and the windows are short and few. This shows
# that a run works, not that it learns.
LAPTOP_PIXELS = {"encoder_depths": (8, 16, 16), "batch_size": 8, "context": 32} | {
    "replay_steps": 200_000,
    "segment_length": 128,
    "num_envs": 16,
    "env_steps_per_update": 64.0,
    "epsilon_steps": 480_000,
}
LAPTOP_ONLY = {
    # DEVIATION (store_executed): most of the 27 padded actions are invalid and replaced. The actor learns
    # much faster from the action that was executed.
    "popgym": {"replay_trajectories": 4000, "reward_scale": 100.0, "store_executed": True},
    # Short horizons make a value depend more on the present action. With little exploration noise, few
    # actions are clipped to the limits, where imitating them would widen the policy.
    "metaworld": {"gammas": (0.5, 0.9, 0.97), "bins": 64, "tau": 0.02, "context": 32, "batch_size": 32}
    | {"epsilon_start": 0.5, "epsilon_end": 0.1, "epsilon_steps": 160_000}
    | {"epsilon_late_start": 0.5, "epsilon_late_end": 0.1}
    | {"replay_steps": 600_000, "segment_length": 512, "num_envs": 16, "env_steps_per_update": 64.0},
    "procgen-easy": LAPTOP_PIXELS,
    "procgen-memory-hard": LAPTOP_PIXELS,
    "atari": LAPTOP_PIXELS,
    "babyai": {"batch_size": 12, "replay_steps": 400_000, "segment_length": 512, "num_envs": 32}
    | {"epsilon_steps": 960_000},
}
# The smallest settings that run all parts of the program. They change the laptop scale.
SMOKE = (
    {"d_model": 16, "d_ff": 32, "layers": 1, "heads": 2, "context": 16, "hidden": (16, 16), "bins": 16}
    | {"encoder_hidden": 16, "encoder_dim": 16, "encoder_depths": (4, 4, 4)}
    | {"gammas": (0.9, 0.99), "batch_size": 4, "warmup_updates": 5}
    | {"num_envs": 4, "env_steps_per_update": 32.0, "epsilon_steps": 4000, "segment_length": 200}
    | {"steps": 4000, "minutes": None, "log_every": 10, "eval_episodes": 1, "final_episodes": 1}
)


def scales_of(name: str, **changes) -> dict[str, dict]:
    "All scales of a benchmark, with `changes` in each of them."
    capacity = {"replay_trajectories": 100} if name == "popgym" else {"replay_steps": 6000, "max_steps": 200}
    paper = column(name)
    laptop = paper | LAPTOP | LAPTOP_ONLY[name]
    smoke = laptop | SMOKE | capacity
    return {"paper": paper | changes, "laptop": laptop | changes, "smoke": smoke | changes}


# Name -> scale -> values. The benchmarks with rescaled rewards have the column of the original.
# `gym`, for any Gymnasium ids, is not in the paper. It has POPGym's column, with one attempt, since its
# observations are vectors too. Its rewards come in any unit, so their multiplier follows from the first of them.
PRESETS: dict[str, dict[str, dict]] = {name: scales_of(name) for name in COLUMNS}
PRESETS["procgen-easy-rescaled"] = scales_of("procgen-easy")
PRESETS["scales"] = scales_of("popgym", attempts=1)
PRESETS["gym"] = scales_of("popgym", attempts=1, reward_scale="auto")
# Rollouts may have any length and observations any width: a capacity in env steps keeps the replay in memory.
for scale, capacity in (("laptop", 1_000_000), ("smoke", 20_000)):
    PRESETS["gym"][scale] |= {"replay_trajectories": None, "replay_steps": capacity}


# OFFICIAL: the scale-dependent critic has a smaller reward multiplier on Atari | authors' script
SCALAR = {"atari": {"reward_scale": 0.25}}


def preset(name: str, scale: str = "paper", variant: str = "ind_ind") -> dict:
    """A new dictionary field name -> value: the column of preset `name`, changed by `scale`.

    `name` is a key of `PRESETS`; `scale` is "paper", "laptop" or "smoke"; `variant` names the losses of actor
    and critic, each "ind"ependent of the scale of returns or "dep"endent on it: "ind_ind" to "dep_dep".
    Every scale has the same fields. Source: paper, Tables 1 and 2. Raises ValueError for an unknown name or
    scale.
    """
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}: choose from {', '.join(PRESETS)}")
    scales = PRESETS[name]
    if scale not in scales:
        raise ValueError(f"unknown scale {scale!r} of preset {name!r}: choose from {', '.join(scales)}")
    return scales[scale] | (SCALAR.get(name, {}) if variant.endswith("_dep") else {})


def format_table(name: str) -> str:
    """The scales of a preset side by side, one line per field; "=" means the paper's value."""
    paper, *smaller = (preset(name, scale) for scale in PRESETS[name])
    rows = [(f"{name} preset", *PRESETS[name])]
    for field, value in paper.items():
        rows.append((field, value, *("=" if values[field] == value else values[field] for values in smaller)))
    pad = "{!s:<22}{!s:<44}{!s:<18}{!s}".format
    return "\n".join(pad(*row) for row in rows)


if __name__ == "__main__":
    import sys  # for the command line alone

    names = sys.argv[1:] or ["popgym"]
    if unknown := [name for name in names if name not in PRESETS]:
        sys.exit(f"unknown preset {unknown[0]!r}: choose from {', '.join(PRESETS)}")
    print("\n\n".join(format_table(name) for name in names))
