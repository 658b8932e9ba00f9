"""The identity of a UDF: its code, and all of the user's code that it reaches.

Nothing is run or imported; files are read from disk. The names count that the UDF reaches in any of
the user's files; a module that is used as an object counts as a whole. In every module that an
import executes, including packages' ``__init__``, those statements count that affect what the UDF
reaches or a library (see `effects`). Installed packages are listed, not hashed; the one that
declares the pipeline is the user's.

`docs/concepts/identity.md` has the rules for users. These are all of them.

Names:
    - ``from helpers import double`` and ``helpers.double`` count `double` and what it names. A
      module counts as a whole if it is used as an object, imported with ``*``, inside a function,
      or inside a compound statement; a package then counts with all of its modules. An import under
      ``try`` or ``with`` may fail, so every file of the user's that it executes counts as a whole.
    - A class counts with all of its methods. A lambda, and a function or class made inside a
      function, counts with the top-level statement that holds it. A lambda that is an argument
      of a top-level call counts by itself.
    - Modules are located on `sys.path`, then on `sys.path` as it was when stages were declared.
    - Code under ``if __name__ == "__main__"`` counts where it changes a name that counts, other
      than a module.
    - Docstrings, type hints and names of local variables count; comments and layout do not.
    - A literal module name, as in ``import_module("helpers")``, counts like an import. A computed
      one that begins with a package, like ``f"plugins.{name}"``, counts like an import of all its
      modules. Other computed names are refused, and so are ``exec``, ``compile``,
      ``module_from_spec``, ``SourceFileLoader``, ``runpy``, ``import_string``,
      ``pkgutil.resolve_name`` and ``pydoc.locate``.
    - With ``globals()``, ``eval``, ``__globals__``, the file's ``__annotations__``,
      ``inspect.getmodule``, or ``sys.modules`` as an object, all names of the file count, and all
      of each user module that it imports.

Top-level statements, in the UDF's file and those that it imports:
    - A call, a store into an object, or a decorator counts if it names, directly or through others,
      something that counts or a library that it may change. So does an ``if``, ``try``, ``with`` or
      loop that imports a file of the user's. A compound statement is one statement. Its place among
      other such statements, constants and imported names counts too.
    - A subclass is such a statement if creating it may run the user's code: a base, or what it
      names, has ``__init_subclass__`` or a similar hook, a metaclass other than ``ABCMeta``, or
      ``Enum`` as a base; every subclass is one if an imported file uses ``__subclasses__``.
    - A function of the user's that is called there counts with all that it names, unless it only
      declares pipelines and returns them. `effects` and `acts` list what changes nothing.

Values (`values`, `objects`, `files`):
    - Workers get the functions of a script with its module-level values. Such a value, also a
      function or class, counts if the script binds the name more than once or in a loop, or has
      another literal for it; and if it is computed, and the script was started with arguments, a
      function changes it, or it is named under ``if __name__ == "__main__"`` or by a function or
      class that is named there. Loggers do not. For a class, its attributes count. A value without
      a stable content counts by the whole script and its command line.
    - Arguments, closures, and defaults of functions made inside a function count by value;
      functions, classes and objects among them also by their code. An object counts by its class
      and its pickle. The layout of an array in memory does not count.
    - Refused: what pickle cannot write, or writes by a name (``np.frompyfunc``); objects pickled as
      bytes that may refer to the user's code (frames of polars, tokenizers); long doubles; folders
      of more than 100,000 files or 256 GiB.
    - A text or path among them that names an existing file or folder counts by its content; so
      does a text with a separator or suffix in a constant, statement or default that counts. By
      their text count a bare word, and folders that hold the source, a target, the default store,
      the code or the whole machine (home, ``/tmp``), or that lie in the source or a target.

Limits. These changes are not detected:
    - Files, tables and services that code reads when it runs or is imported; chance; packages;
      environment variables that are not keyed. Texts inside functions, paths that code joins or
      cuts, paths in `bytes`, and files that an import writes are not followed to their content.
    - Attributes that a script sets in imported modules and on their objects; a script's value that
      a function changes by calling a method which `dict`, `list` and `set` lack.
    - Whether a module exists (``find_spec``, ``hasattr(package, "x")``); modules found by listing a
      folder or on a ``sys.path`` that a function changes; file names in patterns, lists, command
      lines or other files; hidden files and caches of a folder.
    - The user's classes that a pickled model refers to, unless code names them; names in strings
      that a library resolves: pandas' ``query("a > @LIMIT")``, Hydra's ``_target_``, traitlets'
      ``import_item``, lazy modules, forward references outside of hints.
    - Files that the UDF's own file does not import, directly or through others, even if they change
      one that it does. For a function among the arguments, or before or after a model, that is its
      own file and the one that declares the stage, without the order of the latter's imports.
    - Changes without a call or a store: an operator, a property, iteration, ``len(A)`` or
      ``A[key]`` of the user's objects at the top level; ``__set_name__``; ``__init__`` of an enum;
      what a library keeps of an assigned call (``old = np.seterr(..)``) or of a base class; an
      object of the user's as a base; calls in type hints; a condition around an import in the body
      of a class; functions that Dagster calls, such as those under ``@dg.definitions``.
    - A name that is read before its file binds it (circular imports, ``except NameError``); a name
      that is both imported and defined, or both a function and a submodule; mangled names (``__X``
      in a class); whether two arguments are the same object; whether a file has
      ``from __future__ import annotations``; the text, line numbers and ``dir()`` of code that
      looks at itself, and the order of the names in its ``globals()``.
    - What handlers and filters of logging, and the file that `print` writes to, do with a text.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vane_dagster.errors import CodeIdentityError
from vane_dagster.fingerprint.dependencies import FILE, DependencyWalk
from vane_dagster.fingerprint.effects import modules_run
from vane_dagster.fingerprint.files import LocalFiles, file_digests
from vane_dagster.fingerprint.hashing import combine
from vane_dagster.fingerprint.modules import Finder, reading_finder
from vane_dagster.fingerprint.objects import ObjectEncoder
from vane_dagster.types.callables import unwrapped


@dataclass(frozen=True)
class CodeIdentity:
    """The identity of a UDF's code.

    Attributes:
        digest: A digest that is the same in every process, folder and machine for the same code.
        parts: The kind, name and digest of what it consists of, the UDF first.
        packages: The top-level names of installed packages that the code reaches. A package that is
            imported lazily and not installed here is assumed to exist on the workers.
        find_modules: Returns `modules`.
        find_texts: Returns the code that counts, for people, by the name of the file's module;
            that of its own file has none.
    """

    digest: str
    parts: tuple[tuple[str, str, str], ...]
    packages: tuple[str, ...]
    find_modules: Callable[[], tuple[str, ...]] = field(repr=False, compare=False)
    find_texts: Callable[[], dict[str, str]] = field(repr=False, compare=False)

    @functools.cached_property
    def modules(self) -> tuple[str, ...]:
        """The user's own modules that a worker may import for it, including its own module.

        They are found on first use: the search follows imports much further than the digest does.
        """
        return self.find_modules()

    def texts(self) -> dict[str, str]:
        """Return the code that counts, for people, with what each text is."""
        by_name = self.find_texts().items()
        return {f"code of {name}" if name else "code": text for name, text in by_name}


def code_identity(
    obj: Callable[..., Any],
    *,
    version: str | None = None,
    files: LocalFiles | None = None,
) -> CodeIdentity:
    """Compute the identity of a function, a class or a partial of one."""
    target = unwrapped(obj)
    if not callable(obj) or not hasattr(target, "__qualname__"):
        raise CodeIdentityError(
            f"{type(obj).__qualname__} object: expected a function, a class or a partial of one. "
            f"Pass the class itself, and its arguments separately."
        )
    finder = reading_finder()
    module = finder.find(getattr(target, "__module__", None) or "__main__")
    files = files if version is None else LocalFiles(read=False)
    dependency_walk = DependencyWalk(finder, module, files)
    encoder = ObjectEncoder(dependency_walk, files)
    if version is None:
        token = encoder.digest(obj, target.__qualname__)
        reached = dependency_walk.parts()
        values = [
            ("value", name, encoder.script_value(name, value, script))
            for name, value, script in dependency_walk.script_values()
        ]
        reached = dependency_walk.parts() if values else reached  # with what these reach
        own = combine("own", token, reached.pop(target.__qualname__, ""))
        parts = [("code", target.__qualname__, own)]
        for name, part in reached.items():
            kind, _, file = name.partition(f"{FILE} ")
            parts.append(("code", name, part) if kind else (FILE, file, part))
        parts += values
        digest = combine("code", *(part for *_, part in parts))
    else:
        with contextlib.suppress(CodeIdentityError):
            encoder.digest(obj, target.__qualname__)
        where = module.label if module is not None else ""
        owner = getattr(getattr(target, "__self__", None), "__qualname__", "")  # of a class method
        name = f"{owner}.{target.__name__}" if owner else target.__qualname__
        digest = combine("version", where, name, version)
        parts = [("code", target.__qualname__, digest)]
    seeds = dependency_walk.modules | ({module.name} if module is not None else set())
    packages = tuple(sorted(dependency_walk.packages))
    return CodeIdentity(
        digest, tuple(parts), packages, lambda: modules_run(finder, seeds), dependency_walk.texts
    )


def worker_code_digest(
    obj: Callable[..., Any], *, version: str | None = None, files: LocalFiles | None = None
) -> str:
    """Return the digest of the code that the workers of a function or class run.

    All methods of a class count, so that stages that call different ones share its workers. With a
    version, which replaces the code's content in keys, the files that workers import count as a
    whole, so that no edit meets a worker with other code.
    """
    identity = code_identity(obj, version=version, files=files)
    if version is None:
        return identity.digest
    finder = Finder()
    modules = [finder.find(name) for name in identity.modules]
    paths = [module.path for module in modules if module and module.path]
    return combine("files", identity.digest, *file_digests(paths, identity.parts[0][1], "its code"))
