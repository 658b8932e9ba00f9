"""Reads the documentation of the standard library from the running Python."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from types import ModuleType

import pyarrow as pa

SCHEMA = pa.schema(
    {
        "qualname": pa.string(),
        "kind": pa.string(),
        "signature": pa.string(),
        "doc": pa.string(),
        "module": pa.string(),
    }
)

# Attributes that are modules under another name, which a walk of the package does not visit.
_ALIASES = {"os": ("os.path",)}
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclass(frozen=True)
class Doc:
    """A public name of the standard library with its documentation."""

    qualname: str
    kind: str
    signature: str | None
    doc: str
    module: str


def extract(package: str) -> pa.Table:
    """Every documented public name of a top-level module or package, ordered by qualified name.

    A name that several modules offer counts once, under its shortest path.
    """
    seen: dict[int, object] = {}  # keeps the objects too, so that no identity is reused
    found: dict[str, Doc] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated names warn on access
        for module_name, module in sorted(_modules(package).items(), key=_depth):
            for doc, owner in _of_module(module_name, module):
                if id(owner) not in seen and doc.doc:
                    seen[id(owner)] = owner
                    found.setdefault(doc.qualname, doc)
    rows = [asdict(found[name]) for name in sorted(found)]
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def _depth(item: tuple[str, ModuleType]) -> tuple[int, str]:
    return item[0].count("."), item[0]


def _modules(package: str) -> dict[str, ModuleType]:
    """The public modules of a package that can be imported on this machine."""
    top = importlib.import_module(package)
    names = [package, *_ALIASES.get(package, ())]
    for info in pkgutil.walk_packages(getattr(top, "__path__", ()), f"{package}."):
        if not any(part.startswith("_") for part in info.name.split(".")):
            names.append(info.name)
    found = {}
    for name in names:
        try:
            found[name] = importlib.import_module(name)
        except ImportError:  # for another operating system
            continue
    return found


def _of_module(name: str, module: ModuleType) -> Iterator[tuple[Doc, object]]:
    yield _doc(name, "module", module, name), module
    for attribute in _public(name, module):
        value = getattr(module, attribute, None)
        path = f"{name}.{attribute}"
        if inspect.isclass(value):
            yield _doc(path, "class", value, name), value
            for member, raw in vars(value).items():
                if not member.startswith("_") and (kind := _member_kind(raw)):
                    yield _doc(f"{path}.{member}", kind, raw, name), raw
        elif inspect.isroutine(value):
            yield _doc(path, "function", value, name), value


def _public(name: str, module: ModuleType) -> list[str]:
    """The names that a module offers: ``__all__``, else the public names that it defines itself."""
    listed = getattr(module, "__all__", None)
    if listed is not None:
        return list(listed)
    own = (name, "_" + name)
    return [
        attribute
        for attribute, value in vars(module).items()
        if not attribute.startswith("_") and getattr(value, "__module__", None) in own
    ]


def _member_kind(raw: object) -> str | None:
    if inspect.isroutine(raw) or isinstance(raw, (classmethod, staticmethod)):
        return "method"
    return "property" if inspect.isdatadescriptor(raw) else None


def _doc(qualname: str, kind: str, value: object, module: str) -> Doc:
    text = value.__doc__
    doc = inspect.cleandoc(text).strip() if isinstance(text, str) else ""
    return Doc(qualname, kind, _signature(value), doc, module)


def _signature(value: object) -> str | None:
    function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
    if not callable(function):
        return None
    try:
        signature = str(inspect.signature(function))
    except (TypeError, ValueError):  # many functions in C have none
        return None
    return _ADDRESS.sub("", signature)
