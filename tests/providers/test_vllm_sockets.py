"""The sockets of vLLM's engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.attacks import (
    mode,
    shared_tmp,  # noqa: F401  # fixtures
)


def test_sockets_of_vllm_are_in_a_private_folder(
    shared_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network_utils = pytest.importorskip("vllm.utils.network_utils", reason="vllm is not installed")
    from vane_dagster.providers.vllm_engine import engine_folder

    monkeypatch.setenv("VLLM_RPC_BASE_PATH", "")
    monkeypatch.delenv("VLLM_RPC_BASE_PATH")
    folder = engine_folder()
    assert folder.parent == shared_tmp
    assert mode(folder) == 0o700
    assert network_utils.get_open_zmq_ipc_path().startswith(f"ipc://{folder}/")
