r"""Play a trained policy and print its score, task by task.

    python evaluate.py runs/<name> --episodes 20            # the run's best weights
    python evaluate.py runs/<name>/checkpoint.pt --greedy   # any checkpoint; the mode instead of samples
    python evaluate.py runs/<name> --split test             # held-out tasks, levels, layouts and goals
    python evaluate.py runs/<name> --video rollouts.mp4     # and one rollout of each task to look at

For each task: the mean return (of the attempts that count) and its standard error, the returns that score
0 and 1 (results/), and the score between the two; then, where there are several attempts, the return of
each, and its success where the task tells: `solved` is the share of rollouts with success in two thirds of
their attempts. The table is written beside the checkpoint as CSV.
"""

import csv
import sys
from collections import deque
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
import tyro
from tqdm import tqdm

from agent import Agent, Policy
from config import ROOT, Config, check_device, find_run, import_modules, prepare_torch, refuse_import, shown
from envs import MultiTaskEnv
from runtime import checkpoint
from runtime.episode_buffer import parts
from runtime.vector_env import in_processes, make_vector_env, seed_globals
from suites import BENCHMARKS, choose_tasks, endless, env_arguments, held_out_tasks, make_env, nearest
from suites.scores import add_attempts, format_table, load_bounds, score_rows

# ----------------------------------------------------------------------------------- load and play


class TrainedPolicy(Policy):
    """The policy of a checkpoint, which can make the environment that it was trained on."""

    def make_env(self, **kwargs) -> MultiTaskEnv:
        """The environment that this policy was trained on. `kwargs` override arguments of `suites.make_env`."""
        return make_env(**{**env_arguments(self.config), **kwargs})


def make_agent(config, env: MultiTaskEnv) -> Agent:
    """An agent whose networks fit the observations and actions of `env`. ValueError if its encoder does not."""
    vocabulary = BENCHMARKS[config.env].vocabulary if config.env in BENCHMARKS else None
    sizes = (env.observation_size, env.action_size, env.discrete, env.image_shape, env.layout)
    return Agent(config, *sizes, vocabulary)


def load(path, num_envs: int = 1, device: str = "cpu", greedy: bool = False, seed: int = 0) -> TrainedPolicy:
    """Load the policy in a checkpoint: best.pt, checkpoint.pt, or a run's folder or name.

    The policy acts in `num_envs` environments side by side. CheckpointError, one line, for a missing or damaged file;
    ValueError for environments that live in a module of the user's own which is not imported yet. Loading never runs
    code from the file.
    """
    path = find_run(path)
    if path.is_dir():
        path = path / ("best.pt" if (path / "best.pt").exists() else "checkpoint.pt")
    state = checkpoint.load(path, keys=("config", "agent"))
    saved = {k: tuple(v) if isinstance(v, list) else v for k, v in state["config"].items()}
    if saved.get("reward_scale") == "auto":  # from before learning began: there are no values to scale
        saved["reward_scale"] = 1.0
    try:
        config = Config(**saved)
    except TypeError as error:
        raise checkpoint.CheckpointError(f"{path} is of another version of this program: {error}") from error
    remedy = f"add --env {config.env} (in Python: import that module first)"
    refuse_import(config.env, f"{path} plays {config.env}", remedy)
    prepare_torch(None)
    with closing(make_env(**env_arguments(config))) as env:
        agent = make_agent(config, env)
    checkpoint.fill(agent, state["agent"])
    return TrainedPolicy(agent.to(device).eval(), config, num_envs, seed, greedy)


def find_checkpoint(run: str) -> Path:
    """The checkpoint that `run` names: a file, or the best (else the newest) one of a run's folder.

    Raises ValueError, naming the runs there are, if there is none.
    """
    path = find_run(run)
    for file in (path, path / "best.pt", path / "checkpoint.pt"):
        if file.is_file():
            return file
    runs = Path("runs") if Path("runs").is_dir() else ROOT / "runs"
    folder = path.parent if path.parent.name else runs
    known = ", ".join(sorted({shown(file.parent) for file in folder.glob("*/*.pt")}))
    raise ValueError(f"no checkpoint at {run} (there are: {known or f'none in {shown(folder)}/ yet'})")


LONGEST = 5000  # env steps of a rollout in an evaluation, where neither the task nor --max_steps has a limit
LIMITED = (
    f"some tasks have no limit, or one that is far away: evaluations end rollouts after {LONGEST:,} env steps and count their "
    "returns up to there (train with --max_steps N to change it)"
)


def evaluation_arguments(config, split: str = "train") -> dict:
    """`make_env`'s arguments for an evaluation: those of training, on a split, and with a limit where there is none."""
    return env_arguments(config) | {"split": split, "longest": LONGEST}


def evaluation_envs(config, most: int, split: str = "train", seed: int = 0):
    """Environments for `evaluate`, at most `most` and at most as many as in training, in workers where training is."""
    count, arguments = min(config.num_envs, most), evaluation_arguments(config, split)
    return make_vector_env(
        num_envs=count,
        asynchronous=in_processes(config),
        worker_timeout=config.worker_timeout,
        seed=seed,
        **arguments,
    )


