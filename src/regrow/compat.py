"""Aliases of regrow's modules at the paths that other projects use.

A program for torch elastic or for nvidia-resiliency-ext runs after a change to the first part of
its imports only: `torch.distributed.elastic.multiprocessing.errors` is
`regrow.multiprocessing.errors`. A table maps such a path to the names that a module there has.

The import system uses the table for a module of regrow that exists nowhere else. So the folders of
the real packages contain no aliases. This has a disadvantage: type checkers and editors do not find
modules at these paths. They know the names at their real places: `regrow.workers`, `regrow.launch`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

_ALL = "*"
_SAME_MODULE = "is"
# For each alias: the modules with its names, and the names; `A=B` is the name B under the name A.
_ALIASES = {
    # torch.distributed and torch.distributed.elastic
    "agent.server": {"agent": _ALL},
    "agent.server.api": {"agent": _ALL},
    "agent.server.health_check_server": {
        "agent.features.health": "HealthCheckServer create_healthcheck_server"
    },
    "agent.server.local_elastic_agent": {
        "agent": "TORCHELASTIC_ENABLE_FILE_TIMER TORCHELASTIC_TIMER_FILE LocalElasticAgent",
        "agent.attempt.environment": "TORCHELASTIC_HEALTH_CHECK_PORT=HEALTH_CHECK_PORT_ENV",
        "agent.features.state_d": "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT=TIMEOUT_ENV",
    },
    "events.api": {"events.recording": "Event EventMetadataValue EventSource NodeState RdzvEvent"},
    "launcher": {"launch": _ALL},
    # A program replaces names there: `regrow.launcher.api.LocalElasticAgent = MyAgent`.
    "launcher.api": {"launch.api": _SAME_MODULE},
    "multiprocessing": {"workers": _ALL},
    "multiprocessing.api": {"workers.api": _ALL},
    "multiprocessing.errors": {"workers.errors": _ALL},
    "multiprocessing.errors.error_handler": {"workers.errors.error_handler": _ALL},
    "multiprocessing.errors.handlers": {"workers.errors.handlers": _ALL},
    "multiprocessing.redirects": {"workers.redirects": _ALL},
    "multiprocessing.subprocess_handler": {"workers.subprocess_handler": _ALL},
    "multiprocessing.subprocess_handler.handlers": {"workers.subprocess_handler": _ALL},
    "multiprocessing.subprocess_handler.subprocess_handler": {"workers.subprocess_handler": _ALL},
    "multiprocessing.tail_log": {"workers.tail_log": _ALL},
    "rendezvous.api": {
        "rendezvous": (
            "RendezvousClosedError RendezvousConnectionError RendezvousError"
            " RendezvousGracefulExitError RendezvousHandler RendezvousHandlerCreator"
            " RendezvousHandlerRegistry RendezvousInfo RendezvousParameters RendezvousStateError"
            " RendezvousStoreInfo RendezvousTimeoutError rendezvous_handler_registry"
        )
    },
    "rendezvous.c10d_rendezvous_backend": {
        "rendezvous.backends.c10d.torch_c10d": "C10dRendezvousBackend create_backend"
    },
    "rendezvous.dynamic_rendezvous": {
        "rendezvous.node.handler": "DynamicRendezvousHandler create_handler",
        "rendezvous.peer.backend": "RendezvousBackend Token",
        "rendezvous.settings": "RendezvousSettings RendezvousTimeout",
    },
    "rendezvous.etcd_rendezvous": {"rendezvous": "create_rdzv_handler=get_rendezvous_handler"},
    "rendezvous.etcd_rendezvous_backend": {
        "rendezvous.backends.etcd.etcd_backend": "EtcdRendezvousBackend create_backend"
    },
    "rendezvous.etcd_store": {"rendezvous.backends.etcd.etcd_job": "EtcdStore"},
    "rendezvous.registry": {"rendezvous.handler_registry": "get_rendezvous_handler"},
    "rendezvous.static_tcp_rendezvous": {
        "rendezvous.backends.static": "StaticTCPRendezvous create_rdzv_handler=create_handler"
    },
    "timer.file_based_local_timer": {
        "timer.fifo.client": "FileTimerClient",
        "timer.fifo.request": "FileTimerRequest",
        "timer.fifo.server": "FileTimerServer",
    },
    "utils.data.elastic_distributed_sampler": {
        "utils.data._torch_sampler": "ElasticDistributedSampler"
    },
    "utils.log_level": {"utils.logging": "get_log_level"},
    "workers.api": {
        "workers": _ALL,
        "workers.subprocess_handler": "SubprocessHandler get_subprocess_handler",
        "workers.tail_log": "TailLog",
    },
    # nvidia_resiliency_ext
    "inprocess.monitor_thread": {"inprocess.exception": "RankShouldRestart"},
    "inprocess.wrap": {
        "inprocess.call.call": "CallWrapper",
        "inprocess.call.wrapper": "Wrapper",
    },
}


class _Aliases:
    """Meta path finder and loader of the modules in the table."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module `regrow.*` at another project's path, else None."""
        package, _, alias = name.partition(".")
        if package != "regrow" or alias not in _ALIASES:
            return None
        is_package = any(other.startswith(f"{alias}.") for other in _ALIASES)
        return ModuleSpec(name, _Aliases, is_package=is_package)  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: ModuleSpec) -> None:
        """Let the import system create the module."""

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        """Load the real modules, and set their names in `module`."""
        public: list[str] = []
        for path, names in _ALIASES[module.__name__.partition(".")[2]].items():
            real = import_module(f"regrow.{path}")
            if names == _SAME_MODULE:
                sys.modules[module.__name__] = real
                return
            for entry in real.__all__ if names == _ALL else names.split():
                name, _, real_name = entry.partition("=")
                setattr(module, name, getattr(real, real_name or name))
                public.append(name)
        vars(module)["__all__"] = public


def install() -> None:
    """Register the finder, after all finders that the import system already has."""
    if _Aliases not in sys.meta_path:
        sys.meta_path.append(_Aliases)
