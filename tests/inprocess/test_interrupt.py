"""The wrapped function is interrupted once, at any point, and no other code is."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import logging
import os
import queue
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

import pytest
from regrow.inprocess.monitor_thread import RankShouldRestart

from helpers.processes import PATIENCE, wait_until
from helpers.ranks.interrupting import Striker, blocked, sweep
from regrow.inprocess.interrupt import interrupt, no_interrupt_zones
from regrow.inprocess.interrupt.interrupt import GuardedCall, Interrupter
from regrow.timer.stacks.answering import CANDIDATES

SEED = 20261121


@pytest.fixture(autouse=True)
def _no_garbage_of_others() -> Iterator[None]:
    """Collect the garbage of other tests: an exception in its callbacks would be lost."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(autouse=True)
def threads_take_turns_quickly() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def interrupter() -> Iterator[Interrupter]:
    with Interrupter() as interrupter:
        yield interrupter


@pytest.fixture
def striker() -> Iterator[Striker]:
    striker = Striker()
    yield striker
    striker.close()


def in_another_thread(work: Callable[[], None]) -> None:
    """Run `work` outside of the main thread; raise its exception."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive(), "the function was never interrupted"
    if failures:
        raise failures[0]


# --- everywhere, once


class Deaf(logging.Handler):
    """Takes its lock for each record, and does nothing else."""

    def emit(self, record: logging.LogRecord) -> None:
        pass


class Sites:
    """Endless functions of all kinds of code; each counts the exceptions that reach it."""

    def __init__(self) -> None:
        self.arrivals = 0
        self.swallow = 0
        self.open = 0
        self.lock = threading.Lock()
        self.condition = threading.Condition()
        self.queue: queue.Queue[int] = queue.Queue()
        self.log = logging.Logger("of the test")
        self.handler = Deaf()
        self.log.addHandler(self.handler)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1

    def numbers(self) -> Iterator[int]:
        for number in itertools.count():
            try:
                yield number
            finally:
                self.open += 0

    def generators(self) -> None:
        for number in self.numbers():
            sum(n for n in range(number % 10))

    def contexts(self) -> None:
        while True:
            with contextlib.ExitStack() as stack:
                stack.enter_context(self.opened())
                stack.callback(len, ())

    def cleanups(self) -> None:
        while True:
            try:
                raise KeyError
            except KeyError:
                with contextlib.suppress(IndexError):
                    [].pop()
            finally:
                str(self.open)

    def nested(self) -> None:
        def deeper(level: int) -> int:
            return deeper(level - 1) + 1 if level else 0

        while True:
            deeper(20)

    def comprehensions(self) -> None:
        while True:
            {str(a): [b * a for b in range(5)] for a in range(5)}

    def locks(self) -> None:
        while True:
            with self.lock, self.condition:
                self.condition.notify()

    def queues(self) -> None:
        while True:
            self.queue.put(1)
            self.queue.get()

    def logging(self) -> None:
        while True:
            logging.getLogger("of others")
            self.log.setLevel(logging.INFO)
            self.log.warning("here")

    def naps(self) -> None:
        while True:
            time.sleep(0.0001)

    def swallowing(self) -> None:
        while True:
            try:
                self.nested()
            except BaseException:
                self.arrivals += 1
                if not self.swallow:
                    self.arrivals -= 1  # `count` sees it
                    raise
                self.swallow -= 1

    def kinds(self) -> list[Callable[[], None]]:
        return [
            self.generators,
            self.contexts,
            self.cleanups,
            self.nested,
            self.comprehensions,
            self.locks,
            self.queues,
            self.logging,
            self.naps,
            self.swallowing,
        ]

    def locked(self) -> bool:
        """Whether a lock is left locked."""
        plain = self.lock.locked() or self.queue.mutex.locked()
        of_all = vars(logging)["_lock"]
        owned: list[Any] = [self.condition, self.handler.lock, of_all]  # can be locked again here
        return plain or any(lock._is_owned() for lock in owned)

    def count(self, fn: Callable[[], None]) -> None:
        try:
            fn()
        except RankShouldRestart:
            self.arrivals += 1
            raise


def interrupt_everywhere(interrupter: Interrupter, striker: Striker, times: int) -> None:
    dice = random.Random(SEED)
    sites = Sites()
    order = list(range(len(sites.kinds())))
    dice.shuffle(order)
    for number in range(times):
        fn = sites.kinds()[order[number % len(order)]]
        sites.arrivals = 0
        sites.swallow = swallowed = dice.randrange(3) if fn == sites.swallowing else 0
        call = interrupter.call()
        striker.strike(call, dice.random() * 0.0002)
        with contextlib.suppress(RankShouldRestart):  # as pytest.raises, and far cheaper
            call.run(sites.count, fn)
            pytest.fail(f"{fn.__name__} came back in round {number}")
        assert striker.result()
        # A second arrival would be raised here, or in the next round outside of `run`.
        swallowed -= sites.swallow  # fewer, if one arrived outside of its `try`
        assert sites.arrivals in (0, 1 + swallowed), f"{fn.__name__}, round {number}"
        assert not sites.locked(), f"{fn.__name__} left a lock locked in round {number}"
        assert sites.open == 0, f"{fn.__name__} was not unwound in round {number}"


def test_hundreds_of_interrupts_arrive_once_each(
    interrupter: Interrupter, striker: Striker
) -> None:
    interrupt_everywhere(interrupter, striker, 400)


def test_hundreds_of_interrupts_arrive_in_another_thread_than_the_main_one(
    striker: Striker,
) -> None:
    def work() -> None:
        with Interrupter() as interrupter:
            interrupt_everywhere(interrupter, striker, 100)

    in_another_thread(work)


if sys.version_info >= (3, 13):

    def test_nothing_is_left_switched_on_in_the_interpreter(striker: Striker) -> None:
        monitoring = sys.monitoring

        def tools() -> list[str | None]:
            return [monitoring.get_tool(number) for number in range(6)]

        def work() -> None:
            with Interrupter() as interrupter:
                call = interrupter.call()
                striker.strike(call)
                with pytest.raises(RankShouldRestart):
                    call.run(Sites().nested)
                assert striker.result()
                (ours,) = set(tools()) - set(before)
                assert ours == "regrow"
                assert monitoring.get_events(tools().index(ours)) == 0

        before = tools()
        in_another_thread(work)
        assert tools() == before

    def test_a_thread_is_interrupted_also_when_other_tools_have_all_identifiers(
        striker: Striker,
    ) -> None:
        monitoring = sys.monitoring
        taken = [number for number in range(6) if monitoring.get_tool(number) is None]
        for number in taken:
            monitoring.use_tool_id(number, "of others")

        def work() -> None:
            with Interrupter() as interrupter:
                call = interrupter.call()
                striker.strike(call)
                with pytest.raises(RankShouldRestart):
                    call.run(Sites().nested)

        try:
            in_another_thread(work)
        finally:
            for number in taken:
                monitoring.free_tool_id(number)


# --- never after the call


@contextlib.contextmanager
def no_free_signal() -> Iterator[None]:
    for number in CANDIDATES:
        signal.signal(number, lambda *_: None)
    try:
        yield
    finally:
        for number in CANDIDATES:
            signal.signal(number, signal.SIG_DFL)


def by_signal(interrupter: Interrupter) -> GuardedCall:
    assert interrupter.signum is not None
    return interrupter.call()


def by_exception(interrupter: Interrupter) -> GuardedCall:
    return GuardedCall(None, time.monotonic)


def by_code_events(interrupter: Interrupter) -> GuardedCall:
    assert interrupter.signum is None
    return interrupter.call()


WAYS = [by_signal, by_exception]
if sys.version_info >= (3, 13):
    WAYS.append(by_code_events)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_no_exception_arrives_after_the_call_at_any_time_of_the_request(
    striker: Striker,
    monkeypatch: pytest.MonkeyPatch,
    late: bool,
    way: Callable[[Interrupter], GuardedCall],
) -> None:
    without = no_free_signal() if way is by_code_events else contextlib.nullcontext()
    with without, Interrupter() as interrupter:
        found = sweep(lambda: way(interrupter), striker, monkeypatch, late=late)
    assert found.strays == []
    assert found.instructions > 20
    assert found.interrupted > 5


class ClassicalCall:
    """An interrupt is requested while the function runs, and may arrive at any later time."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._running = False

    def run(self, fn: Callable[[], Any], /) -> Any:
        self._running = True
        try:
            return fn()
        finally:
            self._running = False

    def interrupt(self) -> bool:
        if self._running:
            interrupt.set_async_exception(self._thread, RankShouldRestart)
            return True
        return False


