"""Fill in the parameters of a call by their annotations.

A parameter matches a class if its annotation is that class, or a union that contains it
(`Optional[C]`, `C | None`), alone or inside `Annotated`. No other annotation matches: not a base
class (`object`), and not a generic type with the class as an argument (`list[C]`).

Annotations may be strings, as they all are under `from __future__ import annotations`. Each is
evaluated separately, in the module of the function. So an annotation that cannot be evaluated
(for example, a name that is imported for the type checker only) does not affect the others. Such
an annotation is compared by name.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Union

from regrow.utils import repr_of

__all__ = ["check_type", "count_type_in_params", "substitute_param_value"]


def check_type(annotation: Any, cls: type) -> bool:
    """Return whether a parameter with this annotation matches a class.

    Args:
        annotation: the annotation, evaluated or a string.
        cls: the class.
    """
    if isinstance(annotation, str):
        return _says(annotation, cls)
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        return check_type(typing.get_args(annotation)[0], cls)
    if origin in (Union, types.UnionType):
        return any(check_type(option, cls) for option in typing.get_args(annotation))
    if isinstance(annotation, typing.ForwardRef):
        return _says(annotation.__forward_arg__, cls)
    return annotation is cls


def count_type_in_params(fn: Callable[..., Any], cls: type) -> int:
    """Return how many parameters of `fn` match `cls`."""
    return len(_meant_for(fn, inspect.signature(fn), cls))


def substitute_param_value(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    subs: Mapping[type, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Fill in the parameters of a call that match certain classes.

    Args:
        fn: the function to call.
        args: its positional arguments. They may omit the parameters that are filled in, or contain
            a placeholder for them.
        kwargs: its keyword arguments, with the same options.
        subs: for each class, the value of the parameter that matches it.

    Returns:
        The positional and keyword arguments for the call.

    Raises:
        TypeError: several parameters match the same class, or the arguments do not fit the
            function.
    """
    signature = inspect.signature(fn)
    values = {}
    for cls, value in subs.items():
        names = _meant_for(fn, signature, cls)
        if len(names) > 1:
            raise TypeError(
                f"{_name(fn)} has {len(names)} parameters annotated {cls.__name__} "
                f"({', '.join(names)}): keep one; each would receive the same value"
            )
        values.update(dict.fromkeys(names, value))
    if not values:
        return args, dict(kwargs)
    bound = _bind(signature, args, kwargs, values)
    bound.arguments = {
        name: values.get(name, bound.arguments.get(name))
        for name in signature.parameters
        if name in values or name in bound.arguments
    }
    return bound.args, bound.kwargs


def _bind(
    signature: inspect.Signature,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    values: Mapping[str, Any],
) -> inspect.BoundArguments:
    """Bind the caller's arguments to the parameters of a function.

    The caller may omit a parameter in `values`, or pass a placeholder: None, or an instance of its
    class. Any other value goes to the next parameter, if the call is then valid.
    """
    whole: inspect.BoundArguments | None = None
    with contextlib.suppress(TypeError):
        whole = signature.bind(*args, **kwargs)
    if whole is not None:
        held = {name: whole.arguments.get(name) for name in values}
        if all(each is None or isinstance(each, type(values[name])) for name, each in held.items()):
            return whole
    others = [each for each in signature.parameters.values() if each.name not in values]
    rest = {name: value for name, value in kwargs.items() if name not in values}
    try:
        bound = signature.replace(parameters=others).bind(*args, **rest)
    except TypeError:
        if whole is None:
            raise
        return whole
    return inspect.BoundArguments(signature, bound.arguments)


def _meant_for(fn: Callable[..., Any], signature: inspect.Signature, cls: type) -> list[str]:
    scope = _globals_of(fn)
    return [
        name
        for name, parameter in signature.parameters.items()
        if check_type(_evaluated(parameter.annotation, scope), cls)
    ]


def _evaluated(annotation: Any, scope: dict[str, Any]) -> Any:
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, scope)  # as typing.get_type_hints does
    except Exception:  # noqa: BLE001 - an annotation may contain any code
        return annotation


def _globals_of(fn: Callable[..., Any]) -> dict[str, Any]:
    while isinstance(fn, functools.partial):
        fn = fn.func
    function = inspect.unwrap(fn)
    if not hasattr(function, "__globals__"):  # a callable object
        function = inspect.unwrap(type(function).__call__)
    return dict(getattr(function, "__globals__", {}))


def _says(text: str, cls: type) -> bool:
    """Return whether an annotation that cannot be evaluated names `cls`, or a union with it."""
    try:
        return _names(ast.parse(text, mode="eval").body, cls.__name__)
    except SyntaxError:
        return False


def _names(node: ast.AST, name: str) -> bool:
    match node:
        case ast.Name(id=found) | ast.Attribute(attr=found):
            return found == name
        case ast.Constant(value=str(text)):
            return _names(ast.parse(text, mode="eval").body, name)
        case ast.BinOp(left, ast.BitOr(), right):
            return _names(left, name) or _names(right, name)
        case ast.Subscript(ast.Name(id=generic) | ast.Attribute(attr=generic), ast.Tuple(options)):
            return generic in ("Union", "Annotated") and any(
                _names(option, name) for option in (options if generic == "Union" else options[:1])
            )
        case ast.Subscript(ast.Name(id=generic) | ast.Attribute(attr=generic), option):
            return generic in ("Union", "Optional") and _names(option, name)
    return False


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", None) or repr_of(fn)
