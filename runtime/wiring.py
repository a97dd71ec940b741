r"""From a configuration to the parts of a run: its environments, its replay, and the memory they take.

What     which arguments of a configuration describe its environments, for training and for evaluation; what
         the networks have to know of an environment; the replay that fits it; what all of it will take
Why      the trainer and the evaluation have to agree on these, and a run that cannot fit is refused before
         it has begun
Paper    Table 1 (replay sizes)
Config   `config` is the trainer's (config.py)
"""

import os

from suites import BENCHMARKS


def in_processes(config) -> bool:
    "Whether environments are stepped in worker processes: --workers, or slow simulators and cores enough."
    slow = BENCHMARKS[config.env].slow if config.env in BENCHMARKS else False
    return config.workers == "processes" or (config.workers == "auto" and slow and (os.cpu_count() or 1) >= 4)


def observation_parts(env) -> dict[str, tuple[tuple, type]]:
    "Shape and type of the parts of an observation: the vector, and the image where there is one."
    space = env.observation_space
    spaces = {"vector": space} if space.shape else {name: space[name] for name in ("vector", "image")}
    return {name: (part.shape, part.dtype) for name, part in spaces.items()}


def sizes(env) -> tuple:
    "What `Agent` has to know: vector width O, action width A, whether actions are discrete, image shape, layout."
    discrete, spaces = hasattr(env.action_space, "n"), observation_parts(env)
    actions = int(env.action_space.n if discrete else env.action_space.shape[0])
    return spaces["vector"][0][0], actions, discrete, spaces.get("image", (None,))[0], env.layout
