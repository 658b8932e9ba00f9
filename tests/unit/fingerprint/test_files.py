"""What counts of local files and folders that arguments name, and how they are pickled."""

from __future__ import annotations

import functools
import os
import pickle
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import pydantic
import pytest

import vane_dagster as vd
from support.arguments import grouped
from vane_dagster import _worker_process
from vane_dagster.errors import CodeIdentityError
from vane_dagster.fingerprint import files, hashing
from vane_dagster.fingerprint.bundle import pack
from vane_dagster.fingerprint.local_file import LocalFile, found_in
from vane_dagster.fingerprint.objects import value_digest
from vane_dagster.planning.definition import stage_definition
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.store import Store


def write(root: Path, **texts: str) -> Path:
    """Writes files; ``__`` in a name stands for a separator."""
    for name, text in texts.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def counts(value: Any, file: Path, named: Callable[[Any], str] = value_digest) -> bool:
    """Whether a file's content counts in a value's digest, which else stays the same."""
    before = named(value)
    kept = file.read_bytes() if file.exists() else None
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"another content")
    after = named(value)
    file.unlink() if kept is None else file.write_bytes(kept)
    assert named(value) == before
    return after != before


# Which texts name a file or folder


def test_a_word_is_no_folder_of_the_current_one_by_chance(tmp_path, monkeypatch):
    monkeypatch.chdir(write(tmp_path, tests__a="1", small__notes="1", LICENSE="1"))
    assert not counts("tests", tmp_path / "tests/a.txt")
    assert not counts("small", tmp_path / "small/notes")
    assert not counts("LICENSE", tmp_path / "LICENSE")
    assert not counts({"tests": ["small"]}, tmp_path / "small/notes")


def test_a_word_is_a_path_by_its_suffix_or_its_form(tmp_path, monkeypatch):
    monkeypatch.chdir(write(tmp_path, tests__a="1", model__x__y="1", **{"weights.xyz": "1"}))
    assert counts("weights.xyz", tmp_path / "weights.xyz")
    assert counts("new.pt", tmp_path / "new.pt"), "from when it exists"
    assert counts(".env", tmp_path / ".env")
    assert not counts("..", tmp_path / "weights.xyz")
    assert counts("./tests", tmp_path / "tests/a")
    assert counts("tests/", tmp_path / "tests/a")
    assert counts(Path("tests"), tmp_path / "tests/a")
    assert not counts("model", tmp_path / "model/config.json")


def test_a_long_text_or_one_that_is_no_name_is_a_text():
    for text in ("a/" * 2000, "a/" + "b" * 300, "/\udcff", "a\0/b", "file:", "file://host/x", "/"):
        assert value_digest(text) == value_digest(text)


def test_whole_folders_of_the_machine_count_by_their_names(tmp_path, monkeypatch):
    root = write(tmp_path / "a", b__c="1")
    for text in ("/", "/tmp", "/proc", "/proc/self", "~", ".", "..", "./", "/dev", "/dev/null"):
        assert value_digest(Path(text)) == value_digest(Path(text))
    monkeypatch.chdir(root)
    assert not counts(str(root), root / "b/c")
    assert not counts(str(tmp_path), root / "b/c")
    assert counts(str(root / "b"), root / "b/c")
    monkeypatch.chdir("/")
    monkeypatch.setenv("HOME", str(root))
    assert not counts(str(root), root / "b/c")
    monkeypatch.delenv("HOME")
    assert counts(str(root), root / "b/c")


def test_stores_count_by_their_names(tmp_path):
    store = tmp_path / "data/store"
    absent = value_digest(store)
    folder = write(tmp_path / "data", store__docs__fragments="1", words__a="1")
    Store(StoragePath(str(store))).mark()
    assert value_digest(store) == absent
    assert not counts(store, store / "docs/fragments")
    assert not counts(store / "docs", store / "docs/fragments")
    assert not counts(folder, store / "docs/fragments")
    assert counts(folder, folder / "words/a")


# Links, special files and what cannot be read


def test_links_are_followed_once(tmp_path):
    root = write(tmp_path, far__x="1", model__a="1")
    (root / "model/loop").symlink_to(root / "model")
    (root / "model/far").symlink_to(root / "far")
    (root / "model/far_too").symlink_to(root / "far")
    (root / "model/nowhere").symlink_to(root / "absent")
    assert counts(str(root / "model"), root / "far/x")
    assert counts(str(root / "model"), root / "absent")


