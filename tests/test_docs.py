"""The pages say only what is there: links, tests, functions, commands, metrics, tags; and their Python runs."""

import ast
import json
import re
import shlex
import sys
from pathlib import Path

import gymnasium
import pytest
import tyro

import evaluate
import plot
import train
from config import Config
from suites import BENCHMARKS, choose_tasks

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (".", "docs", "benchmarks", "examples", "tests")
PAGES = {str(path.relative_to(ROOT)): path for folder in FOLDERS for path in (ROOT / folder).glob("*.md")}
TEXT = {name: path.read_text() for name, path in PAGES.items()}
ROOMS = (".", "suites", "runtime", "plots")
SCRIPTS = ("benchmarks", "results", "examples", *ROOMS)


def section(page: str, title: str) -> str:
    "The part of a page under a title of the second level."
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", TEXT[page], re.MULTILINE | re.DOTALL).group(1)


def rows(text: str) -> list[list[str]]:
    "Cells of each row of the tables in `text`, without the rows above and below a header's line."
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def blocks(language: str = "") -> list[tuple[str, str]]:
    "Blocks of code in all pages: (page, code). examples/README.md's Python is run by test_copying.py."
    return [
        (name, code)
        for name, text in TEXT.items()
        for tag, code in re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        if tag == language and not (language == "python" and name == "examples/README.md")
    ]


# --------------------------------------------------------------------------------- links and names


def anchors(page: Path) -> set[str]:
    "The anchors that GitHub makes of a page's titles."
    titles = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page: Path, text: str) -> list[str]:
    "Links of a page that lead nowhere."
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if "://" not in link and (not target.exists() or (anchor and anchor not in anchors(target))):
            broken.append(link)
    return broken


@pytest.mark.parametrize("name", PAGES)
def test_every_link_leads_somewhere(name):
    assert not broken_links(PAGES[name], TEXT[name])


def test_a_link_that_leads_nowhere_is_found():
    page = ROOT / "README.md"
    assert broken_links(page, "[a](train.py) [b](docs/paper.md#equations) [c](https://arxiv.org)") == []
    text = "[a](trian.py) [b](docs/paper.md#equation)"
    assert broken_links(page, text) == ["trian.py", "docs/paper.md#equation"]


@pytest.mark.parametrize("name", PAGES)
def test_every_file_that_is_named_is_there(name):
    folders = "tests|results|figures|benchmarks|examples|docs|suites|runtime|plots"
    paths = re.findall(rf"(?<![\w/.])(?:{folders})/[\w./-]*\w", TEXT[name])
    missing = {path for path in paths if not (ROOT / path).exists() and "NAME" not in path}
    assert not missing
    known = {path.name for folder in (*SCRIPTS, "tests") for path in (ROOT / folder).glob("*.py")}
    python = set(re.findall(r"(?<![\w/<])\w+\.py\b", TEXT[name]))
    assert not python - known - {"yours.py"}


def test_every_test_that_is_named_is_there():
    files = {path.stem: path.read_text() for path in (ROOT / "tests").glob("*.py")}
    defined = {name for text in files.values() for name in re.findall(r"def (test_\w+)", text)}
    named = {name for text in TEXT.values() for name in re.findall(r"\btest_\w+", text)} - set(files)
    assert len(named) > 25 and not {name for name in named if name not in defined and "NAME" not in name}


def test_every_function_that_is_named_is_defined_in_its_file():
    named = {
        (file, name)
        for text in TEXT.values()
        for file, names in re.findall(r"([\w/]+\.py)((?:,? `[\w.]+`)+)", text)
        for name in re.findall(r"`([\w.]+)`", names)
        if not name.endswith(".py")
    }
    missing = [(file, name) for file, name in sorted(named) if name not in definitions(ROOT / file)]
    assert len(named) > 15 and not missing


def definitions(path: Path) -> set[str]:
    "Dotted names that a file defines at its top level, and the methods of its classes."
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
            methods = node.body if isinstance(node, ast.ClassDef) else ()
            found |= {f"{node.name}.{m.name}" for m in methods if isinstance(m, ast.FunctionDef)}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {name.id for t in targets for name in ast.walk(t) if isinstance(name, ast.Name)}
    return found


