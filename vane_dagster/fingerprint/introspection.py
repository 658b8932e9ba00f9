"""Docstrings and type hints, which count only where code may read them.

A parsed tree contains neither (see `detach_texts`). `evidence` collects from the reached code
everything that may read them: names such as ``__doc__``, decorators, bases, and calls with
functions and classes as arguments. `TextRelevance` then decides which docstrings and hints are part
of the identity.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from vane_dagster.fingerprint.code_strings import Imported, paths, syntax_tree

TextKind = Literal["docstring", "hints"]
TEXT_KINDS: tuple[TextKind, TextKind] = ("docstring", "hints")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEFINITIONS = (*_FUNCTIONS, ast.ClassDef)
_BUILTINS = frozenset(dir(builtins)) - {"help", "setattr", "type", "eval", "exec"}
# Their result holds their arguments.
_CARRIERS = frozenset(
    {
        *("list", "tuple", "set", "frozenset", "dict", "zip", "enumerate", "reversed", "iter"),
        *("next", "property", "staticmethod", "classmethod", "functools.partial"),
        *(
            "functools.partialmethod",
            "functools.lru_cache",
            "functools.cache",
            "functools.cached_property",
        ),
    }
)
# They copy the docstring and the hints of their argument to another function.
_COPIERS = frozenset({"functools.wraps", "functools.update_wrapper"})
# Methods of any object that call their arguments.
_CALLING_METHODS = frozenset(
    {
        *("map", "imap", "imap_unordered", "starmap", "apply", "apply_async", "applymap"),
        *("map_elements", "map_batches", "map_partitions", "submit", "run_in_executor"),
        *("transform", "agg", "aggregate", "pipe", "assign", "sort", "groupby", "sort_values"),
        *("setter", "getter", "deleter", "register_forward_hook", "register_forward_pre_hook"),
        *("to", "info", "debug", "warning", "error", "exception"),
    }
)
# Packages that read no docstrings.
_INERT = frozenset(
    {
        *("numpy", "pandas", "polars", "pyarrow", "scipy", "sklearn", "torch", "numba", "jax"),
        *("tensorflow", "keras", "duckdb", "PIL", "cv2", "transformers", "ray"),
        *("sentence_transformers", "tenacity", "backoff", "cachetools", "joblib", "tqdm"),
        *("typing_extensions", "vllm", "dagster", "attr", "attrs", "requests", "httpx", "yaml"),
    }
)
_READ = {
    # Readers of docstrings in the standard library and those packages.
    "docstring": ("inspect", "pydoc", "doctest", "cmd", "unittest", "xmlrpc"),
    "hints": (
        *("inspect", "pydoc", "dataclasses", "typing.NamedTuple", "typing.TypedDict"),
        *("typing.Protocol", "typing.get_type_hints", "functools.singledispatch", "dagster"),
        *("functools.singledispatchmethod", "torch.jit", "torch.library", "attr", "attrs"),
        *("typing_extensions.NamedTuple", "typing_extensions.TypedDict", "polars", "ray.serve"),
        *("typing_extensions.Protocol", "transformers", "ctypes", "keras"),
    ),
}
_READERS: dict[TextKind, frozenset[str]] = {
    "docstring": frozenset({"__doc__", "getdoc", "getsource", "getsourcelines", "getmembers"}),
    "hints": frozenset(
        {
            *("__annotations__", "get_type_hints", "get_annotations", "getfullargspec"),
            *("getsource", "getsourcelines", "__dataclass_fields__"),
        }
    ),
}
_READING_IMPORTS: dict[TextKind, frozenset[str]] = {
    "docstring": frozenset({"pydoc", "doctest", "inspect", "docopt.docopt"}),
    "hints": frozenset({"inspect.signature", "inspect.Signature", "inspect"}),
}


def detach_texts(node: ast.AST) -> None:
    """Detach the docstring and the hints of a module, class or function from its tree.

    They are kept on the node, as statements: `docstring` and `hints`.
    """
    body = getattr(node, "body", ())
    first = body[0].value if body and isinstance(body[0], ast.Expr) else None
    if isinstance(first, ast.Constant) and isinstance(first.value, str):
        node.__dict__["docstring"] = [ast.copy_location(ast.Expr(first), first)]
    if isinstance(node, _FUNCTIONS):
        arguments = node.args
        plain = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        rest = [item for item in (arguments.vararg, arguments.kwarg) if item is not None]
        found = [(item.arg, item.annotation) for item in (*plain, *rest)]
        found.append(("return", node.returns))
        for argument in (*plain, *rest):
            argument.annotation = None
        node.returns = None
        node.__dict__["hints"] = [_hint(name, item) for name, item in found if item is not None]
    elif isinstance(node, ast.ClassDef):
        node.__dict__["hints"] = []


def is_only_hint(statement: ast.AnnAssign, scope: ast.AST) -> bool:
    """Return whether ``x: T`` binds nothing; in a class it becomes one of its hints.

    Args:
        statement: The annotated assignment.
        scope: The node of the enclosing module, class or function.
    """
    if statement.value is not None or isinstance(scope, _FUNCTIONS):
        return False
    without_hint(statement, scope)
    return True


def without_hint(statement: ast.stmt, scope: ast.AST) -> ast.stmt:
    """Turn ``x: T = 1`` into ``x = 1``; in a class the hint is detached.

    Args:
        statement: The statement.
        scope: The node of the enclosing module, class or function.

    Returns:
        The statement to use in place of the given one.
    """
    if not isinstance(statement, ast.AnnAssign):
        return statement
    if isinstance(scope, ast.ClassDef) and isinstance(statement.target, ast.Name):
        scope.__dict__["hints"].append(_hint(statement.target.id, statement.annotation))
    if statement.value is None:
        # In a function it still makes the name local.
        statement.annotation = ast.copy_location(ast.Constant(None), statement)
        return statement
    return ast.copy_location(ast.Assign([statement.target], statement.value), statement)


def _hint(name: str, annotation: ast.expr) -> ast.stmt:
    target = ast.copy_location(ast.Name(name, ast.Store()), annotation)
    named = _evaluated(annotation)
    return ast.copy_location(ast.AnnAssign(target, named, None, 1), annotation)


def _evaluated(node: ast.expr) -> ast.expr:
    """Replace forward references, which are strings, with the expressions that they contain."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        try:
            inner = syntax_tree(node.value.strip(), mode="eval").body
        except (SyntaxError, ValueError):
            return node
        for item in ast.walk(inner):
            ast.copy_location(item, node)
        return _evaluated(inner)
    if isinstance(node, ast.Subscript):
        name = getattr(node.value, "attr", getattr(node.value, "id", None))
        if name == "Annotated" and isinstance(node.slice, ast.Tuple) and node.slice.elts:
            node.slice.elts[0] = _evaluated(node.slice.elts[0])
        elif name != "Literal":
            node.slice = _evaluated(node.slice)
    elif isinstance(node, (ast.Tuple, ast.List)):
        node.elts = [_evaluated(item) for item in node.elts]
    elif isinstance(node, ast.BinOp):
        node.left, node.right = _evaluated(node.left), _evaluated(node.right)
    return node


