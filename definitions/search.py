"""`python -m definitions.search "..."`: answers a question from the published vectors."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from definitions.embedder import DIMENSIONS, SentenceEmbedder
from definitions.settings import check_extra, data_folder
from vane_dagster.errors import SourceError, VaneError

# Vectors have length 1, so their inner product is the cosine of the angle between them.
_NEAREST = f"""
    select
        array_inner_product(embedding::FLOAT[{DIMENSIONS}], $query::FLOAT[{DIMENSIONS}]) as score,
        qualname,
        summary
    from read_parquet($files)
    order by score desc, qualname
    limit $top
"""


@dataclass(frozen=True)
class Hit:
    """A name that matches a question; `score` is the cosine, at most 1."""

    score: float
    qualname: str
    summary: str


def published_files(partitions: Sequence[str] | None = None) -> list[Path]:
    """The published files, of all partitions or of some.

    Raises:
        SourceError: If there are none.
    """
    folder = data_folder() / "published"
    files = sorted(folder.glob("*/*.parquet"))
    if partitions is not None:
        files = [file for file in files if file.parent.name in partitions]
    if not files:
        raise SourceError(
            f"{folder} holds no vectors, so there is nothing to search. Run `make demo` first, "
            "or set VANE_DEMO_DATA to the data folder of an earlier one"
        )
    return files


def search(question: str, top: int) -> list[Hit]:
    """The `top` names nearest to a question, best first.

    Raises:
        SourceError: If nothing is published yet.
    """
    import duckdb

    files = [str(file) for file in published_files()]
    query = SentenceEmbedder().encode([question])[0].tolist()
    with duckdb.connect() as connection:
        found = connection.execute(_NEAREST, {"query": query, "files": files, "top": top})
        return [Hit(*row) for row in found.fetchall()]


def show(hits: Sequence[Hit]) -> None:
    """Print names with their scores."""
    width = max(len(hit.qualname) for hit in hits)
    for hit in hits:
        print(f"  {hit.score:.2f}  {hit.qualname:<{width}}  {hit.summary}")


def main() -> None:
    """Find names of the standard library by what they do, and remember what was asked."""
    parser = argparse.ArgumentParser(prog="python -m definitions.search", description=main.__doc__)
    parser.add_argument("question")
    parser.add_argument("--top", default=5, type=int, help="answers (default: %(default)s)")
    given = parser.parse_args()
    try:
        published_files()
        check_extra()
        hits = search(given.question, max(1, given.top))
    except VaneError as error:
        sys.exit(f"Error: {error}")
    show(hits)
    try:
        from definitions.asked import remember

        remember(given.question, hits[0])
    except Exception as error:  # any error: the answer was printed, and that was the task
        reason = f"{type(error).__name__}: {error}"
        print(f"Warning: the question was not remembered: {reason}", file=sys.stderr)


if __name__ == "__main__":
    main()
