r"""Presets: the paper's Tables 1 and 2 as data, and what `laptop` and `smoke` make of them.

What     `preset(name, scale)` returns the configuration's values, field name -> value, that reproduce an
         experiment of the paper; a smaller scale overrides some of them
Why      numbers that decide a result belong in one place, beside the page they come from
Paper    AMAGO-2 (arXiv 2411.11188), appendix A, Tables 1 and 2. "Authors' script": settings that the paper
         does not print and the authors' training script has
Order    an explicit flag beats the scale, which beats the preset. `preset` does the second half of that;
         the command line, which starts from what it returns, the first
Scales   paper   the column as printed, meant for a GPU
         laptop  learns easy tasks within half an hour on a CPU: a smaller network, rarer updates
         smoke   ends within seconds: does the program run at all?
Copy     this file alone; needs nothing but Python
Try      python presets.py
"""

# Each line: meaning, unit | source. One dictionary a table, one more for what neither of them holds.
TABLE_1_POPGYM = {
    "learning_rate": 1e-4,  # AdamW's, after the warm-up | Table 1
    "batch_size": 24,  # windows in a batch, sequences | Table 1
    "replay_trajectories": 15_000,  # replay capacity, full trajectories | Table 1
    "replay_steps": None,  # replay capacity, env steps; exactly one of the two | Table 1
    "weight_decay": 1e-4,  # AdamW's | Table 1, "L2 Penalty"
    "grad_clip": 1.0,  # norm of the whole gradient | Table 1
    "gammas": (0.1, 0.9, 0.95, 0.97, 0.99, 0.995, 0.999),  # discounts learned; the last one acts | Table 1
    "critics": 4,  # ensemble members | Table 1
    "tau": 0.003,  # share of the way that targets move each update | Table 1
}

TABLE_2_POPGYM = {
    "encoder_hidden": 512,  # timestep encoder, hidden width | Table 2
    "encoder_dim": 200,  # timestep encoder, output width | Table 2
    "d_model": 256,  # Transformer, width | Table 2
    "d_ff": 1024,  # Transformer, feed-forward width | Table 2
    "layers": 3,  # Transformer, blocks | Table 2
    "heads": 8,  # Transformer, attention heads | Table 2
    "context": 600,  # how far back the policy can look, env steps | Table 2
    "hidden": (256, 256),  # actor and critic MLPs, widths | Table 2
    "bins": 64,  # critic output bins | Table 2
}

BEYOND_THE_TABLES = {
    # ---- learning
    "bin_low": -1e5,  # lower limit of the bins, scaled returns | appendix A
    "bin_high": 1e5,  # upper limit | appendix A
    "value_label": "twohot",  # labels of the two-hot critic | Eq. 5 and 6
    "popart_beta": 5e-4,  # step size of PopArt's statistics | authors' code
    "n_step": 1,  # rewards summed before a target bootstraps | section 3: one
    "symlog": True,  # bins evenly spaced in symlog space | appendix A
    "action_samples": 3,  # K: samples behind the value of a state, Eq. 4 | authors' code
    "critic_weight": 10.0,  # lambda: weight of the critic's loss beside the actor's | authors' code
    "reward_scale": 200.0,  # what learning multiplies rewards by | authors' script
    "warmup_updates": 2000,  # linear warm-up of the learning rate, updates | authors' script
    "dropout": 0.05,  # on embeddings and feed-forward | authors' script
    # With 27 actions the usual clip to [0.001, 0.99] would cost a sharp policy 2.6% random actions.
    "prob_low": 1e-6,  # probabilities of discrete actions are clipped from below | our choice
    "prob_high": 1.0,  # and from above | our choice
    "chunk": 256,  # states per chunk of critic work; changes memory and speed, not results | our choice
    # ---- collecting
    "attempts": 2,  # plays of a task in a rollout, the first one free exploration | section 4, appendix B
    "store_executed": False,  # True: learn from the valid action that was executed, not the one chosen | paper
    "num_envs": 24,  # environments stepped together | our choice, the paper gives none
    "env_steps_per_update": 12.0,  # env steps collected per gradient step | authors' script
    "epsilon_start": 1.0,  # share of random actions at first | authors' script
    "epsilon_end": 0.05,  # and at last | authors' script
    "epsilon_steps": 1_000_000,  # from first to last, steps of each environment | authors' script
    "segment_length": 2000,  # longer rollouts are stored in segments, env steps | our choice: whole rollouts
    "threads": None,  # CPU threads of one operation; None: as many as there are cores | our choice
    # ---- how long, how often
    "steps": 100_000_000,  # end of the run, env steps over all environments | section 4, Multi-Task POPGym
    "minutes": None,  # end of the run by the clock, minutes | our choice
    "log_every": 50,  # updates between rows of the log | our choice
    "eval_episodes": 5,  # rollouts of each task in an evaluation | our choice
    "final_episodes": 20,  # and in the last one | our choice
}

