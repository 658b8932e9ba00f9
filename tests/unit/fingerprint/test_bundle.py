"""Archives of the user's code: their content, how they are unpacked, and functions without one."""

from __future__ import annotations

import hashlib
import io
import linecache
import os
import pickle
import sys
import threading
import traceback
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support.code_folder import (
    bundle,
    folder,  # noqa: F401  # fixtures
)
from support.code_project import project  # noqa: F401  # a fixture
from support.edits import Project
from vane_dagster.errors import CodeIdentityError, ComputeError
from vane_dagster.fingerprint.bundle import CodeBundle, pack
from vane_dagster.fingerprint.code import code_identity
from vane_dagster.fingerprint.portable import portable_payload
from vane_dagster.worker.user_code import unpack


def test_archive_holds_the_own_modules_and_their_packages(folder: Path) -> None:
    import defs  # type: ignore[import-not-found]  # made by the test

    packed = bundle(defs.Model)
    names = zipfile.ZipFile(io.BytesIO(packed.archive)).namelist()
    assert names == [
        "defs.py",
        "helpers.py",
        "lazy_part.py",
        "pkg/__init__.py",
        "pkg/sub/__init__.py",
        "pkg/sub/shared.py",
        "spaced/inside.py",
    ]
    for file in folder.rglob("*.py"):
        os.utime(file, (1, 1))
    assert bundle(defs.Model) == packed
    assert pack(reversed(code_identity(defs.Model).modules), defs.Model) == packed


def test_tracebacks_of_a_notebook_cell_show_its_lines_in_workers(monkeypatch) -> None:
    cell, text = "/tmp/ipykernel_1/2.py", "def udf(x):\n    return (lambda y: 1 / y)(x)\n"
    lines = text.splitlines(True)
    monkeypatch.setitem(linecache.cache, cell, (len(text), None, lines, cell))
    made: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, cell, "exec"), made)
    for payload in (pack((), made["udf"]).payload, portable_payload((), made["udf"])):
        assert payload is not None
        del linecache.cache[cell]  # as in a worker
        with pytest.raises(ZeroDivisionError) as raised:
            pickle.loads(payload)(0)
        shown = [frame.line for frame in traceback.extract_tb(raised.tb)[1:]]
        assert shown == ["return (lambda y: 1 / y)(x)"] * 2


def test_extension_module_keeps_its_suffix(folder: Path) -> None:
    from importlib.machinery import EXTENSION_SUFFIXES

    name = f"fast{EXTENSION_SUFFIXES[0]}"
    (folder / name).write_bytes(b"machine code")
    (folder / "uses.py").write_text("def udf(b):\n    import fast\n    return fast.run(b)\n")
    from uses import udf  # type: ignore[import-not-found]  # made by the test

    before = code_identity(udf)
    assert name in zipfile.ZipFile(io.BytesIO(bundle(udf).archive)).namelist()
    (folder / name).write_bytes(b"other machine code")
    assert code_identity(udf).digest != before.digest


def test_what_cannot_be_packed_is_named(folder: Path) -> None:
    import defs

    lock = threading.Lock()
    with pytest.raises(CodeIdentityError, match=r"<lambda> cannot be pickled.*build what cannot"):
        pack((), lambda: lock)
    identity = code_identity(defs.Model)
    (folder / "helpers.py").unlink()
    with pytest.raises(CodeIdentityError, match="'helpers' cannot be read for the workers"):
        pack(identity.modules, defs.Model)


