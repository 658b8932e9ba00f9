"""The user's code reaches a process that has nothing but the archive and the payload."""

from __future__ import annotations

import base64
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

from support.code_folder import (
    bundle,
    folder,  # noqa: F401  # fixtures
)
from support.paths import REPOSITORY
from vane_dagster.fingerprint.bundle import CodeBundle

WORKER = """
import base64, json, sys
from pathlib import Path
sys.path.insert(0, {repository!r})
from vane_dagster.worker.user_code import activate, load, unpack
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


def test_each_worker_runs_the_code_that_it_was_sent(folder: Path, tmp_path: Path) -> None:
    """An edit has workers of its own, which unpack it beside the code of the others."""
    import defs

    old = bundle(defs.Model)
    (folder / "helpers.py").write_text("def double(b):\n    return 200 * b\n")
    (folder / "spaced/inside.py").write_text("TWO = 20\n")
    new = bundle(defs.Model)
    assert new.digest != old.digest
    shutil.rmtree(folder)
    calls = [(packed, 10, "udf(4)(x)") for packed in (old, new, old)]
    assert [work(tmp_path / "code", call) for call in calls] == [[30], [2028], [30]]


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


def test_definitions_of_a_script_travel_by_value(tmp_path: Path, folder: Path) -> None:
    script = folder / "script.py"
    script.write_text(
        f"import base64, functools, json, sys\nsys.path.insert(0, {str(REPOSITORY)!r})\n"
        "K = 7\ndef helper(b):\n    import helpers\n    return helpers.double(b) + K\n"
        "class Model:\n    def __call__(self, b):\n        return helper(b)\n"
        "def make(n):\n    return lambda b: helper(b) + n\n"
        "@functools.lru_cache(maxsize=8)\ndef remembered(n):\n"
        "    return [*remembered(n - 1), helper(n)] if n else []\n"
        "def cached(b):\n"
        "    assert remembered.cache_parameters()['maxsize'] == 8\n"
        "    return remembered(b) is remembered(b)\n"
        "from vane_dagster.fingerprint.code import code_identity\n"
        "from vane_dagster.fingerprint.bundle import pack\n"
        "for obj in (Model, make(100), cached):\n"
        "    identity = code_identity(obj)\n"
        "    assert identity.modules == ('__main__', 'helpers'), identity\n"
        "    packed = pack(identity.modules, obj)\n"
        "    print(json.dumps([packed.digest, base64.b64encode(packed.archive).decode(),\n"
        "                      base64.b64encode(packed.payload).decode()]))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    calls = []
    texts = ["udf()(x)", "udf(x)", "udf(x)"]
    for line, text in zip(done.stdout.splitlines(), texts, strict=True):
        digest, archive, payload = json.loads(line)
        packed = CodeBundle(digest, base64.b64decode(archive), base64.b64decode(payload))
        calls.append((packed, 1, text))
    assert work(tmp_path / "code", *calls) == [9, 109, True]


def test_racing_processes_see_one_whole_folder(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as opened:
        for number in range(200):
            opened.writestr(f"m{number}.py", f"x = {number}\n")
    file = tmp_path / "archive"
    file.write_bytes(buffer.getvalue())
    code = (
        f"import sys, hashlib, time; sys.path.insert(0, {str(REPOSITORY)!r})\n"
        "from pathlib import Path\nfrom vane_dagster.worker.user_code import unpack\n"
        f"data = Path({str(file)!r}).read_bytes()\nsys.stdin.readline()\n"
        f"root = Path({str(tmp_path / 'code')!r})\n"
        "folder = unpack(data, hashlib.sha256(data).hexdigest(), root)\n"
        "print(len(list(folder.iterdir())))\n"
    )
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    assert [racer.communicate()[0].strip() for racer in racers] == ["200"] * 4
    folders = {entry.name for entry in (tmp_path / "code").iterdir() if entry.is_dir()}
    assert len(folders - {".partial"}) == 1
