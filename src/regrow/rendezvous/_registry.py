"""From a backend's name to its handler.

Plug-ins are entry points of the groups `regrow.handlers` and, since programs written for torchrun
have them, `torchrun.handlers`; each is a function without arguments that returns the creator. One
is looked for only when its name is asked for and nobody has registered it: to read the metadata of
everything that is installed takes longer than all the rest of the start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from regrow.rendezvous._api import RendezvousHandler
from regrow.rendezvous._errors import RendezvousError
from regrow.rendezvous._parameters import RendezvousParameters

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

PLUGIN_GROUPS = ("regrow.handlers", "torchrun.handlers")

RendezvousHandlerCreator = Callable[[RendezvousParameters], RendezvousHandler]


class RendezvousHandlerRegistry:
    """Backends by name.

    Args:
        plugins: where else to look for a name that is not registered.
    """

    def __init__(self, plugins: Callable[[], Mapping[str, EntryPoint]] = dict) -> None:
        self._registry: dict[str, RendezvousHandlerCreator] = {}
        self._plugins = plugins

    def register(self, backend: str, creator: RendezvousHandlerCreator) -> None:
        """Register a creator; to register the same one again changes nothing.

        Args:
            backend: the name of the backend.
            creator: called with the parameters, returns the handler.

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
            ValueError: nobody provides that backend.
            RendezvousError: its plug-in cannot be loaded.
            RuntimeError: the creator made a handler of another backend.
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
            creator: RendezvousHandlerCreator = entry_point.load()()
        except Exception as error:
            raise RendezvousError(
                f"the rendezvous backend '{backend}' is a plug-in that does not load "
                f"({entry_point.group}: {entry_point.value}): {type(error).__name__}: {error}"
            ) from error
        self.register(backend, creator)
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
    """Return the entry points of installed plug-ins by name; regrow's group comes first."""
    from importlib.metadata import entry_points

    found: dict[str, EntryPoint] = {}
    for group in PLUGIN_GROUPS:
        for entry_point in entry_points(group=group):
            found.setdefault(entry_point.name, entry_point)
    return found


def _create_static(params: RendezvousParameters) -> RendezvousHandler:
    from regrow.rendezvous._static import create_rdzv_handler

    return create_rdzv_handler(params)


def _create_c10d(params: RendezvousParameters) -> RendezvousHandler:
    if params.get("store_type"):  # asks for a store of torch's
        from regrow.rendezvous._torch_store import create_handler as create_torch

        return create_torch(params)
    if params.max_nodes == 1:  # which has nobody to meet, so no port is opened for it
        from regrow.rendezvous._local_handler import create_handler as create_local

        return create_local(params)
    from regrow.rendezvous._c10d import create_handler

    return create_handler(params)


def _create_etcd(params: RendezvousParameters) -> RendezvousHandler:
    from regrow.rendezvous._etcd import create_handler

    return create_handler(params)


def _refuse_etcd_v2(params: RendezvousParameters) -> RendezvousHandler:
    raise RendezvousError(
        f"the rendezvous backend '{params.backend}' speaks version 2 of etcd's API, which etcd has "
        f"dropped; use the backend 'etcd' (--rdzv-backend=etcd), which speaks version 3, with the "
        f"same endpoint and keys"
    )


def _create_file(params: RendezvousParameters) -> RendezvousHandler:
    from regrow.rendezvous._file import create_handler

    return create_handler(params)


rendezvous_handler_registry = RendezvousHandlerRegistry(installed_plugins)
rendezvous_handler_registry.register("static", _create_static)
rendezvous_handler_registry.register("c10d", _create_c10d)
rendezvous_handler_registry.register("etcd", _create_etcd)
rendezvous_handler_registry.register("etcd-v2", _refuse_etcd_v2)
rendezvous_handler_registry.register("file", _create_file)


def get_rendezvous_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Create the handler that the parameters ask for.

    Raises:
        ValueError: nobody provides that backend; the text lists those there are.
        RendezvousError: the backend cannot be used for this job.
    """
    return rendezvous_handler_registry.create_handler(params)
