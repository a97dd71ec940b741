"""The rules of the house that a program can check, on every file; and each rule, broken once, is seen to complain.

A rule is a function from a file to its complaints. What it lets pass by name is listed here, with the reason.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# What puts components together. Every other file of the root is a component, and can be copied out alone.
PROGRAMS = {"train", "evaluate", "plot"}
TOGETHER = PROGRAMS | {"agent", "config", "wiring", "resuming", "curves", "attention"}
# Copied together: the multi-task environment, the simulators behind it, and many of them side by side.
MAY_IMPORT = {"envs": {"simulators"}, "vector": {"envs"}}
BENCHMARKS = {"popgym", "metaworld", "mujoco", "procgen", "gym3", "minigrid", "ale_py"}
# Lines, comments included. Over that, cut features, not comments.
LIMITS = {"train": 700, "envs": 950, "simulators": 600, "replay": 485}
LIMITS |= dict.fromkeys(("transformer", "encoders", "plot", "agent", "frames", "curves"), 480)
LIMITS |= dict.fromkeys(("twohot_regression", "filtered_cloning", "cached_policy", "popart_critic"), 120)
USUAL_LIMIT = 330
# B batch, T time, C critics, G discounts, K action samples, N bins, A action, D model width, H heads, O observation
KEY = set("BTCGKNADHO")

# Documented elsewhere: methods that are named and described in another place.
GYMNASIUM = {"reset", "step", "render", "close"}  # what gymnasium.Env defines
TWINS = {"ScalarValue": "TwoHotValue"}  # agent.py: the two critics answer to the same names
# Tensors pass through, whatever their shapes.
ANY_SHAPE = {"clean_state_dict"}
# (...), (S,), (..., N), (T+1, O), (len(names), tasks), or in words
SHAPE = r"\(\.\.\.\)|\((\w+\(\w+\)|[\w+*. ]+),[^()]*\)|any shape"
# Equations that happen to be Python.
EQUATIONS = {"# sigma = sqrt(nu - mu^2)"}


class File:
    """A source file: its name, lines, syntax tree, and the docstring at its head."""

    def __init__(self, path: Path, name: str | None = None):
        self.name, self.folder = name or path.stem, path.parent.name
        self.text = path.read_text()
        self.tree = ast.parse(self.text)
        self.head = ast.get_docstring(self.tree) or ""

    def field(self, name: str) -> str:
        """A field of the docstring, its continued lines included; "" where there is none."""
        found = re.search(rf"^{name} +(.*(?:\n {{4,}}\S.*)*)", self.head, re.MULTILINE)
        return found.group(1) if found else ""

    def letters(self) -> set[str]:
        """Capital letters that the field `Shapes` explains."""
        return set(re.findall(r"\b[A-Z]\b", self.field("Shapes")))


HOUSE = {path.stem: File(path) for path in sorted(ROOT.glob("*.py"))}
COMPONENTS = sorted(set(HOUSE) - TOGETHER)
BESIDE = {
    f"{folder}/{path.stem}": File(path)
    for folder in ("examples", "benchmarks", "results")
    for path in sorted((ROOT / folder).glob("*.py"))
}
EVERY = HOUSE | BESIDE


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


# ----------------------------------------------------------------------------------------------- the rules


def documented(file: File) -> list[str]:
    """Public functions and classes have a docstring, and their methods of more than three statements."""
    complaints = []
    for name, node, owner in public(file):
        statements = sum(isinstance(inner, ast.stmt) for inner in ast.walk(node)) - 1
        small = owner is not None and statements <= 3
        is_environment = owner is not None and any(ast.unparse(b).endswith("Env") for b in owner.bases)
        elsewhere = (is_environment and node.name in GYMNASIUM) or (owner and owner.name in TWINS)
        if not ast.get_docstring(node) and not small and not elsewhere:
            complaints.append(f"{name} has no docstring")
    return complaints


def shapes_said(file: File) -> list[str]:
    """A public function that takes tensors or arrays says in which shapes."""
    complaints = []
    for name, node, owner in public(file):
        arguments = node.args.args + node.args.kwonlyargs if isinstance(node, ast.FunctionDef) else []
        takes = [ast.unparse(a.annotation) for a in arguments if a.annotation]
        said = (ast.get_docstring(node) or "") + (ast.get_docstring(owner) or "" if owner else "")
        takes = [kind for kind in takes if re.fullmatch(r"(torch\.)?Tensor.*|np\.ndarray.*", kind)]
        if not takes or node.name in ANY_SHAPE or (owner and owner.name in TWINS):
            continue
        if not re.search(SHAPE, said):
            complaints.append(f"{name} takes {', '.join(takes)} and names no shape")
    return complaints


def head(file: File) -> list[str]:
    """The docstring at a file's head introduces it, within 40 lines, in the fields of its kind."""
    if file.folder in ("examples", "benchmarks", "results") or file.name in PROGRAMS:
        fields = []
        program = '__name__ == "__main__"' in file.text
        said = re.search(rf"\b(python|torchrun)\b.*\b{file.name}\.py", file.head)
        complaints = ["its head names no command to run it"] if program and not said else []
    elif file.name in TOGETHER:
        fields, complaints = ["What", "Why", "Paper"], []
    else:
        # How it differs from the paper, and from its authors' code, stands in `Notes` or at the line: a tag.
        fields, complaints = ["What", "Why", "Paper", "Copy", "Try"], []
        fields += ["Shapes"] if suffixes(file) else []
        if file.field("Try") and f"{file.name}.py" not in file.field("Try"):
            complaints.append(f"`Try` does not run {file.name}.py")
    complaints += [f"its head has no field {f}" for f in fields if not file.field(f)]
    if not file.head or len(file.head.splitlines()) > 40:
        complaints.append(f"its head has {len(file.head.splitlines())} lines: 1 to 40")
    return complaints