def evaluate(
    agent,
    config,
    episodes,
    tasks=None,
    split="train",
    greedy=False,
    seed=0,
    stop=lambda: False,
    bar=None,
    envs=None,
) -> dict[str, list[dict]]:
    """Play `episodes` rollouts of each task without exploration noise.

    `tasks` (default: all of the `split`). Samples from the policy of the last discount, or takes its mode if `greedy`.
    Ends early once `stop()` is True; `bar` is a tqdm bar that counts rollouts. `envs`, from `evaluation_envs`, may be
    used again; default: new ones.
    Returns {task: [rollout]}. A rollout is the `info` of its last step: its counted "return", its "length" in env
    steps and the real "attempt_returns". Rollouts whose worker process died or was silent are missing.
    """
    rollouts = {task: [] for task in tasks or choose_tasks(config.env, config.tasks, split)}
    queue = deque((task, episode) for episode in range(episodes) for task in rollouts)
    with ExitStack() as stack:  # closes the environments, also when a task raises
        if envs is None:
            envs = stack.enter_context(closing(evaluation_envs(config, len(queue), split, seed)))
        E = min(envs.num_envs, len(queue))
        policy = Policy(agent, config, num_envs=E, seed=seed, greedy=greedy)
        seen_E, playing = [None] * E, {}  # what each environment shows, and {e: task} of those in play

        def begin(idle: list[int]) -> None:
            "Begin the next rollouts of the queue in these environments; one whose worker is lost is left out."
            while idle and queue:
                chosen = {e: queue.popleft() for e in idle[: len(queue)]}
                # Far from any seed that training draws; the same variants in every evaluation.
                first = 10**9 + seed * 10**6
                resets = {
                    e: ("reset", {"seed": first + episode, "options": {"task": task}})
                    for e, (task, episode) in chosen.items()
                }
                begun = envs.ask(resets)
                for e, (obs, _) in begun.items():
                    seen_E[e], playing[e] = parts(obs), chosen[e][0]
                idle = [e for e in chosen if e not in begun]
                if bar is not None:
                    bar.update(len(idle))

        begin(list(range(E)))
        while playing and not stop():
            # Those that play no more stay in the batch with their last observation.
            shown_E = [obs or seen_E[next(iter(playing))] for obs in seen_E]
            action_E = policy({name: np.stack([obs[name] for obs in shown_E]) for name in shown_E[0]})
            steps = envs.ask({e: ("step", {"action": action_E[e]}) for e in playing})
            ended = [e for e in playing if e not in steps]  # lost
            for e in sorted(steps):
                obs, _, terminated, truncated, info = steps[e]
                seen_E[e] = parts(obs)
                if terminated or truncated:
                    rollouts[info["task"]].append(info)
                    ended.append(e)
            for e in ended:
                del playing[e]
            if ended:
                policy.reset(np.isin(np.arange(E), ended))
                begin(sorted(ended))
                if bar is not None:
                    bar.update(len(ended))
    return rollouts


def table_of(rollouts: dict[str, list[dict]], env, config: Config) -> list[dict]:
    """The table of what `evaluate` returned, one row a task with rollouts (suites/scores.py); `env` knows the attempts."""
    returns = {task: [info["return"] for info in played] for task, played in rollouts.items() if played}
    rows = score_rows(returns, load_bounds(config.env), env.attempts - env.free_attempts)
    return add_attempts(rows, rollouts, env.free_attempts)


# ---------------------------------------------------------------------------------- the command


@dataclass(frozen=True)
class Options:
    """Play a checkpoint without exploration noise."""

    run: Annotated[str, tyro.conf.Positional]  # a folder under runs/, or a checkpoint file in one
    episodes: int = 20  # rollouts of each task
    env: str | None = None  # gym:MODULE:ID as in training: imports the module of your own environments
    split: Literal["train", "test"] = "train"  # tasks, levels and goals it trained on, or held-out ones
    tasks: str | None = None  # comma-separated subset of the split's tasks
    video: Path | None = None  # write the first rollout of each task to this file: .mp4 or .gif
    greedy: bool = False  # the mode of the policy instead of a sample
    seed: int = 0  # of the variants that are played; training never sees these
    device: str = "auto"  # auto, cpu, cuda, ...
    out: Path | None = None  # where to write the table; default: evaluation.csv beside the checkpoint


def check_draws(env, tasks: list[str]) -> None:
    """ValueError for a task without pictures: no pixels that the agent sees, nor a `render` of the task's own."""
    for task in tasks if env.image_shape is None else ():
        env.reset(seed=0, options={"task": task})
        if env.render() is None:
            raise ValueError(f"--video: {task} draws nothing; videos are of pixels, Meta-World and BabyAI")


