"""Load the definitions of a pipeline with one stage: CPU seconds beyond ``import dagster``.

``python -m benchmarks.definitions --pairs 7`` starts two processes in turn, one that only imports
Dagster and one that loads definitions, and prints the medians of the differences. All modules are
compiled before, as they are where a package is installed.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median

IMPORTS = {
    "import dagster": "import dagster as dg",
    "and pyarrow, numpy": "import dagster as dg, numpy, pyarrow",
    "definitions": """
import dagster as dg
import vane_dagster as vd


class Model:
    def __call__(self, batch):
        return batch


docs = vd.Pipeline("docs", source=vd.parquet("/nowhere/*.parquet"), id="id")
docs.map_batches("model", Model, columns=["text"], schema={"x": "FLOAT[4]"})
resources = {"compute": vd.LocalCompute(), "store": vd.FragmentStore(root="/nowhere/store")}
defs = dg.Definitions(assets=[docs.build_assets()], resources=resources)
""",
}


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=7)
    pairs = parser.parse_args().pairs
    with tempfile.TemporaryDirectory() as name:
        files = {title: Path(name, f"case_{n}.py") for n, title in enumerate(IMPORTS)}
        kept = {key: each for key, each in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        environment = kept | {"PYTHONPYCACHEPREFIX": str(Path(name, "compiled"))}

        def measure(title: str) -> float:
            return cpu_seconds(sys.executable, files[title], environment)

        for title, file in files.items():
            file.write_text(IMPORTS[title])
            measure(title)
        rounds = [{title: measure(title) for title in files} for _ in range(pairs)]
    base = next(iter(IMPORTS))
    for title in IMPORTS:
        beyond = median(each[title] - each[base] for each in rounds)
        print(f"{title:20} {median(each[title] for each in rounds):.3f} s, beyond {beyond:.3f} s")


def cpu_seconds(python: str, file: Path, environment: Mapping[str, str]) -> float:
    """Run a file in a new process and return its CPU time."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([python, str(file)], env=environment, check=True, cwd=file.parent)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