def imports(file: File) -> list[str]:
    """A component imports no other, and no package that its `Copy` line does not name; benchmarks' late."""
    late = {
        inner
        for function in ast.walk(file.tree)
        if isinstance(function, (ast.FunctionDef, ast.Lambda))
        for inner in ast.walk(function)
    }
    complaints, component = (
        [],
        file.name not in TOGETHER and file.folder not in ("examples", "benchmarks", "results"),
    )
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or "."]
        else:
            continue
        for module in modules:
            top = module.split(".")[0]
            if top in BENCHMARKS and node not in late:
                complaints.append(f"{module}: a benchmark's package is imported inside a function only")
            if not component or top in sys.stdlib_module_names or top in MAY_IMPORT.get(file.name, ()):
                continue
            if top in HOUSE:
                complaints.append(f"imports its sibling {top}")
            elif top in BENCHMARKS and file.name not in ("envs", "simulators"):
                complaints.append(f"imports {top}, which only environments may")
            else:
                package = "tensorboard" if module.endswith(".tensorboard") else top
                named = "benchmark" if top in BENCHMARKS else package
                if not re.search(rf"\b{named}\b", file.field("Copy")):
                    complaints.append(f"imports {package}, which its `Copy` line does not name")
    return complaints


def suffixes(file: File) -> dict[str, str]:
    "Names that end in a shape, and that shape: {logits_BTCGN: BTCGN}."
    names = set()
    for node in ast.walk(file.tree):
        names |= {getattr(node, kind, None) for kind in ("id", "arg", "attr")}
    found = {
        n: re.fullmatch(r"_?[a-z]\w*?_([A-Z0-9]*[A-Z][A-Z0-9]*)", n) for n in names if isinstance(n, str)
    }
    return {name: match.group(1) for name, match in found.items() if match}


def letters(file: File) -> list[str]:
    """Letters of a shape are those of the key, and those that the file's own `Shapes` explains.

    What puts components together uses their letters.
    """
    known = KEY | file.letters()
    if file.name in TOGETHER or file.folder in ("examples", "benchmarks", "results"):
        known = known.union(*(HOUSE[name].letters() for name in COMPONENTS))
    return [
        f"{name}: {''.join(sorted(unknown))} is not explained"
        for name, shape in sorted(suffixes(file).items())
        if (unknown := {letter for letter in shape if letter.isalpha()} - known)
    ]


def length(file: File) -> list[str]:
    """No file is longer than its limit."""
    lines, limit = len(file.text.splitlines()), LIMITS.get(file.name, USUAL_LIMIT)
    return [f"{lines} lines, {limit} are allowed"] if lines > limit else []


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


# ------------------------------------------------------------------------------------------------ the tests

