"""The built-in plug-ins, one by one."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from helpers.unspeakable import Falsy
from regrow.inprocess import Compose, FrozenState, State
from regrow.inprocess.abort import (
    Abort,
    AbortPersistentCheckpointProcesses,
    AbortTorchDistributed,
    AbortTransformerEngine,
)
from regrow.inprocess.attribution import (
    Interruption,
    InterruptionRecord,
    format_interruption_records,
)
from regrow.inprocess.completion import Completion
from regrow.inprocess.exception import (
    HealthCheckError,
    InternalError,
    RestartAbort,
    RestartError,
    TimeoutError,
)
from regrow.inprocess.finalize import Finalize, ThreadedFinalize
from regrow.inprocess.health_check import CudaHealthCheck, FaultCounter, FaultCounterExceeded
from regrow.inprocess.initialize import Initialize, RetryController
from regrow.inprocess.nested_restarter import (
    Announcement,
    NestedRestarterAborted,
    NestedRestarterCallback,
    NestedRestarterFinalized,
    NestedRestarterHandlingCompleted,
    NestedRestarterHandlingStarting,
)
from regrow.inprocess.terminate import Terminate
from regrow.inprocess.torch import torch_abort

LONG = timedelta(seconds=30)


def state(iteration: int = 0, error: Exception | None = None, rank: int = 0) -> FrozenState:
    return State(rank, 8, rank, 6, iteration=iteration, fn_exception=error).freeze()


# ------------------------------------------------------------------ initialize


@pytest.mark.parametrize(
    ("controller", "broken"),
    [
        (RetryController(max_iterations=3), r"state.iteration=3 .* reached max_iterations=3"),
        (RetryController(min_world_size=9), r"state.world_size=8 is below min_world_size=9"),
        (RetryController(min_active_world_size=7), r"active_world_size=6 is below min_active"),
    ],
)
def test_a_bound_of_the_retry_controller_ends_the_wrapper(
    controller: RetryController, broken: str
) -> None:
    with pytest.raises(RestartAbort, match=broken):
        controller(state(iteration=3))


def test_the_retry_controller_lets_everything_within_its_bounds_pass() -> None:
    within = RetryController(max_iterations=4, min_world_size=8, min_active_world_size=6)
    for controller in (within, RetryController()):
        assert controller(given := state(iteration=3)) is given


def test_the_retry_controller_names_every_broken_bound() -> None:
    with pytest.raises(RestartAbort, match=r"min_world_size=9; .*max_iterations=0"):
        RetryController(0, 9)(state())


def test_no_restart_is_no_exception_that_a_function_could_swallow() -> None:
    assert not issubclass(RestartAbort, Exception)
    for error in (HealthCheckError, InternalError, TimeoutError, FaultCounterExceeded):
        assert issubclass(error, RestartError)


# ------------------------------------------------------------------ finalize


def test_a_threaded_finalize_calls_the_function_in_another_thread() -> None:
    called: list[object] = []

    def tidy(*args: object, **kwargs: object) -> None:
        called.extend([args, kwargs, threading.current_thread()])

    finalize = ThreadedFinalize(LONG, tidy, (1,), {"x": 2})
    assert finalize(given := state()) is given
    assert called[:2] == [(1,), {"x": 2}]
    assert called[2] is not threading.current_thread()
    ThreadedFinalize(LONG, tidy, None)(state())
    assert called[3:5] == [(), {}]


def test_a_threaded_finalize_that_is_late_is_given_up() -> None:
    held = threading.Event()
    late = ThreadedFinalize(timedelta(milliseconds=10), held.wait)
    with pytest.raises(TimeoutError, match=r"ThreadedFinalize-0 did not finish within 0.01 s"):
        late(state())
    held.set()


@pytest.mark.parametrize("kind", [ValueError, Falsy])
def test_a_threaded_finalize_that_failed_does_not_pass_for_done(kind: type[Exception]) -> None:
    def fail() -> None:
        raise kind("the writer is broken")

    with pytest.raises(kind, match="the writer is broken"):
        ThreadedFinalize(LONG, fail)(state())


# ------------------------------------------------------------------ health checks


def test_a_rank_may_cause_as_many_faults_as_it_is_allowed() -> None:
    counter = FaultCounter(max_rank_faults=2)
    for _ in range(2):
        counter(state(error=ValueError("x")))
        counter(state())  # another rank's fault
    with pytest.raises(
        FaultCounterExceeded, match=r"rank 0 caused 3 faults, .*max_rank_faults=2.*ValueError"
    ):
        counter(state(error=ValueError("x")))


def test_without_a_bound_faults_are_only_counted() -> None:
    counter = FaultCounter()
    for _ in range(5):
        counter(state(error=ValueError("x")))
    assert counter.faults_count == 5


def test_a_process_without_torch_has_no_device_that_could_be_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert CudaHealthCheck()(given := state()) is given
    assert "torch" not in sys.modules


# ------------------------------------------------------------------ abort


def test_process_groups_are_aborted_where_torch_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    aborted: list[bool] = []
    monkeypatch.setattr(torch_abort, "abort_process_groups", lambda: aborted.append(True))
    given = state()
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert AbortTorchDistributed()(given) is given
    assert aborted == []
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    assert AbortTorchDistributed()(given) is given
    assert aborted == [True]


def test_transformer_engine_lets_go_where_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    abort, destroyed = AbortTransformerEngine(), []
    for name in ("transformer_engine.pytorch", "transformer_engine.pytorch.fp8"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    given = state()
    assert abort(given) is given
    base = types.SimpleNamespace(destroy_ub=lambda: destroyed.append("buffers"))
    engine = types.SimpleNamespace(module=types.SimpleNamespace(base=base))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", engine)
    abort(given)
    assert destroyed == ["buffers"]
    manager = types.SimpleNamespace(reset=lambda: destroyed.append("groups"))
    fp8 = types.SimpleNamespace(FP8GlobalStateManager=manager)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.fp8", fp8)
    abort(given)
    assert destroyed == ["buffers", "buffers", "groups"]


def test_checkpoints_of_nvidia_resiliency_ext_are_aborted_where_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    abort, given, aborted = AbortPersistentCheckpointProcesses(), state(), []
    name = "nvidia_resiliency_ext.checkpointing.async_ckpt.core"
    monkeypatch.delitem(sys.modules, name, raising=False)
    assert abort(given) is given
    core = types.SimpleNamespace(abort_nvrx_checkpoint=lambda: aborted.append(True))
    monkeypatch.setitem(sys.modules, name, core)
    assert abort(given) is given
    assert aborted == [True]


def test_the_argument_or_the_environment_names_the_folder_of_the_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NVRX_FR_TRACE_PATH", raising=False)
    assert AbortTorchDistributed().torch_fr_trace_path is None
    monkeypatch.setenv("NVRX_FR_TRACE_PATH", "/traces")
    assert AbortTorchDistributed().torch_fr_trace_path == "/traces"
    assert AbortTorchDistributed(torch_fr_trace_path="/others").torch_fr_trace_path == "/others"


@pytest.mark.parametrize("folder", ["/proc/no/such/folder", "no\0folder", "{tmp_path}"])
def test_a_trace_that_cannot_be_had_keeps_no_abort_back(
    folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(**flags: bool) -> bytes:
        raise RuntimeError("the recorder is out of order")

    aborted = []
    distributed = types.SimpleNamespace(is_initialized=lambda: True, get_rank=lambda: 0)
    native = types.SimpleNamespace(
        _distributed_c10d=types.SimpleNamespace(_dump_fr_trace_json=fails)
    )
    torch = types.SimpleNamespace(distributed=distributed, _C=native)
    for name, module in (
        ("torch", torch),
        ("torch._C", native),
        ("torch._C._distributed_c10d", native._distributed_c10d),
        ("torch.distributed", distributed),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch_abort, "abort_process_groups", lambda: aborted.append(True))
    AbortTorchDistributed(folder.format(tmp_path=tmp_path))(state(0))
    assert aborted == [True]
    assert "the trace of torch's collectives cannot be written" in caplog.text


# ------------------------------------------------------------------ nested restarters


def test_an_outer_launcher_receives_the_states_of_the_inner_restarter() -> None:
    announced: list[Announcement] = []
    completed = NestedRestarterHandlingCompleted(sink=announced.append)
    starting = NestedRestarterHandlingStarting(sink=announced.append)
    completed(state(0))
    starting(state(0))
    completed(state(1))
    completed(state(0))  # another call of the wrapper
    NestedRestarterFinalized(sink=announced.append)(state(1))
    NestedRestarterAborted(sink=announced.append)(state(1))
    assert announced == [
        ("initialize", None),
        ("handling", "starting"),
        ("handling", "completed"),
        ("initialize", None),
        ("finalized", None),
        ("aborted", None),
    ]


@pytest.mark.parametrize(
    ("plugin", "family"),
    [
        (NestedRestarterHandlingCompleted, Initialize),
        (NestedRestarterHandlingStarting, Abort),
        (NestedRestarterFinalized, Completion),
        (NestedRestarterAborted, Terminate),
    ],
)
def test_one_rank_announces_and_the_plugins_are_of_their_families(
    plugin: Callable[..., NestedRestarterCallback], family: type
) -> None:
    announced: list[Announcement] = []
    announcer = plugin(special_rank=3, sink=announced.append)
    assert isinstance(announcer, family)
    assert isinstance(Compose(announcer, announcer), family)
    announcer(state(rank=0))
    assert announced == []
    assert announcer(given := state(rank=3)) is given
    assert len(announced) == 1


def test_an_announcement_is_a_line_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    NestedRestarterHandlingStarting()(state())
    NestedRestarterAborted()(state())
    starting, aborted = capsys.readouterr().out.splitlines()
    assert starting.endswith(
        " [ALWAYS] [InprocessRestarter.Restarter] "
        "[NestedRestarter] name=[InProcess] state=handling stage=starting"
    )
    assert aborted.endswith("[NestedRestarter] name=[InProcess] state=aborted")


# ------------------------------------------------------------------ attribution


@pytest.mark.parametrize("kind", Interruption)
def test_a_record_is_read_back_from_what_it_is_written_as(kind: Interruption) -> None:
    record = InterruptionRecord(12, kind)
    assert InterruptionRecord.from_str(str(record)) == record


@pytest.mark.parametrize("text", ["", "rank=x", "InterruptionRecord(rank=1, Interruption.NEVER)"])
def test_what_is_no_record_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a record of an interruption"):
        InterruptionRecord.from_str(text)


def test_records_are_formatted_by_kind_with_few_ranks() -> None:
    gone = [InterruptionRecord(rank, Interruption.TERMINATED) for rank in range(20)]
    records = [InterruptionRecord(7, Interruption.EXCEPTION), *gone, gone[0]]
    assert format_interruption_records(records) == (
        "Interruption.EXCEPTION on rank 7, "
        "Interruption.TERMINATED on ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"
    )
    assert format_interruption_records([]) == ""


def test_base_classes_are_abstract() -> None:
    families: list[Callable[[], object]] = [Initialize, Abort, Finalize, Completion, Terminate]
    for family in families:
        with pytest.raises(TypeError, match="abstract"):
            family()
