"""The modules of the package that workers import, compared with the files of the code digest."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import vane_dagster as vd
from vane_dagster.compute.code_digest import shared_files

PACKAGE = Path(vd.__file__).parent
IMPORTS = """
import importlib, json, sys

for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
print(json.dumps([m.__file__ for n, m in sys.modules.items() if n.startswith("vane_dagster.")]))
"""


def test_the_files_of_the_digest_import_no_others() -> None:
    covered = shared_files(PACKAGE).keys()
    modules = [
        ".".join((PACKAGE.name, *Path(name).with_suffix("").parts)).removesuffix(".__init__")
        for name in covered
    ]
    command = [sys.executable, "-c", IMPORTS, json.dumps(modules)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = {str(Path(file).relative_to(PACKAGE)) for file in json.loads(ran.stdout)}
    assert imported == covered
