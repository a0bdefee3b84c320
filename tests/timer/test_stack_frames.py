"""The parser of dumps, and the line about a place."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from regrow.timer.stacks import answering
from regrow.timer.stacks.report import Dump, Frame, Thread, parse, top, where

PYTHON = "/opt/conda/lib/python3.11"
SITE = f"{PYTHON}/site-packages"

# The format of Python 3.11 to 3.13, with the name in brackets from 3.14.
LISTED = f"""\
Thread 0x00007f0208000001 [pin memory] (most recent call first):
  File "{PYTHON}/threading.py", line 327 in wait
  File "{PYTHON}/threading.py", line 1002 in _bootstrap

Thread 0x00007f0208000002 (most recent call first):
  <no Python frame>

Current thread 0x00007f0209092b80 (most recent call first):
  Garbage-collecting
  File "we\\x0aird"p\\xe4th.py", line 9 in __del__
  File ???, line ??? in ???
  File "<stdin>", line 11 in <module>
  ...

Extension modules: numpy.core._multiarray_umath, torch._C (total: 2)
"""


def dump(*frames: Frame, main: bool = True) -> Dump:
    return Dump(7, "dumped", threads=(Thread(1, True, main, frames),))


TRAIN = Frame("/home/me/train.py", 42, "step")
REDUCE = Frame(f"{SITE}/torch/distributed/distributed_c10d.py", 2810, "all_reduce")
WAIT = Frame(f"{PYTHON}/threading.py", 327, "wait")


def test_a_dump_is_parsed_with_all_kinds_of_lines() -> None:
    pinning, native, main = parse(LISTED, 0x7F0209092B80)
    assert (pinning.current, pinning.main) == (False, False)
    assert pinning.frames == (WAIT, Frame(f"{PYTHON}/threading.py", 1002, "_bootstrap"))
    assert native.frames == ()
    assert (main.ident, main.current, main.main) == (0x7F0209092B80, True, True)
    assert main.frames == (
        Frame('we\\x0aird"p\\xe4th.py', 9, "__del__"),
        Frame("???", 0, "???"),
        Frame("<stdin>", 11, "<module>"),
    )


def test_the_oldest_thread_is_the_main_one_if_that_is_unknown() -> None:
    assert [thread.main for thread in parse(LISTED)] == [False, False, True]


def test_an_unlisted_main_thread_is_reported() -> None:
    listed = LISTED.replace("Current thread", "Thread")
    assert not any(thread.main for thread in parse(listed, 1))
    assert where(Dump(7, "dumped", threads=parse(listed, 1))) == (
        "unknown: its main thread is not in the dump"
    )


def test_the_first_of_two_stacks_of_the_main_thread_counts() -> None:
    first = 'Stack (most recent call first):\n  File "train.py", line 1 in step\n'
    main = parse(first + LISTED, 0x7F0209092B80)[0]
    assert (main.ident, main.main, main.current) == (0x7F0209092B80, True, True)
    assert main.frames == (Frame("train.py", 1, "step"),)


@settings(max_examples=60, deadline=None)
@given(
    st.text()
    | st.lists(st.sampled_from(LISTED.splitlines()) | st.text(max_size=20), max_size=30).map(
        "\n".join
    ),
    st.integers(0, 2**64),
)
def test_any_text_gives_one_printable_line(text: str, main: int) -> None:
    line = where(Dump(1, "dumped", text=text, threads=parse(text, main)))
    assert line.isprintable()


def test_the_innermost_call_is_shown_with_the_users_own() -> None:
    assert where(dump(REDUCE, TRAIN, Frame("/home/me/train.py", 90, "main"))) == (
        "in all_reduce (distributed_c10d.py:2810), called by step (train.py:42)"
    )


def test_a_hang_in_the_users_code_is_shown_once() -> None:
    assert where(dump(TRAIN)) == "in step (train.py:42)"


def test_frames_that_all_calls_pass_through_are_left_out() -> None:
    ours = Frame(answering.__file__, 1, "arm")
    frozen = Frame("<frozen importlib._bootstrap>", 241, "_call_with_frames_removed")
    queue = Frame(f"{PYTHON}/queue.py", 171, "get")
    assert where(dump(WAIT, queue, ours, frozen, TRAIN)) == (
        "in get (queue.py:171), called by step (train.py:42)"
    )


def test_a_users_file_with_a_library_name_is_shown() -> None:
    assert where(dump(Frame("/home/me/threading.py", 3, "spin"))) == "in spin (threading.py:3)"


def test_a_thread_in_library_code_only_shows_its_innermost_call() -> None:
    assert where(dump(WAIT)) == "in wait (threading.py:327)"


def test_a_training_that_is_installed_itself_is_shown_as_the_caller() -> None:
    step = Frame(f"{SITE}/mytraining/__init__.py", 5, "step")
    inner = Frame(f"{SITE}/torch/nn/functional.py", 6, "linear")
    assert top([REDUCE, inner, step]) == (REDUCE, step)
    assert where(dump(REDUCE, inner, step)).endswith("called by step (mytraining/__init__.py:5)")


def test_code_without_a_file_is_the_users() -> None:
    assert where(dump(REDUCE, Frame("<ipython-input-2>", 2, "<module>"))).endswith(
        "called by <module> (<ipython-input-2>:2)"
    )


def test_names_are_printable_and_short() -> None:
    line = where(dump(Frame("/tmp/a\x1b[31m\n" + "x" * 500, 0, "f\u202e")))
    assert line == "in f\\u202e (a\\x1b[31m\\n" + "x" * 19 + "…" + "x" * 29 + ")"


def test_a_thread_without_python_code_is_in_native_code() -> None:
    assert where(dump()) == "in native code that no Python code called"


def test_another_thread_than_the_main_one_is_named_as_such() -> None:
    assert where(dump(TRAIN, main=False)) == (
        "in step (train.py:42), in another thread than the main one"
    )


def test_a_process_without_stacks_is_described_by_the_reason() -> None:
    assert where(Dump(1, "stopped")) == "stopped by a signal (SIGSTOP or a debugger)"
    assert where(Dump(1, "gone")) == "unknown: gone"
    assert where(Dump(1, "silent", "no\nanswer")) == "unknown: no\\nanswer"
    asleep = Dump(1, "silent", "in an uninterruptible sleep in the kernel, at nfs_wait")
    assert where(asleep) == asleep.note
