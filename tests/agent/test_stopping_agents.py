"""The agent's side of `regrow.should_stop`: the page, the agreement over a store, the decisions."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from queue import SimpleQueue
from time import monotonic
from types import SimpleNamespace
from typing import Any, cast

import pytest

from helpers.processes import PATIENCE, wait_until
from regrow._stopping import END, RUN, STOP_COMMAND
from regrow.agent import WorkerState
from regrow.agent.decisions import events
from regrow.agent.decisions.decide import AgentPhase, AgentState, decide
from regrow.agent.decisions.early_stop import EndNow, Leave, NodeReport, StopAt, Verdict
from regrow.agent.features import StartedWorkers, early_stop
from regrow.agent.features.early_stop import EarlyStop
from regrow.agent.features.stop_agreement import (
    agree,
    ask,
    decode_request,
    encode_request,
)
from regrow.agent.features.stop_page import StopPage
from regrow.store import MemoryStore, StoreClosedError

STEPPING = """
import sys, regrow
step = 0
while not regrow.should_stop():
    step += 1
print(step + 1, regrow.deadline() is not None)
"""


@pytest.fixture
def page() -> Iterator[StopPage]:
    made = StopPage(2)
    yield made
    made.close()


def start(page: StopPage, local_rank: int, script: str = STEPPING) -> subprocess.Popen[str]:
    env = os.environ | page.environment(local_rank)
    return subprocess.Popen([sys.executable, "-c", script], env=env, stdout=-1, text=True)


def ended(worker: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = worker.communicate(timeout=PATIENCE)
    return worker.returncode, output


# --- the page, under real processes


def test_no_rank_passes_the_position_that_the_agent_reads_on_hold(page: StopPage) -> None:
    workers = [start(page, 0), start(page, 1)]
    wait_until(lambda: page.using() == 2, "the first calls")
    assert page.decision == RUN
    page.hold(monotonic() + PATIENCE)
    chosen = page.position() + 1
    page.decide(chosen)
    assert [ended(worker) for worker in workers] == [(0, f"{chosen} True\n")] * 2
    assert page.stopped() == 2


def test_a_rank_that_starts_later_waits_for_the_decision_as_well(page: StopPage) -> None:
    page.hold(monotonic() + PATIENCE)
    worker = start(page, 1)
    wait_until(lambda: page.using() == 1, "the first call")
    assert worker.poll() is None
    page.decide(7)
    assert ended(worker) == (0, "7 True\n")


def test_a_rank_whose_agent_has_ended_does_not_wait(page: StopPage) -> None:
    page.hold(monotonic() + PATIENCE)
    waits = start(page, 0, "import regrow; print(regrow.should_stop())")
    wait_until(lambda: page.using() == 1, "the first call")
    page.close()  # as the kernel does
    assert ended(waits) == (0, "False\n")


def test_a_rank_does_not_wait_beyond_the_deadline(page: StopPage) -> None:
    page.hold(monotonic())
    assert ended(start(page, 0, "import regrow; print(regrow.should_stop())")) == (0, "False\n")


def test_a_rank_goes_on_where_the_job_ends_as_by_a_signal(page: StopPage) -> None:
    page.hold(monotonic() + PATIENCE)
    waits = start(page, 0, "import regrow; print(regrow.should_stop())")
    wait_until(lambda: page.using() == 1, "the first call")
    page.decide(END)
    assert ended(waits) == (0, "False\n")


def test_a_dropped_request_leaves_no_trace(page: StopPage) -> None:
    page.hold(monotonic() + PATIENCE)
    page.decide(RUN)
    page.hold(monotonic() + PATIENCE)
    waits = start(page, 0, "import regrow; print(regrow.should_stop())")
    wait_until(lambda: page.using() == 1, "the first call")
    assert waits.poll() is None
    page.decide(1)
    assert ended(waits) == (0, "True\n")


@pytest.mark.parametrize("value", ["", "x", "a|b|c", "/dev/null|/dev/null|0", "|||", "/x|/y|-1"])
def test_a_worker_whose_page_cannot_be_opened_goes_on(value: str) -> None:
    script = "import regrow; print(regrow.should_stop(), regrow.deadline())"
    env = os.environ | {"REGROW_STOP": value}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False None\n"


def test_a_slot_beyond_the_page_is_no_slot(page: StopPage) -> None:
    assert ended(start(page, 2, "import regrow; print(regrow.should_stop())")) == (0, "False\n")
    assert ended(start(page, -1, "import regrow; print(regrow.should_stop())")) == (0, "False\n")


def test_calls_count_from_the_start_of_an_iteration(page: StopPage) -> None:
    script = """
