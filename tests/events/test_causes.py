"""The cause of a failure in the end of a process's stderr: real samples, and any text at all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.events import find_cause

PLAIN = """\
INFO epoch 3
Traceback (most recent call last):
  File "/job/train.py", line 12, in <module>
    main()
  File "/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1775, in _call_impl
    return forward_call(*args, **kwargs)
KeyError: 'x'
"""
CHAINED = """\
Traceback (most recent call last):
  File "/job/data.py", line 4, in load
    return cache[key]
           ~~~~~^^^^^
KeyError: 'batch'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/job/train.py", line 30, in <module>
    load()
RuntimeError: cannot load the batch
"""
GROUP = """\
  + Exception Group Traceback (most recent call last):
  |   File "/job/train.py", line 3, in <module>
  |     raise ExceptionGroup("many", [ValueError(1)])
  | ExceptionGroup: many (1 sub-exception)
  +-+---------------- 1 ----------------
    | ValueError: 1
    +------------------------------------
"""
SYNTAX = """\
  File "/job/train.py", line 2
    x = = 3
        ^
SyntaxError: invalid syntax
"""
LOADER = """\
Traceback (most recent call last):
  File "/job/train.py", line 9, in <module>
    for batch in loader:
  File "/venv/lib/python3.11/site-packages/torch/_utils.py", line 705, in reraise
    raise exception
KeyError: Caught KeyError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "/venv/lib/python3.11/site-packages/torch/utils/data/_utils/worker.py", line 308, in _worker
    data = fetcher.fetch(index)
  File "/job/data.py", line 7, in __getitem__
    return self.items[n]
KeyError: 'seven'

