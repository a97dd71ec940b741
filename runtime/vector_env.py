r"""Several multi-task environments stepped together, in process or in worker processes that may die.

What     `make_vector_env` makes them from a benchmark's name: `InProcess` steps one after the other, `InWorkers` a
         process each. Both reset on the same step, and can be saved and put back in mid-rollout
Why      one batched step of the policy serves all of them; a simulator that takes longer than handing it to
         another process gains from several; and in a run of days, some worker dies
Paper    none: our choice
Shapes   E environments; observations (E, O), or a dictionary of (E, ...)
Try      python -m runtime.vector_env
"""

import contextlib
import functools
import multiprocessing
import os
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence

import gymnasium
import numpy as np
from gymnasium.vector import SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space

from suites import make_env


def make_vector_env(env: str, num_envs: int, asynchronous: bool = False, worker_timeout=300.0, **kwargs):
    """`num_envs` of `make_env(env, **kwargs)` stepped together, in process or in worker processes.

    `reset(seed=s)` seeds environment i with s + i. They reset on the same step: where rollout i ends, the
    observation is already the next one's first, as are info["task"] and info["task_id"]; the old one's last
    observation is info["final_obs"][i], its info info["final_info"]["return"][i] and so on, each
    (num_envs, ...) with a mask info["final_info"]["_return"]. Gymnasium's default, resetting on the next step,
    would put a step into the data that nobody chose.
    `snapshots()` is each environment's `snapshot()`; `restore(them)` returns what `reset` does, of where they were
    taken, and begins a new rollout for a None among them; `restart(i)` is environment i's own `reset()`.
    A worker that dies, or does not answer a step within `worker_timeout` seconds, is replaced, and its rollout
    dropped: a step's info["lost"] (num_envs,) is True there, the observation a new rollout's first, the reward
    0. It is False in all other steps, and always in process.
    """
    makes = [functools.partial(make_env, env, lane=(i, num_envs), **kwargs) for i in range(num_envs)]
    return InWorkers(makes, worker_timeout) if asynchronous else InProcess(makes, autoreset_mode="SameStep")


def together(obs_E: Sequence):
    "Observations of all environments as one, (E, ...), or a dictionary of such."
    if isinstance(obs_E[0], dict):
        return {name: together([obs[name] for obs in obs_E]) for name in obs_E[0]}
    return np.array(obs_E)


def begun(obs_E: Sequence, info_E: Sequence[dict]) -> tuple:
    "Observations and info of all environments, as their `reset` returned them, as one."
    task_E = np.array([info["task"] for info in info_E], dtype=object)
    return together(obs_E), {"task": task_E, "task_id": np.array([info["task_id"] for info in info_E])}


def step_on(env, action) -> tuple:
    """`step`, and `reset` at a rollout's end: the five results, and the ended rollout's last ones or None."""
    obs, reward, terminated, truncated, info = env.step(action)
    if not (terminated or truncated):
        return obs, reward, terminated, truncated, info, None
    last, (obs, info) = {"final_obs": obs, "final_info": info}, env.reset()
    return obs, reward, terminated, truncated, info, last


def restore(env, snapshot: dict) -> tuple:
    """Play a rollout again, up to where `snapshot` was taken: (observation, info) as they were then.

    The rest follows as it would have. (A simulator's own state would need a pickle, and loading one runs code.)
    Where seed and actions do not determine a simulator, the observation may differ: compare it. A rollout that ends
    too early is followed by a new one, whose first observation equals no later one.
    """
    env.np_random.bit_generator.state, over = snapshot["generator"], False
    obs, info = env.reset(options={"task": snapshot["task"]})
    for action in snapshot["actions"]:
        if over:
            return env.reset()
        obs, _, terminated, truncated, info = env.step(action)
        over = terminated or truncated
    return obs, info


def stepped(envs: VectorEnv, steps_E: Sequence[tuple], lost_E: np.ndarray) -> tuple:
    "What `step_on` returned of each environment, as one: each of them (E,) or (E, ...)."
    obs_E, reward_E, terminated_E, truncated_E, info_E, last_E = zip(*steps_E)
    (obs, info), last = begun(obs_E, info_E), {}
    for e, ended in enumerate(last_E):
        last = last if ended is None else envs._add_info(last, ended, e)
    info |= {"lost": lost_E} | last
    return obs, np.array(reward_E), np.array(terminated_E), np.array(truncated_E), info


