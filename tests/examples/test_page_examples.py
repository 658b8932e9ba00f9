"""The examples of the pages, as a reader would run them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import dagster as dg
import lance
import numpy as np

import vane_dagster
import vane_dagster as vd
from support import forked
from support.snippets import block

ROOT = Path(vane_dagster.__file__).parents[1]


def test_the_example_for_a_laptop_runs(tmp_path):
    (tmp_path / "texts.py").write_text(
        block((ROOT / "docs/concepts/pipelines.md").read_text(), "On a laptop")
    )
    done = forked.run(["texts.py"], os.environ, tmp_path, 120)
    assert done.returncode == 0, done.stderr
    rows = [{"id": 1, "length": 1}, {"id": 2, "length": 2}, {"id": 3, "length": 3}]
    assert done.stdout.splitlines()[-1] == str(rows)


def test_the_first_example_of_the_readme_prints_what_it_says(tmp_path):
    page = "README.md"
    (tmp_path / "reviews.py").write_text(block((ROOT / page).read_text(), "A first example"))
    done = forked.run(["reviews.py"], os.environ, tmp_path, 120)
    assert done.returncode == 0, done.stderr
    printed = (ROOT / page).read_text().partition("prints, after Dagster's log:\n\n```\n")[2]
    printed = printed.partition("```")[0]
    assert len(printed.splitlines()) == 2
    assert done.stdout.endswith(printed)


def test_the_second_example_of_the_readme_is_a_pipeline(tmp_path, monkeypatch):
    (tmp_path / "readme_definitions.py").write_text(
        block((ROOT / "README.md").read_text(), "On a cluster, by day, from S3")
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    # The module was written just now.
    import readme_definitions  # type: ignore[import-not-found]  # written above

    keys = readme_definitions.defs.resolve_all_asset_keys()
    assert {key.to_user_string() for key in keys} >= {
        "docs/clean", "docs/embedding", "docs/enriched", "docs/published",
    }  # fmt: skip
    assert isinstance(readme_definitions.defs, dg.Definitions)


def test_the_alerts_of_the_page_on_metrics_name_the_checks_that_failed(tmp_path, capsys):
    names: dict[str, Any] = {}
    exec(block((ROOT / "docs/metrics.md").read_text(), "Alerts"), names)
    ones = vd.Pipeline("ones", source=vd.table([{"id": 1}]), id="id")
    golden = vd.Asset(checks=[vd.checks.Golden({"id": [1], "one": [2]})])
    ones.project("one", {"id": "id", "one": "1"}, asset=golden)
    resources = {"compute": vd.LocalCompute(), "store": vd.FragmentStore(root=str(tmp_path / "s"))}
    with dg.DagsterInstance.ephemeral() as instance:
        result = dg.materialize([ones.build_assets()], resources=resources, instance=instance)
        capsys.readouterr()
        (entry,) = instance.all_logs(result.run_id, of_type=dg.DagsterEventType.RUN_SUCCESS)
        event, run = entry.dagster_event, result.dagster_run
        names["alert"](dg.build_run_status_sensor_context("alert", event, instance, run))
    assert capsys.readouterr().out.startswith("ones/one golden None: 1 of 1 rows differ")
    assert {sensor.name for sensor in names["alerts"]} == {"alert_success", "alert_failure"}


def vector(id: int) -> np.ndarray:
    return np.random.default_rng(id).random(384, np.float32)


def test_the_index_of_a_lance_table_follows_its_rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/guides/publishing.md").read_text()
    code = block(page, "A vector index").replace("s3://lake/v.lance", "v.lance")

    def publish(rows: range) -> None:
        docs = vd.Pipeline("docs", source=vd.table([{"id": n} for n in rows]), id="id")
        kind = {"vectors": vd.tensor("float32", (384,))}
        vectors = docs.map("vectors", vector, schema=kind, reuse=vd.Reuse(version="1"))
        names = {"dg": dg, "vectors_table": vectors.write("lance", "v.lance", format="lance")}
        docs.run(compute=vd.LocalCompute(), store="store")
        exec(code, names)
        assert dg.materialize([names["vector_index"]]).success

    publish(range(200))
    assert not lance.dataset("v.lance").describe_indices()
    for rows in (range(300), range(100, 500)):
        publish(rows)
        table = lance.dataset("v.lance")
        assert table.stats.index_stats("vectors_idx")["num_unindexed_rows"] == 0
        for id in (rows[0], rows[-1]):
            nearest = {"column": "vectors", "q": vector(id), "k": 1, "refine_factor": 10}
            assert table.to_table(nearest=nearest)["id"].to_pylist() == [id]
        nearest = {"column": "vectors", "q": vector(0), "k": 1, "refine_factor": 10}
        found = table.to_table(nearest=nearest)["id"].to_pylist()
        assert (found == [0]) == (0 in rows), "deleted rows are in no answer"
