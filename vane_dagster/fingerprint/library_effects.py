"""What calls of the standard library and of well-known packages write, by their names."""

from __future__ import annotations

import builtins

INERT = frozenset({"dagster", "vane_dagster", "logging", "warnings"})
PURE = frozenset({
    "__future__", "abc", "argparse", "base64", "collections", "contextlib", "copy", "dataclasses",
    "datetime", "enum", "fractions", "functools", "hashlib", "inspect", "itertools", "json", "math",
    "numbers", "pathlib", "pprint", "re", "statistics", "string", "struct", "textwrap", "time",
    "traceback", "types", "typing", "typing_extensions", "uuid", "zoneinfo",
})  # fmt: skip
PURE_NAMES = (
    "os.path.", "os.environ.get", "os.environ.copy", "os.getenv", "os.getcwd", "os.cpu_count",
    "os.fspath", "sys.stdout.", "sys.stderr.", "gc.collect", "platform.", "operator.itemgetter",
    "operator.attrgetter", "operator.methodcaller", "importlib.metadata.", "importlib.resources.",
    "threading.Lock", "threading.RLock", "threading.local",
)  # fmt: skip
# Functions of the modules above that change what they are given, or the process.
IMPURE = frozenset({
    "dataclasses.dataclass", "functools.total_ordering", "functools.update_wrapper",
    "abc.update_abstractmethods", "struct.pack_into", "time.tzset", "enum.global_enum",
    "contextlib.chdir", "contextlib.redirect_stdout", "copy.dispatch_table",
})  # fmt: skip
DECORATOR = "functools.cache"  # stands for what returns what it is given
DECORATORS = frozenset({
    "functools.cache", "functools.lru_cache", "functools.wraps", "functools.singledispatch",
    "contextlib.contextmanager", "abc.abstractmethod", "typing.overload", "typing.final",
    "enum.unique", "typing.runtime_checkable", "typing.no_type_check",
})  # fmt: skip
# Libraries whose functions return new objects: a change of one is no change of the library.
FRESH = frozenset({"duckdb", "numpy", "pandas", "polars", "pyarrow", "torch"})
ITEM_WRITERS = frozenset({
    "add", "append", "appendleft", "clear", "difference_update", "discard", "extend", "extendleft",
    "insert", "intersection_update", "move_to_end", "pop", "popitem", "popleft", "remove",
    "reverse", "rotate", "setdefault", "sort", "symmetric_difference_update", "update",
    "__setitem__", "__delitem__",
})  # fmt: skip
READERS = frozenset({
    "absolute", "as_posix", "capitalize", "casefold", "copy", "count", "decode", "difference",
    "encode", "endswith", "exists", "expanduser", "find", "format", "format_map", "get", "glob",
    "hexdigest", "index", "intersection", "is_dir", "is_file", "isdigit", "isdisjoint", "issubset",
    "issuperset", "items", "iterdir", "join", "joinpath", "keys", "lower", "lstrip", "match",
    "most_common", "partition", "read_bytes", "read_text", "relative_to", "removeprefix",
    "removesuffix", "replace", "resolve", "rglob", "rpartition", "rsplit", "rstrip", "search",
    "split", "splitlines", "startswith", "strip", "sub", "title", "union", "upper", "values",
    "with_name", "with_suffix", "__getitem__", "__len__", "__contains__", "__iter__",
    "__subclasses__",
})  # fmt: skip
GETTERS = frozenset({"get", "__getitem__"})
STATE_VERBS = frozenset({
    "activate", "add", "append", "apply", "autolog", "basicconfig", "clear", "component",
    "configure", "disable", "enable", "extend", "factory", "init", "initialize", "insert",
    "install", "instrument", "load", "login", "manual", "monkey", "patch", "pop", "putenv",
    "register", "remove", "reset", "seed", "set", "setdefault", "setlocale", "setup", "unregister",
    "update", "use",
})  # fmt: skip
LOADERS = frozenset({"load", "loads", "init"})  # verbs that mostly return what is new
IMPORTERS = frozenset({
    "importlib.import_module", "importlib.__import__", "__import__", "pydoc.locate",
    "pkgutil.resolve_name", "importlib.util.find_spec",
})  # fmt: skip
RUNNERS = frozenset({
    "importlib.util.spec_from_file_location", "runpy.run_path", "runpy.run_module",
    "importlib.reload", "execfile",
})  # fmt: skip

BUILTINS = frozenset(dir(builtins))
SCALARS = frozenset({
    "abs", "all", "any", "ascii", "bin", "bool", "bytes", "callable", "chr", "divmod", "float",
    "format", "frozenset", "hasattr", "hash", "hex", "id", "input", "int", "isinstance",
    "issubclass", "len", "oct", "ord", "pow", "print", "range", "repr", "round", "str", "sum",
})  # fmt: skip


def is_state_verb(name: str, *, assigned: bool = False) -> bool:
    """Says whether a function's name says that it changes the state of its library."""
    words = name.lower().strip("_").split("_")
    if assigned and (name in LOADERS or (words[0] == "load" and words[-1] != "dotenv")):
        return False
    whole = name.lower()
    return words[0] in STATE_VERBS or words[-1] == "seed" or whole.startswith("set")
