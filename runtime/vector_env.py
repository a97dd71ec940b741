r"""Several multi-task environments stepped together, in this process or in worker processes that may die.

What     `make_vector_env` makes them from a benchmark's name. `InProcess` steps one after the other; `InWorkers` has
         a process for each. Both reset on the same step, and can be saved and restored within a rollout
Why      one batched step of the policy serves all environments; slow simulators gain from running in parallel;
         and in a run of days, some worker dies
Paper    none: our choice
Shapes   E environments; observations (E, O), or a dictionary of (E, ...)
"""

import contextlib
import functools
import multiprocessing
import os
import random
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

from suites import BENCHMARKS, make_env


def make_vector_env(
    env: str, num_envs: int, asynchronous: bool = False, worker_timeout=300.0, seed=0, **kwargs
):
    """`num_envs` of `make_env(env, **kwargs)`, stepped together in this process or in worker processes.

    `reset(seed=s)` seeds environment i with s + i. Environments reset on the same step: where rollout i ends, the
    observation, info["task"] and info["task_id"] are the next rollout's first. The ended rollout's last observation
    is info["final_obs"][i], and its info is info["final_info"]["return"][i] and so on, each (num_envs, ...) with a
    mask info["final_info"]["_return"]. Gymnasium's default, to reset on the next step, would add a step to the
    data whose action nobody chose.
    `snapshots()` lists each environment's `snapshot()`. `restore(snapshots)` returns the observations and info at
    that point, as `reset` does; None begins a new rollout. `restart(i)` resets environment i alone.
    A worker that dies, or is silent for `worker_timeout` seconds, is replaced and its rollout is lost: in that step
    info["lost"] (num_envs,) is True, the observation is a new rollout's first, and the reward is 0.
    `ask({i: (method, arguments)})` calls a method of single environments, and returns {i: its result} without
    those whose workers were lost. `seed` is that of the workers' global generators: see `seed_globals`.
    """
    makes = [functools.partial(make_env, env, index=(i, num_envs), **kwargs) for i in range(num_envs)]
    if asynchronous:
        return InWorkers(makes, worker_timeout, seed)
    return InProcess(makes, autoreset_mode="SameStep")


