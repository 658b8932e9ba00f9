"""A row that ends its server costs one row, and its neighbors are not blamed."""

from __future__ import annotations

import vane_dagster as vd
from support.data import read_stage
from support.misbehaving_server import requests
from support.server_runs import echo, prompting


def test_a_row_that_ends_the_server_costs_one_row(tmp_path, local, materialize):
    server = echo("llm", f"--requests={tmp_path}/requests", version="1")
    texts = [f"row {n}" + " poison" * (n == 7) for n in range(30)]
    materialize(prompting(tmp_path / "src", server, texts, workers=2), local)
    table = read_stage(tmp_path / "store", "prompting", "answers")
    assert sorted(table["id"].to_pylist()) == [n for n in range(30) if n != 7]
    aside = vd.quarantine("prompting/answers", store=str(tmp_path / "store"))
    assert (aside["id"].to_pylist(), aside["error"].to_pylist()) == ([7], ["ServerDied"])
    assert requests(tmp_path / "requests").count("row 7 poison") == 5
