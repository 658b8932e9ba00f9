"""Edits of small projects, and the effect of each on the identity of a function or class."""

from __future__ import annotations

import importlib
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from support.paths import REPOSITORY
from vane_dagster.errors import CodeIdentityError
from vane_dagster.fingerprint.code import CodeIdentity, code_identity
from vane_dagster.fingerprint.module_attributes import module_attribute, module_folders


class Project:
    """A folder of a user's modules, imported anew after each edit."""

    _installed: ClassVar[set[str]] = set()  # modules that are in no folder of a test

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, **files: str) -> None:
        for name, text in files.items():
            path = self.root / (name.replace("__in__", "/") + ".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def edit(self, name: str, old: str, new: str) -> None:
        path = self.root / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    def forget(self) -> None:
        """Forget every module of this folder, so that the next import reads it anew."""
        root, temporary = str(self.root), tempfile.gettempdir()
        environment = sys.prefix, str(REPOSITORY)
        for known in sys.modules.keys() - self._installed:
            loaded = sys.modules[known]
            places = module_attribute(loaded, "__file__"), *(module_folders(loaded) or ())
            if any(str(place).startswith(root) for place in places):
                del sys.modules[known]
            elif not any(
                str(place).startswith(temporary) and not str(place).startswith(environment)
                for place in places
            ):
                self._installed.add(known)
        shutil.rmtree(self.root / "__pycache__", ignore_errors=True)
        # Of the folder alone: `importlib.invalidate_caches` goes through hundreds of others.
        for folder, finder in list(sys.path_importer_cache.items()):
            if folder.startswith(str(self.root)) and finder is not None:
                finder.invalidate_caches()

    def load(self, name: str, module: str = "defs"):
        self.forget()
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        return found

    def identity(self, name: str = "udf", module: str = "defs", **options: str) -> CodeIdentity:
        return code_identity(self.load(name, module), **options)

    def digest(self, name: str = "udf", module: str = "defs") -> str:
        return self.identity(name, module).digest


@dataclass(frozen=True)
class Edit:
    """An edit of one file of a project in which ``defs.py`` defines ``udf``.

    Attributes:
        name: A unique description of the edit.
        files: The project before the edit: path to content, including ``defs.py``. ``{root}`` in a
            content is the project's folder.
        file: The edited file.
        old: The replaced text.
        new: The replacement.
        changes: Whether the results can change, so that the identity must change.
        needless: The results cannot change, but the identity does, as a known limit.
    """

    name: str
    files: Mapping[str, str]
    file: str
    old: str
    new: str
    changes: bool = True
    needless: bool = field(default=False)

    def write(self, root: Path) -> None:
        """Write the project as it is before the edit."""
        for path, text in self.files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text.replace("{root}", str(root)))

    def outcome(self, project: Project) -> str:
        """Return the effect: ``changed``, ``kept``, or ``refused`` if `version=` is requested."""
        self.write(project.root)
        try:
            before = project.digest()
        except CodeIdentityError:
            return "refused"
        path = project.root / self.file
        text = path.read_text()
        assert text.count(self.old) >= 1, f"{self.file} has no {self.old!r}"
        path.write_text(text.replace(self.old, self.new))
        try:
            return "kept" if project.digest() == before else "changed"
        except CodeIdentityError:
            return "refused"
