"""The public names as one list, and torch's names at torch's paths.

A commit that adds or removes a name must change this file too. So no name changes by accident.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

PUBLIC = {
    "regrow": """
        State __version__ deadline expires phase rng should_stop step
    """,
    "regrow.agent": """
        DEFAULT_ROLE ElasticAgent LocalElasticAgent RunResult SimpleElasticAgent
        TORCHELASTIC_ENABLE_FILE_TIMER TORCHELASTIC_TIMER_FILE Worker WorkerGroup
        WorkerSpec WorkerState
    """,
    "regrow.events": """
        EVENTS_FILE Event EventFile EventLog EventMetadataValue EventSource Expiry Failure
        InProcessRestart LostNode NodeState OtherFailure PlannedRestart RdzvEvent StalledProgress
        StepMark Story Suspension as_record construct_and_record_rdzv_event find_event_file
        get_logging_handler print_story read_events record record_rdzv_event
        register_logging_handler story
    """,
    "regrow.heartbeat": """
        Exchange HeartbeatFailure JaxExchange Progress StoreExchange TorchExchange
        progress start step
    """,
    "regrow.inprocess": """
        CallWrapper Compose FrozenState Mode State Status Wrapper abort attribution
        completion exception finalize health_check initialize monitor_thread
        nested_restarter rank_assignment rank_filter state store terminate wrap
    """,
    "regrow.inprocess.rank_assignment": """
        ActivateAllRanks ActiveWorldSizeDivisibleBy FillGaps FilterCountGroupedByKey
        FilterGroupedByKey Layer LayerFlag MaxActiveWorldSize RankAssignment
        RankAssignmentCtx RankDiscarded RankFilter ShiftRanks Tree
    """,
    "regrow.launch": """
        LaunchConfig elastic_launch launch_agent
    """,
    "regrow.ledger": """
        Ledger MEANINGS PRODUCTIVE Span UNKNOWN build_ledgers find_logs is_phase read_ledgers
        render title
    """,
    "regrow.metrics": """
        ConsoleMetricHandler MetricData MetricHandler
        MetricStream MetricsConfig NullMetricHandler configure getStream
        get_elapsed_time_ms initialize_metrics prof profile publish_metric put_metric
    """,
    "regrow.rendezvous": """
        DynamicRendezvousHandler Judged LeavingAnnounced LivenessRendezvousBackend NodesWaiting
        PushingRendezvousHandler RendezvousBackend RendezvousClosedError
        RendezvousConnectionError RendezvousError RendezvousGracefulExitError
        RendezvousHandler RendezvousHandlerCreator RendezvousHandlerRegistry
        RendezvousInfo RendezvousParameters RendezvousSettings RendezvousStateError
        RendezvousStoreInfo RendezvousTimeout RendezvousTimeoutError RoundClosed
        RoundEnded SoloRendezvousHandler WatchedRendezvousBackend create_handler
        get_rendezvous_handler rendezvous_handler_registry
    """,
    "regrow.state": """
        State StateError Transport rng
    """,
    "regrow.store": """
        Answer ConnectionState Limits MemoryStore PrefixStore STORE_ENV STORE_PORT_ENV
        STORE_TOKEN_ENV ServerProcess Service ServiceClient Store StoreAuthError
        StoreClient StoreClosedError StoreConnectionError StoreError StoreLimitError
        StoreProtocolError StoreServer StoreServiceError StoreSessionLost StoreTimeout
        StoreValueError Tls connect load_token make_token start_server worker_store
    """,
    "regrow.timer": """
        FileTimerClient FileTimerRequest FileTimerServer LocalTimerClient
        LocalTimerServer MultiprocessingRequestQueue RequestQueue TimerClient
        TimerRequest TimerServer configure expires
    """,
    "regrow.utils": """
        BrokenLine JsonLinesFile PortReservation get_env_variable_or_raise get_free_port
        get_logger get_socket_with_port macros read_json_lines to_json
    """,
    "regrow.workers": """
        AffinityMode ChildFailedError DefaultLogsSpecs ErrorHandler Guardian LogsDest
        LogsSpecs MultiprocessContext NumaOptions PContext ProcessFailure RunProcsResult
        SignalException Std StoppedEarly SubprocessContext WorkerChange get_error_handler
        process_states record start_processes to_map
    """,
    "regrow.workers.errors": """
        ChildFailedError ErrorHandler ProcessFailure get_error_handler record
    """,
    "regrow.run": """
        config_from_args determine_local_world_size get_args_parser get_rdzv_endpoint
        get_use_env main parse_args parse_min_max_nnodes run run_script_path
    """,
    "regrow.control_plane": """
        TORCH_WORKER_SERVER_SOCKET worker_main
    """,
}

# More paths of torch's modules. The usual path has `regrow` in place of
# `torch.distributed.elastic` or `torch.distributed`.
ALSO_AT = {
    "elastic.agent.server": ["regrow.agent"],
    "elastic.multiprocessing": ["regrow.workers"],
    "elastic.multiprocessing.api": ["regrow.workers.api"],
    "elastic.multiprocessing.errors": ["regrow.workers.errors"],
    "elastic.multiprocessing.errors.error_handler": ["regrow.workers.errors.error_handler"],
    "elastic.multiprocessing.errors.handlers": ["regrow.workers.errors.handlers"],
    "elastic.multiprocessing.redirects": ["regrow.workers.redirects"],
    "elastic.multiprocessing.subprocess_handler": ["regrow.workers.subprocess_handler"],
    "elastic.multiprocessing.tail_log": ["regrow.workers.tail_log"],
    "launcher": ["regrow.launch"],
}
# `regrow.launch` is torch's launcher; run as a program it is torch's `launch`.
MOVED = {"launch": ["regrow.launch.__main__"]}
# Names of torch that are left out on purpose; docs/architecture.md explains why.
PLATFORMS = "there is one platform"
VERSION_2 = (
    "about version 2 of etcd's API, which etcd 3.6 no longer has: the handler speaks version 3"
)
OMITTED = {
    "multiprocessing.api": {
        "IS_MACOS": PLATFORMS,
        "IS_WINDOWS": PLATFORMS,
        "get_std_cm": "a step of torch's own workers: `redirect` or `contextlib.nullcontext`",
    },
    "multiprocessing.errors": {
        "GlobalRank": "a name for int in torch's own annotations",
        "JSON": "a name for dict[str, Any] in torch's own annotations",
    },
    "multiprocessing.redirects": {
        "IS_MACOS": PLATFORMS,
        "IS_WINDOWS": PLATFORMS,
        "get_libc": "ctypes.CDLL(None)",
        "libc": "ctypes.CDLL(None)",
    },
    "multiprocessing.subprocess_handler.subprocess_handler": {"IS_WINDOWS": PLATFORMS},
    "multiprocessing.tail_log": {
        "tail_logfile": "a step of `TailLog`",
    },
    "rendezvous.c10d_rendezvous_backend": {"DEFAULT_PORT": "29400"},
    "rendezvous.dynamic_rendezvous": {
        "get_method_name": "a step of torch's own events",
    },
    "rendezvous.etcd_rendezvous": {
        "CONST_ETCD_FROZEN_TTL": VERSION_2,
        "CONST_ETCD_JOINABLE_EPHEMERAL_TTL": VERSION_2,
        "CONST_ETCD_SETUP_TTL": VERSION_2,
        "CONST_RUNID_SUBROOT_TTL": VERSION_2,
        "CONST_WORKER_KEEPALIVE_TTL": VERSION_2,
        "EtcdRendezvous": VERSION_2,
        "EtcdRendezvousHandler": VERSION_2,
        "EtcdRendezvousRetryImmediately": VERSION_2,
        "EtcdRendezvousRetryableFailure": VERSION_2,
    },
    "rendezvous.etcd_server": {
        "find_free_port": "regrow.utils.get_socket_with_port",
        "stop_etcd": "EtcdServer.stop",
    },
    "rendezvous.etcd_store": {"cas_delay": VERSION_2},
    "utils.data.elastic_distributed_sampler": {"T": "a type variable of torch's own annotations"},
    "utils.store": {"DistStoreError": "torch.distributed.DistStoreError"},
}


def torch_modules() -> dict[str, Path]:
    """Return the files of torch's modules by name below `torch.distributed`; import none."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    distributed = Path(spec.submodule_search_locations[0], "distributed")
    files = [distributed / "run.py", distributed / "launch.py"]
    for package in ("elastic", "launcher"):
        files += distributed.joinpath(package).rglob("*.py")
    names = {path: path.relative_to(distributed).with_suffix("").parts for path in files}
    return {
        ".".join(parts[:-1] if parts[-1] == "__init__" else parts): path
        for path, parts in names.items()
        if parts[-1] == "__init__" or not parts[-1].startswith("_")
    }


