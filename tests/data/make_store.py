"""Makes `store.tar.gz`: a store that a release has written, and what else that run left.

``python tests/data/make_store.py`` with the release's code, from a checkout of it that has this
file, `frozen_pipeline.py` and `tests/support`. The stored paths of the folder are replaced by
``@FOLDER@``.
"""

from __future__ import annotations

import os
import sys
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

# E402: these need the path above.
import dagster as dg  # noqa: E402
import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

import frozen_pipeline as frozen  # noqa: E402
import vane_dagster as vd  # noqa: E402
from support.llm_server import KEY, serving  # noqa: E402


def main() -> None:
    os.environ["FROZEN_KEY"] = KEY
    with tempfile.TemporaryDirectory() as name, serving() as (server, base_url):
        folder = Path(name)
        os.chdir(folder)
        for place, partition in enumerate(frozen.PARTITIONS):
            (folder / "source" / partition).mkdir(parents=True)
            ids = pa.array(range(4 * place, 4 * place + 4), pa.int64())
            texts = [" one two", "three ", "four five six", "seven"]
            rows = {"id": ids, "text": texts, "n": pa.array([1, 2, 3 - place, 4], pa.int64())}
            pq.write_table(pa.table(rows), folder / "source" / partition / "rows.parquet")
        frozen.set_times(folder)
        for label in ("one two", "three", "four five six", "seven"):
            asked = next(iter_prompts(label))
            server.answers[asked] = ["good"]
        pipeline = frozen.pipeline(folder, base_url)
        resources = {
            "compute": vd.LocalCompute(num_cpus=2),
            "store": vd.FragmentStore(root=str(folder / "store")),
        }
        for partition in frozen.PARTITIONS:
            dg.materialize([pipeline.build_assets()], partition_key=partition, resources=resources)
        for file in [*folder.glob("store/**/*.json")]:
            file.write_text(file.read_text().replace(str(folder), "@FOLDER@"))
        with tarfile.open(HERE / "store.tar.gz", "w:gz") as archive:
            for below in ("source", "store", "files", "merged", "table"):
                archive.add(folder / below, below)


def iter_prompts(text: str):
    yield (
        "Which of these labels fits the text best? Answer with the label alone.\n\n"
        f"- good\n- bad\n\nText: {text}"
    )


if __name__ == "__main__":
    main()
