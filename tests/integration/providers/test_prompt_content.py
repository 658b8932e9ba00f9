"""Prompts with images, sounds and documents, sent by the clients of two APIs to a server.

The server refuses requests in another form than the APIs publish.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import vane_dagster as vd
from support.data import read_stage, write_source
from support.in_process import compute
from support.media import PDF, PIXELS, picture, sound
from support.prompts import asked
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.store import Store
from vane_dagster.types.tensors import from_ndarray

GREEDY = {"temperature": 0, "max_tokens": 9}


def ask(docs: vd.Pipeline, url: str, name: str, messages: Any, **given: Any) -> None:
    asked(docs, url, messages, name, sampling_params=GREEDY, **given)


def read(folder: Path, stage: str) -> dict[Any, str]:
    rows = read_stage(folder / "store", "docs", stage)
    return dict(zip(rows[rows.column_names[0]].to_pylist(), rows[stage].to_pylist()))


def test_content_of_columns_by_each_api(tmp_path, server, endpoint, backend):
    tensors = from_ndarray(PIXELS[None].repeat(2, 0), vd.tensor("uint8", (4, 6, 3)))
    columns = {
        "id": [0, 1],
        "tensor": tensors,
        "pictures": [[picture("JPEG"), picture("WEBP", (9, 9))], [picture("TIFF")]],
        "pdf": [PDF, None],
        "sound": [sound(), b"no sound"],
        "url": ["https://x/1.png", "file:///1.png"],
    }
    write_source(tmp_path / "src", columns)
    docs = vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "src")), id="id")
    aside = {"on_error": "quarantine", "max_error_rate": 0.5}
    pictures = [vd.image("tensor"), "First {id}", vd.image("pictures", max_pixels=64)]
    detailed = [vd.image("tensor", detail="low"), "Is it like this?", vd.image("pictures")]
    talk = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": ["{id}", vd.image("tensor")]},
        {"role": "assistant", "content": "It is blue."},
        {"role": "user", "content": ["Why?"]},
    ]
    fetched = [vd.image("url", fetch_by_provider=True), "{id}"]
    for provider in ("openai", "anthropic"):
        by = {"provider": provider}
        ask(docs, endpoint[1], f"{provider}_pictures", pictures, **by)
        ask(docs, endpoint[1], f"{provider}_talk", talk, **by)
        ask(docs, endpoint[1], f"{provider}_pdf", [vd.document("pdf"), "{id}"], **by, **aside)
        ask(docs, endpoint[1], f"{provider}_url", fetched, **by, **aside)
    ask(docs, endpoint[1], "detailed", detailed)
    ask(docs, endpoint[1], "heard", [vd.audio("sound"), "{id}"], **aside)
    compute(docs, Store(StoragePath(str(tmp_path / "store"))), backend=backend)

    tensor = "[image/png 6x4]"
    for provider in ("openai", "anthropic"):
        assert read(tmp_path, f"{provider}_pictures") == {
            0: f"echo: {tensor}\nFirst 0\n[image/jpeg 6x4]\n[image/png 8x8]",
            1: f"echo: {tensor}\nFirst 1\n[image/png 6x4]",
        }
        assert read(tmp_path, f"{provider}_talk") == {0: "echo: Why?", 1: "echo: Why?"}
        pdf = f"[application/pdf, {len(PDF)} bytes]"
        assert read(tmp_path, f"{provider}_pdf") == {0: f"echo: {pdf}\n0"}
        assert read(tmp_path, f"{provider}_url") == {0: "echo: [https://x/1.png]\n0"}
    assert read(tmp_path, "heard") == {0: f"echo: [audio/wav, {len(sound())} bytes]\n0"}
    images = [
        part["image_url"]
        for body in server.bodies
        for part in body["messages"][-1]["content"]
        if "Is it like this?" in str(body) and part["type"] == "image_url"
    ]
    assert Counter(image.get("detail") for image in images) == {"low": 2, None: 3}
    messages = {
        stage: vd.quarantine(f"docs/{stage}", store=str(tmp_path / "store"))["message"].to_pylist()
        for stage in ("openai_pdf", "anthropic_url", "heard")
    }
    assert messages == {
        "openai_pdf": ["column 'pdf' is null; a prompt needs it"],
        "anthropic_url": [
            "column 'url' holds a str; expected http:// or https:// URLs, because of "
            "fetch_by_provider"
        ],
        "heard": [
            "column 'sound' holds a file of another type than 'audio/wav', 'audio/mpeg', "
            "'audio/flac', 'audio/ogg', 'audio/mp4'"
        ],
    }
