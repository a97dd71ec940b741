"""The rules of the house that a program can check, on every file; each rule is also shown a file that breaks it.

A rule is a function from a file, or from the graph of imports, to a list of complaints.
"""

import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
ROOMS = (".", "suites", "runtime", "plots")
BESIDE = ("benchmarks", "examples", "results")
# Each of these can be copied out alone.
COMPONENTS = {
    "twohot",
    "critics",
    "crr_actor",
    "popart",
    "transformer",
    "encoders",
    "replay",
    "envs",
    "presets",
}
BENCHMARKS = {"popgym", "metaworld", "mujoco", "procgen", "procgen_gym", "gym3", "minigrid", "ale_py"}
# B batch, T time, C critics, G discounts, K action samples, N bins, A action, D model width, H heads, O observation
KEY = set("BTCGKNADHO")

# What the rules let pass by name.
GYMNASIUM = {"reset", "step", "render", "close"}  # gymnasium.Env documents them
TWINS = {"ScalarValue": "TwoHotValue"}  # agent.py: the first has the methods of the second, documented there
ANY_SHAPE = {"clean_state_dict"}  # takes tensors of whatever shape
EQUATIONS = {"# sigma = sqrt(nu - mu^2)"}  # happen to be valid Python
# (), (...), (S,), (..., N), (T+1, O), (len(names), tasks), or in words
SHAPE = r"(?<!\w)\(\)|\(\.\.\.\)|\((\w+\(\w+\)|[\w+*. ]+),[^()]*\)|any shape"


class File:
    """A source file: its dotted name, syntax tree, and the docstring at its head."""

    def __init__(self, path: Path, name: str):
        self.name, self.text = name, path.read_text()
        self.tree = ast.parse(self.text)
        self.head = ast.get_docstring(self.tree) or ""

    def field(self, name: str) -> str:
        """A field of the docstring, its continued lines included; "" where there is none."""
        found = re.search(rf"^{name} +(.*(?:\n {{4,}}\S.*)*)", self.head, re.MULTILINE)
        return found.group(1) if found else ""

    def letters(self) -> set[str]:
        """Capital letters that the field `Shapes` explains."""
        return set(re.findall(r"\b[A-Z]\b", self.field("Shapes")))


def files(root: Path, rooms: tuple[str, ...]) -> dict[str, File]:
    "Python files in the rooms, by their dotted names: {train, suites, suites.popgym, ...}."
    found = {}
    for room in rooms:
        for path in sorted((root / room).glob("*.py")):
            name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
            found[name] = File(path, name)
    return found


HOUSE = files(ROOT, ROOMS)
EVERY = HOUSE | files(ROOT, BESIDE)


def public(file: File) -> list[tuple[str, ast.FunctionDef | ast.ClassDef, ast.ClassDef | None]]:
    "Public functions, classes and their methods: (dotted name, definition, its class)."
    found = []
    for node in file.tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            found.append((node.name, node, None))
            for method in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
                    found.append((f"{node.name}.{method.name}", method, node))
    return found


def imports(tree: ast.Module) -> list[tuple[str, ast.stmt]]:
    "Every import of a file, inside functions too: (dotted name, statement). Of `from a import b`: a.b."
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: imports are absolute here"
            found += [(f"{node.module}.{alias.name}", node) for alias in node.names]
    return found


def graph(house: dict[str, File]) -> dict[str, set[str]]:
    "Which files of the house each file imports."
    edges = {}
    for name, file in house.items():
        edges[name] = set()
        for module, _ in imports(file.tree):
            while module and module not in house:  # a.b.c may be the function c of the file a.b
                module = module.rpartition(".")[0]
            edges[name] |= {module} - {""}
    return edges


# ----------------------------------------------------------------------------------------- rules for a file