def seed_globals(*numbers: int) -> int:
    """Seed the global generators of Python and NumPy, from which some environments draw; returns the seed.

    A worker starts as a copy of this process: without seeds of their own, all of them would draw the same.
    """
    seed = int(np.random.SeedSequence(numbers).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    return seed


def in_processes(config) -> bool:
    """Whether `--workers` asks for worker processes; "auto" does for slow simulators, if there are 4 cores or more."""
    slow = config.env in BENCHMARKS and BENCHMARKS[config.env].slow
    return config.workers == "processes" or (config.workers == "auto" and slow and (os.cpu_count() or 1) >= 4)


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


def stack_observations(obs_E: Sequence):
    "Observations of all environments as one array (E, ...), or a dictionary of arrays."
    if isinstance(obs_E[0], dict):
        return {name: stack_observations([obs[name] for obs in obs_E]) for name in obs_E[0]}
    return np.array(obs_E)


def stack_resets(resets_E: Sequence[tuple]) -> tuple:
    "Observations and info of all environments from each one's `reset()`."
    obs_E, info_E = zip(*resets_E)
    task_E = np.array([info["task"] for info in info_E], dtype=object)
    task_id_E = np.array([info["task_id"] for info in info_E])
    return stack_observations(obs_E), {"task": task_E, "task_id": task_id_E}


def stack_steps(envs: VectorEnv, steps_E: Sequence[tuple], lost_E: np.ndarray) -> tuple:
    "The result of `step` from each environment's `step_on()`; `lost_E` (E,)."
    obs_E, reward_E, terminated_E, truncated_E, info_E, ended_E = zip(*steps_E)
    obs, info = stack_resets(list(zip(obs_E, info_E)))
    info["lost"] = lost_E
    for e, ended in enumerate(ended_E):
        if ended:
            info = envs._add_info(info, ended, e)
    return obs, np.array(reward_E), np.array(terminated_E), np.array(truncated_E), info


class InProcess(SyncVectorEnv):
    """`MultiTaskEnv`s stepped one after the other; see `make_vector_env`.

    A POPGym task takes 10 microseconds a step, and `MultiTaskEnv` adds 4. Gymnasium's own `step` would add 2.6,
    because it gathers information and copies observations one environment at a time; all at once, it is 0.5.
    """

    def step(self, actions) -> tuple:
        """Step every environment; where a rollout ends, begin the next one."""
        steps_E = [step_on(env, action) for env, action in zip(self.envs, actions, strict=True)]
        return stack_steps(self, steps_E, np.zeros(self.num_envs, dtype=bool))

    def snapshots(self) -> list[dict]:
        """Each environment's rollout so far."""
        return [env.snapshot() for env in self.envs]

    def restore(self, snapshots: Sequence[dict | None]) -> tuple:
        """Repeat these rollouts; None begins a new one."""
        pairs = zip(self.envs, snapshots, strict=True)
        return stack_resets([restore(env, snapshot) if snapshot else env.reset() for env, snapshot in pairs])

    def restart(self, e: int) -> tuple:
        """Begin a new rollout in environment `e`; returns its observation and info."""
        return self.envs[e].reset()

    def ask(self, requests: dict[int, tuple]) -> dict:
        """Results {e: result} of the requests {e: (method, arguments)}."""
        return {e: getattr(self.envs[e], method)(**arguments) for e, (method, arguments) in requests.items()}


class InWorkers(VectorEnv):
    """`MultiTaskEnv`s in a worker process each; a worker that dies or is silent is replaced. See `make_vector_env`.

    Gymnasium's `AsyncVectorEnv` waits for ever for a silent worker, and replaces none.
    Raises ValueError, and ends all workers, for a faulty task, for a worker that is lost while it begins or restores
    a rollout, and for one that is lost three times without finishing a rollout in between.
    """

    start_seconds = 60.0  # allowed on top of `timeout` where a worker starts and makes its simulators

    def __init__(self, makes: Sequence[Callable], timeout: float = 300.0, seed: int = 0):
        self.makes, self.num_envs, self.timeout, self.seed = makes, len(makes), timeout, seed
        self._parent, self._seed, self._replaced, self._started = os.getpid(), 0, 0, 0
        self.processes, self._pipes, self._selector = [], {}, selectors.PollSelector()
        self._losses_E = np.zeros(self.num_envs, dtype=int)  # since each environment last finished a rollout
        with contextlib.closing(makes[0]()) as env:  # for its spaces; never stepped
            self.single_observation_space, self.single_action_space = env.observation_space, env.action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.processes.extend(self._start(e) for e in range(self.num_envs))

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        """Begin a rollout in every environment."""
        self._seed = self._seed if seed is None else int(seed)
        seeds = [None if seed is None else int(seed) + e for e in range(self.num_envs)]
        requests = {e: ("reset", {"seed": s, "options": options}) for e, s in enumerate(seeds)}
        return stack_resets(self._begin(requests))

    def step(self, actions) -> tuple:
        """Step every environment; where a rollout ends or is lost, begin the next one."""
        requests = {e: ("step_on", {"action": a}) for e, a in zip(range(self.num_envs), actions, strict=True)}
        steps = self._ask(requests)
        lost_E = np.array([e not in steps for e in requests])
        while missing := [e for e in requests if e not in steps]:
            resets = {e: ("reset", {"seed": self._replace(e)}) for e in missing}
            for e, (obs, info) in self._ask(resets, self.start_seconds).items():
                steps[e] = obs, 0.0, False, False, info, None
        result = stack_steps(self, [steps[e] for e in requests], lost_E)
        self._losses_E[result[2] | result[3]] = 0
        return result

    def snapshots(self) -> list[dict | None]:
        """Each environment's rollout so far; None for a lost worker, which the next step replaces."""
        snapshots = self._ask({e: ("snapshot", {}) for e in range(self.num_envs)})
        return [snapshots.get(e) for e in range(self.num_envs)]

    def restore(self, snapshots: Sequence[dict | None]) -> tuple:
        """Repeat these rollouts; None begins a new one."""
        # No seed is given here: workers that are replaced later draw theirs from the saved state.
        self._seed = next((s["generator"]["state"]["state"] for s in snapshots if s), self._seed)
        requests = [("restore", {"snapshot": s}) if s else ("reset", {}) for s in snapshots]
        seconds = max(len(s["actions"]) if s else 0 for s in snapshots)  # at most one for each step
        return stack_resets(self._begin(dict(zip(range(self.num_envs), requests, strict=True)), seconds))

    def restart(self, e: int) -> tuple:
        """Begin a new rollout in environment `e`; returns its observation and info."""
        return self._begin({e: ("reset", {})})[0]

    def ask(self, requests: dict[int, tuple]) -> dict:
        """Results {e: result} of the requests {e: (method, arguments)}, without those of lost workers.

        A lost worker is replaced at once; its environment has to be reset. It may be lost any number of times.
        """
        begins = any(method == "reset" for method, _ in requests.values())
        answers = self._ask(requests, self.start_seconds if begins else 0.0)
        for e in requests.keys() - answers.keys():
            self.processes[e] = self._start(e)
        return answers

    def close_extras(self, **kwargs) -> None:
        """Close the pipes, and kill the workers that still run after two seconds."""
        if os.getpid() != self._parent:  # a worker's copy of this object
            return
        for pipe in self._pipes.values():
            pipe.close()
        deadline = time.monotonic() + 2
        try:
            for process in self.processes:
                process.join(max(0.0, deadline - time.monotonic()))
        finally:  # even after Ctrl-C, none is left
            for process in self.processes:
                process.kill()
                process.join(1)

    def _begin(self, requests: dict[int, tuple], seconds: float = 0.0) -> list[tuple]:
        "Answers to `requests`, each of which begins a rollout."
        answers = self._ask(requests, self.start_seconds + seconds)
        if len(answers) < len(requests):
            self._give_up()
        return [answers[e] for e in requests]

    def _ask(self, requests: dict[int, tuple], more_seconds: float = 0.0) -> dict:
        """Answers {e: result} to requests {e: (method, arguments)}, without those of lost workers.

        A worker is lost if it has died, or if `timeout` and more pass in which none of them answers. ValueError
        for a fault that one reports.
        """
        if self.closed:
            raise gymnasium.error.ClosedEnvironmentError("these environments are closed")
        answers, waiting, silent = {}, set(), 0.0
        try:
            for e, request in requests.items():
                with contextlib.suppress(OSError):  # it has died
                    self._pipes[e].send(request)
                    waiting.add(e)
            # Count quarters of a second, not the time: while Ctrl-Z stops this program and its workers, at most
            # one quarter is lost.
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
        except BaseException:  # Ctrl-C, too: answers that are still on their way would fit no later request
            self.close()
            raise
        return answers

    def _start(self, e: int) -> multiprocessing.Process:
        "A new worker for environment `e`."
        self._pipes[e], theirs = multiprocessing.Pipe()
        self._started += 1
        arguments = (self.makes[e], theirs, list(self._pipes.values()), (self.seed, self._started))
        process = multiprocessing.Process(target=serve, args=arguments, daemon=True)
        process.start()
        theirs.close()
        self._selector.register(self._pipes[e], selectors.EVENT_READ, e)
        return process

    def _kill(self, e: int) -> None:
        "End worker `e`, if that has not been done."
        if not self._pipes[e].closed:
            self._selector.unregister(self._pipes[e])
            self._pipes[e].close()
            self.processes[e].kill()
            self.processes[e].join(1)

    def _replace(self, e: int) -> int:
        "Start a new worker for environment `e`; returns the seed to begin with."
        self._losses_E[e] += 1
        if self._losses_E[e] == 3:
            self._give_up(" three times in a row")
        self.processes[e] = self._start(e)
        # 64 random bits, so that no other environment is likely to have this seed.
        self._replaced += 1
        return int(np.random.SeedSequence([self._seed, e, self._replaced]).generate_state(1, np.uint64)[0])

    def _give_up(self, times: str = "") -> None:
        "End all workers and raise ValueError."
        self.close()
        raise ValueError(
            f"a worker process died or was silent for {self.timeout:g} seconds{times}, perhaps because memory ran "
            "out: resume from the last checkpoint with --resume and the run's --name, and with fewer --num_envs or "
            "--workers none"
        )


def serve(make: Callable, pipe, parents: Sequence, seeds: tuple[int, int]) -> None:
    """The loop of a worker: step, reset, save or restore its environment as the parent asks, until that closes its end.

    `pipe` is this worker's end. `parents` are the parent's ends of all pipes, copied into this process: they must
    be closed here, or no worker would notice that the parent is gone. `seeds` are those of the global generators.
    Each answer is (result, None); after a fault it is (None, message), and the worker ends.
    """
    # A terminal's Ctrl-C reaches every process: a worker that died of it would fail the step after which the
    # parent saves. The parent's handler of SIGTERM is inherited, and would keep a worker alive.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    seed = seed_globals(*seeds)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)
        sys.modules["torch"].set_num_threads(1)
    for parent in parents:
        parent.close()
    try:
        with contextlib.closing(make()) as env:
            while True:
                method, arguments = pipe.recv()
                call = {"step_on": step_on, "restore": restore}.get(method) or getattr(type(env), method)
                pipe.send((call(env, **arguments), None))
    except Exception as error:  # noqa: BLE001  the parent raises it
        # ValueError is a task's fault, told in one line; anything else is an error of this program.
        fault = str(error) if isinstance(error, ValueError) else traceback.format_exc()
        with contextlib.suppress(OSError):  # the parent has closed its end
            pipe.send((None, fault))
