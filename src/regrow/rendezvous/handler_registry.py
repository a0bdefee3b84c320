"""Registry that creates the handler of a rendezvous backend by the backend's name.

Plug-ins are entry points of the groups `regrow.handlers` and `torchrun.handlers`; programs for
torchrun have the latter. Each entry point is a function without arguments that returns the creator.
The registry looks for a plug-in only when its name is requested and not registered. Reading the
metadata of all installed packages takes longer than the rest of the start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from regrow.rendezvous.errors import RendezvousError, RendezvousUsageError
from regrow.rendezvous.interface import RendezvousHandler
from regrow.rendezvous.parameters import RendezvousParameters

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

PLUGIN_GROUPS = ("regrow.handlers", "torchrun.handlers")

_OWN = {
    "static": "static",
    "c10d": "c10d.c10d_handler",
    "etcd": "etcd.etcd_backend",
    "file": "directory.directory_backend",
}
"""Modules of regrow's own backends, loaded on request."""
_OVER_A_BACKEND = ("c10d.torch_c10d", "etcd.etcd_backend", "directory.directory_backend")
"""The modules that create a backend, and no handler."""

RendezvousHandlerCreator = Callable[[RendezvousParameters], RendezvousHandler]


class RendezvousHandlerRegistry:
    """Creators of handlers, by the name of the backend.

    Args:
        plugins: returns the entry points for names that are not registered.
    """

    def __init__(self, plugins: Callable[[], Mapping[str, EntryPoint]] = dict) -> None:
        self._registry: dict[str, RendezvousHandlerCreator] = {}
        self._plugins = plugins

    def register(self, backend: str, creator: RendezvousHandlerCreator) -> None:
        """Register a creator; registering the same creator again has no effect.

        Args:
            backend: the name of the backend.
            creator: a function that receives the parameters and returns the handler.

        Raises:
            ValueError: the name is empty, or belongs to another creator.
        """
        if not backend:
            raise ValueError("The rendezvous backend name must be a non-empty string.")
        current = self._registry.setdefault(backend, creator)
        if current != creator:
            raise ValueError(
                f"The rendezvous backend '{backend}' cannot be registered with '{creator}' as it "
                f"is already registered with '{current}'."
            )

    def create_handler(self, params: RendezvousParameters) -> RendezvousHandler:
        """Create the handler of the backend that the parameters name.

        Raises:
            ValueError: no creator or plug-in has that name.
            RendezvousError: the plug-in cannot be loaded.
            RuntimeError: the creator returned a handler of another backend.
        """
        creator = self._registry.get(params.backend) or self._load(params.backend)
        handler = creator(params)
        if handler.get_backend() != params.backend:
            raise RuntimeError(
                f"The rendezvous backend '{handler.get_backend()}' does not match the requested "
                f"backend '{params.backend}'."
            )
        return handler

    def _load(self, backend: str) -> RendezvousHandlerCreator:
        plugins = self._plugins()
        entry_point = plugins.get(backend)
        if entry_point is None:
            raise ValueError(_unknown(backend, {*self._registry, *plugins}))
        try:
            creator = _load_plugin(entry_point)
        except Exception as error:
            from regrow.utils import headline

            raise RendezvousError(
                f"the rendezvous backend '{backend}' is a plug-in that does not load "
                f"({entry_point.group}: {entry_point.value}): {headline(error)}"
            ) from error
        self.register(backend, creator)
        return creator


def _load_plugin(entry_point: EntryPoint) -> RendezvousHandlerCreator:
    """Load a plug-in while torch's warnings about plug-ins that it cannot load are off.

    When a plug-in imports torch, torch loads all plug-ins, including the importing one. This fails,
    because that plug-in is not imported yet, and torch logs a traceback.
    """
    import logging

    torch_logger = logging.getLogger("torch.distributed.elastic.rendezvous.registry")
    before, torch_logger.disabled = torch_logger.disabled, True
    try:
        creator: RendezvousHandlerCreator = entry_point.load()()
    finally:
        torch_logger.disabled = before
    return creator


def _unknown(backend: str, known: Iterable[str]) -> str:
    from difflib import get_close_matches

    known = sorted(known)
    near = get_close_matches(backend, known, n=1)
    return (
        f"The rendezvous backend '{backend}' is not registered. Did you forget to call `register`?"
        f" Known backends: {', '.join(known) or 'none'}."
        + (f" Did you mean '{near[0]}'?" if near else "")
    )


def installed_plugins() -> dict[str, EntryPoint]:
    """Return the entry points of installed plug-ins by name; regrow's group takes precedence."""
    from importlib.metadata import entry_points

    found: dict[str, EntryPoint] = {}
    for group in PLUGIN_GROUPS:
        for entry_point in entry_points(group=group):
            found.setdefault(entry_point.name, entry_point)
    return found


def _create_own(params: RendezvousParameters) -> RendezvousHandler:
    module = _OWN[params.backend]
    if params.backend == "c10d" and params.get("store_type"):  # selects torch's store
        module = "c10d.torch_c10d"
    elif params.backend in ("static", "c10d") and params.max_nodes == 1:
        module = "solo"
    own = import_module(f"regrow.rendezvous.backends.{module}")
    if module not in _OVER_A_BACKEND:
        handler: RendezvousHandler = own.create_handler(params)
        return handler
    from regrow.rendezvous.node.handler import create_handler

    backend, store = own.create_backend(params)
    try:
        return create_handler(store, backend, params)
    except BaseException:
        backend.close()
        raise


def _refuse_etcd_v2(params: RendezvousParameters) -> RendezvousHandler:
    raise RendezvousUsageError(
        f"the rendezvous backend '{params.backend}' needs version 2 of etcd's API, which etcd has "
        f"removed; use the backend 'etcd' (--rdzv-backend=etcd), which uses version 3, with the "
        f"same endpoint and keys"
    )


rendezvous_handler_registry = RendezvousHandlerRegistry(installed_plugins)
for _backend in _OWN:
    rendezvous_handler_registry.register(_backend, _create_own)
rendezvous_handler_registry.register("etcd-v2", _refuse_etcd_v2)


def get_rendezvous_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Create the handler for the parameters.

    Raises:
        ValueError: no backend has that name; the text lists the known backends.
        RendezvousError: the backend cannot be used for this job.
    """
    return rendezvous_handler_registry.create_handler(params)
