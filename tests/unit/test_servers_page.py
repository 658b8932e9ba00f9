"""The examples in docs/servers.md declare what they say."""

from __future__ import annotations

import re
import sys
import types
from typing import Any

import pytest

import vane_dagster as vd
from support.paths import REPOSITORY
from vane_dagster.pipeline.servers import ModelServer

PAGE = (REPOSITORY / "docs" / "servers.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.strip().splitlines()[-1][:40])
def test_an_example_declares_its_servers_and_stages(block, monkeypatch, tmp_path):
    found: dict[str, Any] = {}
    if "ServeApplication" in block:
        (tmp_path / "ranking.py").write_text("app = None\n")
        monkeypatch.syspath_prepend(str(tmp_path))
    if "my_pipelines" in block:
        pytest.importorskip("fastapi", reason="an application is built with fastapi")
        module = types.ModuleType("my_pipelines")
        module.llm = vd.VLLMServer("m")  # type: ignore[attr-defined]  # a module made here
        monkeypatch.setitem(sys.modules, "my_pipelines", module)
    exec(compile(block, "docs/servers.md", "exec"), found)
    servers = [value for value in found.values() if isinstance(value, ModelServer)]
    assert servers
    for server in servers:
        assert server.identity()
    pipeline = found.get("pipeline")
    if pipeline is not None:
        used = {key for stage in pipeline if stage.spec.runs_udf for key in stage.spec.udf.servers}
        assert used <= {server.key for server in servers}
        assert used


def test_the_page_lists_every_option():
    from vane_dagster.pipeline.servers import ServerOptions

    listed = re.findall(r"`(\w+)`", PAGE.partition("## Options")[2].partition("\n## ")[0])
    assert set(ServerOptions.__dataclass_fields__) <= set(listed)
