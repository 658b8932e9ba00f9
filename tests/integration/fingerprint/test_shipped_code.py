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
for archive, payload, argument, text in order["calls"]:
    activate(unpack(base64.b64decode(archive), Path(order["root"])))
    results.append(eval(text, {{"udf": load(base64.b64decode(payload)), "x": argument}}))
print(json.dumps(results))
"""


def work(root: Path, *calls: tuple[CodeBundle, Any, str]) -> Any:
    """Runs calls one after the other in one fresh process that can't see the user's folder."""
    encoded = [
        (base64.b64encode(b.archive).decode(), base64.b64encode(b.payload).decode(), x, t)
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


def test_each_process_runs_the_code_that_it_was_sent(folder: Path, tmp_path: Path) -> None:
    import defs

    # An edit has workers of its own, which unpack it beside the code of the others.
    old = bundle(defs.Model)
    (folder / "helpers.py").write_text("def double(b):\n    return 200 * b\n")
    (folder / "spaced/inside.py").write_text("TWO = 20\n")
    new = bundle(defs.Model)
    assert new.archive != old.archive

    # A file of definitions that was loaded under a name of its own.
    file = tmp_path / "elsewhere" / "my-file.py"
    file.parent.mkdir()
    file.write_text("K = 5\nclass Model:\n    def __call__(self, b):\n        return b + K\n")
    spec = importlib.util.spec_from_file_location("my-file", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["my-file"] = module
    spec.loader.exec_module(module)
    named = bundle(module.Model)
    assert zipfile.ZipFile(io.BytesIO(named.archive)).namelist() == ["my-file.py"]

    # What a script defines travels by value.
    (folder / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(folder / "script.py")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    by_value = []
    for line, text in zip(done.stdout.splitlines(), ["udf()(x)", "udf(x)", "udf(x)"], strict=True):
        archive, payload = json.loads(line)
        packed = CodeBundle(base64.b64decode(archive), base64.b64decode(payload), "")
        by_value.append((packed, 1, text))

    shutil.rmtree(folder)
    shutil.rmtree(file.parent)
    root = tmp_path / "code"
    assert work(root, (old, 10, "udf(4)(x)")) == [30]
    assert work(root, (new, 10, "udf(4)(x)"), (named, 1, "udf()(x)")) == [2028, 6]
    assert work(root, (old, 10, "udf(4)(x)")) == [30]
    assert work(root, *by_value) == [207, 307, True]


SCRIPT = f"""
import base64, functools, json, sys
sys.path.insert(0, {str(REPOSITORY)!r})
K = 7
def helper(b):
    import helpers
    return helpers.double(b) + K
class Model:
    def __call__(self, b):
        return helper(b)
def make(n):
    return lambda b: helper(b) + n
@functools.lru_cache(maxsize=8)
def remembered(n):
    return [*remembered(n - 1), helper(n)] if n else []
def cached(b):
    assert remembered.cache_parameters()['maxsize'] == 8
    return remembered(b) is remembered(b)
from vane_dagster.fingerprint.code import code_identity
from vane_dagster.fingerprint.bundle import pack
for obj in (Model, make(100), cached):
    identity = code_identity(obj)
    assert identity.modules == ('__main__', 'helpers'), identity
    packed = pack(identity.modules, obj)
    print(json.dumps([base64.b64encode(packed.archive).decode(),
                      base64.b64encode(packed.payload).decode()]))
"""