def names_of(path: Path) -> set[str]:
    """Return the public names that a module defines, or that a package exports."""
    found: set[str] = set()
    statements = list(_statements(ast.parse(path.read_text()).body))
    for node in statements:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            here = {name.id for name in targets if isinstance(name, ast.Name)}
            found |= here
            if "__all__" in here and node.value is not None:
                found |= set(ast.literal_eval(node.value))
    if path.name == "__init__.py" and "__all__" not in found:
        for node in statements:
            if isinstance(node, ast.ImportFrom) and (
                node.level or str(node.module).startswith("torch.distributed.")
            ):
                found |= {alias.asname or alias.name for alias in node.names} - {"*"}
    # A module's logger is private.
    return {name for name in found if not name.startswith("_") and name not in ("log", "logger")}


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try):
                yield from _statements(getattr(node, part, []))


@pytest.mark.parametrize("package", PUBLIC)
def test_a_package_exports_what_it_is_known_to_export(package: str) -> None:
    module = importlib.import_module(package)
    assert sorted(module.__all__) == PUBLIC[package].split()
    for name in module.__all__:
        assert getattr(module, name) is not None


def test_every_public_name_of_torchs_modules_is_here_or_is_left_out_on_purpose() -> None:
    missing: dict[str, list[str]] = {}
    for theirs, path in torch_modules().items():
        names = names_of(path)
        below = theirs.removeprefix("elastic").lstrip(".")
        own = ".".join(filter(None, ["regrow", below]))
        for ours in MOVED.get(theirs) or [own, *ALSO_AT.get(theirs, [])]:
            there = importlib.import_module(ours)
            # Names that load lazily are not loaded here, because they may need torch.
            known = vars(there).keys() | set(there.__all__)
            if lacking := sorted(names - known):
                missing[below] = lacking
    assert missing == {module: sorted(names) for module, names in OMITTED.items()}