def keep_module_docstring(tree: ast.Module) -> None:
    """Bind a module's docstring to a name, if the module mentions ``__doc__``."""
    found = tree.__dict__.get("docstring")
    if not found or not tree.body:
        return
    # Other modules may read it as an attribute of the module.
    tree.body[0].__dict__["module_docstring"] = found
    if any(isinstance(node, ast.Name) and node.id == "__doc__" for node in ast.walk(tree)):
        target = ast.copy_location(ast.Name("__doc__", ast.Store()), found[0])
        tree.body.insert(0, ast.copy_location(ast.Assign([target], found[0].value), found[0]))


@dataclass(frozen=True)
class ArgumentUse:
    """A name that is passed to a call.

    Attributes:
        name: The name.
        callees: The functions that may be called.
        at: The position or name of the argument; None if unknown.
        result_is_used: Whether the call's result is passed on.
        is_import: Whether the callees are imported paths. It distinguishes such a path from an
            equal string that is a plain name.
    """

    name: str
    callees: frozenset[str]
    at: int | str | None
    result_is_used: bool
    is_import: bool


@dataclass(eq=False)
class Definition:
    """A function or class, and the code that may read its docstring and hints.

    Attributes:
        node: Its node.
        name: Its name.
        qualname: Its qualified name.
        holder: The definition that contains it, if any.
        decorators: Its decorators.
        bases: The names that each base may stand for.
        positions: The names of its positional parameters.
        parameters: The names of all of its parameters.
        values: The names that it passes on.
        uses: The names that it passes to calls.
        carried: The names that its result may hold.
    """

    node: ast.AST
    name: str
    qualname: str
    holder: Definition | None
    decorators: tuple[ast.expr, ...]
    bases: tuple[frozenset[str], ...]
    positions: tuple[str, ...]
    parameters: set[str]
    values: set[str] = field(default_factory=set)
    uses: set[ArgumentUse] = field(default_factory=set)
    carried: set[str] = field(default_factory=set)

    def given(self, at: int | str | None) -> set[str]:
        """Return the parameters that may hold an argument."""
        if isinstance(at, int) and at < len(self.positions):
            return {self.positions[at]}
        return {at} if isinstance(at, str) and at in self.parameters else self.parameters

    def texts(self, kind: TextKind) -> list[ast.stmt]:
        """Return the docstring or the hints, as statements."""
        found: list[ast.stmt] = self.node.__dict__.get(kind, [])
        return found


