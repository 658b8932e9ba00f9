"""Checks of the distributions in `dist/`, as users install them.

    python tools/dist.py content            # what the wheel and the sdist hold
    python tools/dist.py run 3.12 3.13      # the wheel in new environments, one for each Python
    python tools/dist.py run --lowest 3.11  # with the oldest dependencies of pyproject.toml

``run`` installs the wheel by uv, runs the first example of README.md with ``LocalCompute`` and with
``RayCompute``, and compares what it prints. With ``--lowest``, the unit tests of `TESTS` follow, in
the unpacked sdist.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IN_SDIST = [
    *(".ci/tests.py", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "Makefile"),
    *("README.md", "pyproject.toml", "workspace.yaml", "tools/api.py", "tests/conftest.py"),
    *("benchmarks/README.md", "definitions/dagster.yaml", "docs/cli.md", "examples/README.md"),
]
EXTRAS = ["anthropic", "client", "delta", "huggingface", "iceberg", "images", "lance", "openai"]
EXTRAS += ["s3", "ui"]
"""The extras whose oldest versions are tried."""
TEST_TOOLS = ["hypothesis", "pandas", "polars", "pyiceberg[sql-sqlite]"]
TEST_TOOLS += ["pytest", "pytest-timeout", "pytest-xdist"]
TESTS = ["storage", "sources", "types", "planning", "test_layers.py"]
TESTS += ["fingerprint/test_digests_of_version_1.py"]
"""The unit tests that depend on the versions of Dagster, Ray, Arrow and DuckDB."""
NEEDS_TORCH = ["types/test_tensors.py"]
BACKENDS = ["LocalCompute", "RayCompute"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("content")
    running = commands.add_parser("run")
    running.add_argument("pythons", nargs="+", help="versions, such as 3.12, or paths")
    running.add_argument("--lowest", action="store_true", help="the oldest dependencies, and tests")
    options = parser.parse_args(arguments)
    if options.command == "content":
        check_content()
        return
    for python in options.pythons:
        with environment(python, options.lowest) as (bin_folder, folder):
            first_example(bin_folder, folder)
            if options.lowest:
                unit_tests(bin_folder, folder)


def distribution(pattern: str) -> Path:
    """Return the only file of the pattern in `dist/`."""
    files = sorted((ROOT / "dist").glob(pattern))
    if len(files) != 1:
        sys.exit(f"dist/{pattern}: expected one file, got {len(files)}: run `make dist`")
    return files[0]


def check_content() -> None:
    """Fail unless the wheel holds the package alone, and the sdist what builds and tests it."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    package = {name for name in tracked.stdout.splitlines() if name.startswith("vane_dagster/")}
    with zipfile.ZipFile(distribution("*.whl")) as wheel:
        names = {each for each in wheel.namelist() if ".dist-info/" not in each}
        info = {name.rpartition(".dist-info/")[2] for name in wheel.namelist()} - names
        entry_points = [name for name in wheel.namelist() if name.endswith("/entry_points.txt")]
        points = wheel.read(entry_points[0]).decode() if entry_points else ""
    with tarfile.open(distribution("*.tar.gz")) as sdist:
        members = {name.partition("/")[2] for name in sdist.getnames()}
    wrong = [
        *(f"the wheel lacks {name}" for name in sorted(package - names)),
        *(f"the wheel holds {name}" for name in sorted(names - package)),
        *(f"the sdist lacks {name}" for name in sorted({*package, *IN_SDIST} - members)),
        *(f"the wheel has no {name}" for name in {"METADATA", "licenses/LICENSE"} - info),
        *(
            f"the wheel has no entry point {name}"
            for name in ("vane-dagster = ", "[dagster_dg_cli.registry_modules]")
            if name not in points
        ),
    ]
    if wrong:
        sys.exit("\n".join(wrong))
    print(f"{len(names)} files in the wheel, {len(members)} in the sdist")


