"""Local files as arguments: what counts of them, and how they are pickled."""

from __future__ import annotations

import functools
import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic
import pytest

import vane_dagster as vd
from vane_dagster import _worker_process
from vane_dagster.fingerprint.bundle import pack
from vane_dagster.fingerprint.local_file import LocalFile, found_in
from vane_dagster.fingerprint.objects import value_digest


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    file = tmp_path / "first" / "model.pt"
    file.parent.mkdir()
    file.write_bytes(b"weights")
    return file


def moved(file: Path, folder: str, name: str) -> Path:
    target = file.parent.parent / folder / name
    target.parent.mkdir(exist_ok=True)
    return file.rename(target)


def test_only_content_and_name_count(weights):
    before = value_digest({"weights": vd.local_file(weights)})
    weights = moved(weights, "second", "model.pt")
    assert value_digest({"weights": vd.local_file(str(weights))}) == before
    weights.write_bytes(b"edited")
    edited = value_digest({"weights": vd.local_file(weights)})
    weights = moved(weights, "second", "other.pt")
    renamed = value_digest({"weights": vd.local_file(weights)})
    assert len({before, edited, renamed}) == 3


def test_the_files_of_a_folder_count_by_their_names(tmp_path):
    folder = tmp_path / "tokenizer"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "vocab.txt").write_text("a")
    (folder / ".lock").write_text("hidden")
    file = vd.local_file(f"{folder}/")
    before = value_digest(file)
    (folder / ".lock").write_text("other")
    assert value_digest(file) == before
    (folder / "inner" / "vocab.txt").rename(folder / "vocab.txt")
    assert value_digest(file) != before
    assert file.name == "tokenizer"


def test_a_relative_path_is_that_of_the_declaration(weights, monkeypatch):
    monkeypatch.chdir(weights.parent)
    file = vd.local_file("model.pt")
    monkeypatch.chdir("/")
    assert file == vd.local_file(os.fsencode(weights))
    assert file.content().blobs[0].size == 7


def mapped(batch, nested):
    return batch


def declare(path: Path, **asset: Any) -> vd.Stage:
    docs = vd.Pipeline("docs", source=vd.parquet("/nowhere"), id="id")
    given = {"nested": [vd.local_file(path)]}
    return docs.map_batches(
        "mapped", mapped, schema={"n": "BIGINT"}, fn_kwargs=given, asset=vd.Asset(**asset)
    )


def test_a_missing_file_fails_where_it_is_declared(tmp_path):
    with pytest.raises(
        vd.errors.DefinitionError, match=r"docs/mapped.*gone\.pt.*cannot be read.*deps"
    ):
        declare(tmp_path / "gone.pt")


def test_a_file_that_an_asset_makes_may_be_missing_until_the_run(tmp_path):
    stage = declare(tmp_path / "model.pt", deps=["model"])
    spec = stage.spec
    before = spec.components(stage.pipeline)
    with pytest.raises(
        vd.errors.CodeIdentityError, match=r"model\.pt'\) cannot be read.*Restore it"
    ):
        spec.local_files()
    (tmp_path / "model.pt").write_text("weights")
    assert len(spec.local_files()) == 1
    assert spec.components(stage.pipeline) != before


def test_a_worker_that_imports_the_declaration_reads_nothing(weights, monkeypatch):
    stage = declare(weights)
    monkeypatch.setenv(_worker_process._VARIABLE, "1")
    before = value_digest(vd.local_file(weights))
    weights.write_bytes(b"edited")
    assert value_digest(vd.local_file(weights)) == before
    weights.unlink()
    assert declare(weights).spec.components(stage.pipeline)


@pytest.mark.parametrize("kind", ["empty", "broken", "circular"])
def test_folders_that_cannot_travel(tmp_path, kind):
    folder = tmp_path / "folder"
    folder.mkdir()
    if kind != "empty":
        (folder / "file").write_text("content")
        (folder / "link").symlink_to(tmp_path / "gone" if kind == "broken" else folder)
    with pytest.raises(
        vd.errors.CodeIdentityError, match="no files" if kind == "empty" else "link"
    ):
        vd.local_file(folder).content()


class Validated(pydantic.BaseModel):
    inner: Any


@dataclass
class Settings:
    weights: Any
    inner: Any = None


def test_files_are_found_in_arguments(weights):
    file, other = vd.local_file(weights), vd.local_file(weights.parent)
    cycle: list[Any] = [other]
    cycle.append(cycle)
    given = {"a": [file], "b": Settings(1, (file, cycle)), "c": functools.partial(print, x=other)}
    assert set(found_in(given, LocalFile)) == {file, other}
    assert list(found_in([{file: 1}], LocalFile)) == [file]
    assert list(found_in([lambda: (file, later)], LocalFile)) == [file]
    later = None
    assert list(found_in(Validated(inner={"weights": file}), LocalFile)) == [file]
    assert list(found_in(["model.pt", Settings], LocalFile)) == []


class Unpickler(pickle.Unpickler):
    def persistent_load(self, digest: str) -> str:
        return f"copy of {digest}"


def test_arguments_are_pickled_without_the_content(weights):
    import io

    weights.write_bytes(b"w" * 100_000)
    file = vd.local_file(weights)
    content = file.content()
    bundle = pack([], {"weights": [file]}, {file: content})
    assert len(bundle.payload) < 1000
    assert str(weights).encode() not in bundle.payload
    loaded = Unpickler(io.BytesIO(bundle.payload)).load()
    assert loaded == {"weights": [f"copy of {content.digest}"]}


def test_a_file_that_is_no_argument_is_refused(weights):
    file = vd.local_file(weights)

    def closure() -> LocalFile:
        return file

    with pytest.raises(vd.errors.CodeIdentityError, match="is not an argument; pass it as one"):
        pack([], closure)


def test_code_that_takes_it_for_a_path_is_told_where_it_is_one(weights):
    with pytest.raises(TypeError, match=r"only in a worker .* fn_constructor_kwargs"):
        Path(vd.local_file(weights))


@pytest.mark.parametrize("path", ["", "s3://key:secret@lake/model.pt", "file:///m.pt", ["a"]])
def test_what_is_no_path_is_refused(path):
    with pytest.raises(
        vd.errors.DefinitionError, match=r"given no path.* Pass a URL .* open"
    ) as found:
        vd.local_file(path)
    assert "secret" not in str(found.value)