def test_every_test_file_has_its_line():
    listed = set(re.findall(r"\[(\w+\.py)\]", TEXT["tests/README.md"]))
    assert listed == {path.name for path in (ROOT / "tests").glob("*.py")} - {"conftest.py"}


# ---------------------------------------------------------------------------------------- commands

COMMAND = r"(?:python|torchrun [^\n`]*?) ?((?:[\w/]+/)?\w+\.py)\b([^\n`]*)"


def commands() -> list[tuple[str, str, list[str]]]:
    "Commands in all pages, in blocks and in lines: (page, script, arguments)."
    found = []
    for name, text in TEXT.items():
        text = re.sub(r"\n {9,}(?=--)", " ", text)  # a command that is continued
        for script, arguments in re.findall(COMMAND, text):
            if (ROOT / script).exists() or script in ("train.py", "evaluate.py", "plot.py"):
                found.append((name, script, shlex.split(arguments, comments=True)))
    return found


def check_command(script: str, arguments: list[str]) -> None:
    "Parse a command with the parser of its script. SystemExit or AssertionError for one that cannot be."
    if "--help" in arguments:
        return
    if script == "train.py":
        config = tyro.cli(Config, args=arguments, default=Config(env="popgym"))
        if config.env not in ("NAME", "ENV"):
            assert config.env in BENCHMARKS or config.env.startswith("gym:")
            if config.env == "popgym":
                choose_tasks(config.env, config.tasks)
    elif script in ("evaluate.py", "plot.py"):
        tyro.cli({"evaluate.py": evaluate, "plot.py": plot}[script].Options, args=arguments)
    else:
        source = (ROOT / ("suites/__main__.py" if script == "envs.py" else script)).read_text()
        flags = [argument for argument in arguments if argument.startswith("-")]
        assert all(re.search(rf'add_argument\(\s*"{flag}"', source) for flag in flags)
        if script == "envs.py":
            assert all(name in BENCHMARKS for name in arguments if name not in ("--list", "NAME"))


def test_every_command_parses():
    found = commands()
    scripts = {script for _, script, _ in found}
    assert len(found) > 40 and {"train.py", "evaluate.py", "plot.py", "envs.py"} <= scripts
    wrong = []
    for page, script, arguments in found:
        try:
            check_command(script, arguments)
        except (SystemExit, AssertionError, ValueError):
            wrong.append(f"{page}: {script} {' '.join(arguments)}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "command",
    [
        "train.py --attempt 2",
        "train.py --env popgim",
        "train.py --tasks RepeatFirst",
        "train.py --variant ind",
        "evaluate.py runs/a --split held",
        "plot.py run --seeds 2",
        "benchmarks/learning.py --seed 0",
    ],
)
def test_a_command_that_cannot_be_is_found(command, capsys):
    script, *arguments = command.split()
    with pytest.raises((SystemExit, AssertionError, ValueError)):
        check_command(script, arguments)


def test_every_target_of_make_exists():
    named = {
        name for text in TEXT.values() for name in re.findall(r"(?:^|`)make ([\w-]+)", text, re.MULTILINE)
    }
    assert len(named) > 3 and named <= set(
        re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    )


def test_every_flag_that_is_named_exists():
    flags = set(re.findall(r"`--([\w-]+)`", "".join(TEXT.values())))
    fields = {flag.removeprefix("no-") for flag in flags} - {"list"}
    own = {"split", "video", "greedy", "episodes"}
    assert len(fields) > 40 and fields <= set(Config.__dataclass_fields__) | own


# ------------------------------------------------------------------------------------------- tables


def tagged(tag: str, path: Path) -> bool:
    return re.search(rf"\b{tag}\b", path.read_text()) is not None


