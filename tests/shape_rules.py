"""The rules of the shape test: each takes one parsed source file and returns what is wrong with it.

Owns: the limits and how they are measured.  Does not own: which files are checked (``test_shape.py``).
All rules read syntax trees only; nothing is imported or executed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Final

MAX_FILE_LINES: Final = 400
MAX_FUNCTION_LINES: Final = 60
MAX_PARAMETERS: Final = 6
MAX_METHODS: Final = 14

FORBIDDEN_SUFFIXES: Final = ("Manager", "Helper", "Helpers", "Util", "Utils", "Handler", "Processor")
FORBIDDEN_MODULES: Final = frozenset({"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"})
COMMAND_DECORATORS: Final = frozenset({"command", "callback"})

MUTABLE_LITERALS: Final = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp)
MUTABLE_CALLS: Final = frozenset(
    {"list", "dict", "set", "bytearray", "defaultdict", "deque", "OrderedDict", "Counter", "ChainMap", "array"}
    | {"WeakKeyDictionary", "WeakValueDictionary", "WeakSet", "SimpleNamespace", "count", "cycle", "iter"}
)
IMMUTABLE_CALLS: Final = frozenset(
    {"tuple", "frozenset", "MappingProxyType", "int", "float", "str", "bytes", "bool", "range", "len", "min", "max"}
    | {"NewType", "TypeVar", "TypeVarTuple", "ParamSpec", "namedtuple", "NamedTuple", "TypedDict", "Enum", "getLogger"}
    | {"compile", "Struct", "Path", "version", "attrgetter", "itemgetter"}
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Source:
    """One Python file: its place in the package (``cache/kinds.py``), its dotted module name, text and tree."""

    path: str
    module: str
    text: str
    tree: ast.Module

    @classmethod
    def parse(cls, path: str, text: str, package: str = "ostinato") -> Source:
        parts = [package, *Path(path).with_suffix("").parts]
        if parts[-1] == "__init__":
            parts.pop()
        return cls(path, ".".join(parts), text, ast.parse(text, filename=path))

    def at(self, node: ast.AST, message: str) -> str:
        return f"{self.path}:{getattr(node, 'lineno', 1)}: {message}"


def read_package(root: Path) -> tuple[Source, ...]:
    """All Python files under ``root``, the directory of the package."""
    files = sorted(root.rglob("*.py"))
    return tuple(Source.parse(file.relative_to(root).as_posix(), file.read_text("utf-8"), root.name) for file in files)


# ---------------------------------------------------------------------------------------------------------------- sizes


def long_file(source: Source) -> list[str]:
    lines = len(source.text.splitlines())
    return [f"{source.path}: {lines} lines, limit {MAX_FILE_LINES}"] if lines > MAX_FILE_LINES else []


def long_functions(source: Source) -> list[str]:
    found = []
    for function in _functions(source.tree):
        lines = (function.end_lineno or function.lineno) - function.lineno + 1
        if lines > MAX_FUNCTION_LINES:
            found.append(source.at(function, f"{function.name} has {lines} lines, limit {MAX_FUNCTION_LINES}"))
    return found


def wide_functions(source: Source) -> list[str]:
    """Parameters, without ``self`` and ``cls``.  A command's parameters are its flags, so commands are exempt."""
    methods = {id(item) for cls in _classes(source.tree) for item in cls.body if isinstance(item, Function)}
    found = []
    for function in _functions(source.tree):
        names = {_last_name(decorator) for decorator in function.decorator_list}
        if names & COMMAND_DECORATORS:
            continue
        spec = function.args
        count = len(spec.posonlyargs) + len(spec.args) + len(spec.kwonlyargs) + bool(spec.vararg) + bool(spec.kwarg)
        if id(function) in methods and "staticmethod" not in names:
            count -= 1
        if count > MAX_PARAMETERS:
            found.append(source.at(function, f"{function.name} has {count} parameters, limit {MAX_PARAMETERS}"))
    return found


def large_classes(source: Source) -> list[str]:
    """Every function in a class body counts, private and special ones too; overloads and setters count once."""
    found = []
    for cls in _classes(source.tree):
        count = len({item.name for item in cls.body if isinstance(item, Function)})
        if count > MAX_METHODS:
            found.append(source.at(cls, f"class {cls.name} has {count} methods, limit {MAX_METHODS}"))
    return found


def vague_names(source: Source) -> list[str]:
    classes = (cls for cls in _classes(source.tree) if cls.name.endswith(FORBIDDEN_SUFFIXES))
    return [source.at(cls, f"class {cls.name}: say what it is, not that it manages") for cls in classes]


# ---------------------------------------------------------------------------------------------------------------- state


def module_state(source: Source) -> list[str]:
    """Mutable objects bound at module level, and functions that rebind a module's names."""
    found = [source.at(node, "global: no function rebinds a module's name") for node in _globals(source.tree)]
    for node in _module_statements(source.tree.body):
        match node:
            case ast.Assign(targets=targets, value=value):
                names, final = [_last_name(target) for target in targets], False
            case ast.AnnAssign(target=target, annotation=annotation, value=ast.expr() as value):
                names, final = [_last_name(target)], "Final" in ast.unparse(annotation)
            case ast.AugAssign():
                found.append(source.at(node, "a module-level name is changed in place"))
                continue
            case _:
                continue
        if names != ["__all__"] and not _is_constant(value, final or all(name.isupper() for name in names)):
            found.append(source.at(node, f"{', '.join(names)}: mutable (or not Final) state at module level"))
    return found


def _globals(tree: ast.Module) -> Iterator[ast.Global]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Global))