@dataclass
class Evidence:
    """The evidence of some code about the use of docstrings and hints.

    Attributes:
        readers: The kinds that it reads by name, from any object.
        values: The names that it passes on, so any code may read them.
        uses: The names that it passes to calls.
        definitions: The functions and classes in it, including nested ones.
        module_docstring: The docstring of the module.
    """

    readers: set[TextKind] = field(default_factory=set)
    values: set[str] = field(default_factory=set)
    uses: set[ArgumentUse] = field(default_factory=set)
    definitions: list[Definition] = field(default_factory=list)
    module_docstring: list[ast.stmt] = field(default_factory=list)


@dataclass(frozen=True)
class _Context:
    """The destination of an expression's value: `callees`, other code (`is_value`), or none."""

    is_value: bool = False
    callees: frozenset[str] | None = None
    at: int | str | None = None
    is_returned: bool = False


# Nodes that only inspect a value, and do not pass it on.
_ENDS = (
    *(ast.Attribute, ast.Subscript, ast.Compare, ast.BinOp, ast.UnaryOp, ast.FormattedValue),
    *(ast.Raise, ast.Assert, ast.Expr, ast.withitem, ast.ExceptHandler, ast.Delete),
)
_NOWHERE = _Context()
_VALUE = _Context(is_value=True)
_RETURNED = _Context(is_value=True, is_returned=True)


def evidence(nodes: Iterable[ast.AST]) -> Evidence:
    """Collect the evidence in nodes."""
    found = Evidence()
    stack: list[tuple[ast.AST, _Context, Definition | None]]
    stack = [(node, _NOWHERE, None) for node in nodes]
    while stack:
        node, context, holder = stack.pop()
        found.readers.update(_readers(node))
        found.module_docstring += node.__dict__.get("module_docstring", ())
        if isinstance(node, _DEFINITIONS):
            definition = _definition(node, holder)
            found.definitions.append(definition)
            stack += [(item, _NOWHERE, definition) for item in node.body]
            stack += [(item, inner, holder) for item, inner in _around(node)]
            continue
        name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", None)
        if isinstance(name, str) and isinstance(getattr(node, "ctx", None), ast.Load):
            _record(found, name, context, holder)
        stack += [(item, inner, holder) for item, inner in _children(node, context)]
    return found


def _record(found: Evidence, name: str, context: _Context, holder: Definition | None) -> None:
    places: list[Evidence | Definition] = [found]
    while holder is not None and name not in holder.parameters:
        holder = holder.holder
    if holder is not None:
        if context.is_returned or (context.callees is not None and context.is_value):
            # The caller of a function gets the arguments that it returns.
            holder.carried.add(name)
        if context.is_returned:
            return
        places = [holder]
    for place in places:
        if context.callees is not None:
            is_import = any(isinstance(item, Imported) for item in context.callees)
            use = ArgumentUse(name, context.callees, context.at, context.is_value, is_import)
            place.uses.add(use)
        elif context.is_value:
            place.values.add(name)


