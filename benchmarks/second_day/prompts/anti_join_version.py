"""What is written by hand: Daft's `prompt` for the rows that are not among the outputs.

The prompt is among the keys, as by somebody who thinks of its edits.
"""

from __future__ import annotations

import os
from typing import Any

import daft  # type: ignore[import-not-found,unused-ignore]  # it may be in another environment
from daft.ai.openai.provider import (  # type: ignore[import-not-found,unused-ignore]  # likewise
    OpenAIProvider,
)

from benchmarks.job import Job, Result
from benchmarks.second_day import anti_join
from benchmarks.second_day.prompts.endpoint import MODEL, URL

EXIT_AT_ONCE = anti_join.EXIT_AT_ONCE


def run(job: Job) -> Result:
    """Anti-join with the outputs."""
    from embedder import prompt  # type: ignore[import-not-found,unused-ignore]  # of the day

    def answer(rows: Any) -> Any:
        return rows.with_column("answer", answered(rows))

    return anti_join.run(job, answer=answer, output="answer", version=prompt("{text}"))


def answered(rows: Any) -> Any:
    """Return the expression that asks the endpoint; rows that it refuses get null."""
    from embedder import prompt  # type: ignore[import-not-found,unused-ignore]  # of the day

    return daft.functions.prompt(
        daft.functions.format(prompt("{}"), rows["text"]),
        provider=OpenAIProvider("endpoint", base_url=os.environ[URL], api_key="none"),
        model=MODEL,
        use_chat_completions=True,
        on_error="log",
    )