POPGYM = TABLE_1_POPGYM | TABLE_2_POPGYM | BEYOND_THE_TABLES

# Half an hour on a CPU is a small fraction of the paper's arithmetic. It is spent on a narrow network with
# few discounts, so that there are updates enough; the learning rate and the targets move faster to match.
LAPTOP = {
    "learning_rate": 5e-4,
    "replay_trajectories": 4000,
    "gammas": (0.1, 0.9, 0.99),
    "critics": 2,
    "tau": 0.01,
    "encoder_hidden": 128,
    "encoder_dim": 64,
    "d_model": 64,
    "d_ff": 256,
    "layers": 2,
    "heads": 4,
    "context": 128,
    "hidden": (64, 64),
    "bins": 32,
    "reward_scale": 100.0,
    "warmup_updates": 100,
    "dropout": 0.0,
    # DEVIATION: of 27 padded actions most are invalid and replaced. The actor learns from the one that was
    # carried out, which teaches much faster.
    "store_executed": True,
    "num_envs": 64,
    "env_steps_per_update": 256.0,
    "epsilon_steps": 30_000,
    "minutes": 30.0,
    # Operations this small gain little from a second thread, and lose all of it, and more, as soon as
    # another program wants that core.
    "threads": 1,
    "chunk": 512,
}

SMOKE = LAPTOP | {
    "batch_size": 4,
    "replay_trajectories": 100,
    "gammas": (0.9, 0.99),
    "encoder_hidden": 16,
    "encoder_dim": 16,
    "d_model": 16,
    "d_ff": 32,
    "layers": 1,
    "heads": 2,
    "context": 16,
    "hidden": (16, 16),
    "bins": 16,
    "warmup_updates": 5,
    "num_envs": 4,
    "env_steps_per_update": 32.0,
    "epsilon_steps": 1000,
    "segment_length": 200,
    "steps": 4000,
    "minutes": None,
    "log_every": 10,
    "eval_episodes": 1,
    "final_episodes": 1,
}

# name -> scale -> values. `gym`, for any Gymnasium ids, is not in the paper: it takes POPGym's column, whose
# observations are vectors, too, and plays each task once. POPGym's returns lie in [-1, 1]; elsewhere they
# are often in the hundreds, and 200 times that would leave the bins.
GYM = {"attempts": 1, "reward_scale": 10.0}
# Four POPGym tasks whose rewards are rescaled, to compare the four variants: as POPGym, one attempt.
SCALES = {"attempts": 1}
PRESETS: dict[str, dict[str, dict]] = {
    "popgym": {"paper": POPGYM, "laptop": LAPTOP, "smoke": SMOKE},
    "scales": {"paper": POPGYM | SCALES, "laptop": LAPTOP | SCALES, "smoke": SMOKE | SCALES},
    "gym": {"paper": POPGYM | GYM, "laptop": LAPTOP | GYM, "smoke": SMOKE | GYM},
}


def preset(name: str, scale: str = "paper") -> dict:
    """Configuration values, field name -> value: the paper's column of preset `name`, shrunk to `scale`.

    `name` is a key of `PRESETS`; `scale` is "paper", "laptop" or "smoke". Every scale has the same fields.
    The dictionary is a fresh one. Source: paper, Tables 1 and 2. Raises ValueError for an unknown name or scale.
    """
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}: choose from {', '.join(PRESETS)}")
    scales = PRESETS[name]
    if scale not in scales:
        raise ValueError(f"unknown scale {scale!r} of preset {name!r}: choose from {', '.join(scales)}")
    return {**scales["paper"], **scales[scale]}


def format_table(name: str) -> str:
    """The scales of a preset side by side, a line a field; "=" where a scale keeps the paper's value."""
    paper = preset(name, "paper")
    shrunk = [preset(name, scale) for scale in PRESETS[name] if scale != "paper"]
    lines = [
        f"{name + ' preset':<22}"
        + "".join(f"{scale:<44}" if scale == "paper" else f"{scale:<18}" for scale in PRESETS[name])
    ]
    for field, value in paper.items():
        cells = ["=" if values[field] == value else str(values[field]) for values in shrunk]
        lines.append(f"{field:<22}{value!s:<44}" + "".join(f"{cell:<18}" for cell in cells))
    return "\n".join(line.rstrip() for line in lines)


if __name__ == "__main__":
    print(format_table("popgym"))
