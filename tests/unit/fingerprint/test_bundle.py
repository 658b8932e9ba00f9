"""The user's code reaches a process that has nothing but the archive and the payload."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.paths import REPOSITORY
from vane_dagster.errors import CodeIdentityError, ComputeError
from vane_dagster.fingerprint.bundle import CodeBundle, activate, load, pack, unpack
from vane_dagster.fingerprint.code import code_identity
from vane_dagster.fingerprint.modules import module_folders

DEFS = """
import helpers
from pkg.sub import shared
class Model:
    def __init__(self, n):
        import lazy_part
        from spaced import inside
        self.n = n + lazy_part.ONE + inside.TWO + shared.THREE
    def __call__(self, b):
        return helpers.double(b) + self.n
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    root = tmp_path / "user"
    files = {
        "defs.py": DEFS,
        "helpers.py": "def double(b):\n    return 2 * b\n",
        "lazy_part.py": "ONE = 1\n",
        "spaced/inside.py": "TWO = 2\n",
        "pkg/__init__.py": "",
        "pkg/sub/__init__.py": "",
        "pkg/sub/shared.py": "THREE = 3\n",
        "pkg/unreached.py": "",
        "pkg/data.txt": "not code",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.setattr(sys, "path", [str(root), *sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    yield root
    for name in set(sys.modules) - before:
        places = [getattr(sys.modules[name], "__file__", None)]
        places += module_folders(sys.modules[name]) or ()
        if any(str(place).startswith(str(tmp_path)) for place in places):
            del sys.modules[name]


def bundle(obj: Any) -> CodeBundle:
    return pack(code_identity(obj).modules, obj)


WORKER = """
import base64, json, sys
from pathlib import Path
sys.path.insert(0, {repository!r})
from vane_dagster.fingerprint.bundle import activate, load, unpack
order = json.loads(sys.stdin.read())
results = []
for archive, digest, payload, argument, text in order["calls"]:
    activate(unpack(base64.b64decode(archive), digest, Path(order["root"])))
    results.append(eval(text, {{"udf": load(base64.b64decode(payload)), "x": argument}}))
print(json.dumps(results))
"""


def work(root: Path, *calls: tuple[CodeBundle, Any, str]) -> Any:
    """Runs calls one after the other in one fresh process that can't see the user's folder."""
    encoded = [
        (base64.b64encode(b.archive).decode(), b.digest, base64.b64encode(b.payload).decode(), x, t)
        for b, x, t in calls
    ]
    order = json.dumps({"root": str(root), "calls": encoded})
    code = WORKER.format(repository=str(REPOSITORY))
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=order,
        capture_output=True,
        text=True,
        cwd=root.parent,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


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
    assert packed.digest == hashlib.sha256(packed.archive).hexdigest()
    for file in folder.rglob("*.py"):
        os.utime(file, (1, 1))
    assert bundle(defs.Model) == packed
    assert pack(reversed(code_identity(defs.Model).modules), defs.Model) == packed


def test_class_with_lazy_imports_runs_from_the_archive_alone(folder: Path, tmp_path: Path) -> None:
    import defs

    packed = bundle(defs.Model)
    shutil.rmtree(folder)
    assert work(tmp_path / "code", (packed, 10, "udf(4)(x)")) == [30]


def test_reused_worker_runs_the_edited_code(folder: Path, tmp_path: Path) -> None:
    import defs

    old = bundle(defs.Model)
    (folder / "helpers.py").write_text("def double(b):\n    return 200 * b\n")
    (folder / "spaced/inside.py").write_text("TWO = 20\n")
    new = bundle(defs.Model)
    assert new.digest != old.digest
    calls = [(packed, 10, "udf(4)(x)") for packed in (old, new, old)]
    assert work(tmp_path / "code", *calls) == [30, 2028, 30]


def test_definitions_file_loaded_under_a_name_of_its_own(tmp_path: Path, folder: Path) -> None:
    file = tmp_path / "elsewhere" / "my-file.py"
    file.parent.mkdir()
    file.write_text("K = 5\nclass Model:\n    def __call__(self, b):\n        return b + K\n")
    spec = importlib.util.spec_from_file_location("my-file", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["my-file"] = module
    spec.loader.exec_module(module)
    packed = bundle(module.Model)
    assert zipfile.ZipFile(io.BytesIO(packed.archive)).namelist() == ["my-file.py"]
    assert work(tmp_path / "code", (packed, 1, "udf()(x)")) == [6]


def test_script_and_local_functions_travel_by_value(tmp_path: Path, folder: Path) -> None:
    script = folder / "script.py"
    script.write_text(
        f"import base64, json, sys\nsys.path.insert(0, {str(REPOSITORY)!r})\n"
        "K = 7\ndef helper(b):\n    import helpers\n    return helpers.double(b) + K\n"
        "class Model:\n    def __call__(self, b):\n        return helper(b)\n"
        "def make(n):\n    return lambda b: helper(b) + n\n"
        "from vane_dagster.fingerprint.code import code_identity\n"
        "from vane_dagster.fingerprint.bundle import pack\n"
        "for obj in (Model, make(100)):\n"
        "    identity = code_identity(obj)\n"
        "    assert identity.modules == ('__main__', 'helpers'), identity\n"
        "    packed = pack(identity.modules, obj)\n"
        "    print(json.dumps([packed.digest, base64.b64encode(packed.archive).decode(),\n"
        "                      base64.b64encode(packed.payload).decode()]))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    calls = []
    for line, text in zip(done.stdout.splitlines(), ["udf()(x)", "udf(x)"], strict=True):
        digest, archive, payload = json.loads(line)
        packed = CodeBundle(digest, base64.b64decode(archive), base64.b64decode(payload))
        calls.append((packed, 1, text))
    assert work(tmp_path / "code", *calls) == [9, 109]


def test_cached_function_of_a_script_travels_by_value(tmp_path: Path, folder: Path) -> None:
    script = folder / "script.py"
    script.write_text(
        f"import base64, functools, json, sys\nsys.path.insert(0, {str(REPOSITORY)!r})\n"
        "@functools.lru_cache(maxsize=8)\ndef load(n):\n    return [n]\n"
        "@functools.lru_cache\ndef sum_to(n):\n    return n + sum_to(n - 1) if n else 0\n"
        "def udf(b):\n"
        "    assert load(b) is load(b) and load.cache_parameters()['maxsize'] == 8\n"
        "    return sum_to(b)\n"
        "from vane_dagster.fingerprint.bundle import pack\n"
        "packed = pack(['__main__'], udf)\n"
        "print(json.dumps([packed.digest, base64.b64encode(packed.archive).decode(),\n"
        "                  base64.b64encode(packed.payload).decode()]))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    digest, archive, payload = json.loads(done.stdout)
    packed = CodeBundle(digest, base64.b64decode(archive), base64.b64decode(payload))
    assert work(tmp_path / "code", (packed, 4, "udf(x)")) == [10]


def test_module_that_imports_by_a_variable_ships_its_whole_package(folder: Path) -> None:
    (folder / "pkg/loader.py").write_text(
        "import importlib\ndef udf(b):\n    return importlib.import_module(f'pkg.{b}')\n"
    )
    from pkg.loader import udf  # type: ignore[import-not-found]  # made by the test

    modules = code_identity(udf, version="1").modules
    assert modules == ("pkg", "pkg.loader", "pkg.sub", "pkg.sub.shared", "pkg.unreached")


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


def archive_of(name: str) -> tuple[bytes, str]:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(name, "x = 1\n")
    return buffer.getvalue(), hashlib.sha256(buffer.getvalue()).hexdigest()


@pytest.mark.parametrize(
    "name", ["../out.py", "/out.py", "a/../../out.py", "a\\..\\b.py", "c:/a.py"]
)
def test_entry_that_leaves_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    archive, digest = archive_of(name)
    with pytest.raises(ComputeError, match="would lie outside of its folder"):
        unpack(archive, digest, tmp_path / "code")
    assert not (tmp_path / "code").exists()
    assert not (tmp_path / "out.py").exists()


def test_wrong_digest_is_refused(tmp_path: Path) -> None:
    archive, digest = archive_of("a.py")
    for wrong, data in [(digest, archive + b"x"), ("0" * 64, archive), ("../x", archive)]:
        with pytest.raises(ComputeError, match="expected"):
            unpack(data, wrong, tmp_path / "code")
    assert not (tmp_path / "code").exists()


def test_root_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "code").write_text("a file")
    archive, digest = archive_of("a.py")
    with pytest.raises(ComputeError, match="code is not private: it is a file owned by"):
        unpack(archive, digest, tmp_path / "code")


def test_racing_processes_see_one_whole_folder(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as opened:
        for number in range(200):
            opened.writestr(f"m{number}.py", f"x = {number}\n")
    file = tmp_path / "archive"
    file.write_bytes(buffer.getvalue())
    code = (
        f"import sys, hashlib, time; sys.path.insert(0, {str(REPOSITORY)!r})\n"
        "from pathlib import Path\nfrom vane_dagster.fingerprint.bundle import unpack\n"
        f"data = Path({str(file)!r}).read_bytes()\nsys.stdin.readline()\n"
        f"root = Path({str(tmp_path / 'code')!r})\n"
        "folder = unpack(data, hashlib.sha256(data).hexdigest(), root)\n"
        "print(len(list(folder.iterdir())))\n"
    )
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(6)
    ]
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    assert [racer.communicate()[0].strip() for racer in racers] == ["200"] * 6
    assert len([entry for entry in (tmp_path / "code").iterdir() if entry.is_dir()]) == 1


def test_activation_leaves_other_places_alone(folder: Path, tmp_path: Path) -> None:
    import helpers  # type: ignore[import-not-found]  # made by the test

    archive, digest = archive_of("only_here.py")
    unpacked = unpack(archive, digest, tmp_path / "code")
    activate(unpacked)
    activate(unpacked)
    assert sys.path.count(str(unpacked)) == 1
    assert sys.path[0] == str(unpacked)
    assert str(folder) in sys.path
    assert sys.modules["helpers"] is helpers
    payload = pack((), len).payload
    assert load(payload) is len