def record(policy, env, tasks: list[str], out: Path, seed: int = 0, fps: int = 15) -> None:
    """Write one rollout of each task as a video to `out`, .mp4 or .gif, one after another.

    Pixels as the agent sees them, enlarged four times; other tasks as their `render` draws them (see `check_draws`).
    """
    import imageio.v3 as imageio  # here, because it is slow to import and seldom needed

    gif = out.suffix == ".gif"
    options = {"duration": 1000 / fps, "loop": 0} if gif else {"codec": "libx264", "fps": fps}
    size = None
    try:
        with imageio.imopen(out, "w", plugin="pillow" if gif else "pyav") as writer:
            for task in tqdm(tasks, desc="video", unit="task", disable=None):
                obs, info = env.reset(seed=10**9 + seed * 10**6, options={"task": task})
                policy.reset()
                while "return" not in info:
                    frame = obs["image"].repeat(4, 0).repeat(4, 1) if isinstance(obs, dict) else env.render()
                    # All frames are as large as the first, and of even sides, as H.264 has it.
                    size = size or [side // 2 * 2 for side in frame.shape[:2]]
                    places = (np.linspace(0, old - 1, new).astype(int) for old, new in zip(frame.shape, size))
                    writer.write(frame[np.ix_(*places)][None], **options)
                    obs, *_, info = env.step(policy(obs))
    except BaseException:
        out.unlink(missing_ok=True)  # what was begun of it cannot be played
        raise


def main(argv: list[str] | None = None) -> list[dict]:
    """Evaluate as `argv` says (default: the program's own arguments); returns the table's rows."""
    options = tyro.cli(Options, args=argv)
    episodes, split, greedy, seed = options.episodes, options.split, options.greedy, options.seed
    if episodes < 1:
        raise ValueError(f"--episodes must be at least 1, got {episodes}")
    if seed < 0:
        raise ValueError(f"--seed must be 0 or more, got {seed}")
    import_modules(options.env)
    path = find_checkpoint(options.run)
    device = ("cuda" if torch.cuda.is_available() else "cpu") if options.device == "auto" else options.device
    check_device(device)
    video = options.video
    out = options.out or path.parent / f"evaluation{'_test' if split == 'test' else ''}.csv"
    # What cannot be written is said before the work, not after it.
    if video and video.suffix not in (".mp4", ".gif"):
        raise ValueError(f"--video writes .mp4 or .gif, not {video.name}")
    for flag, file in (("--out", out), ("--video", video)):
        if file and not file.parent.is_dir():
            raise ValueError(f"{flag} {file}: there is no folder {file.parent}")
    torch.manual_seed(seed_globals(seed))  # generators from which some environments draw
    policy = load(path, device=device, greedy=greedy)
    config = policy.config
    if options.env not in (None, config.env):
        raise ValueError(
            f"{path} was trained on {config.env}: --env {options.env} cannot be played. Leave it out"
        )
    if split == "test" and config.env.startswith("gym:"):
        raise ValueError(
            "--split test: gym: tasks have no held-out levels. Leave it out: seeds are new in any case"
        )
    load_bounds(config.env)  # a damaged table is told now, not after the episodes
    prepare_torch(config.threads)  # as in training: more threads only slow down a small network
    with closing(make_env(**evaluation_arguments(config, split))) as env:
        chosen = env.tasks if options.tasks is None else options.tasks.replace(",", " ").split()
        if not chosen:
            raise ValueError("--tasks is empty: name tasks, or leave it out to play all of them")
        if unknown := [task for task in chosen if task not in env.tasks]:
            hint = f"did you mean {nearest(unknown[0], env.tasks)}?"
            if split == "train" and set(unknown) <= set(held_out_tasks(config.env, config.tasks)):
                hint = "held out: add --split test"
            raise ValueError(f"{path} was not trained on {', '.join(unknown)}: {hint}")
        if video:
            check_draws(env, chosen)
        print(f"{path}: tasks {len(chosen)}, rollouts of each {episodes}, {'mode' if greedy else 'samples'}")
        if endless(env, config.max_steps):
            print(LIMITED)
        with tqdm(total=len(chosen) * episodes, unit="rollout", disable=None) as bar:
            played = evaluate(policy.agent, config, episodes, chosen, split, greedy, seed, bar=bar)
        if lost := len(chosen) * episodes - sum(map(len, played.values())):
            why = f"their processes died or were silent for {config.worker_timeout:g} seconds"
            print(f"{lost} of {len(chosen) * episodes} rollouts were lost: {why}")
        rows, groups = table_of(played, env, config), None
        if not rows:
            raise ValueError(
                "all rollouts were lost: there is no table. Look at the tasks' own output, or try fewer"
            )
        if split == "test" and (held_out := held_out_tasks(config.env, config.tasks)):
            trained = [task for task in env.tasks if task not in held_out]
            groups = {"trained, unseen variants": trained, "held-out": held_out}
        print(format_table(rows, groups))
        with open(out, "w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        print(f"written: {shown(out)}")
        if video:
            record(policy, env, chosen, video, seed)
            print(f"written: {video}")
    return rows


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except (ValueError, OSError, ImportError, checkpoint.CheckpointError) as error:
        sys.exit(f"error: {error}")