"""
OF_TORCH = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "/job/train.py", line 21, in <module>
[rank1]:     dist.all_reduce(x)
[rank1]: RuntimeError: CUDA error: device-side assert triggered
[rank1]: CUDA kernel errors might be asynchronously reported at some other API call.
[rank1]:[W1128 15:00:00 ProcessGroupNCCL.cpp:1250] Warning: process group has NOT been destroyed
"""
CPP = """\
step 12
terminate called after throwing an instance of 'c10::Error'
  what():  CUDA error: an illegal memory access was encountered
Exception raised from c10_cuda_check_implementation at CUDAException.cpp:43
"""
RUST_OLD = """\
thread 'main' panicked at 'index out of bounds: the len is 3', src/loader.rs:14:9
note: run with `RUST_BACKTRACE=1` environment variable to display a backtrace
"""
RUST = """\
thread '<unnamed>' (812) panicked at /src/loader.rs:14:9:
index out of bounds: the len is 3 but the index is 9
note: run with `RUST_BACKTRACE=1` environment variable to display a backtrace
"""
GO = "panic: assignment to entry in nil map\n\ngoroutine 1 [running]:\nmain.main()\n"
FAULT = """\
Fatal Python error: Segmentation fault

Current thread 0x00007f3a (most recent call first):
  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at
  File "/job/train.py", line 6 in crash
  File "/job/train.py", line 8 in <module>
"""
LOGGED = PLAIN + "INFO the batch is skipped\n" * 50
CASES = {
    "plain": (PLAIN, 1, "KeyError: 'x' (train.py:12)"),
    "chained": (CHAINED, 1, "RuntimeError: cannot load the batch (train.py:30)"),
    "gloo": (
        PLAIN.replace("KeyError: 'x'", "RuntimeError: [/b/gloo/tcp/pair.cc:553] Connection closed"),
        1,
        "RuntimeError: Connection closed (train.py:12)",
    ),
    "group": (GROUP, 1, "ExceptionGroup: many (1 sub-exception) (train.py:3)"),
    "syntax": (SYNTAX, 1, "SyntaxError: invalid syntax (train.py:2)"),
    "data loader": (LOADER, 1, "KeyError: 'seven' (data.py:7)"),
    "torch": (
        OF_TORCH,
        1,
        "RuntimeError: CUDA error: device-side assert triggered (train.py:21)",
    ),
    "long message": (
        PLAIN.replace("'x'", "first\nsecond\nthird"),
        1,
        "KeyError: first (train.py:12)",
    ),
    "colours": (
        "\x1b[1;31m" + PLAIN.replace("KeyError", "\x1b[31mKeyError\x1b[0m"),
        1,
        "KeyError: 'x' (train.py:12)",
    ),
    "progress bar": ("10%|#\r20%|##\r" + PLAIN, 1, "KeyError: 'x' (train.py:12)"),
    "C++": (
        CPP,
        -6,
        "c10::Error: CUDA error: an illegal memory access was encountered",
    ),
    "C++ after an exception": (
        PLAIN + CPP,
        -6,
        "c10::Error: CUDA error: an illegal memory access was encountered",
    ),
    "abort in the exit of Python": (PLAIN + "Aborted\n", -6, "KeyError: 'x' (train.py:12)"),
    "Rust before 1.73": (RUST_OLD, 101, "panic: index out of bounds: the len is 3 (loader.rs:14)"),
    "Rust": (
        RUST,
        101,
        "panic: index out of bounds: the len is 3 but the index is 9 (loader.rs:14)",
    ),
    "Go": (GO, 2, "panic: assignment to entry in nil map"),
    "faulthandler": (FAULT, -11, "Fatal Python error: Segmentation fault (train.py:6)"),
    "shell": (
        "train.sh: line 3: foo: command not found\n",
        127,
        "train.sh: line 3: foo: command not found",
    ),
    "argparse": ("usage: t.py [-h]\nt.py: error: no --x\n\n", 2, "t.py: error: no --x"),
    "glibc": ("double free or corruption (out)\n", -6, "double free or corruption (out)"),
    "cut at its start": (
        '  File "/job/train.py", line 3, in f\n    f()\nOSError: no\n',
        1,
        "OSError: no",
    ),
    "an old exception, handled": (LOGGED, 3, "INFO the batch is skipped"),
    "an exception and later lines": (LOGGED, 1, "KeyError: 'x' (train.py:12)"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_cause_is_found_in_the_output_of_a_real_program(name: str) -> None:
    output, exitcode, summary = CASES[name]
    cause = find_cause(output, exitcode)
    assert cause is not None
    assert cause.summary == summary


def test_the_text_of_a_chain_of_exceptions_begins_with_the_first_one() -> None:
    cause = find_cause("INFO begin\n" + CHAINED)
    assert cause is not None
    assert cause.is_traceback
    assert cause.text.startswith("Traceback")
    assert "KeyError: 'batch'" in cause.text
    assert cause.text.endswith("RuntimeError: cannot load the batch")


@pytest.mark.parametrize("signum", [9, 15, 2, 1])
def test_what_a_process_wrote_before_a_signal_from_outside_is_no_cause(signum: int) -> None:
    assert find_cause(PLAIN, -signum) is None


@pytest.mark.parametrize("output", ["", "\n \n\r\n"])
def test_a_process_that_wrote_nothing_has_no_cause(output: str) -> None:
    assert find_cause(output) is None


SCRIPTS = {
    "raise": ("def f():\n    raise ValueError('no')\nf()\n", "ValueError: no (s.py:2)"),
    "from": (
        "try:\n    {}['x']\nexcept KeyError as e:\n    raise OSError('no') from e\n",
        "OSError: no (s.py:4)",
    ),
    "group": (
        "raise ExceptionGroup('two', [ValueError(1), KeyError(2)])",
        "ExceptionGroup: two (2 sub-exceptions) (s.py:1)",
    ),
    "syntax": ("x = = 3\n", "SyntaxError: invalid syntax (s.py:1)"),
    "import": (
        "import not_there\n",
        "ModuleNotFoundError: No module named 'not_there' (s.py:1)",
    ),
    "exit": ("import sys; sys.exit('bad flag')\n", "bad flag"),
    "assert": ("assert 1 == 2, 'one\\ntwo'\n", "AssertionError: one (s.py:1)"),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_exception_of_a_script_is_found_as_this_python_prints_it(
    name: str, tmp_path: Path
) -> None:
    program, summary = SCRIPTS[name]
    (tmp_path / "s.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "s.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    cause = find_cause(done.stderr, done.returncode)
    assert cause is not None
    assert cause.summary == summary


_PIECES = [
    *(sample for sample, _, _ in CASES.values()),
    "\r",
    "\x1b[31m",
    "  + ",
    "| ",
    "[rank1]: ",
]


@given(
    st.lists(st.sampled_from(_PIECES) | st.text(max_size=40), max_size=6).map("".join),
    st.integers(-64, 255),
    st.integers(0, 400),
)
def test_no_output_makes_the_search_fail(output: str, exitcode: int, cut: int) -> None:
    cause = find_cause(output[cut:], exitcode)
    if cause is not None:
        assert "\n" not in cause.summary
        assert cause.summary
        assert cause.text
