"""Your own functions before and after a language model, row by row.

`preprocess` makes the conversation and the sampling parameters of each row, as for `ray.data.llm`;
`postprocess` turns the answer into columns, in a separate stage. An edit of `postprocess` computes
only that stage again and sends no prompts, because the answers are stored. Needs
`pip install 'vane-dagster[openai]'` and OPENAI_API_KEY; OPENAI_BASE_URL names another endpoint, and
`VANE_EXAMPLES_API_MODEL` its model.
"""

import os
from pathlib import Path
from typing import Any, TypedDict

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq

import vane_dagster as vd

ROOT = Path(os.environ.get("VANE_EXAMPLES", "vane-examples"), "questions").absolute()
QUESTIONS = ["Where is my parcel?", "May I return the lamp?", "", "Do you sell kettles?"]
TONES = {"email": "Answer in two polite sentences.", "chat": "Answer in five words."}


@dg.asset
def questions() -> None:
    """The input: questions of customers, one of them empty."""
    (ROOT / "questions").mkdir(parents=True, exist_ok=True)
    channels = ["email", "chat", "chat", "email"]
    table = pa.table({"id": range(len(QUESTIONS)), "text": QUESTIONS, "channel": channels})
    pq.write_table(table, ROOT / "questions" / "all.parquet")


def preprocess(row: dict[str, Any]) -> dict[str, Any]:
    if not row["text"]:
        raise ValueError("the question is empty")
    return {
        "messages": [
            {"role": "system", "content": TONES[row["channel"]]},
            {"role": "user", "content": row["text"]},
        ],
        "sampling_params": {
            "temperature": 0,
            "max_tokens": 80 if row["channel"] == "email" else 20,
        },
    }


class Reply(TypedDict):
    reply: str
    words: int


def postprocess(row: dict[str, Any]) -> Reply:
    text = row["generated_text"].strip()
    return {"reply": text, "words": len(text.split())}


desk = vd.Pipeline("desk", source=vd.parquet(str(ROOT / "questions"), asset=questions), id="id")
answers = desk.prompt(
    "answers",
    preprocess,
    provider="openai",
    model=vd.Model(
        os.environ.get("VANE_EXAMPLES_API_MODEL", "gpt-4o-mini"),
        options={"base_url": os.environ.get("OPENAI_BASE_URL")},
    ),
    columns=["text", "channel"],  # what the function gets
    output_column="generated_text",
    include_columns=["text"],
    concurrency=vd.Workers(env_vars=["OPENAI_API_KEY"]),
    # An error of the function fails only its row.
    on_error=vd.Failures("quarantine", max_error_rate=0.5),
)
# The return type of the function declares the columns.
replies = answers.map("replies", postprocess, columns=["generated_text"], include_columns=["text"])
replies.write("published", str(ROOT / "out"))

assets = [questions, desk.build_assets()]
resources = {"compute": vd.RayCompute(), "store": vd.FragmentStore(root=str(ROOT / "store"))}
defs = dg.Definitions(assets=assets, resources=resources)


def main() -> None:
    result = dg.materialize(assets, resources=resources)
    for done in result.asset_materializations_for_node("desk_pipeline"):
        computed = done.metadata["rows_computed"].value
        print(done.asset_key.path[-1], "computed:", computed)
    for row in pq.read_table(ROOT / "out").to_pylist():
        print(f"{row['text']} -> {row['reply']} ({row['words']} words)")
    for row in vd.quarantine("desk/answers", store=str(ROOT / "store")).to_pylist():
        print(f"quarantined, id {row['id']}: {row['message']}")


if __name__ == "__main__":
    main()
