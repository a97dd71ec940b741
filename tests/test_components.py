"""Every component runs alone in an empty folder, and keeps the house's rules."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
COMPONENTS = [
    "twohot",
    "popart",
    "critics",
    "crr_actor",
    "transformer",
    "encoders",
    "replay",
    "frames",
    "lanes",
]
COMPONENTS += ["simulators", "envs", "presets", "checkpoint", "scores", "logbook"]
# One pair that is copied together: the multi-task environment and the simulators behind it.
MAY_IMPORT = {"envs": ["simulators"]}
FILES = {path.stem for path in ROOT.glob("*.py")}


@pytest.mark.parametrize("name", COMPONENTS)
def test_runs_alone_and_prints_its_worked_example(name, tmp_path):
    for file in (name, *MAY_IMPORT.get(name, ())):
        shutil.copy(ROOT / f"{file}.py", tmp_path)
    command = [sys.executable, "-W", "error::SyntaxWarning", f"{name}.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 3


@pytest.mark.parametrize("name", COMPONENTS)
def test_imports_no_sibling(name):
    tree = ast.parse((ROOT / f"{name}.py").read_text())
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    assert imported & FILES == set(MAY_IMPORT.get(name, ()))


@pytest.mark.parametrize("name", sorted(FILES))
def test_public_functions_are_documented(name):
    tree = ast.parse((ROOT / f"{name}.py").read_text())
    assert len((ast.get_docstring(tree) or "").splitlines()) <= 40
    undocumented = [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
        and node in tree.body
    ]
    assert not undocumented
