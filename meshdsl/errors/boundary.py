"""The boundary of the public names: an error that leaves a public function has the user's line and says what is wrong.

Public functions are wrapped when they are looked up, with the methods of the classes in `METHODS`, and the functions
and iterators that a public function returns. A `MeshdslError` without a line gets the caller's. After any other error,
the arguments are compared with the annotations of the function: those that contradict them are the reason, and are
reported together. If all arguments fit, the error is not the caller's, and it passes unchanged; so does an error that
was raised by the user's own code, for example by a function that was passed.

A call that succeeds is not compared: functions check what they read. Only those in `_STORES`, which read their
arguments later, are compared at once, and flags, because every value is true or false.
"""

from __future__ import annotations

import collections.abc
import contextlib
import functools
import inspect
import sys
import traceback
import types
import typing
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Union

import numpy as np

from . import NOWHERE, MeshdslError, ShapeError, at, caller, is_ours, shown, users_line, with_users_frames

_STORES = {
    *("HubConfig", "HuggingFace", "Model", "Overlap", "WeightUpdate", "Workload", "checkpoint", "compile"),
    *("custom_vjp", "grad", "model", "param", "train.train", "value_and_grad", "vmap"),
}
_STORING_MODULES = ("init.", "optim.")
METHODS = {
    "Checkpoints",
    "Compiled",
    "Mesh",
    "Model",
    "Plan",
    "Tensor",
    "Workload",
    "train.Iterated",
    "train.TokenFiles",
}
_FUNCTIONS = {"optim.Optimizer": ("init", "update")}  # fields whose values are functions that users call
_RETURNS_FUNCTIONS = {"checkpoint", "custom_vjp", "grad", "jaxify", "value_and_grad", "vmap"}
# called in every step, or for every equation
_HOT = {"Compiled": ("__call__",), "Mesh": ("count",), "Tensor": ("__init__", "block_until_ready", "numpy")}
_NUMBERS: dict[Any, tuple[type, ...]] = {
    int: (int, np.integer),
    float: (int, float, np.integer, np.floating),
    complex: (int, float, complex, np.number),
    bool: (bool, np.bool_),
}


def guarded(value: Any, name: str) -> Any:
    """The public function or class `name`, with errors as the module describes; other values unchanged."""
    if isinstance(value, types.FunctionType):
        return value if _is_guarded(value) else _wrapped(value, name)
    init = vars(value).get("__init__") if isinstance(value, type) else None
    if isinstance(init, types.FunctionType) and not issubclass(value, BaseException) and not _is_guarded(init):
        if "__init__" not in _HOT.get(name, ()):
            value.__init__ = _wrapped(init, name, fields=_FUNCTIONS.get(name, ()))
        if name in METHODS:
            _guard_methods(value, name)
    return value


def _is_guarded(function: Callable[..., Any]) -> bool:
    return getattr(function, "is_guarded", False)


def _guard_methods(cls: type, name: str) -> None:
    for method, value in list(vars(cls).items()):
        if method in _HOT.get(name, ()) or (method.startswith("_") and method != "__call__"):
            continue
        shown = name if method == "__call__" else f"{name}.{method}"
        if isinstance(value, types.FunctionType) and not _is_guarded(value):
            setattr(cls, method, _wrapped(value, shown))
        elif isinstance(value, staticmethod | classmethod) and not _is_guarded(value.__func__):
            setattr(cls, method, type(value)(_wrapped(value.__func__, shown)))


def guarded_module(module: types.ModuleType, name: str) -> types.ModuleType:
    """A public module whose public functions and classes are guarded; so are those of its public submodules."""
    for member in module.__all__:
        value = getattr(module, member)
        if isinstance(value, types.ModuleType):
            guarded_module(value, f"{name}.{member}")
        elif not _is_guarded(value):
            setattr(module, member, guarded(value, f"{name}.{member}"))
    return module