def documented(file: File) -> list[str]:
    """Files, public functions and classes have a docstring, and methods of more than three statements."""
    complaints = [] if file.head or not file.text.strip() else ["the file has no docstring"]
    for name, node, owner in public(file):
        statements = sum(isinstance(inner, ast.stmt) for inner in ast.walk(node)) - 1
        small = owner is not None and statements <= 3
        is_environment = owner is not None and any(ast.unparse(b).endswith("Env") for b in owner.bases)
        elsewhere = (is_environment and node.name in GYMNASIUM) or (owner and owner.name in TWINS)
        if not ast.get_docstring(node) and not small and not elsewhere:
            complaints.append(f"{name} has no docstring")
    return complaints


def shapes_named(file: File) -> list[str]:
    """A public function that takes tensors or arrays names their shapes."""
    complaints = []
    for name, node, owner in public(file):
        arguments = node.args.args + node.args.kwonlyargs if isinstance(node, ast.FunctionDef) else []
        takes = [ast.unparse(a.annotation) for a in arguments if a.annotation]
        takes = [kind for kind in takes if re.fullmatch(r"(torch\.)?Tensor.*|np\.ndarray.*", kind)]
        text = (ast.get_docstring(node) or "") + (ast.get_docstring(owner) or "" if owner else "")
        elsewhere = node.name in ANY_SHAPE or (owner and owner.name in TWINS)
        if takes and not elsewhere and not re.search(SHAPE, text):
            complaints.append(f"{name} takes {', '.join(takes)} and names no shape")
    return complaints


def copied_alone(file: File) -> list[str]:
    """A file whose `Copy` line begins with "this file" imports only files and packages that the line names.

    Every component has such a line.
    """
    copy, complaints = file.field("Copy"), []
    if not copy.startswith("this file"):
        return ["its head has no `Copy` line"] if file.name in COMPONENTS else []
    beside = set(re.findall(r"(\w+)\.py", copy.partition(";")[0]))  # "this file with envs.py; needs numpy"
    for sibling in sorted(graph(HOUSE | {file.name: file})[file.name]):
        if sibling.rpartition(".")[2] not in beside:
            complaints.append(f"imports its sibling {sibling}")
    for module, _ in imports(file.tree):
        top = module.partition(".")[0]
        if top in sys.stdlib_module_names or top in HOUSE:
            continue
        package = "tensorboard" if ".tensorboard" in module else top
        named = "benchmark" if package in BENCHMARKS else package
        if not re.search(rf"\b{named}\b", copy):
            complaints.append(f"imports {package}, which its `Copy` line does not name")
    return complaints


def benchmarks_late(file: File) -> list[str]:
    """A benchmark's package is imported inside functions only: nobody needs the packages of the others."""
    functions = [n for n in ast.walk(file.tree) if isinstance(n, (ast.FunctionDef, ast.Lambda))]
    late = {inner for function in functions for inner in ast.walk(function)}
    early = [m for m, node in imports(file.tree) if m.partition(".")[0] in BENCHMARKS and node not in late]
    return [f"{module} is a benchmark's package: import it inside a function" for module in early]


def suffixes(file: File) -> dict[str, str]:
    "Names that end in a shape, and that shape: {logits_BTCGN: BTCGN}."
    names = set()
    for node in ast.walk(file.tree):
        names |= {getattr(node, kind, None) for kind in ("id", "arg", "attr")}
    found = {
        n: re.fullmatch(r"_?[a-z]\w*?_([A-Z0-9]*[A-Z][A-Z0-9]*)", n) for n in names if isinstance(n, str)
    }
    return {name: match.group(1) for name, match in found.items() if match}


def letters_explained(file: File) -> list[str]:
    """Letters of a shape are those of the key, or the file's field `Shapes` explains them.

    Files that put components together also use the components' letters.
    """
    known = KEY | file.letters()
    if file.name not in COMPONENTS:
        known = known.union(*(HOUSE[name].letters() for name in COMPONENTS))
    return [
        f"{name}: {''.join(sorted(unknown))} is not explained"
        for name, shape in sorted(suffixes(file).items())
        if (unknown := {letter for letter in shape if letter.isalpha()} - known)
    ]


# Each rule, and the files that it holds for.
RULES = {
    documented: EVERY,
    shapes_named: HOUSE,
    copied_alone: HOUSE,
    benchmarks_late: EVERY,
    letters_explained: EVERY,
}


