"""Arguments are filled in by their annotations, in every notation."""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Optional, Union

import pytest

from regrow.inprocess.param_utils import (
    check_type,
    count_type_in_params,
    substitute_param_value,
)

if TYPE_CHECKING:
    from decimal import Decimal


class Live:
    """Replaces CallWrapper."""


class Derived(Live):
    pass


module = types.SimpleNamespace(Live=Live)
LIVE = Live()


def filled(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    args, kwargs = substitute_param_value(fn, args, kwargs, {Live: LIVE})
    return fn(*args, **kwargs)


@pytest.mark.parametrize(
    "annotation",
    [
        Live,
        Optional[Live],  # noqa: UP045 - as older code has it
        Union[None, int, Live],  # noqa: UP007
        Live | None,
        Annotated[Live, "live"],
        Annotated[Live | None, "live"],
        Optional["Live"],
        "Live",
        "module.Live",
        "Live | None",
        "None | int | Live",
        "Optional[Live]",
        "typing.Union[int, Live]",
        "Annotated[Live, 1]",
        "'Live'",
    ],
)
def test_the_class_and_unions_with_it_are_meant(annotation: Any) -> None:
    assert check_type(annotation, Live)


@pytest.mark.parametrize(
    "annotation",
    [
        object,
        Any,
        None,
        Derived,
        int,
        list[Live],
        list[int],
        dict[str, Live],
        Callable[..., int],
        Callable[[Live], None],
        type[Live],
        Annotated[int, Live],
        typing.TypeVar("T"),
        "object",
        "list[Live]",
        "Callable[[Live], None]",
        "Annotated[int, Live]",
        "type[Live]",
        "Live.attribute",
        "Lively",
        "not python at all",
        "",
    ],
)
def test_nothing_else_is_meant(annotation: Any) -> None:
    assert not check_type(annotation, Live)


def test_the_live_one_takes_the_place_of_what_was_given() -> None:
    def train(steps: int, live: Live | None = None, *rest: int, x: object = 3) -> tuple[Any, ...]:
        return steps, live, rest, x

    assert filled(train, 5) == (5, LIVE, (), 3)
    assert filled(train, 5, None, 6, x=7) == (5, LIVE, (6,), 7)
    assert filled(train, steps=5, live=None) == (5, LIVE, (), 3)


def test_it_may_be_left_out_without_a_default_and_at_any_position() -> None:
    def first(live: Live, a: int, b: int = 2) -> tuple[Any, ...]:
        return live, a, b

    def between(a: int, live: Live, /, b: int = 2, *, c: int, **more: int) -> tuple[Any, ...]:
        return a, live, b, c, more

    def by_keyword(a: int, *, live: Live) -> tuple[Any, ...]:
        return a, live

    assert filled(first, 1) == (LIVE, 1, 2)
    assert filled(first, b=3, a=1) == (LIVE, 1, 3)
    assert filled(first, None, 1) == (LIVE, 1, 2)
    assert filled(first, Live(), 1, 3) == (LIVE, 1, 3)
    assert filled(first, 1, 3) == (LIVE, 1, 3)
    assert filled(first, "anything", 1, 3) == (LIVE, 1, 3)
    assert filled(between, 1, 3, c=4, d=5) == (1, LIVE, 3, 4, {"d": 5})
    assert filled(by_keyword, 1) == (1, LIVE)


def test_parameters_with_other_annotations_keep_their_arguments() -> None:
    def train(a: list[int], b: Callable[..., int], c: object, d: Decimal, live: Live) -> Any:
        return a, b, c, d, live

    given = ([1], len, object(), 2)
    assert filled(train, *given) == (*given, LIVE)


def test_annotations_that_are_evaluated_already_are_understood() -> None:
    def train(a, b, live):  # type: ignore[no-untyped-def]
        return a, b, live

    train.__annotations__ = {"a": list[int], "b": Callable[..., int], "live": Live | None}
    assert filled(train, 1, 2) == (1, 2, LIVE)


def test_an_import_for_the_type_checker_only_is_taken_by_its_name() -> None:
    def train(number: Decimal | None = None, other: int = 1) -> Any:
        return number

    class Decimal:  # as if the module had imported it
        pass

    assert count_type_in_params(train, Decimal) == 1
    assert count_type_in_params(train, Live) == 0


def test_methods_partials_objects_and_wrapped_functions_are_filled_in() -> None:
    class Trainer:
        def train(self, live: Live, a: int) -> tuple[Any, ...]:
            return live, a

        def __call__(self, a: int, live: Live | None = None) -> tuple[Any, ...]:
            return live, a

    def train(a: int, live: Live) -> tuple[Any, ...]:
        return live, a

    @functools.wraps(train)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return train(*args, **kwargs)

    for fn in (Trainer().train, Trainer(), train, wrapped):
        assert filled(fn, 1) == (LIVE, 1)
    assert filled(functools.partial(train, 1)) == (LIVE, 1)


def test_a_function_that_asks_for_nothing_is_called_as_it_is() -> None:
    defaults: list[int] = []

    def train(a: int, into: list[int] = defaults) -> list[int]:
        return into

    args, kwargs = substitute_param_value(train, (1,), {}, {Live: LIVE})
    assert (args, kwargs) == ((1,), {})


def test_more_than_one_place_for_it_is_an_error() -> None:
    def train(one: Live, other: Live | None = None) -> None: ...

    assert count_type_in_params(train, Live) == 2
    with pytest.raises(TypeError, match=r"train has 2 parameters annotated Live \(one, other\)"):
        filled(train)


def test_arguments_that_do_not_fit_raise_pythons_error() -> None:
    def train(a: int, live: Live) -> None: ...

    with pytest.raises(TypeError, match="missing a required argument: 'a'"):
        filled(train)
    with pytest.raises(TypeError, match="unexpected keyword argument 'b'"):
        filled(train, 1, b=2)
