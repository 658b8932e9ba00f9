"""The examples in docs/servers.md declare what they say."""

from __future__ import annotations

import re
from typing import Any

import pytest

from support.paths import REPOSITORY
from vane_dagster.pipeline.servers import ModelServer

PAGE = (REPOSITORY / "docs" / "servers.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.strip().splitlines()[-1][:40])
def test_an_example_declares_its_servers_and_stages(block):
    found: dict[str, Any] = {}
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
    from vane_dagster.pipeline.servers import ServerArguments

    listed = re.findall(r"`(\w+)`", PAGE.partition("## Options")[2].partition("\n## ")[0])
    assert set(ServerArguments.__annotations__) <= set(listed)
