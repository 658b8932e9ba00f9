"""The demo: semantic search over the documentation of Python's own standard library."""

from __future__ import annotations

from definitions.assets import defs

__all__ = ["defs"]