def _module_statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run at import time outside functions and classes."""
    for node in body:
        yield node
        if not isinstance(node, Function | ast.ClassDef):
            for field in ("body", "orelse", "finalbody"):
                yield from _module_statements(getattr(node, field, []))
            for handler in getattr(node, "handlers", []):
                yield from _module_statements(handler.body)


def _is_constant(value: ast.expr, declared: bool) -> bool:
    """True if the value cannot change.  ``declared``: the name is Final or UPPERCASE, so an unknown call is trusted."""
    match value:
        case ast.Call(func=func):
            name = _last_name(func)
            return name in IMMUTABLE_CALLS or (declared and name not in MUTABLE_CALLS)
        case ast.Tuple(elts=parts) | ast.BoolOp(values=parts):
            return all(_is_constant(part, declared) for part in parts)
        case ast.BinOp(left=one, right=two) | ast.IfExp(body=one, orelse=two):
            return _is_constant(one, declared) and _is_constant(two, declared)
        case ast.NamedExpr(value=inner) | ast.Starred(value=inner):
            return _is_constant(inner, declared)
        case _:
            return not isinstance(value, MUTABLE_LITERALS)


# --------------------------------------------------------------------------------------------------------------- safety


def unsafe_code(source: Source) -> list[str]:
    """Ways to run code that came in as data: unpicklers, ``eval``, ``exec``, ``torch.load``."""
    found = []
    for node, name in _imported_names(source.tree):
        if name.split(".")[0] in FORBIDDEN_MODULES or name == "torch.load":
            found.append(source.at(node, f"import of {name}"))
    torch_names = _aliases(source.tree, "torch")
    for node in ast.walk(source.tree):
        match node:
            case ast.Call(func=ast.Name(id="eval" | "exec" as name)):
                found.append(source.at(node, f"{name}()"))
            case ast.Attribute(value=ast.Name(id=owner), attr="load") if owner in torch_names:
                found.append(source.at(node, "torch.load"))
            case ast.Attribute(value=ast.Name(id="builtins"), attr="eval" | "exec" as name):
                found.append(source.at(node, f"builtins.{name}"))
            case ast.keyword(arg="allow_pickle", value=value) if not _is_false(value):
                found.append(source.at(node, "allow_pickle"))
            case ast.Call(func=func, args=[ast.Constant(value=str(name)), *_]):
                if _last_name(func) in {"import_module", "__import__"} and name.split(".")[0] in FORBIDDEN_MODULES:
                    found.append(source.at(node, f"import of {name}"))
    return found


def _aliases(tree: ast.Module, module: str) -> set[str]:
    """The names under which ``module`` is imported in this file, its own included."""
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.Import))
    return {alias.asname or module for node in imports for alias in node.names if alias.name == module} | {module}


def misplaced_torch(source: Source) -> list[str]:
    """Torch is imported in the runtime, in movers and in the plug-in's worker, nowhere else."""
    folder, _, file = source.path.rpartition("/")
    if source.path.startswith("runtime/") or source.path == "integrations/vllm/worker.py":
        return []
    if folder == "connectors" and file.endswith("_mover.py"):
        return []
    names = _imported_names(source.tree)
    return [source.at(node, f"import of {name}") for node, name in names if name.split(".")[0] == "torch"]


def inner_config(source: Source) -> list[str]:
    """Configs are read at the edge; the cache, transfers and the hierarchy get plain arguments."""
    if source.path.split("/")[0] not in {"cache", "transfer", "hierarchy"}:
        return []
    names = _imported_names(source.tree, source)
    return [source.at(node, f"import of {name}") for node, name in names if name.startswith("ostinato.config")]


# -------------------------------------------------------------------------------------------------------------- imports


def import_graph(sources: Sequence[Source]) -> dict[str, set[str]]:
    """Module -> modules it imports when it runs (function-level imports included, ``TYPE_CHECKING`` blocks not)."""
    modules = {source.module for source in sources}
    graph: dict[str, set[str]] = {}
    for source in sources:
        targets = set()
        for _, name in _imported_names(source.tree, source, typing_only=False):
            candidates = (name, name.rpartition(".")[0])
            targets.update([next((module for module in candidates if module in modules), "")])
        graph[source.module] = targets - {"", source.module}
    return graph


def import_cycle(sources: Sequence[Source]) -> list[str]:
    """One cycle among the modules, as a list that starts and ends with the same name; empty if there is none."""
    try:
        TopologicalSorter(import_graph(sources)).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def _imported_names(
    tree: ast.Module, source: Source | None = None, typing_only: bool = True
) -> Iterator[tuple[ast.AST, str]]:
    """Absolute dotted names; ``from a import b`` gives ``a.b``.  Relative imports need ``source`` to be resolved."""
    for node in _nodes(tree, typing_only):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = _base_module(node, source)
            for alias in node.names:
                yield node, f"{base}.{alias.name}" if base else alias.name


def _base_module(node: ast.ImportFrom, source: Source | None) -> str:
    if not node.level or source is None:
        return node.module or ""
    is_package = source.path.endswith("__init__.py")
    parts = source.module.split(".")
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join([*parts, node.module] if node.module else parts)


def _nodes(node: ast.AST, typing_only: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and not typing_only and _last_name(child.test) == "TYPE_CHECKING":
            for other in child.orelse:
                yield other
                yield from _nodes(other, typing_only)
        else:
            yield child
            yield from _nodes(child, typing_only)


# ---------------------------------------------------------------------------------------------------------------- trees


def _functions(tree: ast.Module) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def _classes(tree: ast.Module) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def _last_name(node: ast.AST) -> str:
    """``a.b.c(...)`` -> ``c``."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Call(func=inner) | ast.Subscript(value=inner):
            return _last_name(inner)
        case _:
            return ""