def _wrapped(function: Callable[..., Any], name: str, fields: Iterable[str] = ()) -> Callable[..., Any]:
    """`function` with errors explained. `fields`: functions that the object created by this `__init__` holds."""
    signature = inspect.signature(function)
    stores = name in _STORES or name.startswith(_STORING_MODULES)
    flags = [p.name for p in signature.parameters.values() if p.annotation == "bool"]
    contradictions = functools.partial(_contradictions, function, signature, name)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values())
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            wrong = contradictions(args, kwargs) if _misread(error) and not _from_the_user(error) else None
            explained = wrong or _explained(error, name, values)
            if explained is None:
                raise
            called_by = sys._getframe(1).f_code.co_filename
            raise (_at_caller(explained) if is_ours(called_by) else with_users_frames(_at_caller(explained))) from None
        misfit = stores or any(flag in kwargs and not fits(kwargs[flag], bool) for flag in flags)
        if misfit and (wrong := contradictions(args, kwargs)) is not None:
            raise _at_caller(wrong)
        for field in fields:
            object.__setattr__(args[0], field, guarded(getattr(args[0], field), f"{name}.{field}"))
        return _guarded_result(result, name, values)

    call.is_guarded = True  # pyright: ignore[reportAttributeAccessIssue] - a mark for `_is_guarded`
    return call


def _guarded_result(result: Any, name: str, values: Sequence[Any]) -> Any:
    """A result whose own errors are explained too: those of a generator's items, or of a returned function."""
    if isinstance(result, types.GeneratorType):
        return _iterated(result, name, values)
    if name in _RETURNS_FUNCTIONS and isinstance(result, types.FunctionType):
        return _returned(result, name)
    return result


def _at_caller(error: MeshdslError) -> MeshdslError:
    """The error with the line of the user, if a user called: a command has no line."""
    where = caller()
    return error if where == NOWHERE else at(error, where)


def _explained(error: Exception, name: str, values: Iterable[Any]) -> MeshdslError | None:
    """The error itself if it is ours; the error of a call that a function of the user's does not take; else None."""
    return error if isinstance(error, MeshdslError) else _miscalled(error, name, values)


def _returned(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A function that the public function `name` made of the user's, with errors explained."""
    values = [cell.cell_contents for cell in function.__closure__ or ()]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _explaining(name, values):
            return function(*args, **kwargs)

    return call


def _iterated(records: Generator[Any, Any, Any], name: str, values: Iterable[Any]) -> Generator[Any, Any, Any]:
    """The same items; an error gets the line that asked for the next one."""
    with _explaining(name, values):
        return (yield from records)


@contextlib.contextmanager
def _explaining(name: str, values: Iterable[Any]) -> Generator[None]:
    """Errors of the block with the line of the user, where they are ours or of a call of the user's function."""
    try:
        yield
    except Exception as error:
        explained = _explained(error, name, values)
        if explained is None:
            raise
        raise _at_caller(explained) from None


def _from_the_user(error: Exception) -> bool:
    """True if the user's code raised it, inside the call."""
    inner = traceback.extract_tb(error.__traceback__)[1:]
    return users_line((frame.filename, frame.lineno or 0) for frame in inner) is not None


def _misread(error: Exception) -> bool:
    """True for an error that is not ours, or of meshdsl reading a tensor as a list, truth or array: it expected one."""
    if not isinstance(error, MeshdslError):
        return True
    frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)][-2:]
    reads = ("__iter__", "__bool__", "__getitem__", "__array__")
    return len(frames) == 2 and frames[1].co_name in reads and is_ours(frames[0].co_filename)


def _miscalled(error: Exception, name: str, values: Iterable[Any]) -> ShapeError | None:
    """The error if a function that the user gave takes other arguments than meshdsl called it with.

    `values` are those that the user gave, or objects that hold them.
    """
    called, parenthesis, _ = str(error).partition("()")
    if not isinstance(error, TypeError) or not parenthesis or called not in _functions(values):
        return None
    return ShapeError(f"md.{name} called a function with arguments that it does not take\n  {error}")


