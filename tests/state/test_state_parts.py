"""A part that was packed is equal after unpacking, and what does not fit is named by its key."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import regrow
from regrow.state import StateError, Transport, tree
from regrow.state.parcel import CHUNK, Courier
from regrow.state.parts import Part
from regrow.state.private import pack, unpack


class Pipe:
    """A transport in memory, for one sender and one receiver."""

    def __init__(self, damage: Callable[[int, bytearray], None] = lambda *_: None) -> None:
        self.messages: list[bytes] = []
        self._damage = damage

    def send(self, rank: int, data: memoryview) -> None:
        message = bytearray(data)
        self._damage(len(self.messages), message)
        self.messages.append(bytes(message))

    def receive(self, rank: int, into: memoryview) -> None:
        into[:] = self.messages.pop(0)


def carry(source: Any, target: Any, through: Transport | None = None) -> None:
    pipe = through or Pipe()
    Courier(pipe, 1).send(Part("replicated", "x", source))
    Courier(pipe, 0).receive(Part("replicated", "x", target))


class Loader:
    """An object with a state, which makes a new one at each call, as samplers do."""

    def __init__(self, position: int) -> None:
        self.position = position

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "order": np.arange(self.position)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        assert list(state["order"]) == list(range(self.position))


class Empty(Loader):
    """An object whose arrays do not exist yet, as in an optimizer before its first step."""

    def state_dict(self) -> dict[str, Any]:
        return {"position": 0}


class Color(str, Enum):  # noqa: UP042
    RED = "red"


class Level(IntEnum):
    HIGH = 3


class Long(IntEnum):
    OTHER = 1 << 70


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=100)
)
arrays: st.SearchStrategy[Any] = st.builds(
    lambda dtype, shape: (
        np.arange(int(np.prod(shape)), dtype=np.int64).astype(dtype).reshape(shape)
    ),
    st.sampled_from(["f4", "f8", "i1", "u4", "?", ">i2", "c16"]),
    st.lists(st.integers(0, 4), max_size=3),
)
states = st.recursive(
    scalars | arrays,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=4) | st.integers(-9, 9), inner, max_size=4)
    ),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return (
            type(other) is type(one)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and one.tobytes() == other.tobytes()
        )
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


@given(states)
def test_a_state_arrives_as_it_was_sent(state: Any) -> None:
    target: dict[str, Any] = {}
    carry({"value": state}, target)
    assert same(target, {"value": state})


@given(states)
def test_a_private_part_is_restored_as_it_was_kept(state: Any) -> None:
    target: list[Any] = []
    unpack(pack([Part("private", "x", [state])]), [Part("private", "x", target)], 0)
    assert same(target, [state])


def test_keys_and_values_of_subclasses_become_the_plain_type() -> None:
    source = {
        np.str_("a"): {np.float64(0.5): 1},
        Color.RED: {Level.HIGH: np.zeros(2)},
        "values": [Color.RED, Level.HIGH, np.float64(0.5), np.str_("b")],
    }
    targets: list[dict[Any, Any]] = [{}, {Color.RED: {Level.HIGH: np.ones(2)}}]
    for target in targets:
        carry(source, target)
        assert same(
            target,
            {"a": {0.5: 1}, "red": {3: np.zeros(2)}, "values": ["red", 3, 0.5, "b"]},
        )
        types = [type(name) for name in (*target, *target["a"], *target["red"])]
        assert types == [str, str, str, float, int]


def test_an_array_is_filled_in_place_whatever_its_layout() -> None:
    target = {"w": np.zeros((4, 6))[:, ::2]}
    view, values = target["w"], np.arange(12.0).reshape(4, 3)
    carry({"w": values}, target)
    assert target["w"] is view
    assert (view == values).all()


def read_only(value: Any) -> Any:
    value.flags.writeable = False
    return value


@pytest.mark.parametrize(
    "locked",
    [
        read_only(np.zeros((4, 3))),
        read_only(np.zeros((4, 6))[:, ::2]),
        np.broadcast_to(np.zeros(3), (4, 3)),
    ],
)
def test_an_array_that_is_read_only_gives_way_to_a_new_one(locked: Any) -> None:
    values, target = np.arange(12.0).reshape(4, 3), {"w": locked}
    carry({"w": values}, target)
    assert (target["w"] == values).all()
    assert (locked == 0).all()
    with pytest.raises(StateError, match=r"replicated\['x'\] cannot be changed on this rank"):
        carry(values, locked)


def test_an_array_of_a_dtype_that_is_not_of_numpy_arrives_with_this_dtype() -> None:
    source = {
        "w": np.arange(3).astype(ml_dtypes.bfloat16),
        "f": np.ones(3, ml_dtypes.float8_e4m3fn),
        "void": np.zeros(2, "V2"),
    }
    target: dict[str, Any] = {}
    carry(source, target)
    assert same(target, source)
    carry({"w": np.ones(3, ml_dtypes.bfloat16)}, {"w": target["w"]})
    assert list(target["w"]) == [1, 1, 1]
    with pytest.raises(StateError, match=r"\['w'\] is numpy <f2 .* and numpy bfloat16"):
        carry({"w": source["w"]}, {"w": np.zeros(3, "f2")})


def test_a_part_of_several_chunks_arrives() -> None:
    source: Any = np.arange(2 * CHUNK + 5, dtype=np.uint8)
    target = np.zeros_like(source)
    carry(source, target)
    assert (source == target).all()


def test_an_object_gets_the_state_of_another_through_load_state_dict() -> None:
    for target in (Loader(5), Loader(4), Empty(0)):
        carry(Loader(5), target)
        assert target.position == 5


@given(st.integers(0, 3), st.integers(0, 1 << 30))
def test_any_damaged_byte_is_found_before_it_is_used(message: int, place: int) -> None:
    def damage(number: int, data: bytearray) -> None:
        if number == message:
            data[place % len(data)] ^= 1 << place % 8

    target = {"a": np.zeros(9), "b": np.zeros(9)}
    with pytest.raises(StateError, match=r"replicated\['x'\].* was damaged .* from rank 0"):
        carry({"a": np.ones(9), "b": np.ones(9)}, target, Pipe(damage))
    assert set(target["b"]) == {0.0}  # the later of the two is not touched
    assert set(target["a"]) <= {0.0, 1.0}


def test_chunks_in_another_order_are_found() -> None:
    pipe = Pipe()
    Courier(pipe, 1).send(Part("replicated", "x", {"a": np.zeros(9), "b": np.ones(9)}))
    pipe.messages[2:] = pipe.messages[:1:-1]
    with pytest.raises(StateError, match=r"replicated\['x'\]\['a'\] was damaged"):
        Courier(pipe, 0).receive(Part("replicated", "x", {}))


@pytest.mark.parametrize(
    ("source", "target", "text"),
    [
        ({"w": np.zeros(3)}, {"w": np.zeros(4)}, r"\['w'\] is numpy <f8 \[4\] on this rank"),
        ({"w": np.zeros(3)}, {"w": np.zeros(3, "f4")}, r"\['w'\] is numpy <f4 \[3\] on this rank"),
        ({"w": np.zeros(3)}, {"v": np.zeros(3)}, r"\['[vw]'\] exists on .*and does not on"),
        ({"w": 3}, [], r"replicated\['x'\] is of type list on this rank, and dict"),
    ],
)
def test_what_does_not_fit_is_named_by_its_key_and_changes_nothing(
    source: Any, target: Any, text: str
) -> None:
    before = pack([Part("replicated", "x", target)])
    with pytest.raises(StateError, match=text):
        carry(source, target)
    assert pack([Part("replicated", "x", target)]) == before


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": {"b": object()}}, r"x\['a'\]\['b'\] has the type object, which cannot be sent"),
        ({"a": [1, 1 << 64]}, r"x\['a'\]\[1\] is a number of more than 64 bits"),
        ({"a": np.array([{}])}, r"x\['a'\]: an array of dtype object has no plain bytes"),
        ({"a": {1 << 70: 3}}, r"the key 1180591620717411303424 of x\['a'\] is a number of more th"),
        ({"a": Long.OTHER}, r"x\['a'\] is a number of more than 64 bits"),
        ({(1, 2): 3}, r"x has the key \(1, 2\), which is not a str or a number"),
    ],
)
def test_a_value_that_cannot_be_sent_is_named_by_its_key(value: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        tree.flatten(value, "x")


def test_a_part_that_nests_without_end_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(TypeError, match="nested more than 64 deep"):
        tree.flatten(endless, "x")


kinds = st.sampled_from(["dict", "list", "tuple", "numpy", "torch", "dtensor", "other"])
anything = st.recursive(
    scalars | kinds,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=2), inner, max_size=2)
        | st.builds(lambda kind, rest: [kind, *rest], kinds, st.lists(inner, max_size=3))
    ),
    max_leaves=8,
)


@given(st.binary(max_size=40) | anything.map(msgspec.msgpack.encode))
def test_bytes_that_are_no_structure_are_refused(data: bytes) -> None:
    with suppress(StateError):
        built = tree.build(tree.decode(data, "x"), "x", lambda key, spec: None)
        assert tree.flatten(built, "x")[1] == {}  # it was a structure


def test_a_part_that_cannot_be_changed_in_place_is_refused() -> None:
    with pytest.raises(TypeError, match=r"replicated\['n'\] is of type int: a part is"):
        regrow.State({"n": 3})


def test_a_rank_in_two_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="has a rank twice"):
        regrow.State({"n": []}, replicas=[[0, 1], [1, 2]])


def test_a_commit_before_a_recovery_is_refused() -> None:
    with (
        pytest.raises(RuntimeError, match=r"call recover\(call, default\) first"),
        regrow.State({"n": []}).commit(1),
    ):
        pass


def test_the_random_numbers_continue_from_a_kept_state() -> None:
    import random

    part = Part("private", "rng", regrow.rng())
    kept = pack([part])
    drawn = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()]
    unpack(kept, [part], 0)
    again = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()]
    assert drawn == again


def test_regrow_imports_neither_torch_nor_numpy_for_a_state(tmp_path: Path) -> None:
    import subprocess
    import sys

    program = (
        "import sys, regrow\nregrow.State({'n': []}, {'rng': regrow.rng()}).clean\n"
        "print(*[name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
