"""Which of a model's elementwise calls let neighbours in, and how they are kept from it.

Owns: the search (one forward pass under a recording mode) and the three ways of replacing what was found.  Does not
own: how an aligned call is made (``elementwise``), the search for mixers (``mixers``).

Which functions differ at the end of a range depends on dtype and processor, so it is tried for each way of calling that
the forward pass shows.  A module that makes such a call gets, whichever comes first::

    an activation module          its forward over an aligned line
    calls in its own forward      a copy of the forward in which these calls are aligned ones (from its source)
    calls anywhere else           the mode around its forward: right, but slow

Runs once per model, at load.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ostinato.runtime.elementwise import (
    ELEMENTWISE,
    OVER_ROWS,
    AlignedMode,
    Call,
    Way,
    aligned_call,
    call_at,
    lies_apart,
    over_aligned_line,
    tensor_place,
    way_of,
)

_TRIAL: Final = 4096
_TRIAL_PIECE: Final = 7
"""Fewer elements than a vector step of any instruction set: such a piece is all tail."""
_ACTIVATIONS: Final = ("torch.nn.modules.activation", "transformers.activations")
_DROPPED: Final = frozenset({"deprecate_kwarg", "force_accelerate_hooks"})
"""Decorators that a copy of a forward can do without: old names of arguments, offloading."""
_POWERS: Final = frozenset({"pow", "__pow__", "__rpow__"})
_CALL, _POWER, _ACTIVATE = "__ostinato_call", "__ostinato_power", "__ostinato_activate"


@dataclass(frozen=True, slots=True)
class Site:
    """A place that lets neighbours in: in ``module``, by name, the code ``code`` calls ``functions``."""

    module: str
    code: CodeType
    function: str


@dataclass(frozen=True, slots=True)
class Unaligned:
    """What one forward pass showed: ``sites``, and ways of calling that need no line."""

    sites: frozenset[Site]
    plain: frozenset[Way]


def find_unaligned(model: nn.Module, run: Callable[[], object], replaced: frozenset[str] = frozenset()) -> Unaligned:
    """The sites of ``model`` as seen in ``run``, a forward pass of it; paths that it does not take are not seen.

    ``replaced``: names of functions whose insides do not count, because others will stand in their place.
    """
    recording = _Recording(replaced)
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(recording.entering(name)))
        handles.append(module.register_forward_hook(recording.leaving(), always_call=True))
    try:
        with recording:
            run()
    finally:
        for handle in handles:
            handle.remove()
    plain = frozenset(way for way, differs in recording.ways.items() if not differs)
    return Unaligned(frozenset(recording.sites), plain)


def align(model: nn.Module, found: Unaligned, replaced: Collection[str] = ()) -> tuple[str, ...]:
    """Make the calls that were found aligned ones; names of modules, with a ``*`` where that costs a mode.

    ``replaced``: names of modules that run other code than what was found.  To be called after the last replacement of
    a module's ``forward``.
    """
    by_module: dict[str, list[Site]] = {}
    for site in found.sites:
        by_module.setdefault(site.module, []).append(site)
    done = []
    for name, module in list(model.named_modules()):
        sites = by_module.get(name)
        if sites is None or name in replaced:
            continue
        if _is_activation(module):
            module.forward = _over_line(module.forward)
        elif (copy := _copy_aligned(module, sites, found.plain)) is not None:
            module.forward = MethodType(copy, module)
        else:
            module.forward = _within(AlignedMode(found.plain), module.forward)
            name += "*"
        done.append(name)
    return tuple(done)


# ---------------------------------------------------------------------------------------------------------- recording


class _Recording(TorchFunctionMode):
    """Notes which module makes which calls.  Tries each way of calling once."""

    def __init__(self, replaced: frozenset[str]) -> None:
        super().__init__()
        self.sites: set[Site] = set()
        self.ways: dict[Way, bool] = {}
        self._replaced = replaced
        self._stack: list[str] = [""]

    def entering(self, name: str) -> Callable[..., None]:
        return lambda *_: self._stack.append(name)

    def leaving(self) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            self._stack.pop()

        return hook

    def __torch_function__(
        self, func: Call, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._differs(func, args, kwargs):
            code = _calling_code(sys._getframe(1), self._replaced)
            if code is not None:
                self.sites.add(Site(self._stack[-1], code, func.__name__))
        return func(*args, **kwargs)

    def _differs(self, func: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        if func in OVER_ROWS:
            return lies_apart(args)
        if func not in ELEMENTWISE or (place := tensor_place(args, kwargs)) is None:
            return False
        way = way_of(func, args, kwargs, place)
        if way is None:
            return True
        if way not in self.ways:
            self.ways[way] = _tail_differs(call_at(func, args, kwargs, place), way.dtype)
        return self.ways[way]


def _calling_code(frame: FrameType | None, replaced: frozenset[str]) -> CodeType | None:
    """The code outside of torch and activations that made the call; None inside of a function that is ``replaced``."""
    code = None
    while frame is not None:
        if frame.f_code.co_name in replaced:
            return None
        package = str(frame.f_globals.get("__name__", ""))
        if code is None and package.split(".")[0] != "torch" and package not in _ACTIVATIONS:
            code = frame.f_code
        frame = frame.f_back
    return code


def _tail_differs(call: Callable[[Tensor], Tensor], dtype: torch.dtype) -> bool:
    """Whether numbers at the end of a range may come out otherwise than inside it."""
    if not dtype.is_floating_point:
        return True
    line = (3 * torch.randn(_TRIAL, generator=torch.Generator().manual_seed(_TRIAL))).to(dtype)
    whole = call(line.clone())
    pieces = torch.cat([call(piece.clone()) for piece in torch.split(line, _TRIAL_PIECE)])
    same = (whole == pieces) | (whole.isnan() & pieces.isnan())
    return not bool(same.all())


# ---------------------------------------------------------------------------------------------------------- replacing


def _is_activation(module: nn.Module) -> bool:
    """By place and by trial: a line of numbers gives, number by number, what the numbers give alone."""
    if type(module).__module__ not in _ACTIVATIONS or next(module.parameters(), None) is not None:
        return False
    line = torch.linspace(-2.0, 2.0, 8)
    try:
        with torch.inference_mode():
            whole = module(line)
            apart = torch.cat([module(line[i : i + 1]) for i in range(line.numel())])
    except (RuntimeError, TypeError, IndexError, ValueError):
        return False
    return whole.shape == line.shape and torch.allclose(whole, apart, atol=1e-5)


def _over_line(forward: Call) -> Call:
    @functools.wraps(forward)
    def run(values: Tensor) -> Tensor:
        return over_aligned_line(forward, values)

    return run


def _within(mode: AlignedMode, forward: Call) -> Call:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return forward(*args, **kwargs)

    return run


def _copy_aligned(module: nn.Module, sites: list[Site], plain: frozenset[Way]) -> FunctionType | None:
    """The module's forward with the calls of ``sites`` aligned; None when they cannot all be found in its source."""
    function = inspect.unwrap(getattr(module.forward, "__func__", module.forward))
    if not isinstance(function, FunctionType) or any(site.code is not function.__code__ for site in sites):
        return None
    definition = _definition(function)
    if definition is None:
        return None
    rewrite = _Rewrite(frozenset(site.function for site in sites))
    rewrite.visit(definition)
    if not rewrite.complete():
        return None
    code = _compile(definition, function.__code__)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    if code is None or any(name not in cells for name in code.co_freevars):
        return None
    closure = tuple(cells[name] for name in code.co_freevars)
    copy = FunctionType(
        code, {**function.__globals__, **_helpers(plain)}, function.__name__, function.__defaults__, closure
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _definition(function: FunctionType) -> ast.FunctionDef | None:
    """The source of ``function`` without its decorators, or None where it is not to be had or these are needed."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError, TypeError):
        return None
    match tree.body:
        case [ast.FunctionDef(decorator_list=decorators) as definition]:
            names = {ast.unparse(item).partition("(")[0] for item in decorators}
            definition.decorator_list = []
            ast.increment_lineno(definition, function.__code__.co_firstlineno - 1)
            return definition if names <= _DROPPED and not _has_private_names(definition) else None
        case _:
            return None


def _has_private_names(definition: ast.FunctionDef) -> bool:
    """Names like ``self.__x`` mean something else outside of their class."""
    names = {node.attr for node in ast.walk(definition) if isinstance(node, ast.Attribute)}
    return any(name.startswith("__") and not name.endswith("__") for name in names)


def _compile(definition: ast.FunctionDef, original: CodeType) -> CodeType | None:
    """The code of ``definition``, compiled where ``original``'s free variables are free variables as well."""
    definition.args.defaults = [ast.Constant(None) for _ in definition.args.defaults]
    definition.args.kw_defaults = [item and ast.Constant(None) for item in definition.args.kw_defaults]
    definition.returns = None
    for argument in ast.walk(definition.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    outer = ast.parse(f"def outer({', '.join(original.co_freevars)}): pass")
    assert isinstance(outer.body[0], ast.FunctionDef)
    outer.body[0].body = [definition]
    whole = compile(ast.fix_missing_locations(outer), original.co_filename, "exec", dont_inherit=True)
    for middle in whole.co_consts:
        if isinstance(middle, CodeType):
            return next((item for item in middle.co_consts if isinstance(item, CodeType)), None)
    return None


class _Rewrite(ast.NodeTransformer):
    """Turns calls of the named functions into aligned ones, and counts them off."""

    def __init__(self, functions: frozenset[str]) -> None:
        self._functions = functions
        self._found: set[str] = set()

    def complete(self) -> bool:
        """Whether all functions were found, or may be behind an activation that is looked up by name."""
        return _ACTIVATE in self._found or self._functions <= self._found

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        match node.func:
            case ast.Attribute(value=owner, attr=name) if name in self._functions:
                self._found.add(name)
                node.args = [owner, ast.Constant(name), *node.args]
                node.func = ast.Name(_CALL, ast.Load())
            case ast.Subscript(value=ast.Name(id="ACT2FN")):
                self._found.add(_ACTIVATE)
                node.args = [node.func, *node.args]
                node.func = ast.Name(_ACTIVATE, ast.Load())
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Pow) or not self._functions & _POWERS:
            return node
        self._found |= self._functions & _POWERS
        return ast.Call(ast.Name(_POWER, ast.Load()), [node.left, node.right], [])


def _helpers(plain: frozenset[Way]) -> dict[str, Call]:
    """What rewritten code calls: for ``owner.name(...)``, for ``a ** b``, and for ``ACT2FN[...](a)``."""

    def call(owner: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        if isinstance(owner, Tensor):
            return aligned_call(plain, getattr(Tensor, name), (owner, *args), kwargs)
        return aligned_call(plain, getattr(owner, name), args, kwargs)

    def power(base: Any, exponent: Any) -> Any:
        if isinstance(base, Tensor) or isinstance(exponent, Tensor):
            return aligned_call(plain, torch.pow, (base, exponent), {})
        return base**exponent

    return {_CALL: call, _POWER: power, _ACTIVATE: over_aligned_line}
