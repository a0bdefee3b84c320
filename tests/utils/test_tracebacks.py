"""Tracebacks in a few lines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.processes import PATIENCE
from regrow.utils import call_in_thread, shortened, stack_of
from regrow.utils.tracebacks import MOST_LINES


def frame(path: str, number: int) -> str:
    return f'  File "{path}", line {number}, in call\n    call()\n    ^^^^^^\n'


def test_a_long_traceback_loses_the_frames_of_packages_first() -> None:
    header = "Traceback (most recent call last):\n"
    library = "".join(frame("/x/site-packages/torch/nn.py", n) for n in range(40))
    text = header + frame("/home/train.py", 7) + library + "ValueError: bad\n"
    assert shortened(text) == (
        "Traceback (most recent call last):",
        '  File "/home/train.py", line 7, in call',
        "    call()",
        "    ^^^^^^",
        "ValueError: bad",
    )


@given(st.text(max_size=3000))
def test_any_text_is_cut_to_a_few_lines(text: str) -> None:
    assert len(shortened(text)) <= MOST_LINES


def test_a_long_traceback_of_the_user_keeps_its_begin_and_its_end() -> None:
    text = "Traceback (most recent call last):\n"
    text += "".join(frame("/home/train.py", n) for n in range(40)) + "RecursionError: deep\n"
    lines = shortened(text)
    assert (lines[0], lines[-1]) == ("Traceback (most recent call last):", "RecursionError: deep")
    assert lines[1].startswith("... ")
    assert len(lines) == MOST_LINES


def raised(error: BaseException) -> BaseException:
    """Return the exception after it has been raised."""
    with pytest.raises(type(error)) as caught:
        raise error
    return caught.value


def test_the_stack_of_an_exception_ends_with_it_and_names_the_line_that_raised_it() -> None:
    lines = stack_of(raised(KeyError("no such layer")))
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "KeyError: 'no such layer'"
    assert any("in raised" in line for line in lines)


def test_a_stack_begins_with_the_code_that_regrow_has_called() -> None:
    def function() -> None:
        raise ValueError("bad")

    error = call_in_thread(function, "test").exception(PATIENCE)
    assert error is not None
    assert "in function" in stack_of(error)[1]


def test_the_stack_of_a_deep_recursion_is_short() -> None:
    def deep(left: int) -> None:
        if not left:
            raise ValueError("x" * 10_000)
        other(left - 1)

    def other(left: int) -> None:
        deep(left - 1)

    with pytest.raises(ValueError, match="x") as caught:
        deep(300)
    lines = stack_of(caught.value)
    assert len(lines) <= MOST_LINES
    assert max(map(len, lines)) <= 300
    assert lines[-1].startswith("ValueError: xxx")


def test_an_exception_whose_class_refuses_its_text_has_no_stack_or_a_short_one() -> None:
    class RefusesAllError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

        def __getattribute__(self, name: str) -> object:
            if name == "__notes__":
                raise RuntimeError("no notes")
            return super().__getattribute__(name)

    assert len(stack_of(raised(RefusesAllError()))) <= MOST_LINES
