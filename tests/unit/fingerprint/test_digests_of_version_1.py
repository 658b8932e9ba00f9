"""Digests that version 1 has frozen: stores hold keys that are made of them.

They are the same in every supported version of Python and of Arrow.
"""

from __future__ import annotations

import json
from pathlib import Path

import v1_code

from vane_dagster.fingerprint.code import code_identity
from vane_dagster.fingerprint.hashing import combine, digest
from vane_dagster.fingerprint.modules import files_read_once
from vane_dagster.fingerprint.objects import value_digest
from vane_dagster.storage.row_keys import row_keys
from vane_dagster.types.schema import schema_code

FROZEN = Path(v1_code.__file__).with_name("v1_digests.json")


@files_read_once()
def computed() -> dict[str, dict[str, str]]:
    functions = {**v1_code.CODE, "logged": v1_code.logged}
    schemas = v1_code.VALUES["schemas"][0], [v1_code.VALUES["types"][5]]
    return {
        "code": {name: code_identity(each).digest for name, each in functions.items()},
        "values": {
            f"{kind} {number}": value_digest(value)
            for kind, values in v1_code.VALUES.items()
            for number, value in enumerate(values)
        },
        "row keys": {
            name: row_keys([column])[:, 0].tobytes().hex()
            for name, column in v1_code.COLUMNS.items()
        },
        "rows": {
            str(number): key.tobytes().hex()
            for number, key in enumerate(row_keys([*v1_code.COLUMNS.values()]).T)
        },
        "schemas": {"columns": schema_code(schemas[0])},
        "hashes": {"combine": combine("tag", "ä", b"\0"), "digest": digest("a", 1, None)},
    }


def test_digests_are_those_of_version_1():
    """If one differs, each store computes again what has it: `CONTRIBUTING.md`, "Stored keys"."""
    frozen = json.loads(FROZEN.read_text())
    found = computed()
    assert {kind: [*each] for kind, each in found.items()} == {k: [*e] for k, e in frozen.items()}
    differ = [f"{k}: {n}" for k, each in frozen.items() for n in each if found[k][n] != each[n]]
    assert differ == []