class InProcess(SyncVectorEnv):
    """`MultiTaskEnv`s stepped one after the other; see `make_vector_env`.

    A POPGym task takes 10 microseconds a step, and what `MultiTaskEnv` does with it 4. Gymnasium's own `step`
    adds 2.6, to gather information and to stack and copy observations one environment at a time: done for all
    of them at once, that takes 0.5.
    """

    def step(self, actions):
        """One step of every environment; where a rollout ends, the next one has begun."""
        steps_E = [step_on(env, action) for env, action in zip(self.envs, actions, strict=True)]
        return stepped(self, steps_E, np.zeros(self.num_envs, dtype=bool))

    def snapshots(self) -> list[dict]:
        """Each environment's rollout so far."""
        return [env.snapshot() for env in self.envs]

    def restore(self, snapshots: Sequence[dict | None]) -> tuple:
        """Live these rollouts again; None begins a new one."""
        pairs = zip(self.envs, snapshots, strict=True)
        return begun(*zip(*[restore(env, snapshot) if snapshot else env.reset() for env, snapshot in pairs]))

    def restart(self, e: int) -> tuple:
        """Begin a new rollout in environment `e`; its observation and info."""
        return self.envs[e].reset()


class InWorkers(VectorEnv):
    """`MultiTaskEnv`s in worker processes, one each, of which a dead or silent one is replaced.

    See `make_vector_env`. Gymnasium's own `AsyncVectorEnv` waits for ever for a silent worker, and replaces none.
    ValueError, all workers ended, for a faulty task, for a worker that is lost while it begins or restores a
    rollout, and for one that is lost three times without having finished one.
    """

    start_seconds = 60.0  # more than for a step, to start a process and to make simulators

    def __init__(self, makes: Sequence[Callable], timeout: float = 300.0):
        self.makes, self.num_envs, self.timeout = makes, len(makes), timeout
        self.lanes, self._parent, self._seed, self._replaced = range(self.num_envs), os.getpid(), 0, 0
        self.processes, self._pipes, self._selector = [], {}, selectors.PollSelector()
        self._lost_E = np.zeros(self.num_envs, dtype=int)  # times since a rollout was finished
        with contextlib.closing(makes[0]()) as env:  # looked at, not played
            self.single_observation_space, self.single_action_space = env.observation_space, env.action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.processes.extend(self._start(e) for e in self.lanes)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        """Begin a rollout in every environment."""
        self._seed = self._seed if seed is None else int(seed)
        seeds = [None if seed is None else int(seed) + e for e in self.lanes]
        requests = {e: ("reset", {"seed": seeds[e], "options": options}) for e in self.lanes}
        return begun(*zip(*self._begin(requests)))

    def step(self, actions) -> tuple:
        """One step of every environment; where a rollout ends, or is lost, the next one has begun."""
        requests = {e: ("step_on", {"action": a}) for e, a in zip(self.lanes, actions, strict=True)}
        steps = self._ask(requests)
        lost_E = np.array([e not in steps for e in self.lanes])
        while missing := [e for e in self.lanes if e not in steps]:
            new = self._ask({e: ("reset", {"seed": self._replace(e)}) for e in missing}, self.start_seconds)
            steps |= {e: (obs, 0.0, False, False, info, None) for e, (obs, info) in new.items()}
        result = stepped(self, [steps[e] for e in self.lanes], lost_E)
        self._lost_E[result[2] | result[3]] = 0
        return result

    def snapshots(self) -> list[dict | None]:
        """Each environment's rollout so far; None of a worker that is lost, which the next step replaces."""
        known = self._ask({e: ("snapshot", {}) for e in self.lanes})
        return [known.get(e) for e in self.lanes]

    def restore(self, snapshots: Sequence[dict | None]) -> tuple:
        """Live these rollouts again; None begins a new one."""
        self._seed = next((s["generator"]["state"]["state"] for s in snapshots if s), self._seed)
        requests = [("restore", {"snapshot": s}) if s else ("reset", {}) for s in snapshots]
        longest = max(len(s["actions"]) if s else 0 for s in snapshots)  # a second for each step, at most
        return begun(*zip(*self._begin(dict(zip(self.lanes, requests, strict=True)), longest)))

    def restart(self, e: int) -> tuple:
        """Begin a new rollout in environment `e`; its observation and info."""
        return self._begin({e: ("reset", {})})[0]

    def close_extras(self, **kwargs) -> None:
        """Hang up, and kill the workers that are still there after two seconds, whatever they are doing."""
        if os.getpid() != self._parent:  # a worker's copy of this object
            return
        for pipe in self._pipes.values():
            pipe.close()
        deadline = time.monotonic() + 2
        try:
            for process in self.processes:
                process.join(max(0.0, deadline - time.monotonic()))
        finally:  # Ctrl-C leaves none of them behind
            for process in self.processes:
                process.kill()
                process.join(1)

    def _begin(self, requests: dict[int, tuple], seconds: float = 0.0) -> list[tuple]:
        "The answers to `requests`, which begin rollouts."
        answers = self._ask(requests, self.start_seconds + seconds)
        if len(answers) < len(requests):
            self._give_up()
        return [answers[e] for e in requests]

    def _ask(self, requests: dict[int, tuple], more_seconds: float = 0.0) -> dict:
        """The answers {e: result} to the requests {e: (method, arguments)}. A worker that has died is left out, and so
        is one that was silent for `timeout` and more after the last answer of any. ValueError for what one reports.
        """
        if self.closed:
            raise gymnasium.error.ClosedEnvironmentError("these environments are closed")
        answers, waiting, silent = {}, set(), 0.0
        try:
            for e, request in requests.items():
                with contextlib.suppress(OSError):  # it is dead
                    self._pipes[e].send(request)
                    waiting.add(e)
            # In quarters of a second: Ctrl-Z, which stops this program and its workers, takes away just one.
            while waiting and silent < self.timeout + more_seconds:
                ready = self._selector.select(0.25)
                silent = 0.0 if ready else silent + 0.25
                for e in (key.data for key, _ in ready):
                    waiting.discard(e)
                    try:
                        answers[e], fault = self._pipes[e].recv()
                    except (EOFError, OSError):
                        self._kill(e)
                        continue
                    if fault:
                        raise ValueError(fault)
            for e in requests.keys() - answers.keys():
                self._kill(e)
        except BaseException:  # with Ctrl-C among them: some have answered, and some still will
            self.close()
            raise
        return answers

    def _start(self, e: int) -> multiprocessing.Process:
        "A new process for environment `e`."
        self._pipes[e], theirs = multiprocessing.Pipe()
        arguments = (self.makes[e], theirs, list(self._pipes.values()))
        process = multiprocessing.Process(target=serve, args=arguments, daemon=True)
        process.start()
        theirs.close()
        self._selector.register(self._pipes[e], selectors.EVENT_READ, e)
        return process

    def _kill(self, e: int) -> None:
        "End worker `e`, whatever it is doing, if that has not been done."
        if not self._pipes[e].closed:
            self._selector.unregister(self._pipes[e])
            self._pipes[e].close()
            self.processes[e].kill()
            self.processes[e].join(1)

    def _replace(self, e: int) -> int:
        "A new worker for environment `e`; returns the seed that it should begin with."
        self._lost_E[e] += 1
        if self._lost_E[e] == 3:
            self._give_up(" three times in a row")
        self.processes[e] = self._start(e)
        # 64 bits of their own: hardly ever one that was given or drawn elsewhere.
        self._replaced += 1
        return int(np.random.SeedSequence([self._seed, e, self._replaced]).generate_state(1, np.uint64)[0])

    def _give_up(self, times: str = "") -> None:
        "ValueError, all workers ended."
        self.close()
        raise ValueError(
            f"a worker process died or was silent for {self.timeout:g} seconds{times}, killed perhaps because memory "
            "ran out: add --resume and the run's --name to go on from its last checkpoint, with fewer --num_envs or "
            "--workers none"
        )