# Files that a rule is held to; the others are none of its business.
RULES = {
    documented: EVERY,
    shapes_said: HOUSE,
    head: EVERY,
    imports: EVERY,
    letters: EVERY,
    length: {name: file for name, file in EVERY.items() if not name.startswith(("benchmarks/", "results/"))},
}


@pytest.mark.parametrize("name", EVERY)
def test_the_rules_of_the_house(name):
    broken = [f"{name}.py: {c}" for rule, files in RULES.items() if name in files for c in rule(files[name])]
    assert not broken, "\n".join(broken)


def test_nothing_is_put_off_or_left_in_comments():
    assert not left_over(ROOT)


def test_what_is_let_pass_is_still_there():
    "An exemption that nobody needs any more would hide the next mistake."
    text = "".join(file.text for file in EVERY.values())
    assert all(f"class {twin}" in text for pair in TWINS.items() for twin in pair)
    assert all(f"def {name}" in text for name in ANY_SHAPE) and all(line in text for line in EQUATIONS)
    assert set(HOUSE) >= TOGETHER and {*LIMITS} <= {name.split("/")[-1] for name in EVERY}


HEAD = 'r"""A file.\n\nWhat     x\nWhy      x\nPaper    x\nShapes   Q queries\nCopy     this file alone; needs torch\n'
HEAD += 'Try      python twohot.py\n"""\n'
LONG = "    a = 1\n    b = 2\n    c = 3\n    return a + b + c\n"
BROKEN = [
    (documented, f"{HEAD}def f(x):\n{LONG}", "f has no docstring"),
    (documented, f"{HEAD}class C:\n  'x'\n  def f(x):\n{LONG.replace('    ', '      ')}", "C.f has no"),
    (shapes_said, f"{HEAD}def f(x: Tensor):\n    'A tensor to a tensor.'\n", "names no shape"),
    (head, HEAD.replace("Why ", "What for "), "no field Why"),
    (head, HEAD.replace("Copy ", "Take "), "no field Copy"),
    (head, HEAD.replace("Shapes ", "Sizes ") + "x_BT = 1\n", "no field Shapes"),
    (head, HEAD.replace("x\n", "x\n" + 40 * "         x\n"), "lines: 1 to 40"),
    (head, HEAD.replace("twohot.py", "popart.py"), "does not run twohot.py"),
    (imports, f"{HEAD}import popart\n", "imports its sibling popart"),
    (imports, f"{HEAD}def f():\n    from popart import PopArt\n", "imports its sibling popart"),
    (imports, f"{HEAD}import numpy as np\n", "imports numpy, which its `Copy` line"),
    (imports, f"{HEAD}from torch.utils.tensorboard import SummaryWriter\n", "imports tensorboard, which"),
    (
        imports,
        f"{HEAD}try:\n    import popgym.envs\nexcept ImportError:\n    pass\n",
        "inside a function only",
    ),
    (imports, f"{HEAD}def f():\n    import popgym.envs\n", "only environments may"),
    (letters, f"{HEAD}def f(x_BTZ):\n    return x_BTZ\n", "x_BTZ: Z is not"),
    (letters, f"{HEAD}x.y_2R = 1\n", "y_2R: R is not"),
    (length, HEAD + 330 * "x = 1\n", "lines, 330 are allowed"),
]


@pytest.mark.parametrize(("rule", "source", "complaint"), BROKEN)
def test_each_rule_complains_of_a_file_that_breaks_it(rule, source, complaint, tmp_path):
    path = tmp_path / "twohot.py"
    path.write_text(source)
    assert any(complaint in c for c in rule(File(path))), rule(File(path))
    # And of nothing else: what is broken is that alone.
    kept = (
        f"{HEAD}from torch import Tensor\nx_BTQ = 1\ndef f(x: Tensor):\n    'Tensors (..., N) to a number.'\n"
    )
    path.write_text(kept)
    assert not [c for each in RULES for c in each(File(path))]


@pytest.mark.parametrize("comment", ["TODO: later", "FIXME", "XXX", "x = f(y)", "return x_BT.sum()"])
def test_a_comment_that_puts_off_or_is_code_is_found(comment, tmp_path):
    (tmp_path / "file.py").write_text(f"x = 1\n# {comment}\n")
    assert len(left_over(tmp_path)) == 1
    (tmp_path / "file.py").write_text("x = 1\n# The equation: y = 2 x. A note for whoever comes next.\n")
    assert not left_over(tmp_path)