import regrow
from regrow._stopping import begin_iteration
begin_iteration(0, 3)
regrow.should_stop()
begin_iteration(0, 4)
print(regrow.should_stop(), regrow.should_stop())
"""
    page.decide((3 << 32) + 900)  # chosen before the restart: the first call of iteration 4
    assert ended(start(page, 0, script)) == (0, "True True\n")
    assert page.position() == (4 << 32) + 2


THREADS = """
import regrow, threading
def calls(times):
    return [regrow.should_stop() for _ in range(times)]
def other(times):
    found = []
    thread = threading.Thread(target=lambda: found.extend(calls(times)))
    thread.start()
    thread.join()
    return found
"""


@pytest.mark.parametrize("early", ["", "other(2)\n"])
def test_only_the_calls_of_the_main_thread_count(page: StopPage, early: str) -> None:
    page.decide(4)
    script = f"{THREADS}{early}print(*calls(3), *other(9), *calls(1), *other(1))"
    assert ended(start(page, 0, script)) == (0, " ".join(["False"] * 12 + ["True"] * 2) + "\n")


def test_the_calls_of_one_other_thread_count_if_the_main_thread_makes_none(page: StopPage) -> None:
    page.decide(4)
    assert ended(start(page, 0, f"{THREADS}print(*other(4))")) == (0, "False False False True\n")


def test_calls_go_on_counting_after_1024_wrapped_calls(page: StopPage) -> None:
    script = """
import regrow
from regrow._stopping import begin_iteration
begin_iteration({call}, 0)
print(regrow.should_stop())
begin_iteration({call} + 1, 0)
print(regrow.should_stop())
"""
    page.decide(((1023 << 20) << 32) + 2)  # the second call within call 1023
    early, late = (start(page, rank, script.format(call=1022 + rank)) for rank in range(2))
    assert ended(early) == (0, "False\nFalse\n")
    assert ended(late) == (0, "False\nTrue\n")
    assert page.position() == 1  # of the rank that is in call 1024


# --- signals of a scheduler at a worker


def signaled(page: StopPage, signum: int, before: str = "", after: str = "") -> tuple[int, str]:
    """Send a signal to a worker that has called `should_stop`; return its end."""
    script = f"{before}\nimport regrow, time\nregrow.should_stop()\n{after}\n"
    worker = start(page, 0, script + "while not regrow.should_stop(): pass\nprint('stops')")
    wait_until(lambda: page.using() == 1, "the first call")
    worker.send_signal(signum)
    if worker.poll() is None and not before:
        page.hold(monotonic() + PATIENCE)  # the agent has got the signal as well
        page.decide(page.position() + 1)
    return ended(worker)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_a_worker_survives_a_signal_that_its_agent_got_as_well(page: StopPage, signum: int) -> None:
    assert signaled(page, signum) == (0, "stops\n")


def test_a_handler_of_the_script_stays(page: StopPage) -> None:
    own = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(5))"
    assert signaled(page, signal.SIGTERM, before=own) == (5, "")


def test_a_forked_child_of_a_worker_dies_of_the_signal(page: StopPage) -> None:
    fork = """