def _definition(
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, holder: Definition | None
) -> Definition:
    bases: list[ast.expr] = []
    parameters: set[str] = set()
    positions: list[str] = []
    if isinstance(node, ast.ClassDef):
        bases = [*node.bases, *(item.value for item in node.keywords if item.arg == "metaclass")]
    else:
        plain = [item.arg for item in (*node.args.posonlyargs, *node.args.args)]
        positions = plain[1:] if plain[:1] in (["self"], ["cls"]) else plain
        parameters = {item.arg for item in ast.walk(node.args) if isinstance(item, ast.arg)}
    decorators = tuple(node.decorator_list)
    qualname = node.name if holder is None else f"{holder.qualname}.{node.name}"
    inherited = tuple(_callees(item) for item in bases)
    names = parameters - {"self", "cls"}
    at = tuple(positions)
    return Definition(node, node.name, qualname, holder, decorators, inherited, at, names)


def _around(node: ast.AST) -> Iterator[tuple[ast.AST, _Context]]:
    """Yield the expressions that are evaluated where a class or function is defined."""
    if isinstance(node, _FUNCTIONS):
        for item in (*node.args.defaults, *node.args.kw_defaults):
            if item is not None:
                yield item, _VALUE
    elif isinstance(node, ast.ClassDef):
        yield from ((item, _NOWHERE) for item in node.bases)
        yield from ((item.value, _VALUE) for item in node.keywords)
    for item in getattr(node, "decorator_list", ()):
        yield item, _NOWHERE


