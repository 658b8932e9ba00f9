"""The examples of the pages, as a reader would run them."""

from __future__ import annotations

import os
from pathlib import Path

import dagster as dg

import vane_dagster
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