@pytest.mark.parametrize("name", EVERY)
def test_the_rules_of_the_house(name):
    broken = [f"{name}: {c}" for rule, held in RULES.items() if name in held for c in rule(held[name])]
    assert not broken, "\n".join(broken)


def test_exemptions_are_still_needed():
    "An exemption that nobody needs any more would hide the next mistake."
    text = "".join(file.text for file in EVERY.values())
    assert all(f"class {twin}" in text for pair in TWINS.items() for twin in pair)
    assert all(f"def {name}" in text for name in ANY_SHAPE) and all(line in text for line in EQUATIONS)


HEAD = 'r"""A file.\n\nShapes   Q queries\nCopy     this file with popart.py; needs torch\n"""\n'
GOOD = "import popart\nfrom torch import Tensor\nx_BTQ = 1\n"
GOOD += "def f(x: Tensor):\n    'Tensors (..., N) to a number.'\n    import math\n"
LONG = "        a = 1\n        b = 2\n        c = 3\n        return a + b + c\n"
BROKEN = [
    (documented, "x = 1\n", "the file has no docstring"),
    (documented, f"{HEAD}def f(x):\n{LONG}", "f has no docstring"),
    (documented, f"{HEAD}class C:\n    'x'\n    def f(x):\n{LONG}", "C.f has no docstring"),
    (shapes_named, f"{HEAD}def f(x: Tensor):\n    'A tensor to a tensor.'\n", "names no shape"),
    (copied_alone, HEAD.replace("Copy ", "Take "), "no `Copy` line"),
    (copied_alone, f"{HEAD}import critics\n", "imports its sibling critics"),
    (copied_alone, f"{HEAD}def f():\n    from runtime import logger\n", "imports its sibling runtime.logger"),
    (copied_alone, f"{HEAD}import numpy as np\n", "imports numpy, which its `Copy` line"),
    (
        copied_alone,
        f"{HEAD}from torch.utils.tensorboard import SummaryWriter\n",
        "imports tensorboard, which",
    ),
    (copied_alone, f"{HEAD}def f():\n    import popgym.envs\n", "imports popgym, which"),
    (
        benchmarks_late,
        f"{HEAD}try:\n    import popgym.envs\nexcept ImportError:\n    pass\n",
        "inside a function",
    ),
    (letters_explained, f"{HEAD}def f(x_BTZ):\n    return x_BTZ\n", "x_BTZ: Z is not"),
    (letters_explained, f"{HEAD}x.y_2R = 1\n", "y_2R: R is not"),
]


@pytest.mark.parametrize(("rule", "source", "complaint"), BROKEN)
def test_each_rule_complains_of_a_file_that_breaks_it(rule, source, complaint, tmp_path):
    path = tmp_path / "twohot.py"
    path.write_text(source)
    complaints = rule(File(path, "twohot"))
    assert len(complaints) == 1 and complaint in complaints[0]
    path.write_text(HEAD + GOOD)
    assert not [c for each in RULES for c in each(File(path, "twohot"))]


# ----------------------------------------------------------------------------------- the graph of imports


def circle(edges: dict[str, set[str]]) -> str:
    "A circle of imports as `a -> b -> a`; an empty string where there is none."
    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError as error:
        return " -> ".join(reversed(error.args[1]))
    return ""


def may_import(name: str, other: str) -> bool:
    "Whether one file of the house may import another, apart from circles."
    if name == "agent":
        return other in COMPONENTS
    if name.startswith("suites"):
        return other in COMPONENTS or other.startswith("suites")
    return other != "train" and (name, other) != ("evaluate", "runtime.run")


def forbidden(edges: dict[str, set[str]]) -> list[str]:
    "Imports that the layout does not allow."
    pairs = [(name, other) for name in sorted(edges) for other in sorted(edges[name])]
    return [f"{name} -> {other}" for name, other in pairs if not may_import(name, other)]


def test_imports_form_no_circle():
    found = circle(graph(HOUSE))
    assert not found, found