def test_links_upwards_are_not_walked_in_circles(tmp_path):
    root = write(tmp_path / "model", a="1", sub__b="1", sub__more__c="1")
    for name, target in (("up", ".."), ("here", "."), ("again", "../sub")):
        (root / "sub" / name).symlink_to(target)
        (root / "sub/more" / name).symlink_to(target)
    (root / "loop").symlink_to(".")
    found = list(files.walk_files(str(root)))
    assert sorted(name for name, path in found if path) == ["a", "sub/b", "sub/more/c"]
    assert len(found) < 12


def test_special_files_count_by_their_names(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("socket")
        for name in ("pipe", "socket"):
            assert value_digest(Path(name)) == value_digest(Path(name))
    folder = write(tmp_path / "model", a="1")
    os.mkfifo(folder / "pipe")
    assert counts(str(folder), folder / "a")


@pytest.mark.skipif(os.geteuid() == 0, reason="root can read everything")
def test_a_file_in_a_folder_that_cannot_be_read_is_refused(tmp_path):
    folder = write(tmp_path / "model", inner__a="1")
    (folder / "inner").chmod(0)
    with pytest.raises(CodeIdentityError, match=r"kwargs: '.*model' names .* cannot be read"):
        value_digest(str(folder), "kwargs")
    (folder / "inner").chmod(0o700)


@pytest.mark.parametrize(
    ("limit", "most", "named"),
    [("MAX_FILES", 2, "3 bytes in 3 files"), ("MAX_BYTES", 2, "3 bytes in 3 files")],
)
def test_too_many_files_or_bytes_are_refused(limit, most, named, tmp_path, monkeypatch):
    folder = write(tmp_path / "model", a="1", b__c="1", d="1")
    monkeypatch.setattr(files, limit, 3)
    assert counts(str(folder), folder / "a") if limit == "MAX_FILES" else value_digest(folder)
    monkeypatch.setattr(files, limit, most)
    with pytest.raises(CodeIdentityError) as found:
        value_digest({"m": str(folder)}, "fn_kwargs")
    message = str(found.value)
    assert message.startswith(f"fn_kwargs['m']: {str(folder)!r} names {named} or more.")
    assert "version=" in message


_SIZE = 1 << 20


def settled(file: Path, content: bytes) -> Path:
    """Write a file with the same modification time as every other one, well in the past."""
    file.write_bytes(content)
    os.utime(file, (1_700_000_000, 1_700_000_000))
    return file


@pytest.fixture
def later(monkeypatch):
    """Set the clock far ahead of every time stamp, so that the files are settled."""
    now = hashing.time.time_ns
    monkeypatch.setattr(hashing.time, "time_ns", lambda: now() + 10**12)


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("VANE_DAGSTER_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_a_change_that_keeps_size_and_time_counts(tmp_path, home, later):
    file = settled(tmp_path / "weights.bin", b"x" * _SIZE)
    before = value_digest(file)
    settled(file, b"y" * _SIZE)
    assert value_digest(file) != before


def test_what_was_just_written_is_not_kept(tmp_path, home):
    file = tmp_path / "weights.bin"
    file.write_bytes(b"x" * _SIZE)
    value_digest(file)
    assert not (home / "file-digests").exists()


def test_content_is_kept_for_other_processes(tmp_path, home, later):
    file, small = (settled(tmp_path / str(n), b"x" * n) for n in (_SIZE, 1))
    here = value_digest([file, small])
    (record,) = (home / "file-digests").iterdir()
    assert record.stat().st_mode & 0o077 == 0 == record.parent.stat().st_mode & 0o077
    files._digests._held.clear()  # as in another process
    assert value_digest([file, small]) == here
    files._digests._held.clear()
    record.write_text("0" * 64)
    assert value_digest([file, small]) != here, "the large file was not read again"


@pytest.mark.parametrize("spoilt", ["file", "open", "garbage"])
def test_a_cache_that_cannot_be_used_is_none(spoilt, tmp_path, home, later):
    file = settled(tmp_path / "weights.bin", b"x" * _SIZE)
    expected = value_digest(file)
    (record,) = (home / "file-digests").iterdir()
    files._digests._held.clear()
    if spoilt == "file":
        record.unlink()
        record.parent.rmdir()
        record.parent.write_text("no folder")
    elif spoilt == "open":
        record.write_text("0" * 64)
        record.parent.chmod(0o777)
    else:
        record.write_text("[]")
    assert value_digest(file) == expected


# What a pipeline's own data and code are


def udf(batch, path=None):
    return batch


def definition(tmp_path: Path, source: str = "src", target: str = "out", **given: Any) -> str:
    docs = vd.Pipeline("docs", source=vd.parquet(str(tmp_path / source)), id="id")
    stage = docs.map_batches("x", udf, schema={"y": "BIGINT"}, **grouped(given))
    stage.write("published", str(tmp_path / target))
    return stage_definition(docs, stage.spec)


@pytest.mark.parametrize(
    ("source", "argument", "file", "expected"),
    [
        ("src", "src", "src/a.txt", False),
        ("src", "src/below", "src/below/a.txt", False),
        ("all/src", "all", "all/a.txt", False),
        ("src", "out", "out/a.txt", False),
        ("src/*.parquet", "src", "src/a.txt", False),
        ("src/*.parquet", "src/model", "src/model/a.txt", True),
        ("src/**/*.parquet", "src", "src/a.txt", False),
        ("src/*/part.parquet", "src/day", "src/day/a.txt", True),
        ("s3://bucket/src", "src", "src/a.txt", True),
        ("source", "src", "src/a.txt", True),
    ],
)
def test_folders_of_the_source_and_the_target_count_by_name(
    source, argument, file, expected, tmp_path
):
    write(tmp_path, src__day__x="1").joinpath("src/day/part.parquet").write_text("")
    for name in ("all/src", "src/below", "src/model", "out/day"):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
    if source.startswith("s3:"):
        docs = vd.Pipeline("docs", source=vd.parquet(source), id="id")
        args = {"schema": {"y": "BIGINT"}, "fn_kwargs": {"path": str(tmp_path / argument)}}
        spec = docs.map_batches("x", udf, **args).spec
        assert counts(0, tmp_path / file, lambda _: stage_definition(docs, spec)) is expected
        return
    given = {"fn_kwargs": {"path": str(tmp_path / argument)}, "source": source}
    assert counts(0, tmp_path / file, lambda _: definition(tmp_path, **given)) is expected


def test_a_version_stands_for_content_and_for_what_has_no_identity(tmp_path, monkeypatch):
    folder = write(tmp_path / "model", a="1")
    given = {"fn_kwargs": {"path": str(folder)}}
    named = counts(0, folder / "a", lambda _: definition(tmp_path, **given))
    versioned = counts(0, folder / "a", lambda _: definition(tmp_path, version="1", **given))
    assert (named, versioned) == (True, False)
    other = definition(tmp_path, version="1", fn_kwargs={"path": str(folder) + "/"})
    assert other != definition(tmp_path, version="1", **given), "the text counts"
    monkeypatch.setattr(files, "MAX_FILES", 0)
    with pytest.raises(CodeIdentityError, match=r"'docs/x', argument fn_kwargs\['path'\]: '"):
        definition(tmp_path, **given)
    assert definition(tmp_path, version="1", **given)
    locks = [definition(tmp_path, version="1", fn_kwargs={"path": Lock()}) for _ in range(2)]
    assert locks[0] == locks[1]
    with pytest.raises(CodeIdentityError, match=r"fn_kwargs\['path'\] is a _thread\.lock"):
        definition(tmp_path, fn_kwargs={"path": Lock()})


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
    with pytest.raises(
        vd.errors.DefinitionError, match=r"only in a worker .* fn_constructor_kwargs"
    ):
        Path(vd.local_file(weights))


@pytest.mark.parametrize("path", ["", "s3://key:secret@lake/model.pt", "file:///m.pt", ["a"]])
def test_what_is_no_path_is_refused(path):
    with pytest.raises(
        vd.errors.DefinitionError, match=r"given no path.* Pass a URL .* open"
    ) as found:
        vd.local_file(path)
    assert "secret" not in str(found.value)
