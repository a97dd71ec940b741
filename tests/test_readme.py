"""README.md says nothing that is not there: files, tests, metrics, presets; and its Python runs as written."""

import json
import re
import subprocess
import sys
from pathlib import Path

import gymnasium
import pytest

import train
from suites import BENCHMARKS

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", ROOT / "examples" / "README.md"]
SMOKE = '"--scale", "smoke", "--device", "cpu", "--steps", "600"'


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_every_file_that_is_linked_is_there(page):
    links = [link for link in re.findall(r"\]\(([^)#]+)", page.read_text()) if "://" not in link]
    assert links
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing
    for name in set(
        re.findall(r"(?:tests|results|figures|benchmarks|examples)/[\w.-]+\.\w+", page.read_text())
    ):
        assert (ROOT / name).exists(), name


def test_every_test_that_is_named_is_there():
    defined = {
        name
        for path in (ROOT / "tests").glob("*.py")
        for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    files = {path.stem for path in (ROOT / "tests").glob("*.py")}
    named = set(re.findall(r"\btest_\w+", README)) - files
    assert len(named) > 25 and named <= defined, named - defined


def test_every_difference_is_tagged_where_it_is_made():
    table = README[README.index("## Errata and deviations") : README.index("## What the log says")]
    rows = re.findall(r"^\| (ERRATUM|OFFICIAL|DEVIATION) \|.*\| ([\w., ]+\.py) \| ", table, re.MULTILINE)
    assert len(rows) >= 20 and len(rows) == len(re.findall(r"^\| [A-Z]{6,} \|", table, re.MULTILINE))
    untagged = [
        (tag, name)
        for tag, files in rows
        for name in files.split(", ")
        if tag not in (ROOT / name).read_text()
    ]
    assert not untagged


def test_sections_come_in_the_order_in_which_a_reader_needs_them():
    titles = re.findall(r"^## (.*)", README, re.MULTILINE)
    order = ("Start", "See it learn", "The map", "From observation", "Results", "Does it hold", "Errata")
    order += (
        "What the log",
        "Presets",
        "How fast",
        "Use it",
        "Copy",
        "Many GPUs",
        "What can go wrong",
        "Not meant",
    )
    places = [next(i for i, title in enumerate(titles) if title.startswith(start)) for start in order]
    assert places == sorted(places)


@pytest.mark.parametrize("variant", ["ind_ind", "dep_dep"])
def test_every_metric_that_is_logged_has_a_row(tmp_path, monkeypatch, variant):
    monkeypatch.setattr(train, "ROOT", tmp_path)
    flags = ["--scale", "smoke", "--device", "cpu", "--steps", "1200", "--final_episodes", "1", "--name", "a"]
    train.main([*flags, "--env", "babyai", "--tasks", "BabyAI-GoToLocal-v0", "--variant", variant])
    lines = (tmp_path / "runs" / "a" / "metrics.jsonl").read_text().splitlines()
    logged = {key for line in lines for key in json.loads(line)} - {"step", "updates", "minutes"}
    table = README[README.index("## What the log says") : README.index("## Presets")]
    rows = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    names = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    patterns = [re.sub(r"<\w+>", "[^/]+", name) for name in names]
    unexplained = {key for key in logged if not any(re.fullmatch(pattern, key) for pattern in patterns)}
    # Means over tasks are called as what they are means of.
    unexplained = {
        key for key in unexplained if not re.fullmatch(r"eval/(try|success) \d_mean|eval/solved_mean", key)
    }
    assert len(logged) > 20 and not unexplained


def test_every_preset_has_its_cost():
    table = README[README.index("## Presets") : README.index("## How fast")]
    assert all(f"`{name}`" in table for name in BENCHMARKS)


def blocks():
    "Python blocks of the README by the first name that they define or import."
    return re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_environment_of_ones_own_trains(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "ROOT", tmp_path)
    (block,) = [block for block in blocks() if "gymnasium.register" in block]
    assert len([line for line in block.splitlines() if line.strip()]) <= 25
    try:
        exec(block.replace('"--minutes", "3"', SMOKE), {})  # noqa: S102 - as written, but for its length
        gymnasium.registry.pop("Echo-v0")
        more = '"--resume", "--steps", "900", "--final_episodes", "1"'
        exec(block.replace('"--minutes", "3"', more), {})  # noqa: S102 - and gone on with
        assert train.load(tmp_path / "runs" / "echo").make_env().tasks == ["Echo-v0"]
    finally:
        gymnasium.registry.pop("Echo-v0", None)
    assert (tmp_path / "runs" / "echo" / "table.txt").read_text().startswith("task")


def test_the_loop_with_a_trained_policy_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    flags = ["--scale", "smoke", "--device", "cpu", "--steps", "600", "--tasks", "RepeatFirstEasy"]
    train.main([*flags, "--name", "my_run"])
    (block,) = [block for block in blocks() if "policy.make_env" in block]
    capsys.readouterr()
    exec(block, {})  # noqa: S102 - as written
    assert capsys.readouterr().out.startswith("RepeatFirstEasy ")


def test_every_other_block_runs():
    "All but those above, as written."
    rest = [
        block for block in blocks() if "policy.make_env" not in block and "gymnasium.register" not in block
    ]
    assert rest
    for block in rest:
        exec(block, {})  # noqa: S102


def test_every_flag_and_command_that_is_shown_exists():
    helped = subprocess.run(
        [sys.executable, "train.py", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    commands = re.findall(r"^(?:python|torchrun [^\n]*?) ?train\.py ([^#\n]*)", README, re.MULTILINE)
    flags = {flag for command in commands for flag in re.findall(r"--[\w-]+", command)}
    known = {flag.replace("-", "_") for flag in re.findall(r"--([\w-]+)", helped)}
    flags = {flag.removeprefix("--").removeprefix("no-").replace("-", "_") for flag in flags}
    assert len(flags) > 10 and flags <= known, flags - known