def test_every_tag_has_its_row_and_every_row_its_tag():
    table = [
        (tag, name)
        for tag, _, files, _ in (row for row in rows(section("docs/paper.md", "Errata and deviations")))
        if tag in ("ERRATUM", "OFFICIAL", "DEVIATION")
        for name in files.split(", ")
    ]
    untagged = [(tag, name) for tag, name in table if not tagged(tag, ROOT / name)]
    in_code = {
        (tag, str(path.relative_to(ROOT)))
        for room in ROOMS
        for path in (ROOT / room).glob("*.py")
        for tag in ("ERRATUM", "OFFICIAL", "DEVIATION")
        if tagged(tag, path)
    }
    assert len(table) >= 20 and not untagged and not in_code - set(table)


def test_every_metric_that_is_logged_has_a_row_and_every_row_is_logged(trained, runs):
    """Logged by a run with losses independent of scale on POPGym, and one with dependent ones on BabyAI."""
    flags = ["--scale", "smoke", "--device", "cpu", "--steps", "600", "--final_episodes", "1", "--name", "a"]
    train.main(
        [
            *flags,
            "--log_every",
            "1",
            "--env",
            "babyai",
            "--tasks",
            "BabyAI-GoToLocal-v0",
            "--variant",
            "dep_dep",
        ]
    )
    folder, name = trained
    logs = [Path(folder) / name / "metrics.jsonl", runs / "a" / "metrics.jsonl"]
    logged = {key for log in logs for line in log.read_text().splitlines() for key in json.loads(line)}
    logged -= {"step", "updates", "minutes"}
    names = [
        name
        for row in rows(section("docs/running.md", "Metrics"))
        for name in re.findall("`([^`]+)`", row[0])
    ]
    pattern = {name: re.sub(r"<\w+>", "[^/]+", name).replace("[^/]+_mean", r"\d+_mean") for name in names}
    without_row = {key for key in logged if not any(re.fullmatch(p, key) for p in pattern.values())}
    never_logged = {n for n, p in pattern.items() if not any(re.fullmatch(p, key) for key in logged)}
    assert len(logged) > 40 and not without_row and not never_logged


def test_every_preset_has_its_cost():
    table = section("docs/running.md", "Presets and their cost")
    assert all(f"| `{name}`" in table or f", `{name}` |" in table for name in BENCHMARKS)


# ------------------------------------------------------------------------------------------- Python


def test_the_environment_of_your_own_trains_resumes_and_is_played(runs, monkeypatch, capsys):
    """The blocks as written, but for the training's length: the module, the commands, and the loop that plays."""
    (module_block,) = [code for _, code in blocks("python") if "gymnasium.register" in code]
    (play_block,) = [code for _, code in blocks("python") if "policy.make_env" in code]
    commands = [
        line.split("#")[0].split() for line in section("docs/running.md", "Your own environment").splitlines()
    ]
    trains = [words[2:] for words in commands if words[:2] == ["python", "train.py"] and "echo" in words]
    (evaluates,) = [
        words[2:] for words in commands if words[:2] == ["python", "evaluate.py"] and "echo" in words
    ]
    assert [words[-1] for words in trains] == ["3", "6"] and '"runs/my_run"' in play_block
    (runs.parent / "my_envs.py").write_text(module_block)
    monkeypatch.chdir(runs.parent)
    monkeypatch.syspath_prepend(runs.parent)
    smoke = ["--device", "cpu", "--final_episodes", "1", "--minutes", "None", "--steps"]
    try:
        train.main([*trains[0][:-2], "--scale", "smoke", *smoke, "600"])
        train.main([*trains[1][:-2], *smoke, "900"])
        evaluate.main([*evaluates, "--episodes", "1"])
        capsys.readouterr()
        exec(play_block.replace("runs/my_run", "runs/echo"), {})  # noqa: S102
    finally:
        gymnasium.registry.pop("Echo-v0", None)
        sys.modules.pop("my_envs", None)
    assert capsys.readouterr().out.startswith("my_envs:Echo-v0 ")
    assert (runs / "echo" / "table.txt").read_text().startswith("task")


def test_every_other_block_runs():
    rest = [c for _, c in blocks("python") if "policy.make_env" not in c and "gymnasium.register" not in c]
    assert rest
    for code in rest:
        exec(code, {})  # noqa: S102