def _callees(node: ast.AST) -> frozenset[str]:
    while isinstance(node, (ast.Call, ast.Subscript)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return paths(node)


def _children(node: ast.AST, context: _Context) -> Iterator[tuple[ast.AST, _Context]]:
    """Yield the children of a node, and the destination of each one's value."""
    inner = _VALUE
    if isinstance(node, ast.Call):
        callees = paths(node.func) or frozenset({"?"})
        yield node.func, _NOWHERE
        is_used = context.is_value or context.callees is not None
        starred = False
        places: list[tuple[ast.expr, int | str | None]] = []
        for index, argument in enumerate(node.args):
            starred |= isinstance(argument, ast.Starred)
            places.append((argument, None if starred else index))
        places += [(keyword.value, keyword.arg) for keyword in node.keywords]
        for argument, at in places:
            inner = context if callees <= _CARRIERS else _Context(is_used, callees, at)
            yield argument, _RETURNED if callees <= _COPIERS else inner
        if isinstance(node.func, ast.Name) and context.callees is not None:
            # An object that is created for a call may read the class's docstring and hints.
            yield ast.Name(f"{node.func.id}()", ast.Load()), context
        return
    if isinstance(node, _ENDS):
        inner = _NOWHERE
    elif isinstance(node, ast.Return):
        inner = _RETURNED
    elif isinstance(node, (ast.Starred, ast.Await, ast.IfExp, ast.List, ast.Tuple, ast.Set)):
        inner = context
    elif isinstance(node, (ast.Dict, ast.NamedExpr, ast.BoolOp)):
        inner = context if context != _NOWHERE else _VALUE
    for item in ast.iter_child_nodes(node):
        is_test = item is getattr(node, "test", None)
        yield item, _NOWHERE if is_test or isinstance(item, ast.stmt) else inner


def _readers(node: ast.AST) -> Iterator[TextKind]:
    """Yield the kinds that a node reads by name."""
    if isinstance(node, ast.Attribute):
        if not isinstance(node.ctx, ast.Load):
            return
        names = {node.attr}
        base = getattr(node.value, "id", None)
        if node.attr == "__dict__" and base != "self":
            yield from TEXT_KINDS
        reads = paths(node)
    elif isinstance(node, ast.Name):
        # A module reads its own docstring by its name.
        names = {node.id} - {"__doc__"}
        reads = paths(node) if "stands_for" in node.__dict__ else frozenset()
        if node.id == "help" and isinstance(node.ctx, ast.Load):
            yield from TEXT_KINDS
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        names, reads = {node.value}, frozenset()
    elif isinstance(node, ast.Call) and paths(node.func) == {"vars"}:
        if node.args and getattr(node.args[0], "id", None) != "self":
            yield from TEXT_KINDS
        return
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        names, reads = {item.name for item in node.names}, frozenset()
        module = getattr(node, "module", None)
        if "*" in names and module in ("inspect", "pydoc", "typing"):
            yield from TEXT_KINDS
        if module is not None:
            reads = frozenset(f"{module}.{item.name}" for item in node.names)
    else:
        return
    for kind in TEXT_KINDS:
        if names & _READERS[kind] or reads & (_READING_IMPORTS[kind] - {"inspect"}):
            yield kind


@dataclass
class TextRelevance:
    """Decides which docstrings and hints count, from all evidence of a walk.

    Attributes:
        pieces: The evidence of all reached code.
        kind_of: Returns the kind of a top-level module; None if it cannot be found.
        forced: The qualified names of the functions with hints that always count.
    """

    pieces: list[Evidence]
    kind_of: Callable[[str], str | None]
    forced: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self._definitions: dict[str, list[Definition]] = {}
        self._inner: dict[Definition, list[Definition]] = {}
        for piece in self.pieces:
            for item in piece.definitions:
                self._definitions.setdefault(item.name, []).append(item)
                if item.holder is not None:
                    self._inner.setdefault(item.holder, []).append(item)
        self._readers = {kind for piece in self.pieces for kind in piece.readers}
        self._values = {name for piece in self.pieces for name in piece.values}
        self._uses = {use for piece in self.pieces for use in piece.uses}
        self._leaking: dict[tuple[Definition, TextKind, int | str | None], bool] = {}
        self._inherited: dict[tuple[Definition, TextKind], bool] = {}
        self._found: dict[tuple[Definition, TextKind], bool] = {}
        self._escaped = {kind: self._escaping(kind) for kind in TEXT_KINDS}

    def texts(self, piece: Evidence) -> Iterator[tuple[str, list[ast.stmt]]]:
        """Yield the docstrings and hints in a piece that count, with a label for each."""
        for definition in piece.definitions:
            for kind in TEXT_KINDS:
                nodes = definition.texts(kind)
                if nodes and self.counts(definition, kind):
                    yield f"{kind} of {definition.qualname}", nodes
        if piece.module_docstring and "docstring" in self._readers:
            yield "docstring", piece.module_docstring

    def counts(self, definition: Definition, kind: TextKind) -> bool:
        """Return whether the docstring or the hints of a definition are part of the identity.

        Args:
            definition: The function or class.
            kind: ``docstring`` or ``hints``.
        """
        key = (definition, kind)
        if key not in self._found:
            self._found[key] = False
            self._found[key] = self._decide(definition, kind)
        return self._found[key]

    def _decide(self, definition: Definition, kind: TextKind) -> bool:
        if kind in self._readers or (kind == "hints" and definition.qualname in self.forced):
            return True
        if {definition.name, f"{definition.name}()"} & self._escaped[kind]:
            return True
        if not all(self._is_harmless_decorator(item, kind) for item in definition.decorators):
            return True
        if not all(self._is_harmless_base(item, kind) for item in definition.bases):
            return True
        holder = definition.holder
        of_class = holder is not None and isinstance(holder.node, ast.ClassDef)
        return of_class and holder is not None and self._reads_members(holder, kind)

    def _reads_members(self, cls: Definition, kind: TextKind) -> bool:
        """Return whether a reader of a class may read its methods too; a dataclass does not."""
        if not self.counts(cls, kind):
            return False
        if kind in self._readers or {cls.name, f"{cls.name}()"} & self._escaped[kind]:
            return True
        return not self._only_fields(cls, kind)

    def _only_fields(self, cls: Definition, kind: TextKind) -> bool:
        """Return whether readers of a class read its own hints, and never those of its methods."""
        decorated = all(
            _fields_only(_callees(item)) or self._is_harmless_decorator(item, kind)
            for item in cls.decorators
        )
        return decorated and all(
            _fields_only(item) or self._is_harmless_base(item, kind) for item in cls.bases
        )

    def _escaping(self, kind: TextKind) -> set[str]:
        found = set(self._values)
        for use in self._uses:
            harmless = self._is_harmless(use.callees, kind, use.at)
            carried = use.result_is_used and self._carries(use)
            if not harmless or carried:
                found.add(use.name)
        return found

    def _carries(self, use: ArgumentUse) -> bool:
        """Return whether a user's function may return its argument."""
        found = [self._definitions.get(item.rpartition(".")[2], ()) for item in use.callees]
        return any(item.given(use.at) & item.carried for items in found for item in items)

    def _is_harmless_decorator(self, decorator: ast.expr, kind: TextKind) -> bool:
        return self._is_harmless(_callees(decorator), kind, 0, isinstance(decorator, ast.Call))

    def _is_harmless(
        self,
        callees: frozenset[str],
        kind: TextKind,
        at: int | str | None,
        is_factory: bool = False,
    ) -> bool:
        """Return whether a call never reads the docstring or hints of one of its arguments.

        Args:
            callees: The functions that may be called.
            kind: ``docstring`` or ``hints``.
            at: The argument's position or name.
            is_factory: Whether the callee returns the function that gets the argument.
        """
        found = [self._is_harmless_call(item, kind, at, is_factory) for item in callees]
        return bool(found) and all(found)

    def _is_harmless_call(
        self, callee: str, kind: TextKind, at: int | str | None, is_factory: bool
    ) -> bool:
        root, _, rest = callee.partition(".")
        last = callee.rpartition(".")[2]
        if isinstance(callee, Imported):
            whose = "own" if callee.startswith(".") else self.kind_of(root)
            if whose == "own":
                return self._is_transparent(last, kind, at, is_factory)
            return whose is not None and _is_inert(callee, whose, kind)
        if last in self._definitions and (not rest or root in ("self", "cls")):
            return self._is_transparent(last, kind, at, is_factory)
        if not rest:
            return root in _BUILTINS
        return last in _CALLING_METHODS

    def _is_harmless_base(self, callees: frozenset[str], kind: TextKind) -> bool:
        return bool(callees) and all(self._is_harmless_parent(item, kind) for item in callees)

    def _is_harmless_parent(self, base: str, kind: TextKind) -> bool:
        root, _, _ = base.partition(".")
        last = base.rpartition(".")[2]
        if isinstance(base, Imported) and not base.startswith("."):
            whose = self.kind_of(root)
            if whose != "own":
                return whose is not None and _is_inert(base, whose, kind)
        found = self._definitions.get(last)
        if found is None:
            return base in _BUILTINS
        return all(
            isinstance(item.node, ast.ClassDef) and not self._inherits(item, kind) for item in found
        )

    def _inherits(self, cls: Definition, kind: TextKind) -> bool:
        """Return whether readers of a class's docstring or hints read those of subclasses too."""
        key = (cls, kind)
        if key not in self._inherited:
            self._inherited[key] = False
            decorated = all(
                _fields_only(_callees(item)) or self._is_harmless_decorator(item, kind)
                for item in cls.decorators
            )
            bases = all(self._is_harmless_base(item, kind) for item in cls.bases)
            self._inherited[key] = not (bases and decorated)
        return self._inherited[key]

    def _is_transparent(
        self, name: str, kind: TextKind, at: int | str | None, is_factory: bool
    ) -> bool:
        """Return whether no function of a name passes an argument to a reader of `kind`."""
        for item in self._definitions.get(name, ()):
            held = self._inner.get(item, ())
            if isinstance(item.node, ast.ClassDef):
                leaks = any(self._leaks(method, kind, None) for method in held)
            else:
                leaks = self._leaks(item, kind, at)
                # A decorator with arguments returns the function that gets the decorated one.
                leaks |= is_factory and any(self._leaks(inner, kind, 0) for inner in held)
            if leaks:
                return False
        return name in self._definitions

    def _leaks(self, definition: Definition, kind: TextKind, at: int | str | None) -> bool:
        key = (definition, kind, at)
        if key not in self._leaking:
            self._leaking[key] = False
            names = definition.given(at)
            self._leaking[key] = bool(names & definition.values) or any(
                use.name in names and not self._is_harmless(use.callees, kind, use.at)
                for use in definition.uses
            )
        return self._leaking[key]


def _fields_only(callees: frozenset[str]) -> bool:
    """Return whether the callees read a class's own hints, and never those of its methods."""
    known = ("dataclasses.dataclass", "typing.NamedTuple", "typing.TypedDict", "attr", "attrs")
    return bool(callees) and all(
        isinstance(item, Imported) and (item in known or item.partition(".")[0] in known)
        for item in callees
    )


def _is_inert(path: str, whose: str, kind: TextKind) -> bool:
    for reader in _READ[kind]:
        if path == reader or path.startswith(reader + "."):
            return False
    return whose in ("stdlib", "self") or path.partition(".")[0] in _INERT