import os, signal
read_end, write_end = os.pipe()
child = os.fork()
if not child:
    os.write(write_end, b"x")
    for _ in range(6000):  # a signal right before a sleep does not wake Python from it
        time.sleep(0.01)
    os._exit(0)
os.close(write_end)
os.read(read_end, 1)  # nothing, if the signal that the worker got meanwhile has ended the child
os.kill(child, signal.SIGTERM)
print(os.waitpid(child, 0)[1], flush=True)
"""
    assert signaled(page, signal.SIGTERM, after=fork) == (0, "15\nstops\n")


# --- the agreement


def agreed(
    *reports: NodeReport,
    min_nodes: int | None = None,
    store: MemoryStore | None = None,
    number: int = 0,
) -> list[Verdict | None]:
    """Let nodes with these reports agree over one store; return what each of them learns."""
    store, found = store or MemoryStore(), dict[int, Verdict | None]()

    def run(rank: int, until: float) -> None:
        def report(_until: float | None = None) -> NodeReport:
            return reports[rank]

        try:
            found[rank] = agree(store, number, rank, len(reports), until, min_nodes, report)
        except Exception:  # noqa: BLE001 - the result is asserted
            found[rank] = None

    threads = [
        threading.Thread(target=partial(run, rank, monotonic() + PATIENCE))
        for rank in range(len(reports))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(len(reports))]


def test_all_nodes_learn_the_position() -> None:
    reports = [NodeReport(position, 2, 2, False, True) for position in (5, 9, 7)]
    assert agreed(*reports) == [StopAt(10)] * 3


def test_all_nodes_learn_that_not_all_ranks_take_part() -> None:
    found = agreed(NodeReport(5, 2, 2, False, True), NodeReport(0, 1, 2, False, True))
    assert [type(each) for each in found] == [EndNow, EndNow]


def test_without_a_node_the_others_learn_that_the_job_ends() -> None:
    store = MemoryStore()

    def mine(_until: float | None = None) -> NodeReport:
        return NodeReport(5, 2, 2, leaves=False, whole=True)

    with pytest.raises(Exception, match="first/1"):
        agree(store, 0, 0, 2, monotonic() + 0.05, None, mine)
    assert store.get("stop/0/verdict") == b"end"
    with pytest.raises(Exception, match="stop/0/next"):
        agree(MemoryStore(), 0, 1, 2, monotonic() + 0.05, None, mine)


LEAVES, STAYS = NodeReport(9, 2, 2, True, False), NodeReport(5, 2, 2, False, False)


@pytest.mark.parametrize(
    ("min_nodes", "own", "decided"),
    [
        (1, STAYS, b"leave\n"),
        (2, STAYS, b"end"),  # the job needs both
        (None, STAYS, b"end"),
        (1, STAYS._replace(whole=True), b"end"),
    ],
)
def test_a_node_that_does_not_report_in_time_ends_no_other_one_for_one_that_leaves(
    min_nodes: int | None, own: NodeReport, decided: bytes
) -> None:
    store = MemoryStore()
    with pytest.raises(Exception, match="first/1"):
        agree(store, 0, 0, 2, monotonic() + 0.05, min_nodes, lambda _until=None: own)
    assert store.get("stop/0/verdict") == decided


def test_a_second_request_in_a_round_does_not_see_the_reports_of_the_first() -> None:
    store = MemoryStore()
    assert agreed(STAYS, LEAVES, min_nodes=1, store=store) == [Leave()] * 2
    later = [NodeReport(position, 2, 2, False, True) for position in (70, 60)]
    assert agreed(*later, min_nodes=1, store=store, number=1) == [StopAt(71)] * 2


def test_a_request_for_the_whole_job_follows_that_of_a_node_that_leaves() -> None:
    store = MemoryStore()
    agreed(STAYS, LEAVES, min_nodes=1, store=store)
    asked = threading.Thread(target=lambda: calls.append(ask(store, "a test", PATIENCE)))
    calls: list[int | None] = []
    asked.start()
    store.wait(["stop/1/asked"])
    later = [NodeReport(position, 2, 2, False, True) for position in (70, 60)]
    agreed(*later, min_nodes=1, store=store, number=1)
    asked.join()
    assert calls == [71]


class _Ends(MemoryStore):
    """A store whose round ends as soon as the decision is there, before the call is answered."""

    def multi_set(self, *args: Any) -> None:
        super().multi_set(*args)
        raise StoreClosedError("the store client was closed")


def test_a_node_that_leaves_may_end_the_round_before_the_decision_is_confirmed() -> None:
    assert agreed(STAYS, LEAVES, min_nodes=1, store=_Ends()) == [Leave()] * 2


def test_a_decision_for_the_whole_job_needs_its_confirmation() -> None:
    reports = [NodeReport(position, 2, 2, False, True) for position in (5, 9)]
    assert agreed(*reports, store=_Ends()) == [None, StopAt(10)]


@pytest.mark.parametrize("left", [None, 12.5])
def test_a_request_survives_the_store(left: float | None) -> None:
    text = encode_request("SIGTERM at rank 3", left, leaves=True)
    assert decode_request(text) == ("SIGTERM at rank 3", left, True)


def test_a_reason_that_another_agent_sends_controls_no_terminal() -> None:
    assert decode_request("- 0 \x1b[31mnow\x07\nplease\u202e".encode())[0] == "[31mnow please"


@pytest.mark.parametrize("text", [b"", b"1", b"x 0 why", b"-5 0 why", b"nan 0 why", b"inf 0 why"])
def test_a_malformed_request_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        decode_request(text)


# --- the feature


class Node:
    """The feature of one node with one worker; the test handles its messages."""

    def __init__(
        self,
        store: MemoryStore | None = None,
        rank: int = 0,
        nodes: int = 1,
        min_nodes: int | None = None,
    ) -> None:
        self.messages = SimpleQueue[Callable[[], object]]()
        spec = SimpleNamespace(local_world_size=1)
        group = SimpleNamespace(
            spec=spec,
            state=WorkerState.HEALTHY,
            store=store or MemoryStore(),
            group_rank=rank,
            group_world_size=nodes,
        )
        recorder = SimpleNamespace(emit=lambda name, **fields: None)
        self.job = SimpleNamespace(group=group, post=self.messages.put, recorder=recorder)
        self.job.shutdown_timeout, self.job.leaving, self.job.stopping = PATIENCE, False, False
        self.job.handler, self.job.numbered, self.job.round = (
            SimpleNamespace(host="node1"),
            False,
            0,
        )
        self.stop = EarlyStop(cast(Any, self.job), min_nodes=min_nodes)

    def stops_early(self) -> None:
        """Run one attempt; its worker stops because of a signal."""
        environment: dict[str, str] = {}
        self.stop.before_start({0: environment})
        nothing = cast(Any, None)
        self.stop.on_start(StartedWorkers(0, [0], nothing, nothing))
        assert self.messages.get(timeout=PATIENCE)() == events.WorkersStarted()
        assert self.stop.stopped() == ""
        worker = subprocess.Popen([sys.executable, "-c", STEPPING], env=os.environ | environment)
        wait_until(self._is_asked, "a worker that calls should_stop")
        assert self.job.stopping
        assert isinstance(self.messages.get(timeout=PATIENCE)(), events.StopBegun)
        assert worker.wait(PATIENCE) == 0
        assert self.stop.stopped() == "SIGTERM"

    def _is_asked(self) -> bool:
        return isinstance(self.stop.on_signal(events.Signaled(signal.SIGTERM)), events.StopBegun)


@pytest.mark.parametrize("whole", [False, True], ids=["one host leaves", "the job is stopped"])
def test_a_node_goes_on_without_one_that_leaves_before_the_agents_agree(whole: bool) -> None:
    store = MemoryStore()
    node = Node(store.session(), rank=1, nodes=3, min_nodes=1)
    node.stop.open()
    try:
        node.stop.before_start({0: {}})
        nothing = cast(Any, None)
        node.stop.on_start(StartedWorkers(1, [1], nothing, nothing))
        assert node.messages.get(timeout=PATIENCE)() == events.WorkersStarted()
        why = "SIGTERM on host node2"
        store.set("stop/0/asked", encode_request(why, PATIENCE, leaves=not whole))
        begun = node.messages.get(timeout=PATIENCE)()
        assert begun == events.StopBegun(of_another_node=not whole)
        node.job.group.store.close()  # the round is over
        then = node.messages.get(timeout=PATIENCE)()
        assert then == (events.Signaled(signal.SIGTERM) if whole else events.StopDropped())
        assert node.job.stopping is whole
    finally:
        node.stop.close()


def test_a_stop_leaves_nothing_for_the_next_run_of_an_agent() -> None:
    node = Node()
    for _ in range(2):
        node.stop.open()
        assert (node.job.stopping, node.job.kill_at) == (False, None)
        node.stops_early()
        node.stop.close()


def test_a_stop_leaves_nothing_for_an_attempt_that_a_subclass_starts_all_the_same() -> None:
    node = Node()
    node.stop.open()
    node.stops_early()
    node.stop.before_stop()
    node.stops_early()
    node.stop.close()


# --- the decisions of the agent


RUNNING = AgentState(3, AgentPhase.RUNNING, round=4, shared=True)


def stopping(state: AgentState = RUNNING) -> AgentState:
    after, actions = decide(state, events.StopBegun())
    assert (after.stopping, actions) == (True, ())
    return after


@pytest.mark.parametrize(
    "event",
    [
        events.Failing(),
        events.CheckResult(WorkerState.FAILED, 0, 1.0),
        events.RoundOver(4, "a host is lost", 1.0, lost=True),
        events.LeaseOver(4, "its lease expired", 1.0),
        events.Closed(failed=True),
    ],
    ids=lambda event: type(event).__name__,
)
def test_no_attempt_follows_a_stop_that_is_in_progress(event: events.Event) -> None:
    after, actions = decide(stopping(), event)
    assert after.phase is AgentPhase.ENDED
    assert actions == (events.Interrupt(signal.SIGTERM),)


@pytest.mark.parametrize("phase", [AgentPhase.FORMING, AgentPhase.BACKOFF, AgentPhase.STOPPING])
def test_a_job_without_workers_ends_at_once(phase: AgentPhase) -> None:
    _, actions = decide(RUNNING._replace(phase=phase), events.StopBegun())
    assert actions == (events.Interrupt(signal.SIGTERM),)


def test_workers_of_which_the_loop_does_not_know_yet_stop_at_the_same_step() -> None:
    forming = RUNNING._replace(phase=AgentPhase.FORMING)
    forming, actions = decide(forming, events.WorkersStarted())
    assert actions == ()
    state, actions = decide(forming, events.StopBegun())
    assert (state.stopping, state.phase, actions) == (True, AgentPhase.FORMING, ())
    state, actions = decide(state, events.Formed(1.0, 5, True, False))
    assert (state.stopping, state.phase) == (True, AgentPhase.RUNNING)
    assert not any(isinstance(action, events.Interrupt) for action in actions)


def test_a_signal_that_comes_when_a_restart_has_begun_ends_the_job() -> None:
    """The workers that have started are the old ones, and the restart would forget the request."""
    forming = RUNNING._replace(phase=AgentPhase.FORMING)
    state, _ = decide(forming, events.WorkersStarted())
    state, _ = decide(state, events.Formed(1.0, 5, True, False))
    state, _ = decide(state, events.RoundOver(5, "a host is lost", 2.0, lost=True))
    assert state.phase is AgentPhase.FORMING
    _, actions = decide(state, events.StopBegun())
    assert actions == (events.Interrupt(signal.SIGTERM),)


OTHER_LEAVES = events.StopBegun(of_another_node=True)
WAITING = [AgentPhase.FORMING, AgentPhase.BACKOFF, AgentPhase.STOPPING, AgentPhase.AWAITING_VERDICT]


@pytest.mark.parametrize("phase", WAITING)
def test_a_node_whose_workers_do_not_run_does_not_end_with_one_that_leaves(
    phase: AgentPhase,
) -> None:
    state = RUNNING._replace(phase=phase)
    assert decide(state, OTHER_LEAVES) == (state, ())


@pytest.mark.parametrize(
    "event",
    [
        events.RoundOver(4, "its agent got SIGTERM", 1.0),
        events.RoundOver(4, "its workers failed", 1.0, failed=True),
        events.CheckResult(WorkerState.FAILED, 0, 1.0),
    ],
    ids=["it has left", "a worker of another node failed", "a worker of this node failed"],
)
def test_a_node_restarts_as_ever_while_another_one_leaves(event: events.Event) -> None:
    running = RUNNING._replace(remaining_restarts=1, shared=False)
    state, actions = decide(running, OTHER_LEAVES)
    assert actions == ()
    after, actions = decide(state, event)
    assert (after._replace(outlives=False), actions) == decide(running, event)


def test_a_node_goes_on_if_the_other_one_leaves_before_the_loop_knows_of_the_new_workers() -> None:
    state, _ = decide(RUNNING._replace(phase=AgentPhase.FORMING), events.WorkersStarted())
    state, _ = decide(state, OTHER_LEAVES)
    state, _ = decide(state, events.RoundOver(5, "its agent got SIGTERM", 1.0))
    state, actions = decide(state, events.Formed(2.0, 5, True, False))
    assert state.phase is not AgentPhase.ENDED
    assert not any(isinstance(action, events.Interrupt) for action in actions)


def test_workers_that_have_stopped_end_the_job() -> None:
    state, actions = decide(stopping(), events.CheckResult(WorkerState.SUCCEEDED, 0, 1.0))
    assert (state.phase, actions) == (AgentPhase.BARRIER, (events.Barrier(),))
    # Another node has passed the barrier, and has left.
    state, actions = decide(state, events.RoundOver(4, "it left", 1.0, full_grace=True))
    assert actions == (events.Finish(WorkerState.SUCCEEDED),)


def test_a_node_that_asks_for_a_seat_does_not_disturb_a_stop() -> None:
    waiting = events.JoinRequested(4, 1, True, 1.0)
    gathering, _ = decide(RUNNING._replace(started_at=-99.0), waiting._replace(full=False))
    assert gathering.gather_until is not None
    state = stopping(gathering)
    assert state.gather_until is None
    assert decide(state, waiting) == (state, ())


def test_a_failure_elsewhere_ends_the_job_by_the_signal_even_at_the_barrier() -> None:
    state, _ = decide(stopping(), events.CheckResult(WorkerState.SUCCEEDED, 0, 1.0))
    _, actions = decide(state, events.RoundOver(4, "it failed", 1.0, failed=True))
    assert actions == (events.Interrupt(signal.SIGTERM),)


def test_a_job_whose_stop_was_dropped_restarts_as_before() -> None:
    state, _ = decide(stopping(), events.StopDropped())
    _, actions = decide(state, events.RoundOver(4, "a host left", 1.0, full_grace=True, lost=True))
    assert isinstance(actions[0], events.Restart)


def test_a_sigterm_long_after_an_announcement_is_not_that_of_regrow_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node, terminated = Node(), events.Signaled(signal.SIGTERM)
    node.stop.open()
    with node.stop.notices([]):
        os.kill(os.getpid(), STOP_COMMAND)
        monkeypatch.setattr(early_stop, "monotonic", lambda: monotonic() + 3600.0)
        assert node.stop.on_signal(terminated) is terminated
