"""A state as a structure, which msgpack can express, and a list of arrays.

A state is a nesting of dict, list, tuple, None, bool, int, float, str, bytes and arrays. In the
structure, a container or an array is a list that begins with its kind, and any other value is
itself:

    {"w": tensor, "lr": 0.1}   ─►   ["dict", [["w", ["torch", "float32", [3, 4]]], ["lr", 0.1]]]

Subclasses become the plain type: an OrderedDict becomes a dict, a named tuple becomes a tuple, an
enum of str its value. So do keys.
Keys of a dict are str, int, float, bool or None. The arrays follow in the order of the structure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import Any, Final

import msgspec

from regrow.state.arrays import Array, Spec, array_of
from regrow.state.choice import StateError

LONGEST: Final = 256 << 20
"""Maximum bytes of a structure."""
DEEPEST: Final = 64
"""Maximum depth of a structure."""
_SCALARS: Final[dict[type, Callable[[Any], Any]]] = {
    bool: bool,
    int: int.__int__,
    float: float.__float__,
    str: str.__str__,  # str() of an enum is its name
    bytes: bytes,
}
"""Types of values, with the function that turns a subclass into the type."""

Structure = Any
"""A structure as described above. `decode` does not check it; `build` does."""


def flatten(value: object, key: str) -> tuple[Structure, dict[str, Array]]:
    """Take a state apart.

    Args:
        value: the state.
        key: name of the state, with which the keys of its arrays begin.

    Returns:
        The structure, and the arrays by key, such as "model['fc.weight']".

    Raises:
        TypeError: a value has none of the types of a state; the text names its key.
    """
    arrays: dict[str, Array] = {}
    return _flatten(value, key, arrays, 0), arrays


def _flatten(value: object, key: str, arrays: dict[str, Array], depth: int) -> Structure:
    if value is None or type(value) in (bool, float, str, bytes):
        return value
    if depth > DEEPEST:
        raise TypeError(f"{key} is nested more than {DEEPEST} deep")
    if isinstance(value, dict):
        for name in value:
            if name is not None and not isinstance(name, bool | int | float | str):
                raise TypeError(f"{key} has the key {name!r:.80}, which is not a str or a number")
        names = [_plain(name, f"the key {name!r} of {key}") for name in value]
        return [
            "dict",
            [
                [name, _flatten(each, f"{key}[{name!r}]", arrays, depth + 1)]
                for name, each in zip(names, value.values(), strict=True)
            ],
        ]
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return [
            kind,
            [
                _flatten(each, f"{key}[{number}]", arrays, depth + 1)
                for number, each in enumerate(value)
            ],
        ]
    try:
        array = array_of(value)
    except TypeError as error:
        raise TypeError(f"{key}: {error}") from error
    if array is not None:
        arrays[key] = array
        return list(array.spec)
    if isinstance(value, tuple(_SCALARS)):
        return _plain(value, key)
    raise TypeError(
        f"{key} has the type {type(value).__qualname__}, which cannot be sent: a state consists of "
        f"dict, list, tuple, None, bool, int, float, str, bytes, arrays of numpy and tensors"
    )


def _plain(value: object, key: str) -> object:
    """Return None or a scalar as its plain type, which msgpack can express."""
    for kind, convert in _SCALARS.items():
        if isinstance(value, kind):
            plain = convert(value)
            if type(plain) is int and not -(1 << 63) <= plain < 1 << 64:
                raise TypeError(f"{key} is a number of more than 64 bits: keep it as a str")
            return plain
    return value


def encode(structure: Structure) -> bytes:
    """Return a structure as msgpack."""
    return msgspec.msgpack.encode(structure)


def decode(data: bytes, key: str) -> Structure:
    """Return a structure that another rank has sent; `build` checks it.

    Raises:
        StateError: it is not msgpack.
    """
    try:
        return msgspec.msgpack.decode(data, strict=True)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise StateError(f"the structure of {key} cannot be read: {error}") from error


def build(structure: Structure, key: str, make: Callable[[str, Spec], Any]) -> Any:
    """Return the state that a structure describes.

    Args:
        structure: the structure, also one that another process has sent.
        key: name of the state, as for `flatten`.
        make: returns the value for the array of a key.

    Raises:
        StateError: it is no structure; the text names the key.
    """
    return _build(structure, key, make, 0)


def _build(structure: Structure, key: str, make: Callable[[str, Spec], Any], depth: int) -> object:
    if structure is None or isinstance(structure, tuple(_SCALARS)):
        return structure
    match structure:
        case ["dict", list(entries)] if depth <= DEEPEST and all(map(_is_entry, entries)):
            return {
                name: _build(each, f"{key}[{name!r}]", make, depth + 1) for name, each in entries
            }
        case ["list" | "tuple", list(entries)] if depth <= DEEPEST:
            values = [
                _build(each, f"{key}[{number}]", make, depth + 1)
                for number, each in enumerate(entries)
            ]
            return values if structure[0] == "list" else tuple(values)
        case ["numpy" | "torch" | "dtensor" as kind, str(dtype), list(shape)] if all(
            type(size) is int for size in shape
        ):
            return make(key, Spec(kind, dtype, tuple(shape)))
    raise StateError(f"the structure of {key} is malformed: {structure!r:.100}")


def _is_entry(entry: object) -> bool:
    return (
        isinstance(entry, list)
        and len(entry) == 2
        and (entry[0] is None or isinstance(entry[0], bool | int | float | str))
    )


def lines(structure: Structure, key: str) -> Iterator[str]:
    """Yield one line for each array and value: its key and its type, without values of numbers."""
    if not isinstance(structure, list):
        yield f"{key}: {type(structure).__name__}"
    elif structure[0] == "dict":
        yield f"{key}: dict"
        for name, each in structure[1]:
            yield from lines(each, f"{key}[{name!r}]")
    elif structure[0] in ("list", "tuple"):
        yield f"{key}: {structure[0]}"
        for number, each in enumerate(structure[1]):
            yield from lines(each, f"{key}[{number}]")
    else:
        yield f"{key}: {Spec(structure[0], structure[1], tuple(structure[2]))}"


def fingerprint(structure: Structure, key: str) -> str:
    """Return a short name of a structure; equal for states that differ in values only."""
    digest = blake2b(digest_size=16)
    for line in lines(structure, key):
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()
