"""One named part of a state: how it is taken apart, and how it becomes equal to another rank's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from regrow.state import tree
from regrow.state.arrays import Array, Spec, array_of, new_array
from regrow.state.choice import StateError

Fill = Callable[[str, Array], None]
"""Overwrites the array of a key."""


class Part:
    """A part that the user passed to `State`.

    Args:
        kind: "replicated" or "private", for messages.
        name: name of the part.
        value: an object with `state_dict` and `load_state_dict`, a dict, a list, or an array.

    Raises:
        TypeError: the value has another type, so that it cannot be changed in place.
    """

    def __init__(self, kind: str, name: str, value: Any) -> None:
        self.name = name
        self.key = f"{kind}[{name!r}]"
        self._value = value
        self._loads = callable(getattr(value, "state_dict", None)) and callable(
            getattr(value, "load_state_dict", None)
        )
        # The arrays of a module are the same on all ranks. An optimizer may not have its arrays
        # yet, and those of a data loader may have had another length.
        self._fixed = kind == "replicated" and (
            not self._loads or hasattr(value, "named_parameters")
        )
        if not self._loads and not isinstance(value, dict | list) and array_of(value) is None:
            raise TypeError(
                f"{self.key} is of type {type(value).__qualname__}: a part is an object with "
                f"state_dict() and load_state_dict(), a dict, a list, an array of numpy or a tensor"
            )

    def flatten(self) -> tuple[tree.Structure, dict[str, Array]]:
        """Return the structure and the arrays; the arrays are those of the part, not copies.

        Raises:
            TypeError: a value has none of the types of a state; the text names its key.
        """
        return tree.flatten(self._value.state_dict() if self._loads else self._value, self.key)

    def replace(
        self,
        structure: tree.Structure,
        rank: int,
        fill: Fill,
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        """Bring the part to a structure that a rank has sent.

        All keys, types and shapes are compared before anything is changed.

        Args:
            structure: the structure.
            rank: the rank that has sent it, for messages.
            fill: called for each array, in the order of the structure.
            begin: called after the comparison, before the first change.

        Raises:
            StateError: the part does not fit; the text names the key.
        """
        _, own = self.flatten()
        sent: dict[str, Spec] = {}

        tree.build(structure, self.key, sent.setdefault)
        for key, spec in sent.items():
            if self._fixed and key in own and own[key].spec != spec:
                raise StateError(
                    f"{key} is {own[key].spec} on this rank, and {spec} on rank {rank}"
                )
        if self._fixed and own:
            for key in sent.keys() ^ own.keys():
                has, lacks = (f"rank {rank}", "this rank")[:: 1 if key in sent else -1]
                raise StateError(f"{key} exists on {has}, and does not on {lacks}")

        if not self._loads and self.key in own and not own[self.key].writable:
            raise StateError(
                f"{self.key} cannot be changed on this rank: it is read-only, or an expanded "
                f"tensor; pass a copy of it"
            )

        def make(key: str, spec: Spec) -> Any:
            array = own.get(key)
            if array is None or array.spec != spec or not array.writable:
                try:
                    array = new_array(spec)
                except StateError as error:
                    raise StateError(f"{key}: {error}") from error
            fill(key, array)
            return array.value

        begin()
        self._set(tree.build(structure, self.key, make))

    def _set(self, value: Any) -> None:
        if self._loads:
            self._value.load_state_dict(value)
        elif isinstance(self._value, dict) and isinstance(value, dict):
            self._value.clear()
            self._value.update(value)
        elif isinstance(self._value, list) and isinstance(value, list):
            self._value[:] = value
        elif value is not self._value:
            raise StateError(
                f"{self.key} is of type {type(self._value).__qualname__} on this rank, and "
                f"{type(value).__qualname__} on the rank that has sent it"
            )
