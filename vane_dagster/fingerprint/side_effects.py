"""Conservative analysis, by syntax, of a function's effects that outlast a call.

Two versions of a model's code share its state only if calls have no lasting effects that the other
version could observe: none in the state, in a module or in a library. This is undecidable in
general. A statement with an unused result counts as an effect unless it is known to be harmless,
because it has no other purpose. A call with a used result counts as an effect if its name is
that of a method that changes its object, or of a function that changes settings.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypeGuard, Union

from vane_dagster.fingerprint import ast_digest
from vane_dagster.fingerprint.modules import Finder, Module
from vane_dagster.fingerprint.symbols import SourceFile

NameKind = Literal["local", "library", "module", "function", "class", "value", "builtin"]
Function = Union[ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
CONSTRUCTORS = frozenset({"__init__", "__new__", "__post_init__"})

_FORBIDDEN = frozenset(
    {"setattr", "delattr", "exec", "eval", "globals", "locals", "vars", "compile", "__import__"}
)
_CHANGES_OBJECT = frozenset(
    {
        "append", "appendleft", "extend", "insert", "add", "update", "setdefault", "pop", "popitem",
        "popleft", "clear", "remove", "discard", "sort", "reverse", "rotate", "put", "put_nowait",
        "push", "write", "writelines", "fill", "resize", "shuffle", "fit", "fit_transform",
        "partial_fit", "load_state_dict", "set", "store", "seed", "reset", "step", "backward",
        "zero_grad", "register", "heappush", "heappop", "heapreplace", "heappushpop", "heapify",
        "setitem", "delitem", "iadd", "ior", "copyto", "place", "putmask",
        "__setitem__", "__delitem__", "__setattr__", "__init__", "__next__", "__iadd__", "send",
        "subtract", "execute", "executemany", "executescript", "commit",
    }
)  # fmt: skip
_CHANGES_OBJECT_BEGINNINGS = (
    "set_", "add_", "register_", "load_", "enable_", "disable_", "remove_", "update_", "reset_",
)  # fmt: skip
_CHANGES_MODEL = frozenset(
    {"to", "half", "float", "double", "bfloat16", "cuda", "cpu", "eval", "train", "compile"}
)
"""They change a `torch.nn.Module`, but return a new object for a tensor."""
_CHANGES_SETTINGS = frozenset(
    {"seed", "manual_seed", "manual_seed_all", "chdir", "putenv", "setlocale", "filterwarnings",
     "simplefilter", "basicConfig", "configure", "install", "patch", "register", "signal",
     "Thread", "Timer", "Process", "start_new_thread", "Parallel", "get_reusable_executor"}
)  # fmt: skip
"""The last two have processes that outlast a call, with the modules that they have imported."""
_CHANGES_SETTINGS_BEGINNINGS = ("set_", "use_", "enable_", "disable_", "register_", "setdefault")
_GIVES_PARTS = frozenset(
    {"get", "values", "items", "keys", "children", "modules", "parameters", "buffers", "view",
     "named_children", "named_modules", "named_parameters", "get_submodule", "__getitem__"}
)  # fmt: skip
_GIVES_VIEWS = frozenset(
    {"reshape", "ravel", "squeeze", "unsqueeze", "transpose", "swapaxes", "movedim", "permute",
     "flatten", "unflatten", "expand", "expand_as", "view_as", "narrow", "select", "unbind",
     "chunk", "split", "diagonal", "t", "numpy", "detach", "contiguous", "to", "type", "astype",
     "to_numpy", "asfarray", "atleast_1d", "atleast_2d", "atleast_3d", "broadcast_to",
     "broadcast_arrays", "expand_dims", "moveaxis", "rollaxis", "flip", "rot90"}
)  # fmt: skip
"""Methods of arrays, tensors and frames, and functions, with results that may share memory."""
_PASSES_ON = frozenset(
    {"asarray", "asanyarray", "ascontiguousarray", "as_tensor", "from_numpy", "frombuffer", "ravel",
     "reshape", "squeeze", "cast", "iter", "next", "list", "tuple", "dict", "set", "zip",
     "enumerate", "reversed", "sorted", "map", "filter", "chain", "getattr", "min", "max", "copy",
     "memoryview", "type", "nullcontext", "partial", "itemgetter", "attrgetter", "identity"}
)  # fmt: skip
_MAKES_CONTAINERS = frozenset({"list", "dict", "set", "sorted", "defaultdict", "Counter", "deque"})
_DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
_LOGS = frozenset({"debug", "info", "warning", "error", "exception", "critical", "log", "flush"})
_HARMLESS = frozenset({"sleep", "empty_cache", "synchronize", "collect", "barrier", "makedirs",
                       "mkdir", "unlink", "rename", "rmtree", "dump", "warn"})  # fmt: skip


class ModuleNames:
    """Resolves the module-level names of a file."""

    def __init__(self, finder: Finder, module: Module) -> None:
        self.finder, self.module = finder, module
        self._known: dict[str, NameKind] = {}

    @cached_property
    def source(self) -> SourceFile:
        """The parsed file."""
        return self.finder.source(str(self.module.path))

    def kind(self, name: str) -> NameKind:
        """Return the kind of a name; a name that the file does not bind may be of any kind."""
        if name not in self._known:
            self._known[name] = "value"  # in case modules import each other
            self._known[name] = self._found(name)
        return self._known[name]

    def _found(self, name: str) -> NameKind:
        units = self.source.units.get(name)
        if units is None:
            return "builtin" if hasattr(builtins, name) and not self.source.stars else "value"
        kinds: set[NameKind] = set()
        for unit in units:
            statement = unit.nodes[-1]
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
                kinds.add("function")
            elif isinstance(statement, ast.ClassDef):
                kinds.add("class")
            elif isinstance(statement, (ast.Import, ast.ImportFrom)):
                kinds |= {self.imported(ref) for ref in unit.scan.imports}
            else:
                kinds.add("value")
        return kinds.pop() if len(kinds) == 1 else "value"

    def imported(self, ref: ast_digest.ImportRef) -> NameKind:
        """Return the kind of an import's binding."""
        for target in self.finder.targets(self.module, ref):
            module = target.module
            if target.role != "whole" or module is None:
                continue
            if target.attribute is None:
                return "module"
            if not module.is_source:
                return "value"
            return ModuleNames(self.finder, module).kind(target.attribute)
        base = ref.module.partition(".")[0]
        first = self.finder.find(base) if base and not ref.level else None
        return "module" if first is not None and first.kind == "own" else "library"