def archive_of(name: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(name, "x = 1\n")
    return buffer.getvalue()


def test_classes_of_a_script_have_one_content_in_all_processes() -> None:
    def packed(bonus: int, *arguments: str) -> CodeBundle:
        scope: dict[str, Any] = {"__name__": "__main__"}
        exec(f"class Model:\n    def __call__(self, x):\n        return x + {bonus}", scope)
        return pack((), (scope["Model"], arguments, {}))

    digests = [hashlib.md5(name.encode()).hexdigest() for name in "ab"]
    assert packed(1).payload != packed(1).payload, "cloudpickle has no random ids any more"
    assert packed(1).content == packed(1).content
    others = [packed(1), packed(2), *(packed(1, each) for each in digests)]
    assert len({each.content for each in others}) == 4


def test_those_who_unpack_at_once_see_one_whole_folder(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for number in range(50):
            archive.writestr(f"m{number}.py", f"x = {number}\n")
    data, start = buffer.getvalue(), threading.Barrier(4)
    digest = hashlib.sha256(data).hexdigest()

    def unpacked(_: int) -> int:
        start.wait()
        return len(list(unpack(data, tmp_path / "code").iterdir()))

    with ThreadPoolExecutor(4) as threads:
        assert [*threads.map(unpacked, range(4))] == [50] * 4
    folders = {entry.name for entry in (tmp_path / "code").iterdir() if entry.is_dir()}
    assert folders == {digest, ".partial"}


def test_root_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "code").write_text("a file")
    archive = archive_of("a.py")
    with pytest.raises(ComputeError, match="code is not private: it belongs to"):
        unpack(archive, tmp_path / "code")


HELPERS = """
import functools
import re
import threading
from collections import namedtuple

import other

LIMIT = 3
WORD = re.compile(r"\\w+")
LOCK = threading.Lock()
Pair = namedtuple("Pair", "a b")


class Shorter:
    def __init__(self, limit):
        self.limit = limit

    def cut(self, text):
        return text[: self.limit]


def shortened(text):
    return Shorter(LIMIT).cut(text)


@functools.lru_cache
def remembered(text):
    return text


class Sentinel:
    def __reduce__(self):
        return "SENTINEL"


SENTINEL = Sentinel()
LARGE = b"x" * 300_000
"""
HEAD = """
import math
import sys
import importlib

import other
from helpers import *


def udf(row):
    """
RELATIVE = """
def udf(row):
    from . import other

    return other
"""
PORTABLE = {
    "alone": "return row['text'].upper()",
    "a library": "return math.sqrt(len(row['text']))",
    "names of another module": "return shortened(row['text']), Pair(1, 2), WORD.findall('a')",
    "another module": "return other.tail(row['text'])",
    "a cache": "return remembered(row['text']), remembered.cache_info()",
}
BOUND = {
    "a module of the user's, imported in the call": "import other; return other.tail('a')",
    "by a function of importlib": "return importlib.import_module('other').tail('a')",
    "one that is looked up": "return sys.modules['other'].tail('a')",
    "an object that is pickled by its name": "return SENTINEL is not None",
    "what cannot be pickled": "return LOCK.locked()",
    "much data": "return len(LARGE)",
}


def payload(project: Project, body: str) -> bytes | None:
    project.write(
        defs=HEAD.replace("import *", "import (LARGE, LOCK, SENTINEL, WORD, Pair, remembered, "
                          "shortened)") + body + "\n",
        helpers=HELPERS,
        other="def tail(text):\n    return text[-1:]\n",
    )  # fmt: skip
    udf = project.load("udf")
    return portable_payload(code_identity(udf).modules, udf)


@pytest.mark.parametrize("body", PORTABLE.values(), ids=PORTABLE)
def test_a_portable_function_runs_where_its_modules_are_not(body, project, monkeypatch):
    found = payload(project, body)
    assert found is not None
    project.forget()
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(project.root)])
    pickle.loads(found)({"text": "abcdef"})
    assert not {"defs", "helpers", "other"} & set(sys.modules)


@pytest.mark.parametrize("body", BOUND.values(), ids=BOUND)
def test_a_function_that_may_need_its_modules_is_not_portable(body, project):
    assert payload(project, body) is None


def test_a_relative_import_in_a_call_is_one_of_the_users_modules(project):
    (project.root / "portable_pkg").mkdir()
    for name, text in {"__init__": "", "other": "", "defs": RELATIVE}.items():
        (project.root / "portable_pkg" / f"{name}.py").write_text(text)
    udf = project.load("udf", "portable_pkg.defs")
    assert portable_payload(code_identity(udf).modules, udf) is None