def test_a_sweep_finds_the_classical_race(
    striker: Striker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sweep(ClassicalCall, striker, monkeypatch, late=True).strays


# --- calls that block


@contextlib.contextmanager
def waits() -> Iterator[dict[str, Callable[[], object]]]:
    """Calls that last without end."""
    lock = threading.Lock()
    condition = threading.Condition()
    reading, writing = os.pipe()
    ours, theirs = socket.socketpair()
    forever = threading.Thread(target=lock.acquire)

    def wait_for_a_child() -> None:
        with subprocess.Popen(["sleep", "1000"]) as child:
            try:
                child.wait()
            finally:
                child.kill()

    def wait_for_a_notice() -> None:
        with condition:
            condition.wait()

    with ours, theirs, os.fdopen(reading), os.fdopen(writing, "w"):
        lock.acquire()
        forever.start()
        yield {
            "sleep": lambda: time.sleep(1000),
            "lock": lock.acquire,
            "condition": wait_for_a_notice,
            "event": threading.Event().wait,
            "queue": queue.Queue[int]().get,
            "thread": forever.join,
            "select": lambda: select.select([reading], [], []),
            "read": lambda: os.read(reading, 1),
            "recv": lambda: ours.recv(1),
            "child": wait_for_a_child,
        }
        lock.release()
        forever.join()


def test_calls_that_block_are_woken(interrupter: Interrupter, striker: Striker) -> None:
    with waits() as endless:
        for name, wait in endless.items():
            call = interrupter.call()
            striker.strike(call, when=blocked(threading.get_native_id()))
            with pytest.raises(RankShouldRestart):
                call.run(wait)
            assert striker.result(), name


# --- code that is not interrupted


class Requests:
    """Counts the signals that are sent, and provides the clock of the time limits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent = 0
        self.now = 0.0
        self.awaited = threading.Event()
        kill = signal.pthread_kill

        def counting(thread: int, signum: int) -> None:
            self.sent += 1
            kill(thread, signum)

        monkeypatch.setattr(signal, "pthread_kill", counting)

    def clock(self) -> float:
        return self.now

    def await_signals(self) -> None:
        """Wait until the calling thread has received some more signals."""
        before = self.sent
        self.awaited.set()
        wait_until(lambda: self.sent >= before + 3, "asked again and again")


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Requests:
    return Requests(monkeypatch)


def test_an_import_is_completed_first(
    requests: Requests, striker: Striker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "spared_module.py").write_text(
        "import spared_by_test\nspared_by_test.wait()\ncomplete = True\n"
    )
    helper = ModuleType("spared_by_test")
    helper.__dict__["wait"] = requests.await_signals
    monkeypatch.setitem(sys.modules, "spared_by_test", helper)
    monkeypatch.syspath_prepend(tmp_path)
    with Interrupter(requests.clock) as interrupter:
        call = interrupter.call()
        striker.strike(call, when=requests.awaited.is_set)

        def load() -> None:
            __import__("spared_module")
            time.sleep(1000)

        with pytest.raises(RankShouldRestart):
            call.run(load)
        assert striker.result()
    assert sys.modules.pop("spared_module").complete


def test_a_destructor_is_completed_and_loses_no_exception(
    requests: Requests, striker: Striker
) -> None:
    completed = []

    class Held:
        def __del__(self) -> None:
            requests.await_signals()
            completed.append(True)

    def let_go() -> None:
        Held()
        time.sleep(1000)

    with Interrupter(requests.clock) as interrupter:
        call = interrupter.call()
        striker.strike(call, when=requests.awaited.is_set)
        with pytest.raises(RankShouldRestart):
            call.run(let_go)
        assert striker.result()
    assert completed == [True]


def test_a_callback_of_the_collector_is_completed_and_loses_no_exception(
    requests: Requests, striker: Striker
) -> None:
    completed: list[bool] = []
    me = threading.get_ident()

    def called(phase: str, _: object) -> None:
        if phase == "start" and threading.get_ident() == me and not completed:
            requests.await_signals()
            completed.append(True)

    def collect() -> None:
        gc.collect()
        time.sleep(1000)

    with Interrupter(requests.clock) as interrupter:
        call = interrupter.call()
        striker.strike(call, when=requests.awaited.is_set)
        gc.callbacks.append(called)
        try:
            with pytest.raises(RankShouldRestart):
                call.run(collect)
        finally:
            gc.callbacks.remove(called)
        assert striker.result()
    assert completed == [True]


class Save:
    """Handlers of SIGTERM that take their time."""

    def __init__(self, requests: Requests) -> None:
        self.requests = requests
        self.is_complete = False

    def __call__(self, *_: object) -> None:
        self.requests.await_signals()
        self.requests.now += 100 * no_interrupt_zones.HOLD_LIMIT
        self.requests.await_signals()
        self.is_complete = True

    def method(self, signum: int, frame: object) -> None:
        self(signum, frame)


@pytest.mark.parametrize("kind", ["function", "method", "partial", "object"])
def test_a_handler_of_sigterm_is_completed_however_long_it_takes(
    requests: Requests, striker: Striker, kind: str
) -> None:
    save = Save(requests)

    def wait() -> None:
        signal.raise_signal(signal.SIGTERM)
        time.sleep(1000)

    handlers: dict[str, Callable[..., None]] = {
        "function": lambda *_: save(),
        "method": save.method,
        "partial": functools.partial(save.method),
        "object": save,
    }
    before = signal.signal(signal.SIGTERM, handlers[kind])
    try:
        with Interrupter(requests.clock) as interrupter:
            call = interrupter.call()
            striker.strike(call, when=requests.awaited.is_set)
            with pytest.raises(RankShouldRestart):
                call.run(wait)
            assert striker.result()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert save.is_complete


def test_a_function_may_clean_up_while_it_handles_the_exception(
    requests: Requests, striker: Striker
) -> None:
    steps = []

    def clean_up() -> None:
        with contextlib.suppress(KeyError):
            raise KeyError
        try:
            raise KeyError
        except KeyError:  # which now hides the exception that is being handled
            requests.await_signals()
        steps.append("cleaned up")

    def work() -> None:
        try:
            time.sleep(1000)
        finally:
            clean_up()
            requests.await_signals()
            steps.append("done")

    with Interrupter(requests.clock) as interrupter:
        call = interrupter.call()
        striker.strike(call, when=blocked(threading.get_native_id()))
        with pytest.raises(RankShouldRestart):
            call.run(work)
        assert striker.result()
    assert steps == ["cleaned up", "done"]


def test_a_cleanup_that_takes_too_long_is_interrupted(requests: Requests, striker: Striker) -> None:
    def work() -> None:
        try:
            time.sleep(1000)
        finally:
            requests.await_signals()
            requests.now += no_interrupt_zones.HOLD_LIMIT
            time.sleep(1000)

    with Interrupter(requests.clock) as interrupter:
        call = interrupter.call()
        striker.strike(call, when=blocked(threading.get_native_id()))
        with pytest.raises(RankShouldRestart):
            call.run(work)
        assert striker.result()


def test_a_lock_that_is_waited_for_is_no_lock_that_is_just_taken(
    interrupter: Interrupter, striker: Striker
) -> None:
    condition = threading.Condition()
    taken, release = threading.Event(), threading.Event()

    def take() -> None:
        with condition:
            taken.set()
            release.wait(PATIENCE)

    thread = threading.Thread(target=take)
    thread.start()
    taken.wait(PATIENCE)

    def enter() -> None:
        with condition:
            pytest.fail("it is taken")

    call = interrupter.call()
    striker.strike(call)
    with pytest.raises(RankShouldRestart):
        call.run(enter)
    assert striker.result()
    release.set()
    thread.join()


# --- how a call ends


def interrupted_while(interrupter: Interrupter, striker: Striker, error: BaseException) -> Any:
    """Run a function that raises `error` when it is interrupted."""
    call = interrupter.call()

    def work() -> None:
        try:
            time.sleep(1000)
        except RankShouldRestart:
            raise error from None

    striker.strike(call, when=blocked(threading.get_native_id()))
    call.run(work)


def test_a_function_that_takes_a_lock_is_interrupted_only_if_it_is_blocked() -> None:
    def acquire() -> None: ...

    def met(instruction: int) -> bool:
        top.f_lasti = instruction
        return interrupt_check.at(top, guard, None)

    guard: Any = SimpleNamespace()
    top: Any = SimpleNamespace(f_code=acquire.__code__, f_back=guard)
    now = 0.0
    interrupt_check = no_interrupt_zones.InterruptCheck(lambda: now, wakes=True)
    assert not any(met(step) for step in range(3 * no_interrupt_zones.LOOKS))
    # A loop is no progress: the thread was at each place before.
    assert [met(step % 2) for step in range(no_interrupt_zones.LOOKS - 1)] == [False] * 3 + [True]
    # Nor is a wait. Without wakes, an exception arrives only with the lock and ends no wait.
    interrupt_check = no_interrupt_zones.InterruptCheck(lambda: now, wakes=True)
    assert [met(7) for _ in range(no_interrupt_zones.LOOKS)] == [False] * 4 + [True]
    interrupt_check = no_interrupt_zones.InterruptCheck(lambda: now, wakes=False)
    assert not any(met(7) for _ in range(3 * no_interrupt_zones.LOOKS))
    now = no_interrupt_zones.HOLD_LIMIT
    assert met(7)


def test_a_second_signal_ignores_the_frames_of_the_handler(
    interrupter: Interrupter, striker: Striker, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []
    judge = no_interrupt_zones.InterruptCheck.at

    def at(
        interrupt_check: no_interrupt_zones.InterruptCheck, top: FrameType, *others: Any
    ) -> bool:
        found.append(top.f_code.co_name)
        if len(found) == 1:
            assert interrupter.signum is not None
            signal.raise_signal(interrupter.signum)
        return judge(interrupt_check, top, *others)

    def acquire() -> None:
        while True:
            time.sleep(0.0001)

    monkeypatch.setattr(no_interrupt_zones.InterruptCheck, "at", at)
    while found[:1] != ["acquire"]:  # the interrupt may arrive before the function has begun
        found.clear()
        call = interrupter.call()
        striker.strike(call, 0.001)
        with contextlib.suppress(RankShouldRestart):
            call.run(acquire)
        assert striker.result()
    assert set(found) == {"acquire"}
    assert len(found) >= no_interrupt_zones.LOOKS


def test_an_exception_of_the_functions_own_is_the_cause(
    interrupter: Interrupter, striker: Striker
) -> None:
    error = KeyError("of its own")
    with pytest.raises(RankShouldRestart) as raised:
        interrupted_while(interrupter, striker, error)
    assert raised.value.__cause__ is error
    assert striker.result()


def test_a_function_that_exits_is_not_restarted(interrupter: Interrupter, striker: Striker) -> None:
    with pytest.raises(SystemExit):
        interrupted_while(interrupter, striker, SystemExit(3))
    assert striker.result()


def test_a_call_that_is_over_is_not_interrupted(interrupter: Interrupter, striker: Striker) -> None:
    call = interrupter.call()
    assert call.run(int, "7") == 7
    striker.strike(call)
    assert not striker.result()
    assert not call.requested


def test_a_request_before_the_call_begins_takes_effect(
    interrupter: Interrupter, striker: Striker
) -> None:
    call = interrupter.call()
    striker.strike(call)
    assert striker.result()
    with pytest.raises(RankShouldRestart):
        call.run(pytest.fail)


def test_what_the_caller_handles_is_no_exception_of_the_call(
    requests: Requests, striker: Striker
) -> None:
    with Interrupter(requests.clock) as interrupter:
        try:
            raise RankShouldRestart
        except RankShouldRestart:  # as in a wrapper that calls again in its handler
            call = interrupter.call()
            striker.strike(call)
            with pytest.raises(RankShouldRestart):
                call.run(lambda: time.sleep(1000))
    assert striker.result()


# --- the signal


def test_the_signal_is_the_last_unused_one() -> None:
    last = CANDIDATES[-1]
    signal.signal(last, lambda *_: None)
    signal.signal(last - 1, signal.SIG_IGN)
    try:
        with Interrupter() as interrupter:
            assert interrupter.signum == last - 2
        assert signal.getsignal(last - 2) is signal.SIG_DFL
    finally:
        signal.signal(last, signal.SIG_DFL)
        signal.signal(last - 1, signal.SIG_DFL)


def test_without_a_free_signal_code_is_interrupted_and_calls_are_not(
    striker: Striker, caplog: pytest.LogCaptureFixture
) -> None:
    with no_free_signal(), Interrupter() as interrupter:
        call = interrupter.call()
        striker.strike(call)
        with pytest.raises(RankShouldRestart):
            call.run(Sites().nested)
    assert striker.result()
    assert "catches or ignores the signals 44 to 55" in caplog.text


IN_A_PROCESS_OF_ITS_OWN = """
import signal, threading
from regrow.inprocess.interrupt.interrupt import Interrupter
from regrow.timer.stacks.answering import arm

with Interrupter() as interrupter:
    mine = interrupter.signum
    marker = arm()
    assert mine not in (marker.all_threads, marker.one_thread)
with Interrupter() as interrupter:
    assert interrupter.signum == mine
    signal.pthread_sigmask(signal.SIG_BLOCK, {mine})
    signal.pthread_kill(threading.get_ident(), mine)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {mine})
signal.pthread_sigmask(signal.SIG_BLOCK, {mine})
with Interrupter() as interrupter:
    assert mine not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
assert mine in signal.pthread_sigmask(signal.SIG_BLOCK, ())
print("alive")
"""


def test_a_late_signal_does_not_end_the_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IN_A_PROCESS_OF_ITS_OWN],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr
