"""The public names, as one list, and torch's names at torch's paths.

A name that is added or taken away changes this file too, so nobody does it by accident.
"""

from __future__ import annotations

import importlib

import pytest

PUBLIC = {
    "regrow": """
        __version__ expires step
    """,
    "regrow.agent": """
        DEFAULT_ROLE ElasticAgent LocalElasticAgent RunResult SimpleElasticAgent
        TORCHELASTIC_ENABLE_FILE_TIMER TORCHELASTIC_TIMER_FILE Worker WorkerGroup
        WorkerSpec WorkerState
    """,
    "regrow.events": """
        EVENTS_FILE Event EventFile EventLog EventMetadataValue EventSource Expiry Failure
        InPlace Move NodeState OtherFailure RdzvEvent Stall Step Story Suspension as_record
        construct_and_record_rdzv_event find_event_file get_logging_handler print_story
        read_events record record_rdzv_event register_logging_handler story
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
    "regrow.metrics": """
        ConsoleMetricHandler JsonLinesMetricHandler MetricData MetricHandler
        MetricStream MetricsConfig NullMetricHandler configure getStream
        get_elapsed_time_ms initialize_metrics prof profile publish_metric put_metric
    """,
    "regrow.rendezvous": """
        DynamicRendezvousHandler Judged LivenessRendezvousBackend LocalRendezvousHandler
        LocalRounds NodesWaiting PushingRendezvousHandler RendezvousBackend
        RendezvousClosedError RendezvousConnectionError RendezvousError
        RendezvousGracefulExitError RendezvousHandler RendezvousHandlerCreator
        RendezvousHandlerRegistry RendezvousInfo RendezvousParameters RendezvousSettings
        RendezvousStateError RendezvousStoreInfo RendezvousTimeout
        RendezvousTimeoutError RoundClosed RoundEnded WatchedRendezvousBackend
        create_handler get_rendezvous_handler rendezvous_handler_registry
    """,
    "regrow.store": """
        Answer Change Changes Characteristics ConnectionState Limits MemoryStore
        PrefixStore STORE_ENV STORE_PORT_ENV STORE_TOKEN_ENV ServerProcess
        Service Store StoreAuthError StoreClient StoreClosedError
        StoreConnectionError StoreError StoreLimitError StoreProtocolError
        StoreServer StoreServiceError StoreSessionLost StoreTimeout
        StoreTooWeakError StoreValueError Tls WatchStore characteristics_of
        connect load_token make_token require start_server worker_store
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
        SignalException Std SubprocessContext WorkerChange get_error_handler
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

ELASTIC = "torch.distributed.elastic"
TORCH_PATHS = {
    f"{ELASTIC}.agent.server": "regrow.agent",
    f"{ELASTIC}.agent.server.api": "regrow.agent.server.api",
    f"{ELASTIC}.agent.server.local_elastic_agent": "regrow.agent.server.local_elastic_agent",
    f"{ELASTIC}.agent.server.health_check_server": "regrow.agent.server.health_check_server",
    f"{ELASTIC}.control_plane": "regrow.control_plane",
    f"{ELASTIC}.events": "regrow.events",
    f"{ELASTIC}.events.api": "regrow.events.api",
    f"{ELASTIC}.events.handlers": "regrow.events.handlers",
    f"{ELASTIC}.metrics": "regrow.metrics",
    f"{ELASTIC}.metrics.api": "regrow.metrics.api",
    f"{ELASTIC}.multiprocessing": "regrow.workers",
    f"{ELASTIC}.multiprocessing.errors": "regrow.multiprocessing.errors",
    f"{ELASTIC}.multiprocessing.errors.error_handler": "regrow.workers.errors.error_handler",
    f"{ELASTIC}.multiprocessing.errors.handlers": "regrow.workers.errors.handlers",
    f"{ELASTIC}.rendezvous": "regrow.rendezvous",
    f"{ELASTIC}.rendezvous.api": "regrow.rendezvous.api",
    f"{ELASTIC}.rendezvous.c10d_rendezvous_backend": "regrow.rendezvous.c10d_rendezvous_backend",
    f"{ELASTIC}.rendezvous.dynamic_rendezvous": "regrow.rendezvous.dynamic_rendezvous",
    f"{ELASTIC}.rendezvous.registry": "regrow.rendezvous.registry",
    f"{ELASTIC}.rendezvous.static_tcp_rendezvous": "regrow.rendezvous.static_tcp_rendezvous",
    f"{ELASTIC}.timer": "regrow.timer",
    f"{ELASTIC}.timer.api": "regrow.timer.api",
    f"{ELASTIC}.timer.debug_info_logging": "regrow.timer.debug_info_logging",
    f"{ELASTIC}.timer.file_based_local_timer": "regrow.timer.file_based_local_timer",
    f"{ELASTIC}.timer.local_timer": "regrow.timer.local_timer",
    f"{ELASTIC}.utils": "regrow.utils",
    f"{ELASTIC}.utils.data": "regrow.utils.data",
    f"{ELASTIC}.utils.distributed": "regrow.utils.distributed",
    f"{ELASTIC}.utils.store": "regrow.utils.store",
    "torch.distributed.launcher": "regrow.launch",
    "torch.distributed.launcher.api": "regrow.launcher.api",
    "torch.distributed.run": "regrow.run",
}


@pytest.mark.parametrize("package", PUBLIC)
def test_a_package_exports_what_it_is_known_to_export(package: str) -> None:
    module = importlib.import_module(package)
    assert sorted(module.__all__) == PUBLIC[package].split()
    for name in module.__all__:
        assert getattr(module, name) is not None


@pytest.mark.parametrize("torch_path", TORCH_PATHS)
@pytest.mark.filterwarnings("ignore")
def test_every_public_name_of_torchs_module_is_in_ours(torch_path: str) -> None:
    theirs = importlib.import_module(torch_path)
    ours = importlib.import_module(TORCH_PATHS[torch_path])
    listed = getattr(theirs, "__all__", None) or [
        name
        for name, value in vars(theirs).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == torch_path
    ]
    assert [name for name in listed if not hasattr(ours, name)] == []
