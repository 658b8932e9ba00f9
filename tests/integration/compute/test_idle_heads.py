"""A driver waits for a head that is being stopped."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from pathlib import Path

from support.heads import HEAD
from vane_dagster.compute.local_head import Head, LocalHead


def test_a_driver_waits_while_the_head_is_being_stopped(tmp_path: Path) -> None:
    """And then finds it gone, rather than connect to a head that ends under it."""
    local = LocalHead(home=tmp_path, name="stopping")
    local.folder.mkdir()
    found: list[Head | None] = [HEAD]
    driver = threading.Thread(target=lambda: found.append(local.connect(start=False)))
    record = dataclasses.asdict(dataclasses.replace(HEAD, pid=os.getpid()))
    (local.folder / "head.json").write_text(json.dumps(record))

    def nobody_else() -> bool:
        driver.start()
        driver.join(0.2)
        assert driver.is_alive()
        return True

    assert local.stop_if(nobody_else)
    driver.join(30)
    assert found == [HEAD, None]