@contextlib.contextmanager
def environment(python: str, lowest: bool) -> Iterator[tuple[Path, Path]]:
    """Yield the programs' folder of a new environment with the wheel, and a folder to work in."""
    with tempfile.TemporaryDirectory(prefix="vd-") as name:
        folder, target = Path(name), Path(name, "env")
        wheel = str(distribution("*.whl"))
        uv("venv", "--python", python, "--no-python-downloads", target)
        bin_folder = target / "bin"
        install: list[str | Path] = ["pip", "install", "--python", bin_folder / "python"]
        if lowest:
            bounds = folder / "lowest.txt"
            compiled: list[str | Path] = ["pip", "compile", "--resolution", "lowest-direct"]
            compiled += ["--python", bin_folder / "python", "--output-file", bounds]
            compiled += [each for extra in EXTRAS for each in ("--extra", extra)]
            uv(*compiled, ROOT / "pyproject.toml")
            wanted = f"{wheel}[{','.join(EXTRAS)}]"
            uv(*install, "--constraints", bounds, wanted, *TEST_TOOLS)
        else:
            uv(*install, wheel)
        described = subprocess.run(
            [bin_folder / "python", "-c", _VERSIONS], capture_output=True, text=True, check=True
        )
        print(described.stdout.strip(), flush=True)
        yield bin_folder, folder


_VERSIONS = """
import platform
from importlib.metadata import version
names = ("vane-dagster", "dagster", "ray", "pyarrow", "duckdb", "numpy", "pydantic")
print("Python", platform.python_version(), *(f"{name} {version(name)}," for name in names))
"""


def uv(*arguments: str | Path) -> None:
    """Run uv, quietly."""
    subprocess.run([sys.executable, "-m", "uv", "--quiet", *arguments], check=True)


def first_example(bin_folder: Path, folder: Path) -> None:
    """Run the first example of README.md with each backend, and compare what it prints."""
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    code = next(block for language, block in blocks if language == "python")
    expected = next(block for language, block in blocks if not language)
    variables = {**os.environ, "VANE_DAGSTER_HOME": str(folder / "home")}
    variables.pop("PYTHONPATH", None)
    for backend in BACKENDS:
        file = folder / backend / "reviews.py"
        file.parent.mkdir()
        file.write_text(code.replace(BACKENDS[0], backend))
        try:
            printed = output([bin_folder / "python", file.name], file.parent, variables)
        finally:
            if backend == "RayCompute":
                output([bin_folder / "vane-dagster", "cluster", "stop"], folder, variables)
        if not printed.endswith(expected):
            sys.exit(f"{backend}: expected\n{expected}got\n{printed[-4000:]}")
        print(f"  {backend}: the first example of README.md", flush=True)
    plan: list[str | Path] = [bin_folder / "vane-dagster", "plan", "-f", "reviews.py"]
    print(f"  {output(plan, folder / BACKENDS[0], variables).splitlines()[0]}", flush=True)


def unit_tests(bin_folder: Path, folder: Path) -> None:
    """Run the unit tests of `TESTS` in the unpacked sdist."""
    with tarfile.open(distribution("*.tar.gz")) as sdist:
        sdist.extractall(folder)
    (unpacked,) = folder.glob("vane_dagster-*")
    command: list[str | Path] = [
        bin_folder / "python",
        "-m",
        "pytest",
        "-q",
        "-n",
        "2",
        "--dist",
        "worksteal",
    ]
    tests = [f"tests/unit/{name}" for name in TESTS]
    tests += [f"--ignore=tests/unit/{name}" for name in NEEDS_TORCH]
    # Plugins of the libraries' own: some are too old for the newest pytest.
    plugins = ("-p", "no:logging", "-p", "no:anyio", "-p", "no:cacheprovider")
    subprocess.run([*command, *plugins, *tests], cwd=unpacked, check=True)


def output(command: Sequence[str | Path], folder: Path, variables: Mapping[str, str]) -> str:
    """Return what a command prints; fail with it if the command fails."""
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}:\n{(done.stdout + done.stderr)[-8000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
