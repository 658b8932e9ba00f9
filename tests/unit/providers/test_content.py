"""Content of prompts besides text: declarations, messages, and how values are read."""

from __future__ import annotations

import asyncio
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

import vane_dagster as vd
from support.media import PDF, PIXELS, picture, sound
from support.prompts import Reversed, docs, in_turns
from support.udf_calls import row_stage
from vane_dagster.errors import RowErrors
from vane_dagster.planning.definition import stage_definition
from vane_dagster.providers.base import Answer, Media, Request
from vane_dagster.providers.prompting import PromptTask
from vane_dagster.providers.template import Template, parse_template
from vane_dagster.types import image_files


def parsed(messages: Any, system: str | None = None) -> Template:
    return parse_template("here", messages, system)


def media(part: Any, value: Any) -> list[Media]:
    return list(part.values({part.column: value}, None))


def opened(part: Media) -> Image.Image:
    return Image.open(io.BytesIO(part.data))


# Declarations


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "names no column"),
        (["What is this?"], "names no column: \"['What is this?']\""),
        ([vd.audio("sound"), ""], "messages is ''; expected a column's name, text with"),
        ([vd.audio("sound"), {"type": "text"}], "messages is {'type': 'text'}; expected"),
        ([vd.audio("sound"), "{0}"], "has the field {0}"),
        ([{"role": "user"}], "messages has {'role': 'user'}; expected content and a role of"),
        ([{"role": "pilot", "content": "{a}"}], "expected content and a role of 'system', 'user'"),
        ([{"role": "user", "content": vd.audio("sound")}], "a list of such texts and vd.image"),
        (
            [{"role": "assistant", "content": [vd.image("picture")]}],
            "messages has [image `picture`] in a message of the assistant",
        ),
    ],
)
def test_lists_that_are_no_messages(messages, message):
    with pytest.raises(vd.errors.DefinitionError, match=re.escape(message)):
        parsed(messages)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        ("image", {"column": ""}, "vd.image: column is ''"),
        ("image", {"column": "a", "max_pixels": 0}, "vd.image: max_pixels is 0"),
        ("image", {"column": "a", "detail": ""}, "vd.image: detail is ''"),
        ("image", {"column": "a", "max_pixels": 9, "fetch_by_provider": True}, "cannot be kept"),
        ("audio", {"column": 7}, "vd.audio: column is 7"),
        ("document", {"column": "a", "fetch_by_provider": 1}, "fetch_by_provider is 1"),
    ],
)
def test_content_that_is_declared_incorrectly(function, arguments, message):
    with pytest.raises(vd.errors.DefinitionError, match=re.escape(message)):
        getattr(vd, function)(**arguments)


class Sees(Reversed):
    @classmethod
    def features(cls, options: Any) -> set[str]:
        return {"image"}


@pytest.mark.parametrize(
    ("provider", "part", "message"),
    [
        (
            Reversed,
            vd.image("a"),
            "has no image here, only text: the prompt has [image `a`]",
        ),
        (
            Sees,
            vd.image("a", detail="low"),
            "Sees has no image detail here, only text, image: ",
        ),
        ("anthropic", vd.audio("a"), "AnthropicProvider has no audio here, only text, document, "),
        ("openai", vd.document("a", fetch_by_provider=True), "has no document url"),
        ("transformers", vd.image("a", fetch_by_provider=True), "has no image url"),
        ("vllm", vd.document("a"), "VllmProvider has no document here, only text, audio, image"),
    ],
)
def test_what_a_provider_does_not_take_is_refused_at_declaration(provider, part, message, tmp_path):
    with pytest.raises(vd.errors.DefinitionError, match=re.escape(message)):
        docs(tmp_path).prompt("asked", [part], provider=provider, model="m")