def test_imports_run_downwards():
    found = forbidden(graph(HOUSE))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("sources", "found"),
    [
        ({"plot": "def f():\n    from train import main\n", "train": "import plot"}, "plot -> train -> plot"),
        (
            {"suites/__init__": "from suites import gym", "suites/gym": "from suites.scores import x"}
            | {"suites/scores": "if 1:\n    import suites"},
            "suites -> suites.gym -> suites.scores -> suites",
        ),
    ],
)
def test_a_circle_is_found_and_printed(sources, found, tmp_path):
    for name, source in sources.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").write_text(source)
    edges, names = graph(files(tmp_path, ROOMS)), found.split(" -> ")[1:]
    turns = [" -> ".join(names[i:] + names[: i + 1]) for i in range(len(names))]
    assert circle(edges) in turns
    edges[names[0]].discard(names[1])
    assert not circle(edges)


@pytest.mark.parametrize(
    "edge",
    [
        "agent -> suites",
        "agent -> config",
        "evaluate -> runtime.run",
        "runtime.run -> train",
        "plots.runs -> train",
    ]
    + ["suites.procgen -> config", "suites -> runtime.logger"],
)
def test_a_forbidden_import_is_found(edge):
    name, other = edge.split(" -> ")
    allowed = {"agent": {"twohot"}, "runtime.run": {"agent", "evaluate"}, "train": {"runtime.run"}}
    allowed |= {"suites.procgen": {"envs", "suites.scores"}, "plots.runs": {"suites", "evaluate"}}
    assert not forbidden(allowed)
    assert forbidden(allowed | {name: {other}}) == [edge]


# ------------------------------------------------------------------------------------ requirements


@pytest.mark.parametrize(
    ("python", "numpy", "procgen"),
    [("3.11", "1", "procgen-mirror"), ("3.12", "1", "procgen-mirror"), ("3.13", "2", "procgen-gym")],
)
@pytest.mark.parametrize(
    "machine", ["linux x86_64", "linux aarch64", "darwin arm64", "darwin x86_64", "win32 AMD64"]
)
def test_each_python_gets_one_numpy_and_one_procgen(python, numpy, procgen, machine):
    "pip evaluates markers for the Python that runs it, so no other installation shows these."
    where = {"python_version": python, "python_full_version": f"{python}.0"}
    where |= dict(zip(("sys_platform", "platform_machine"), machine.split()))
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    pins = [pin for pin in pins if pin.marker is None or pin.marker.evaluate(where)]
    versions = {pin.name: str(pin.specifier) for pin in pins}
    assert len(versions) == len(pins) and all(v.startswith("==") for v in versions.values())
    assert versions["numpy"].startswith(f"=={numpy}.")
    procgens = [name for name in versions if name.startswith("procgen")]
    assert procgens == ([procgen] if machine == "linux x86_64" else [])


# ------------------------------------------------------------------------------------ comments left behind


def left_over(folder: Path) -> list[str]:
    "Comments that are code, and comments that put something off, in all Python files of a folder."
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select", "ERA001,FIX"]
    command += ["--output-format", "concise", "."]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    complaints = []
    for line in done.stdout.splitlines():
        place = re.match(r"(.+\.py):(\d+):\d+: ", line)
        if place:
            source = (folder / place.group(1)).read_text().splitlines()[int(place.group(2)) - 1]
            complaints += [] if source.strip() in EQUATIONS else [line]
    return complaints


def test_no_comment_is_code_or_puts_something_off():
    assert not left_over(ROOT)


@pytest.mark.parametrize("comment", ["TODO: later", "FIXME", "XXX", "x = f(y)", "return x_BT.sum()"])
def test_a_comment_that_puts_off_or_is_code_is_found(comment, tmp_path):
    (tmp_path / "file.py").write_text(f"x = 1\n# {comment}\n")
    assert len(left_over(tmp_path)) == 1
    (tmp_path / "file.py").write_text("x = 1\n# The equation: y = 2 x. A note for whoever comes next.\n")
    assert not left_over(tmp_path)
