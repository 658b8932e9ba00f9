"""Digests of values: equal in every process, different where the value differs."""

from __future__ import annotations

import collections
import functools
import os
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from support.paths import REPOSITORY, TESTS
from support.values import (
    VALUES,
    Holder,
    Options,
    function,
)
from vane_dagster.errors import CodeIdentityError
from vane_dagster.fingerprint.digest import value_digest


def test_no_two_values_share_a_digest() -> None:
    found: dict[str, Any] = {}
    for value in VALUES:
        digest = value_digest(value)
        assert digest not in found, (value, found[digest])
        found[digest] = value


def test_digests_are_the_same_in_another_process_and_order() -> None:
    here = [value_digest(value) for value in VALUES]
    code = (
        f"import sys; sys.path[:0] = [{str(TESTS)!r}, {str(REPOSITORY)!r}]\n"
        "from support.values import VALUES\n"
        "from vane_dagster.fingerprint.digest import value_digest\n"
        "for value in VALUES: print(value_digest(value))\n"
        "print(value_digest({'a', 'b', 'c', 1, None}), value_digest({'b': 1, 'a': 2}))\n"
    )
    outputs = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment
        )
        assert done.returncode == 0, done.stderr
        outputs.add(done.stdout)
        assert done.stdout.split()[:-2] == here
    assert len(outputs) == 1


def test_layout_in_memory_does_not_count() -> None:
    whole = pa.table({"a": [1, None, 3], "b": ["x", "y", "z"], "c": [[1], None, []]})
    pieces = pa.concat_tables([whole.slice(0, 1), whole.slice(1)])
    assert value_digest(pieces) == value_digest(whole)
    longer = pa.concat_tables([whole, whole])
    assert value_digest(longer.slice(3)) == value_digest(whole)
    matrix = np.arange(6).reshape(2, 3)
    assert value_digest(np.asfortranarray(matrix)) == value_digest(matrix)


@pytest.mark.parametrize(
    ("value", "where", "kind"),
    [
        (object(), "kwargs", "builtins.object"),
        ({"client": threading.Lock()}, "kwargs['client']", "_thread.lock"),
        ({"a": [1, types.SimpleNamespace(session=object())]}, "kwargs['a'][1].session", "object"),
        # It takes no lock, which is what is tested.
        (Options(names=(threading.Lock(),)), "kwargs.names[0]", "lock"),  # type: ignore[arg-type]
        (functools.partial(function, threading.Lock()), "kwargs.args[0]", "lock"),
        (Holder().__init__, "kwargs.__self__", "Holder"),
        ({("k", 1): {object()}}, "kwargs[('k', 1)]{...}", "object"),
        ((x for x in "a"), "kwargs", "generator"),
        (np.random.default_rng(0), "kwargs", "Generator"),
        (np.array([object()]), "kwargs[0]", "object"),
        (collections.defaultdict(threading.Lock, a=threading.Lock()), "kwargs['a']", "lock"),
    ],
)
def test_what_has_no_identity_is_refused_by_its_path(value: Any, where: str, kind: str) -> None:
    with pytest.raises(CodeIdentityError) as info:
        value_digest(value, "kwargs")
    message = str(info.value)
    assert message.startswith(f"{where} is a ")
    assert kind in message.removeprefix(where).split(",")[0]
    assert "build the object inside the class" in message
    assert "version=" in message
    assert "hidden" not in message


def test_cycle_is_refused() -> None:
    value: list[Any] = []
    value.append({"self": value})
    with pytest.raises(CodeIdentityError, match=r"value\[0\]\['self'\] refers back to itself"):
        value_digest(value)


def test_weight_file_counts_with_its_content(tmp_path: Path) -> None:
    file = tmp_path / "weights.bin"
    absent = value_digest(file)
    file.write_bytes(b"one")
    one, text = value_digest(file), value_digest([str(file)])
    assert one != absent
    file.write_bytes(b"two")
    assert value_digest(file) != one
    assert value_digest([str(file)]) != text
    file.write_bytes(b"one")
    os.utime(file, (1, 1))
    assert value_digest(file) == value_digest(file) == one
    assert value_digest({str(file): 1}) == value_digest({str(file): 1})


def test_folder_counts_with_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (folder / "1_Pooling").mkdir(parents=True)
    empty = value_digest(str(folder))
    (folder / "notes.txt").write_text("x")
    model = value_digest(str(folder))
    assert model != empty
    (folder / ".cache").mkdir()
    (folder / ".cache" / "when").write_text("now")
    assert value_digest(str(folder)) == model
    (folder / "1_Pooling" / "config.json").write_text("{}")
    assert value_digest(str(folder)) != model


@pytest.mark.skipif(not Path("/proc/self/mem").is_file(), reason="needs Linux's /proc")
def test_unreadable_file_is_named() -> None:
    with pytest.raises(CodeIdentityError, match=r"'/proc/self/mem' names a file .*cannot be read"):
        value_digest("/proc/self/mem")


def test_torch_values_when_torch_is_there() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    code = (
        f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})\n"
        "import torch\nfrom vane_dagster.fingerprint.digest import value_digest as d\n"
        "found = [d(v) for v in (torch.float16, torch.float32, torch.device('cpu'),"
        " torch.arange(3), torch.arange(3.0), torch.tensor(1), torch.ones(2, 2).T)]\n"
        "assert len(set(found)) == len(found)\n"
        "assert d(torch.arange(6).reshape(2, 3).T.contiguous().T) == "
        "d(torch.arange(6).reshape(2, 3))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_class_of_the_user_counts_with_its_code(tmp_path: Path) -> None:
    digests = []
    for factor in (1, 1, 2):
        folder = tmp_path / f"copy{len(digests)}"
        folder.mkdir()
        (folder / "options_of_user.py").write_text(
            "import dataclasses\n@dataclasses.dataclass\nclass Options:\n    size: int = 1\n"
            f"    def scaled(self):\n        return self.size * {factor}\n"
        )
        code = (
            f"import sys; sys.path[:0] = [{str(folder)!r}, {str(REPOSITORY)!r}]\n"
            "from vane_dagster.fingerprint.digest import value_digest as d\n"
            "import options_of_user as o\nprint(d({'options': o.Options()}))\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        digests.append(done.stdout)
    assert digests[0] == digests[1] != digests[2]