@pytest.mark.parametrize(
    ("part", "kind", "fits"),
    [
        (vd.image("a"), pa.binary(), True),
        (vd.image("a"), pa.list_(pa.large_binary()), True),
        (vd.image("a"), pa.string(), True),
        (vd.image("a"), pa.list_(pa.string()), False),
        (vd.image("a"), vd.tensor("uint8", (4, 6, 3)), True),
        (vd.image("a"), pa.list_(vd.tensor("uint8", (4, 6))), True),
        (vd.image("a"), vd.tensor("float32", (4, 6, 3)), False),
        (vd.image("a"), pa.int64(), False),
        (vd.image("a", fetch_by_provider=True), pa.list_(pa.string()), True),
        (vd.image("a", fetch_by_provider=True), pa.binary(), False),
        (vd.audio("a"), vd.tensor("uint8", (4, 6)), False),
        (vd.document("a"), pa.binary(), True),
    ],
)
def test_types_of_columns(part, kind, fits):
    stage = row_stage("prompt", [part], provider="openai", model="m")
    given = {"source": pa.schema({"id": pa.int64(), "a": kind})}
    assert part.fits(kind) is fits
    if not fits:
        with pytest.raises(vd.errors.SchemaError, match=re.escape(f"'a' of 'source' is {kind}")):
            stage.spec.output_schema(stage.pipeline, given)


def test_one_text_counts_as_it_did_before_there_was_other_content(tmp_path):
    assert parsed("{text}!", "Be brief.").keyed == "{text}!"
    assert parsed("text").keyed == parsed("text", "Be brief.").keyed == "text"
    assert Template().keyed == ""
    assert parsed(["{text}!"]) == parsed([{"role": "user", "content": "{text}!"}])
    assert parsed(["{text}!"]).keyed == "{text}!"
    forms: list[Any] = [
        "{text}", ["{text}", "Briefly."], ["{text}", vd.image("a")], [vd.image("a"), "{text}"],
        ["{text}", vd.image("a", max_pixels=9)], ["{text}", vd.image("a", detail="low")],
        ["{text}", vd.image("a", fetch_by_provider=True)], ["{text}", vd.audio("a")],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "{text}"}],
    ]  # fmt: skip
    found = set()
    for place, form in enumerate(forms):
        pipeline = docs(tmp_path / str(place))
        stage = pipeline.prompt("asked", form, provider="openai", model="m")
        found.add(stage_definition(pipeline, stage.spec))
    assert len(found) == len(forms)


# Messages


def test_messages_of_texts_and_content():
    template = parsed(["Of {n}:", vd.image("pictures"), vd.document("pdf")], "Be brief.")
    row = {"n": 1, "pictures": [picture(), picture("JPEG")], "pdf": PDF}
    system, user = template.messages(row)
    assert system["content"] == "Be brief."
    text, *parts = user["content"]
    assert (text, user["role"]) == ("Of 1:", "user")
    assert [(part.kind, part.media_type) for part in parts] == [
        ("image", "image/png"), ("image", "image/jpeg"), ("document", "application/pdf"),
    ]  # fmt: skip
    assert [part.data for part in parts] == [*row["pictures"], PDF], "small files are not encoded"
    assert "PDF" not in repr(parts)


def test_texts_alone_are_text():
    talk = [
        {"role": "user", "content": ["{a}", "Briefly."]},
        {"role": "assistant", "content": "OK"},
        {"role": "user", "content": ["{b}", vd.image("pictures")]},
    ]
    found = parsed(talk).messages({"a": "x", "b": "y", "pictures": []})
    assert [(m["role"], m["content"]) for m in found] == [
        ("user", "x\nBriefly."), ("assistant", "OK"), ("user", "y"),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="the prompt is empty"):
        parsed([vd.image("pictures")]).messages({"pictures": []})


class Keeps(Reversed):
    def __init__(self) -> None:
        self.requests: list[Request] = []

    async def submit(self, request: Request) -> Answer:
        self.requests.append(request)
        return Answer("said")


def test_content_that_is_null_or_does_not_decode_costs_its_row_alone():
    task = PromptTask(parsed(["{text}", vd.image("a", max_pixels=4)]), "said")
    values = [picture(), None, b"no image", picture("JPEG", (640, 480))[:2000], b""]
    batch = pa.table({"text": [*"abcde"], "a": pa.array(values, pa.binary())})
    provider = Keeps()
    with pytest.raises(RowErrors) as raised:
        asyncio.run(task.run(provider, in_turns(batch)))
    assert [request.messages[0]["content"][0] for request in provider.requests] == ["a"]
    assert raised.value.rows["said"].to_pylist() == ["said"]
    errors = raised.value.errors
    assert {place: str(error).partition(" (")[0] for place, error in errors.items()} == {
        1: "column 'a' is null; a prompt needs it",
        2: "column 'a': not an image in a format that Pillow can read",
        3: "column 'a': image file is truncated",
        4: "column 'a': the image file is empty",
    }  # fmt: skip
    assert {type(error) for error in errors.values()} == {ValueError}


# Values


