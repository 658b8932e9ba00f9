"""The digest of the code that runs in workers and in the pool manager."""

from __future__ import annotations

import ast
import pickletools
import shutil
from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import pytest

import vane_dagster as vd
from vane_dagster.compute.code_digest import (
    ENTRY_POINTS,
    code_digest,
    import_statements,
    shared_files,
)
from vane_dagster.planning.source_code import pack_source
from vane_dagster.sources import Source
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.store import Store

MOOD = {"type": "object", "properties": {"mood": {"type": "string"}}, "required": ["mood"]}
PACKAGE = Path(vd.__file__).parent


@pytest.fixture(scope="module")
def digest() -> str:
    return code_digest(PACKAGE)


class Copy:
    """A copy of the package, whose edits can be taken back."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._before: dict[Path, str | None] = {}

    def edit(self, name: str, text: str = "# edited") -> None:
        """Appends to a file, which may be new."""
        self.write(name, f"{self.read(name) or ''}\n{text}\n")

    def read(self, name: str) -> str | None:
        file = self.folder / name
        return file.read_text() if file.exists() else None

    def write(self, name: str, text: str | None) -> None:
        """Writes a file, or deletes it."""
        file = self.folder / name
        self._before.setdefault(file, self.read(name))
        if text is None:
            file.unlink()
        else:
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)

    def restore(self) -> None:
        for file, text in self._before.items():
            if text is None:
                file.unlink()
            else:
                file.write_text(text)

    def digest(self) -> str:
        return code_digest(self.folder)


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copied") / PACKAGE.name
    return Path(shutil.copytree(PACKAGE, folder, ignore=shutil.ignore_patterns("__pycache__")))


@pytest.fixture
def copy(copied: Path) -> Iterator[Copy]:
    copy = Copy(copied)
    yield copy
    copy.restore()


def test_a_copy_has_the_same_digest(copy: Copy, digest: str) -> None:
    assert copy.digest() == digest


@pytest.mark.parametrize(
    "name",
    [
        "storage/gc.py",
        "storage/store.py",
        "storage/reader.py",
        "storage/publish/registry.py",
        "storage/publish/delta.py",
        "sources/stored.py",
        "engine/preflight.py",
        "engine/scheduler.py",
        "planning/planner.py",
        "pipeline/pipeline.py",
        "fingerprint/bundle.py",
        "compute/client.py",
        "compute/ray_backend.py",
        "cli/main.py",
        "__init__.py",
    ],
)
def test_code_of_the_driver_alone_keeps_pools_warm(copy: Copy, digest: str, name: str) -> None:
    assert copy.read(name)
    copy.edit(name)
    assert copy.digest() == digest


@pytest.mark.parametrize(
    "name",
    [
        *ENTRY_POINTS,
        "errors.py",
        "storage/filesystem.py",
        "compute/pool_state.py",
        "compute/code_digest.py",
        "providers/openai.py",
        "providers/model_client.py",
        "worker/__init__.py",
    ],
)
def test_code_of_workers_and_of_the_pool_manager_counts(copy: Copy, digest: str, name: str) -> None:
    copy.edit(name)
    assert copy.digest() != digest


@pytest.mark.parametrize(
    "statement",
    [
        "from vane_dagster.worker.formats import audio",
        "from vane_dagster.worker.formats.audio import read",
        "import vane_dagster.worker.formats.audio as audio",
        "from .formats import audio",
        "from .formats.audio import read",
        "def read():\n    from vane_dagster.worker.formats.audio import read",
        "if True:\n    try:\n        pass\n    finally:\n        from .formats import (\n"
        "            audio,\n        )",
        'FORMATS = {"audio": "vane_dagster.worker.formats.audio:Reader"}',
        "READER = 'vane_dagster.worker.formats.audio'",
    ],
)
def test_a_new_subpackage_counts_once_a_worker_module_imports_it(
    copy: Copy, statement: str
) -> None:
    copy.edit("worker/formats/__init__.py")
    copy.edit("worker/formats/audio.py", "import json")
    before = copy.digest()
    copy.edit("worker/formats/audio.py")
    assert copy.digest() == before, "nothing imports it yet"

    copy.edit("worker/host.py", statement)
    copy.edit("worker/formats/audio.py", "from vane_dagster.worker.codecs import mp3")
    copy.edit("worker/codecs.py")
    imported = copy.digest()
    assert imported != before
    for name in ("worker/formats/audio.py", "worker/formats/__init__.py", "worker/codecs.py"):
        copy.edit(name)
        assert copy.digest() != imported, name
        imported = copy.digest()


def test_publishers_the_store_and_its_reader_are_not_covered() -> None:
    covered = shared_files(PACKAGE)
    assert {"storage/part_file.py", "storage/quarantine.py", "sources/parquet.py"} <= set(covered)
    driver = ("storage/publish/", "storage/store.py", "storage/reader.py", "sources/stored.py")
    assert [name for name in covered if name.startswith(driver)] == []


def test_code_identity_checks_and_declared_stages_are_not_covered() -> None:
    """Workers hash no code: an edit of what computes identities or declares keeps pools warm."""
    covered = set(shared_files(PACKAGE))
    assert {name for name in covered if name.startswith("pipeline/")} == {
        "pipeline/__init__.py",
        "pipeline/contracts.py",
        "pipeline/keys.py",
        "pipeline/lazy_instances.py",
        "pipeline/options.py",
    }
    assert not [
        name for name in covered if name.startswith(("checks/", "fingerprint/", "testing.py"))
    ]


def test_an_import_for_type_checkers_alone_does_not_count(copy: Copy) -> None:
    copy.edit("worker/codecs.py")
    block = "if TYPE_CHECKING:\n    import json\n\n    from .codecs import mp3\n"
    copy.edit("worker/host.py", block)
    assert "worker/codecs.py" not in shared_files(copy.folder)
    copy.edit("worker/host.py", f"{block}else:\n    from .codecs import mp3")
    assert "worker/codecs.py" in shared_files(copy.folder)


def test_a_name_of_the_package_itself_leads_to_all_of_it(copy: Copy) -> None:
    copy.edit("worker/host.py", "from vane_dagster import Pipeline")
    assert "__init__.py" in shared_files(copy.folder)
    assert "__init__.py" not in shared_files(PACKAGE)


def test_a_module_that_was_moved_has_another_digest(copy: Copy, digest: str) -> None:
    copy.write("worker/codecs.py", copy.read("worker/watchdog.py"))
    copy.write("worker/watchdog.py", "from vane_dagster.worker.codecs import *\n")
    assert copy.digest() != digest


def test_a_missing_entry_point_is_an_error(copy: Copy) -> None:
    copy.write("worker/local_worker.py", None)
    with pytest.raises(FileNotFoundError, match="local_worker"):
        copy.digest()


def test_import_statements_are_found_without_parsing_the_rest() -> None:
    """Of each file of the package, as by parsing all of it; a docstring may seem to hold more."""
    for file in PACKAGE.rglob("*.py"):
        text = file.read_text()
        every = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Import | ast.ImportFrom)]
        found = {ast.unparse(node) for node in import_statements(text)}
        assert {ast.unparse(node) for node in every} <= found, file


@pytest.mark.parametrize("text", ["if 1: import a; x = 'import b'", "x = 1; from a import c"])
def test_statements_that_do_not_begin_a_line_are_why_a_test_compares(text: str) -> None:
    assert not import_statements(text)


def test_text_that_looks_like_a_broken_import_costs_time_alone() -> None:
    text = '"""Words\nfrom here import is not one.\n"""\nfrom a import b\nif 1: import c\n'
    assert [ast.unparse(n) for n in import_statements(text)] == ["from a import b", "import c"]


def test_classes_of_ours_that_travel_pickled_are_covered(tmp_path: Path) -> None:
    """A worker imports them by name, though no module of its own does."""
    pipe = vd.Pipeline("p", source=vd.parquet(str(tmp_path)), id="id")
    pipe.prompt("asked", "Say {text}", provider="openai", model="m", return_format=MOOD)
    pipe.embed("embedded", "text", provider="sentence_transformers", model="m")
    pipe.classify("labelled", "text", ["a"], provider="transformers_classifier", model="m")
    covered = shared_files(PACKAGE)
    found = set()
    for name in ("asked", "embedded", "labelled"):
        spec = pipe[name].spec
        udf = spec.udf
        constructed = (udf.target, udf.constructor_args, dict(udf.constructor_kwargs))
        called = (udf.args, dict(udf.kwargs))
        found |= _texts(cloudpickle.dumps((constructed, called, spec.order)))
    modules = {text for text in found if text.startswith("vane_dagster.")}
    assert len(modules) > 5
    for module in modules:
        assert f"{module.removeprefix('vane_dagster.').replace('.', '/')}.py" in covered


@pytest.mark.parametrize("source", [vd.parquet("/data"), vd.stored("docs/clean")])
def test_sources_of_ours_that_travel_pickled_are_covered(source: Source) -> None:
    bound = source.bind(Store(Location("/store")))
    modules = {text for text in _texts(pack_source(bound)) if text.startswith("vane_dagster.")}
    files = {f"{name.removeprefix('vane_dagster.').replace('.', '/')}.py" for name in modules}
    assert "sources/parquet.py" in files
    assert files <= shared_files(PACKAGE).keys()


def _texts(data: bytes) -> set[str]:
    """The texts of a pickle, among them the modules that it imports."""
    return {arg for _, arg, _ in pickletools.genops(data) if isinstance(arg, str)}
