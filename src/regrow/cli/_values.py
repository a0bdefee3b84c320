"""Values of the command line that take more than a look to be understood."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

from regrow.cli._parser import Said, is_said
from regrow.rendezvous.utils import _parse_rendezvous_config, unknown_config_keys
from regrow.utils import get_logger
from regrow.workers import DefaultLogsSpecs, LogsSpecs

DEFAULT_MASTER_PORT = 29500
LOGS_SPECS_GROUPS = ("regrow.logs_specs", "torchrun.logs_specs")
# Flags that are keys of `--rdzv-conf` as well, and what these are called there.
SECURITY = {
    "rdzv_token_file": "token_file",
    "rdzv_tls_cert": "tls_cert",
    "rdzv_tls_key": "tls_key",
    "rdzv_tls_ca": "tls_ca",
    "insecure": "insecure",
}

logger = get_logger(__name__)


def static_only(args: Namespace) -> str:
    """What was said that a rendezvous other than `static` has no use for."""
    unsaid = {"master_addr": ("127.0.0.1",), "master_port": (None, DEFAULT_MASTER_PORT)}
    said = {name: getattr(args, name, usual[0]) for name, usual in unsaid.items()}
    return ", ".join(
        f"--{name.replace('_', '-')} {value}"
        for name, value in said.items()
        if value not in unsaid[name]
    )


def rendezvous_config(args: Namespace, environ: Mapping[str, str]) -> dict[str, Any]:
    """The keys of `--rdzv-conf`, and what other flags say of the rendezvous; these win."""
    config: dict[str, Any] = dict(_parse_rendezvous_config(args.rdzv_conf))
    unknown = unknown_config_keys(args.rdzv_backend, config)
    if unknown:
        logger.warning(
            "--rdzv-conf: the %s rendezvous does not know %s",
            args.rdzv_backend,
            ", ".join(unknown),
        )
    security = {
        key: value for flag, key in SECURITY.items() if (value := getattr(args, flag, None))
    }
    useless = unknown_config_keys(args.rdzv_backend, security)
    if useless:
        flags = [f"--{flag.replace('_', '-')}" for flag, key in SECURITY.items() if key in useless]
        logger.warning("%s ignored: not for the %s rendezvous", ", ".join(flags), args.rdzv_backend)
    config |= security
    # 0 may be the flag's default, and only static has a use for a rank that nobody asked for.
    asked = isinstance(args, Said) and is_said(args, environ, "node_rank")
    if args.rdzv_backend == "static" or args.node_rank or asked:
        config["rank"] = args.node_rank
    return config


def local_ranks(text: str) -> set[int] | None:
    """The local ranks of a comma-separated list; None, which is all, for an empty one.

    Raises:
        ValueError: an item is no number.
    """
    if not text:
        return None
    try:
        return {int(rank) for rank in text.split(",")}
    except ValueError:
        raise ValueError(
            f"--local-ranks-filter: {text!r} is not a list of local ranks such as 0,1,2"
        ) from None


def logs_specs_class(name: str | None) -> Callable[..., LogsSpecs]:
    """The class that a plug-in of that name provides, or the default.

    Raises:
        ValueError: there is no such plug-in.
    """
    if name is None:
        return DefaultLogsSpecs
    from importlib.metadata import entry_points

    for group in LOGS_SPECS_GROUPS:
        for point in entry_points(group=group, name=name):
            found: Callable[..., LogsSpecs] = point.load()
            return found
    raise ValueError(
        f"Could not find entrypoint under 'torchrun.logs_specs[{name}]' key, nor under"
        f" 'regrow.logs_specs[{name}]'"
    )


def numa_options(mode: str | None) -> Any:
    """The `NumaOptions` of `--numa-binding`."""
    if mode is None:
        return None
    from regrow.workers import AffinityMode, NumaOptions

    return NumaOptions(affinity_mode=AffinityMode(mode))