@pytest.mark.parametrize("shape", [(4, 6), (4, 6, 1), (4, 6, 2), (4, 6, 3), (4, 6, 4)])
def test_tensors_are_sent_as_png(shape):
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    (part,) = media(vd.image("a"), pixels)
    assert part.media_type == "image/png"
    assert np.array_equal(np.asarray(opened(part)).reshape(shape), pixels)


@pytest.mark.parametrize(
    ("value", "media_type"),
    [
        (picture("TIFF"), "image/png"),
        (picture("BMP"), "image/png"),
        (picture("GIF"), "image/gif"),
        (picture("WEBP", lossless=True), "image/webp"),
    ],
)
def test_formats_that_models_do_not_take_are_sent_as_png(value, media_type):
    (part,) = media(vd.image("a"), value)
    assert part.media_type == media_type
    assert opened(part).convert("RGB").getpixel((0, 0)) == (0, 0, 128)
    assert (part.data == value) == (media_type != "image/png")


def test_scaled_images_are_upright_and_keep_their_transparency():
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    (part,) = media(vd.image("a", max_pixels=150), picture("JPEG", (600, 400), exif=exif))
    assert opened(part).size == (10, 15)
    file = io.BytesIO()
    Image.new("RGBA", (60, 40), (0, 0, 0, 0)).quantize().save(file, "PNG")
    (part,) = media(vd.image("a", max_pixels=150), file.getvalue())
    assert opened(part).convert("RGBA").getpixel((0, 0))[3] == 0


@pytest.mark.parametrize(
    ("size", "more"),
    [((15, 10), "15 x 10 are 150 pixels, more than "), ((15, 21), "more pixels than ")],
)
def test_an_image_beyond_the_fixed_limit_is_an_error_that_names_it(size, more, monkeypatch):
    value = picture("PNG", size)
    monkeypatch.setattr(image_files, "MAX_PIXELS", 100)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 151)  # Pillow refuses twice as many
    message = f"{more}the fixed limit of 100; scale it down in a stage before"
    with pytest.raises(ValueError, match=f"column 'a': .*{message}"):
        media(vd.image("a", max_pixels=9), value)


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        (vd.image("a"), "a/path.png", "column 'a' holds a str; expected encoded files (bytes), ui"),
        (vd.image("a"), PIXELS.astype(float), "a tensor of float64 with shape (4, 6, 3); expected"),
        (vd.image("a"), PIXELS.reshape(2, 6, 6), "column 'a': "),
        (vd.image("a"), [picture(), None], "column 'a' holds a null in a list; expected"),
        (vd.image("a", fetch_by_provider=True), "file:///etc/passwd", "expected http:// or https"),
        (vd.audio("a"), PDF, "holds a file of another type than 'audio/wav', 'audio/mpeg', "),
        (vd.audio("a"), PIXELS, "a tensor of uint8 with shape (4, 6, 3); expected encoded files"),
        (
            vd.document("a"),
            sound(),
            "column 'a' holds a file of another type than 'application/pdf'",
        ),
    ],
)
def test_values_that_are_no_content(part, value, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        media(part, value)


@pytest.mark.parametrize(
    ("data", "media_type"),
    [
        (sound(), "audio/wav"),
        (b"ID3\x04", "audio/mpeg"),
        (b"\xff\xfb\x90\x64", "audio/mpeg"),
        (b"fLaC\x00", "audio/flac"),
        (b"OggS\x00", "audio/ogg"),
        (b"\x00\x00\x00\x1cftypM4A ", "audio/mp4"),
    ],
)
def test_sounds_are_known_by_their_first_bytes(data, media_type):
    (part,) = media(vd.audio("a"), data)
    assert (part.media_type, part.data) == (media_type, data)


def test_urls_are_passed_on_and_nothing_is_read():
    part = vd.image("a", fetch_by_provider=True)
    row = {"a": ["https://x/1.png", "http://x/2.png"]}
    found = part.values(row, read_file=pytest.fail)
    assert [(each.url, each.data) for each in found] == [(url, b"") for url in row["a"]]


def test_a_row_names_files_of_the_source_alone(tmp_path: Path):
    from vane_dagster.sources.file import read_listed

    (tmp_path / "a.png").write_bytes(picture())
    with pytest.raises(ValueError, match="column 'a': the row names a file that the pipeline's"):
        vd.image("a").values({"a": str(tmp_path / "a.png")}, read_listed)
