"""Errors that vLLM's processes log while an engine loads; vLLM's own error only refers to them.

The engine gets a logging configuration that also writes errors to a file, besides the usual output.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from vane_dagster.providers.registry import needs

_RECORD = "\x1e"
_ERRORS = "errors.log"
_MAX_SHOWN = 2000


def logged(folder: Path) -> Any:
    """Return a vLLM LoggingConfig that writes errors to a folder, which must outlive the engine."""
    defaults = needs("vllm.logger", "vllm", "vllm").DEFAULT_LOGGING_CONFIG
    config: dict[str, Any] = copy.deepcopy(defaults)
    config["formatters"]["kept"] = {"format": f"{_RECORD}%(message)s"}
    config["handlers"]["kept"] = {
        "class": "logging.FileHandler",
        "filename": str(folder / _ERRORS),
        "formatter": "kept",
        "level": "ERROR",
    }
    config["loggers"]["vllm"]["handlers"].append("kept")
    file = folder / "logging.json"
    file.write_text(json.dumps(config))
    settings = needs("vllm.config.logging", "vllm", "vllm").LoggingConfig
    return settings(pylogging_config_file=str(file))


def cause(folder: Path) -> str | None:
    """Return the first error logged; later ones are its consequences. None if there is none."""
    file = folder / _ERRORS
    text = file.read_text(errors="replace") if file.exists() else ""
    for record in text.split(_RECORD):
        if (found := _raised(record)) is not None:
            return found[:_MAX_SHOWN]
    return None


def _raised(record: str) -> str | None:
    """Return the exception of a record with a traceback: the text after the last line of code."""
    lines = record.rstrip().splitlines()
    frames = [i for i, line in enumerate(lines) if line.startswith('  File "')]
    if not frames:
        return None
    after = lines[frames[-1] + 1 :]
    while after and after[0].startswith("    "):
        after = after[1:]
    return "\n".join(after) or None