@dataclass
class Escapes:
    """Places that receive state, besides the functions that have it as ``self``.

    Attributes:
        passed: Names of the user's functions that get state as an argument; "" for any function.
        to_objects: Whether methods of objects in the state get state as an argument.
        returned: Whether a user's function returns state.
    """

    passed: frozenset[str] = frozenset()
    to_objects: bool = False
    returned: bool = False


@dataclass
class _Locals:
    """The names that a function and its nested functions bind, and the assigned expressions."""

    bound: dict[str, list[ast.expr | None]] = field(default_factory=dict)
    imports: dict[str, NameKind] = field(default_factory=dict)
    refs: list[ast_digest.ImportRef] = field(default_factory=list)

    def bind(self, target: ast.AST, value: ast.expr | None) -> None:
        for node in ast.walk(target):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.bound.setdefault(node.id, []).append(value)


class Effects:
    """Searches a function and its nested functions for effects that outlast a call.

    Args:
        node: The function.
        names: The names of its module.
        shared: Parameters that hold state, such as ``self``.
        methods: Methods of the class of ``self``, which are analyzed separately.
        escapes: The results for other functions; this function's are added.
    """

    def __init__(
        self,
        node: Function,
        names: ModuleNames,
        shared: Collection[str],
        methods: Collection[str],
        escapes: Escapes,
    ) -> None:
        self._node, self._names, self._methods, self._escapes = node, names, methods, escapes
        self._own = set(shared)
        self._locals = self._collected()
        self._pure = set(shared)
        self._state = set(shared)
        self._spread()

    def found(self) -> Iterator[str]:
        """Yield descriptions of the effects that outlast a call."""
        yield from self.modules_passed()
        scoped = {
            id(item.context_expr)
            for node in ast.walk(self._node)
            if isinstance(node, (ast.With, ast.AsyncWith))
            for item in node.items
        }
        for node in ast.walk(self._node):
            yield from self._decorated(node)
            if isinstance(node, ast.Global):
                yield f"line {node.lineno}: `global {', '.join(node.names)}`"
            elif _is_written(node):
                if self._is_outside(node.value):
                    yield f"line {node.lineno}: `{ast.unparse(node)}` is changed"
            elif isinstance(node, ast.AugAssign):
                if self._is_state(node.target, False):
                    yield f"line {node.lineno}: `{ast.unparse(node.target)}` is changed"
            elif isinstance(node, ast.Expr):
                call = node.value.value if isinstance(node.value, ast.Await) else node.value
                if isinstance(call, ast.Call) and not self._may_be_dropped(call):
                    yield f"line {node.lineno}: `{ast.unparse(call)}` is called for its effect"
            elif isinstance(node, ast.Call) and id(node) not in scoped and self._changes(node):
                yield f"line {node.lineno}: `{ast.unparse(node.func)}` may change what outlasts it"

    def stores(self) -> Iterator[str]:
        """Yield the writes to the user's modules and module-level names."""
        for node in ast.walk(self._node):
            if isinstance(node, (ast.Global, ast.Nonlocal)):
                yield f"line {node.lineno}: `{ast.unparse(node)}`"
            elif _is_written(node) and self._is_state(node.value, False):
                yield f"line {node.lineno}: `{ast.unparse(node)}` is changed"

    def settings(self) -> Iterator[tuple[str, bool]]:
        """Yield the settings made in libraries, and whether each seeds a random generator."""
        for node in ast.walk(self._node):
            place = node.func if isinstance(node, ast.Call) else node
            if not isinstance(place, (ast.Name, ast.Attribute, ast.Subscript)):
                continue
            root = ast_digest.root_name(place)
            if root is None or self._kind(root) != "library":
                continue
            name = place.attr if isinstance(place, ast.Attribute) else _name(place) or ""
            sets = isinstance(node, ast.Call) and (_is_setter(name) or name in _CHANGES_OBJECT)
            if sets or _is_written(node):
                yield f"line {place.lineno}: `{ast.unparse(place)}`", "seed" in name

    def own_imports(self) -> Iterator[str]:
        """Yield its imports of user modules, which resolve to the call's modules at run time."""
        for name, kind in self._locals.imports.items():
            if kind != "library":
                yield f"`{name}` is imported in a function"

    def modules_passed(self) -> Iterator[str]:
        """Yield the user's modules that are used other than by reading an attribute."""
        taken = {id(n.value) for n in ast.walk(self._node) if isinstance(n, ast.Attribute)}
        for node in ast.walk(self._node):
            if not isinstance(node, ast.Name) or id(node) in taken:
                continue
            if self._kind(node.id) == "module":
                yield f"line {node.lineno}: the module `{node.id}` is passed on"

    def _collected(self) -> _Locals:
        found = _Locals()
        for node in ast.walk(self._node):
            if isinstance(node, FUNCTIONS):
                for name in parameters(node):
                    found.bound.setdefault(name, [])
                if not isinstance(node, ast.Lambda) and node is not self._node:
                    found.bound.setdefault(node.name, [])
            elif isinstance(node, ast.ClassDef):
                found.bound.setdefault(node.name, [])
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                for ref in ast_digest.import_refs(node, False):
                    found.refs.append(ref)
                    kind = self._names.imported(ref)
                    if found.imports.get(ref.bound, "library") == "library":
                        found.imports[ref.bound] = kind
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    found.bind(target, node.value)
            elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.NamedExpr)):
                found.bind(node.target, node.value)
            elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
                found.bind(node.target, node.iter)
            elif isinstance(node, ast.withitem) and node.optional_vars is not None:
                found.bind(node.optional_vars, node.context_expr)
            elif isinstance(node, ast.ExceptHandler) and node.name:
                found.bound.setdefault(node.name, [])
            elif isinstance(node, ast.Match):
                for inner in ast.walk(node):
                    captured = getattr(inner, "name", None) or getattr(inner, "rest", None)
                    if isinstance(inner, ast.pattern) and captured:
                        found.bound.setdefault(captured, []).append(node.subject)
        return found

    def _spread(self) -> None:
        """Compute the local names that may refer to state, until there are no more."""
        if self._escapes.passed & {"", getattr(self._node, "name", "")}:
            self._pure |= set(parameters(self._node))
            self._state |= set(parameters(self._node))
        inner = [each for each in ast.walk(self._node) if isinstance(each, FUNCTIONS)]
        inside = {name for each in inner if each is not self._node for name in parameters(each)}
        inside -= self._own
        while True:
            before = len(self._pure) + len(self._state)
            if "" in self._escapes.passed or self._passes_inside(inner):
                self._pure |= inside
                self._state |= inside
            for name, values in self._locals.bound.items():
                given = [value for value in values if value is not None]
                if any(self._is_state(value, True) for value in given):
                    self._pure.add(name)
                if any(self._is_state(value, False) for value in given):
                    self._state.add(name)
            if len(self._pure) + len(self._state) == before:
                return

    def _passes_inside(self, inner: Sequence[Function]) -> bool:
        """Return whether state is passed to a nested function, as by `map` or `sorted`."""
        named = {getattr(each, "name", "") for each in inner}
        for node in ast.walk(self._node):
            if isinstance(node, ast.Call):
                values = [*_arguments(node), node.func]
                calls = [v for v in values if isinstance(v, ast.Lambda) or _name(v) in named]
                if calls and any(self._is_state(v, False) for v in values[:-1] if v not in calls):
                    return True
        return False

    def _kind(self, name: str) -> NameKind:
        if name in self._locals.imports:
            return self._locals.imports[name]
        return "local" if name in self._locals.bound else self._names.kind(name)

    def _is_state(self, node: ast.expr, pure: bool) -> bool:
        """Return whether an expression may be state, or hold state.

        Args:
            node: The expression.
            pure: Whether to consider only names, attributes and items, and no call results.
        """
        if isinstance(node, ast.Name):
            kind = self._kind(node.id)
            if kind == "local" or node.id in self._own:
                return node.id in (self._pure if pure else self._state)
            return kind in ("value", "class", "module", "function")
        if isinstance(node, (ast.Attribute, ast.Subscript, ast.Starred, ast.Await, ast.NamedExpr)):
            return self._is_state(node.value, pure)
        if isinstance(node, ast.Call):
            return not pure and self._gives_state(node)
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp)):
            return self._is_state(node.elt, pure)
        if isinstance(node, ast.DictComp):
            return self._is_state(node.value, pure)
        inner: Sequence[ast.expr | None] = ()
        if isinstance(node, ast.IfExp):
            inner = (node.body, node.orelse)
        elif isinstance(node, ast.BoolOp):
            inner = node.values
        elif isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            inner = node.elts
        elif isinstance(node, ast.Dict):
            inner = node.values
        return any(item is not None and self._is_state(item, pure) for item in inner)

    def _gives_state(self, call: ast.Call) -> bool:
        func = call.func
        if isinstance(func, ast.Attribute):
            if func.attr in _GIVES_PARTS | _GIVES_VIEWS and self._is_state(func.value, False):
                return True
            if func.attr in self._methods and self._is_self(func.value):
                return self._escapes.returned
            name = func.attr
        else:
            name = func.id if isinstance(func, ast.Name) else ""
        if name in _PASSES_ON | _GIVES_VIEWS:
            return any(self._is_state(value, False) for value in _arguments(call))
        if isinstance(func, ast.Name) and self._kind(name) in ("function", "local", "value"):
            return self._escapes.returned
        return isinstance(func, ast.Name) and name == "super"

    def _is_self(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Call):
            return isinstance(node.func, ast.Name) and node.func.id == "super"
        return isinstance(node, ast.Name) and node.id in self._own

    def _is_outside(self, node: ast.expr) -> bool:
        """Return whether an object may outlast this call."""
        if self._is_made_here(node):
            return False
        if self._is_state(node, False):
            return True
        root = ast_digest.root_name(node)
        return root is not None and self._kind(root) == "library"

    def _is_made_here(self, node: ast.expr) -> bool:
        """Return whether an expression is a container that this function has created."""
        if not isinstance(node, ast.Name) or node.id in self._own:
            return False
        values = self._locals.bound.get(node.id, [])
        return bool(values) and all(
            isinstance(value, _DISPLAYS)
            or (isinstance(value, ast.Call) and _name(value.func) in _MAKES_CONTAINERS)
            for value in values
        )

    def _may_be_dropped(self, call: ast.Call) -> bool:
        """Return whether a call with an unused result has no lasting effects.

        The user's functions that it runs are analyzed separately.
        """
        func = call.func
        if isinstance(func, ast.Name):
            return self._kind(func.id) != "library" or func.id in _HARMLESS
        if not isinstance(func, ast.Attribute):
            return False
        if func.attr in _LOGS or (func.attr in self._methods and self._is_self(func.value)):
            return True
        root = ast_digest.root_name(func.value)
        if root is not None and self._kind(root) == "module":
            return isinstance(func.value, ast.Name)  # a function of the user's
        if root is not None and self._kind(root) == "library":
            return func.attr in _HARMLESS
        if root is not None and self._kind(root) == "builtin":  # such as `list.append(items, 1)`
            return not any(self._is_state(value, False) for value in _arguments(call))
        return self._is_made_here(func.value) or not self._is_state(func.value, False)

    def _changes(self, call: ast.Call) -> bool:
        """Return whether a call may change state, and record state passed to user functions."""
        func = call.func
        self._note_passed(call)
        given = any(self._is_state(value, False) for value in _arguments(call))
        if any(_is_in_place(keyword) for keyword in call.keywords) and (
            given or (isinstance(func, ast.Attribute) and self._is_state(func.value, False))
        ):
            return True
        if isinstance(func, ast.Name):
            kind = self._kind(func.id)
            if kind == "library" and given and _is_mutator(func.id):
                return True
            if kind == "builtin" and func.id in _FORBIDDEN:
                return True
            if kind == "builtin" and func.id == "next":
                return given
            return kind == "library" and _is_setter(func.id)
        if not isinstance(func, ast.Attribute):
            return False
        if func.attr in self._methods and self._is_self(func.value):
            return False
        if self._is_state(func.value, True) and func.attr in _CHANGES_MODEL:
            return True
        is_kept = self._is_state(func.value, False) and not self._is_made_here(func.value)
        if is_kept and _is_mutator(func.attr):
            return True
        root = ast_digest.root_name(func)
        of_root = None if root is None else self._kind(root)
        if of_root in ("library", "builtin") and given and _is_mutator(func.attr):
            return True
        return of_root == "library" and _is_setter(func.attr)

    def _note_passed(self, call: ast.Call) -> None:
        func = call.func
        root = ast_digest.root_name(func)
        users = isinstance(func, ast.Name) and self._kind(func.id) in ("function", "local", "value")
        if not any(self._is_state(value, False) for value in _arguments(call)):
            return
        name = func.id if isinstance(func, ast.Name) else ""
        if isinstance(func, ast.Attribute):
            users = func.attr in self._methods and self._is_self(func.value)
            users |= root is not None and self._kind(root) == "module"
            self._escapes.to_objects |= not users and self._is_state(func.value, False)
            name = func.attr
        if users and name in self._locals.bound:
            name = ""  # it may be any function
        if users:
            self._escapes.passed |= {name, *self._imported_as(name)}

    def _imported_as(self, name: str) -> Iterator[str]:
        """Yield the original names of an imported name."""
        refs = [ref for ref in self._locals.refs if ref.bound == name]
        for ref in (*refs, *self._names.source.import_refs(name)):
            yield ref.name or name

    def note_returned(self) -> None:
        """Record in the escapes whether the function returns state."""
        for node in ast.walk(self._node):
            value = getattr(node, "value", None)
            if isinstance(node, (ast.Return, ast.Yield, ast.YieldFrom)) and value is not None:
                self._escapes.returned |= self._is_state(value, False)
            elif isinstance(node, ast.Lambda):
                self._escapes.returned |= self._is_state(node.body, False)

    def _decorated(self, node: ast.AST) -> Iterator[str]:
        for decorator in getattr(node, "decorator_list", ()):
            text = ast.unparse(decorator)
            if "cache" in text.lower() or "memo" in text.lower():
                yield f"line {decorator.lineno}: `@{text}` keeps results"


def _is_written(node: ast.AST) -> TypeGuard[ast.Attribute | ast.Subscript]:
    """Return whether a node is an attribute or item that is stored or deleted."""
    return isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load)


def _is_in_place(keyword: ast.keyword) -> bool:
    """Return whether an argument requests a result in the memory of an argument."""
    name = keyword.arg or ""
    value = keyword.value.value if isinstance(keyword.value, ast.Constant) else ...
    if name == "copy":
        return value is not True
    return (name in ("out", "inplace") or name.startswith("overwrite_")) and value is not False


def parameters(node: Function) -> list[str]:
    """Return the names of a function's parameters."""
    args = node.args
    found = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
    return [each.arg for each in found if each is not None]


def _name(node: ast.expr) -> str | None:
    return node.id if isinstance(node, ast.Name) else None


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _is_mutator(name: str) -> bool:
    if name in _CHANGES_OBJECT or name.startswith(_CHANGES_OBJECT_BEGINNINGS):
        return True
    return name.endswith("_") and not name.startswith("_")


def _is_setter(name: str) -> bool:
    return name in _CHANGES_SETTINGS or name.startswith(_CHANGES_SETTINGS_BEGINNINGS)