def _functions(values: Iterable[Any]) -> set[str]:
    """The names of the functions among these values, in their lists, and in the fields of those that are objects."""
    values = [one for value in values for one in (value if isinstance(value, list | tuple) else [value])]
    fields = [field for value in values if hasattr(value, "__dict__") for field in vars(value).values()]
    return {f.__qualname__ for f in (*values, *fields) if isinstance(f, types.FunctionType | type)}


@functools.cache
def annotations_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of a function. Those of `layouts` name JAX, which it loads late."""
    import jax

    return typing.get_type_hints(function, localns={"jax": jax})


def _contradictions(
    function: Callable[..., Any], signature: inspect.Signature, name: str, args: Any, kwargs: Any
) -> ShapeError | None:
    """The error that lists the arguments whose annotations they contradict; None if there is none."""
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as mismatch:
        own = [p for p in signature.parameters if p != "self"]
        return ShapeError(f"md.{name}: {mismatch}\n  it takes ({', '.join(own)})")
    annotations = annotations_of(function)
    wrong = [
        f"  {argument} is {shown(value)}; expected {_type_name(annotations[argument])}"
        for argument, value in _arguments(signature, bound)
        if argument in annotations and not fits(value, annotations[argument])
    ]
    if not wrong:
        return None
    return ShapeError("\n".join([f"md.{name} was called with arguments that it does not take", *wrong]))


def _arguments(signature: inspect.Signature, bound: inspect.BoundArguments) -> Iterable[tuple[str, Any]]:
    """Every argument with its value; each one of `*args` by itself."""
    for argument, value in bound.arguments.items():
        kind = signature.parameters[argument].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            yield from ((argument, one) for one in value)
        elif kind is not inspect.Parameter.VAR_KEYWORD:
            yield argument, value


def fits(value: Any, annotation: Any) -> bool:
    """True if a value may be passed where `annotation` is declared; True where that cannot be told.

    >>> fits(3, float), fits("3", float), fits({"a": 1}, typing.Mapping[str, str])
    (True, False, False)
    """
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (Union, types.UnionType):
        return any(fits(value, one) for one in inner)
    if origin is typing.Literal:
        return any(type(value) is type(one) and value == one for one in inner)
    if annotation is Any:
        return True
    if annotation is None or annotation is type(None):
        return value is None
    if annotation in _NUMBERS:
        return isinstance(value, _NUMBERS[annotation]) and (annotation is bool or not isinstance(value, bool))
    if origin is collections.abc.Callable or annotation is Callable:
        return callable(value)
    if isinstance(origin, type):
        return isinstance(value, origin) and _items_fit(value, origin, inner)
    return isinstance(value, annotation) if isinstance(annotation, type) else True


def _items_fit(value: Any, origin: type, inner: tuple[Any, ...]) -> bool:
    """True if the items of a container fit; an iterator is not consumed, so its items are not known."""
    if issubclass(origin, collections.abc.Mapping) and len(inner) == 2:
        return all(fits(k, inner[0]) and fits(v, inner[1]) for k, v in value.items())
    if issubclass(origin, tuple) and Ellipsis not in inner:
        return len(value) == len(inner) and all(map(fits, value, inner))
    if isinstance(value, str) and inner:
        return fits("", inner[0])
    try:
        items = list(value) if isinstance(value, collections.abc.Collection) else []
    except TypeError:  # an array without axes
        return False
    return not inner or all(fits(one, inner[0]) for one in items)


def _type_name(annotation: Any) -> str:
    """An annotation in words that a user writes."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_type_name(one) for one in inner))
    if annotation is type(None):
        return "None"
    if origin is typing.Literal:
        return " or ".join(map(repr, inner))
    if origin is collections.abc.Callable or annotation is Callable:
        return "a function"
    if isinstance(origin, type):
        return f"{origin.__name__}[{', '.join('...' if one is ... else _type_name(one) for one in inner)}]"
    return getattr(annotation, "__name__", str(annotation))
