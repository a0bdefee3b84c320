"""Public names of nvidia_resiliency_ext.inprocess 0.6 exist, or the page names a replacement.

Exceptions: methods of objects that users do not call, the names of its keys, and `FileStore`, which
needs torch.
"""

from __future__ import annotations

import importlib
import re
from operator import attrgetter
from pathlib import Path

import pytest

NAMES = {
    "abort": """
        Abort AbortPersistentCheckpointProcesses AbortTorchDistributed
        AbortTorchDistributed.collect_fr_trace
        AbortTorchDistributed.shutdown_all_process_group_backends
        AbortTorchDistributed.shutdown_process_group_backend AbortTransformerEngine
    """,
    "attribution": """
        Interruption.BASE_EXCEPTION Interruption.EXCEPTION Interruption.HARD_TIMEOUT
        Interruption.MONITOR_PROCESS_EXCEPTION Interruption.SOFT_TIMEOUT
        Interruption.TERMINATED Interruption.UNRESPONSIVE InterruptionRecord.from_str
        format_interruption_records
    """,
    "completion": "Completion",
    "compose": "Compose find_common_ancestor",
    "exception": "HealthCheckError InternalError RestartAbort RestartError TimeoutError",
    "finalize": "Finalize ThreadedFinalize",
    "health_check": """
        ChainedGPUHealthCheck ChainedNVLHealthCheck ChainedNicHealthCheck CudaHealthCheck
        FaultCounter FaultCounterExceeded HealthCheck
    """,
    "initialize": "Initialize RetryController",
    "monitor_thread": """
        MonitorThread RankShouldRestart async_abort_main_thread async_raise
        delayed_async_raise reraise_if_unraisable
    """,
    "nested_restarter": """
        NestedRestarterAborted NestedRestarterCallback NestedRestarterFinalized
        NestedRestarterHandlingCompleted NestedRestarterHandlingStarting
        NestedRestarterLogger
    """,
    "param_utils": """
        check_type count_type_in_params enforce_subclass enforce_type enforce_value
        substitute_param_value
    """,
    "rank_assignment": """
        ActivateAllRanks ActiveWorldSizeDivisibleBy FillGaps FilterCountGroupedByKey Layer
        LayerFlag.BACKFILL LayerFlag.RESERVE MaxActiveWorldSize Node RankAssignment
        RankAssignmentCtx RankDiscarded RankFilter ShiftRanks Tree bounded_activate
        propagate_terminations
    """,
    "state": """
        FrozenState Mode.ACTIVE Mode.INACTIVE Mode.INITIALIZED Mode.TERMINATED State
        State.advance State.copy_from State.freeze State.from_env State.set_distributed_vars
        freeze_dataclass
    """,
    "store": """
        BarrierError BarrierOverflow BarrierTimeout PrefixStore StoreMixin.barrier
        StoreMixin.completion_barrier StoreMixin.critical_ranks
        StoreMixin.get_all_active_ranks StoreMixin.get_all_heartbeats
        StoreMixin.get_heartbeat StoreMixin.get_initial_ranks
        StoreMixin.get_interruption_records StoreMixin.get_keys StoreMixin.get_packed
        StoreMixin.get_states StoreMixin.get_terminated_ranks StoreMixin.initial_barrier
        StoreMixin.is_rank_at_reentrant_barrier StoreMixin.iteration_barrier
        StoreMixin.lock_interruption_records StoreMixin.record_completed
        StoreMixin.record_interrupted StoreMixin.record_terminated_ranks
        StoreMixin.reentrant_barrier StoreMixin.send_heartbeat StoreMixin.send_key
        StoreMixin.send_state StoreMixin.set_active_rank StoreMixin.set_initial_rank
        StoreMixin.termination_barrier StoreMixin.wait_for_completed
        StoreMixin.wait_for_interrupted TCPStore
    """,
    "terminate": "Terminate",
    "wrap": """
        CallWrapper.atomic CallWrapper.disable_hang_protection CallWrapper.iteration
        CallWrapper.ping HealthCheckPassed Wrapper reserve_fn
    """,
}
PAGE = Path(__file__).parents[2] / "docs" / "guides" / "from-nvidia-resiliency-ext.md"


def names_listed_as_missing() -> set[str]:
    """The names in the first column of the table of missing names, without their modules."""
    table = PAGE.read_text().partition("| nvidia_resiliency_ext.inprocess | here |\n")[2]
    columns = [row.split(" | ")[0].rpartition(": ")[2] for row in table.splitlines()[1:]]
    return {name.rpartition(".")[2] for row in columns for name in re.findall(r"`([\w.]+)`", row)}


@pytest.mark.parametrize("module", NAMES)
def test_a_name_of_the_reference_exists_or_is_in_the_table_of_missing_names(module: str) -> None:
    here, missing = importlib.import_module(f"regrow.inprocess.{module}"), names_listed_as_missing()
    for name in NAMES[module].split():
        try:
            attrgetter(name)(here)
        except AttributeError:
            assert name.rpartition(".")[2] in missing, f"{module}.{name}"
        else:
            assert name.rpartition(".")[2] not in missing, f"{module}.{name} is there"
