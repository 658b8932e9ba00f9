"""Records the questions for `definitions.search`: a small Parquet file for each question."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from definitions.files import write_parquet
from definitions.settings import data_folder

if TYPE_CHECKING:
    from definitions.search import Hit

SCHEMA = pa.schema(
    {
        "id": pa.string(),
        "asked_at": pa.timestamp("us"),  # in UTC, like the days
        "question": pa.string(),
        "answer": pa.string(),
        "score": pa.float64(),
    }
)


def day_folder(day: str) -> Path:
    """The folder with the questions of a day; the day is written as 2026-01-31."""
    return data_folder() / "questions" / day


def remember(question: str, best: Hit) -> Path:
    """Record a question with its best answer, among those of today.

    Returns:
        The file.
    """
    now = datetime.now(UTC)
    row = {
        "id": secrets.token_hex(8),
        "asked_at": now.replace(tzinfo=None),
        "question": question,
        "answer": best.qualname,
        "score": best.score,
    }
    target = day_folder(f"{now:%Y-%m-%d}") / f"{now:%H%M%S}-{row['id']}.parquet"
    write_parquet(pa.Table.from_pylist([row], schema=SCHEMA), target)
    return target
