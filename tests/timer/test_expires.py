"""`expires`: the requests of a block, its scope, and its client."""

from __future__ import annotations

import asyncio
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

import regrow
from regrow.timer import TimerClient, configure, expires

HERE = __file__


class Recorder(TimerClient):
    """A client that records its requests."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.expirations: list[float] = []

    @property
    def armed(self) -> set[str]:
        """The scopes that would be armed at a server now."""
        armed: set[str] = set()
        for what, scope in self.asked:
            (armed.add if what == "arm" else armed.discard)(scope)
        return armed

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        self.asked.append(("arm", scope_id))
        self.expirations.append(expiration_time)

    def release(self, scope_id: str) -> None:
        self.asked.append(("release", scope_id))


@pytest.fixture
def client() -> Iterator[Recorder]:
    client = Recorder()
    configure(client)
    yield client
    configure(None)


def line() -> int:
    """The line that calls this."""
    return sys._getframe(1).f_lineno


def test_a_block_arms_a_timer_in_epoch_seconds_and_releases_it(client: Recorder) -> None:
    before = time.time()
    with expires(after=60):
        assert len(client.armed) == 1
        after = time.time()
    assert client.armed == set()
    assert before + 60 <= client.expirations[0] <= after + 60


def test_the_default_scope_is_the_file_and_line_of_the_caller(client: Recorder) -> None:
    with expires(60):
        here = line() - 1
    assert client.asked == [("arm", f"{HERE}#{here}"), ("release", f"{HERE}#{here}")]


def test_blocks_on_different_lines_do_not_release_each_other(client: Recorder) -> None:
    with expires(60):
        with expires(10):
            assert len(client.armed) == 2
        assert len(client.armed) == 1


def test_recursion_arms_its_scope_again_and_the_inner_end_releases_it(client: Recorder) -> None:
    def descend(depth: int) -> None:
        with expires(60):
            if depth:
                descend(depth - 1)
            assert client.armed == set() if depth else len(client.armed) == 1

    descend(2)
    assert [what for what, _ in client.asked] == ["arm"] * 3 + ["release"] * 3
    assert len({scope for _, scope in client.asked}) == 1


def test_a_scope_and_a_client_may_be_given() -> None:
    configure(None)
    client = Recorder()
    with expires(60, scope="save", client=client):
        pass
    with expires(after=60, client=client, scope="load"):
        pass
    assert [scope for _, scope in client.asked] == ["save", "save", "load", "load"]


def test_an_exception_goes_through_and_the_timer_is_released(client: Recorder) -> None:
    with pytest.raises(KeyError, match="gone"), expires(60):
        raise KeyError("gone")
    assert (len(client.asked), client.armed) == (2, set())


def test_the_client_of_the_start_receives_the_end(client: Recorder) -> None:
    with expires(60):
        configure(None)
    assert client.armed == set()


def test_a_limit_can_be_used_again_with_another_client(client: Recorder) -> None:
    limit, second = expires(60, scope="step"), Recorder()
    with limit:
        pass
    configure(second)
    with limit:
        pass
    assert client.asked == second.asked == [("arm", "step"), ("release", "step")]


def test_a_decorated_function_is_limited_in_each_call(client: Recorder) -> None:
    @expires(60)
    def double(number: int, *, plus: int = 0) -> int:
        """Twice the number."""
        assert len(client.armed) == 1
        return 2 * number + plus

    here = line() - 6
    assert (double(3, plus=1), double(4)) == (7, 8)
    assert client.asked == [(what, f"{HERE}#{here}") for what in ("arm", "release")] * 2
    assert (double.__name__, double.__doc__) == ("double", "Twice the number.")


def test_decorating_needs_no_client() -> None:
    configure(None)

    @expires(60)
    def function() -> None: ...

    with pytest.raises(RuntimeError, match="Configure timer client"):
        function()


def test_a_generator_function_is_not_decorated() -> None:
    def batches() -> Iterator[int]:
        yield 1

    with pytest.raises(TypeError, match=r"batches is a generator function.*with expires"):
        expires(60)(batches)


def test_tasks_in_the_same_block_do_not_release_each_other(client: Recorder) -> None:
    async def task(inside: asyncio.Event, end: asyncio.Event) -> None:
        async with expires(60):
            inside.set()
            await end.wait()

    async def main() -> tuple[set[str], set[str]]:
        events = [asyncio.Event() for _ in range(4)]
        first = asyncio.create_task(task(events[0], events[1]))
        second = asyncio.create_task(task(events[2], events[3]))
        await events[0].wait()
        await events[2].wait()
        both = client.armed
        events[1].set()
        await first
        one = client.armed
        events[3].set()
        await second
        return both, one

    both, one = asyncio.run(main())
    assert (len(both), len(one), len(client.armed)) == (2, 1, 0)
    assert one < both
    assert all(re.fullmatch(re.escape(HERE) + r"#\d+@[0-9a-f]+", scope) for scope in both)


def test_calls_of_a_decorated_coroutine_do_not_release_each_other(client: Recorder) -> None:
    most = 0

    @expires(60)
    async def reply(number: int) -> int:
        nonlocal most
        await asyncio.sleep(0)
        most = max(most, len(client.armed))
        return number

    async def main() -> list[int]:
        return await asyncio.gather(*(reply(number) for number in range(5)))

    assert asyncio.run(main()) == [0, 1, 2, 3, 4]
    assert (most, client.armed) == (5, set())


def test_a_cancelled_task_releases_its_timer_and_an_explicit_scope_is_kept(
    client: Recorder,
) -> None:
    async def main() -> None:
        async with expires(60, scope="step"):
            asyncio.current_task().cancel()  # type: ignore[union-attr]
            await asyncio.sleep(30)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())
    assert client.asked == [("arm", "step"), ("release", "step")]


def test_the_error_without_a_client_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    configure(None)
    monkeypatch.delenv("TORCHELASTIC_TIMER_FILE", raising=False)
    with (
        pytest.raises(
            RuntimeError,
            match=r"Configure timer client before using countdown timers\..*regrow run --timers",
        ),
        expires(60),
    ):
        pass


def test_an_exception_of_a_signal_handler_leaves_no_timer_armed() -> None:
    class Interrupted(Recorder):
        interrupts = 1

        def interrupt(self) -> None:
            self.interrupts -= 1
            if not self.interrupts:
                raise KeyboardInterrupt

        def acquire(self, scope_id: str, expiration_time: float) -> None:
            super().acquire(scope_id, expiration_time)
            self.interrupt()

        def release(self, scope_id: str) -> None:
            self.interrupt()
            super().release(scope_id)

    for place in ("begin", "end"):
        client = Interrupted()
        client.interrupts += place == "end"
        with pytest.raises(KeyboardInterrupt), expires(60, client=client):
            assert place == "end"
        assert client.interrupts <= 0
        assert client.armed == set()


def test_an_invalid_time_is_refused_before_a_timer_is_armed(client: Recorder) -> None:
    with pytest.raises(ValueError, match=r"expires\(after=nan\)"):
        expires(after=math.nan)
    for wrong in ("60", None, timedelta(seconds=60), len):
        with pytest.raises(TypeError, match=re.escape(f"expires(after={wrong!r}): give a number")):
            expires(wrong)  # type: ignore[arg-type]
    assert client.asked == []


def test_a_worker_of_an_agent_needs_no_set_up(tmp_path: Path) -> None:
    pipe = tmp_path / "timers"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    program = "import regrow\nwith regrow.expires(after=60, scope='step'): pass"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "TORCHELASTIC_TIMER_FILE": str(pipe)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    sent = os.read(reader, 65536).decode()
    os.close(reader)
    assert (done.returncode, done.stderr) == (0, "")
    assert sent.count('"scope_id": "step"') == 2


def test_regrow_loads_timers_when_they_are_used() -> None:
    program = (
        "import sys, regrow\n"
        "print(*[name for name in ('regrow.timer', 'multiprocessing') if name in sys.modules])\n"
        "regrow.expires\n"
        "print(*[name for name in ('multiprocessing', 'asyncio', 'socket') "
        "if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == ("\n\n", "")
    assert regrow.expires is expires
    with pytest.raises(AttributeError, match="no attribute 'expire'"):
        regrow.expire  # noqa: B018