def serve(make: Callable, pipe, parents: Sequence) -> None:
    """A worker's whole life: step, reset and save its environment as the parent asks, until that hangs up.

    `pipe` is this end; `parents` the other ends of all pipes, copied into this process, where they would keep
    workers from noticing that their parent is gone. Answers are (result, None), or (None, what is wrong) at the end.
    """
    # Ctrl-C reaches every process of a terminal; a worker that died of it would fail the parent's last step
    # before it has saved. A parent's own handler of SIGTERM, inherited, would keep a worker alive.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    for parent in parents:
        parent.close()
    try:
        with contextlib.closing(make()) as env:
            while True:
                method, arguments = pipe.recv()
                call = {"step_on": step_on, "restore": restore}.get(method) or getattr(type(env), method)
                pipe.send((call(env, **arguments), None))
    except Exception as error:  # noqa: BLE001  not lost: the parent raises it
        # A task's fault in its one line; anything else is a mistake of ours.
        fault = str(error) if isinstance(error, ValueError) else traceback.format_exc()
        with contextlib.suppress(OSError):  # the parent has hung up
            pipe.send((None, fault))


if __name__ == "__main__":
    envs = make_vector_env("scales", 2, tasks="RepeatFirstEasy")
    obs, info = envs.reset(seed=0)
    print(f"two environments: observations (E, O) = {obs.shape}, tasks {info['task'].tolist()}")
    for _ in range(51):
        obs, reward_E, terminated_E, _, info = envs.step([0, 1])
    returns = info["final_info"]["return"].round(3).tolist()
    print(f"step 51: terminated {terminated_E.tolist()}, returns {returns}; the next rollouts have begun:")
    start = obs[:, envs.envs[0].layout["attempt_start"]].ravel().tolist()
    print(f"  attempt_start {start}; the old ones' last observations: {len(info['final_obs'])}")
    envs.step([0, 1])
    saved, seen = envs.snapshots(), envs.step([2, 2])[0]
    again = make_vector_env("scales", 2, tasks="RepeatFirstEasy")
    again.restore(saved)
    print(
        f"put back elsewhere, the same action leads to the same: {bool((again.step([2, 2])[0] == seen).all())}"
    )
    envs.close(), again.close()
