"""The public names: parameters, registry, the result of a round, and handlers of users."""

from __future__ import annotations

import importlib
import subprocess
import sys
from datetime import timedelta
from importlib.metadata import EntryPoint
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import regrow.rendezvous as package
from helpers.jobs.plain_handler import PlainHandler
from regrow.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousHandlerRegistry,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
    get_rendezvous_handler,
    handler_registry,
    rendezvous_handler_registry,
)
from regrow.rendezvous.foreign import adapted
from regrow.rendezvous.utils import (
    _parse_rendezvous_config,
    parse_rendezvous_endpoint,
    unknown_config_keys,
)
from regrow.store import MemoryStore, StoreTimeout

TORCH = "torch.distributed.elastic.rendezvous.api"
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    return PlainHandler("mine")


def plugin() -> Any:
    """The function that an entry point names; it returns the creator."""
    return create_handler


def broken_plugin() -> Any:
    raise OSError("no such library")


def parameters(backend: str = "mine", **config: Any) -> RendezvousParameters:
    return RendezvousParameters(backend, "host:1", "job", 1, 2, **config)


# --- names


def test_every_public_name_can_be_imported() -> None:
    assert package.__all__ == sorted(package.__all__)
    for name in package.__all__:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = package.nothing


@pytest.mark.parametrize("module", ["api", "registry", "static_tcp_rendezvous", "utils"])
def test_torchs_submodules_exist(module: str) -> None:
    torch_module = pytest.importorskip(f"torch.distributed.elastic.rendezvous.{module}")
    ours = importlib.import_module(f"regrow.rendezvous.{module}")
    for name in torch_module.__all__:
        assert hasattr(ours, name), name
        assert name in ours.__all__
    if module == "api":
        assert ours.RendezvousError is RendezvousError


def test_all_errors_are_rendezvous_errors() -> None:
    errors = [getattr(package, name) for name in package.__all__ if name.endswith("Error")]
    assert len(errors) == 6
    assert all(issubclass(error, RendezvousError) for error in errors)


def test_the_import_needs_neither_the_store_nor_the_metadata_of_packages() -> None:
    heavy = (
        "asyncio",
        "importlib.metadata",
        "msgspec",
        "socket",
        "json",
        "regrow.store",
    )
    script = f"import sys, regrow.rendezvous; print([m for m in {heavy!r} if m in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"


# --- parameters


def test_parameters_hold_what_they_were_given() -> None:
    params = RendezvousParameters("b", "e", "r", 1, 3, "addr", key="value")
    assert (params.backend, params.endpoint, params.run_id) == ("b", "e", "r")
    assert (params.min_nodes, params.max_nodes, params.local_addr) == (1, 3, "addr")
    assert params.get("key") == "value"
    assert params.get("other") is None
    assert params.get("other", 7) == 7


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("", "e", "r", 1, 1), "The rendezvous backend name must be a non-empty string."),
        (("b", "e", "r", 0, 1), r"The minimum number of rendezvous nodes \(0\) must be greater"),
        (("b", "e", "r", 3, 2), r"The maximum number of rendezvous nodes \(2\) must be greater"),
    ],
)
def test_invalid_parameters_are_refused(args: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        RendezvousParameters(*args)


@pytest.mark.parametrize("value", ["1", "True", "tRue", "T", "t", "yEs", "Y", 1, True])
def test_values_that_mean_true(value: object) -> None:
    assert parameters(key=value).get_as_bool("key") is True


@pytest.mark.parametrize("value", ["0", "False", "faLse", "F", "f", "nO", "N", 0, False])
def test_values_that_mean_false(value: object) -> None:
    assert parameters(key=value).get_as_bool("key") is False


@pytest.mark.parametrize("value", ["01", "Flse", "Ture", "g", "4", "_", "", 2, -1, 1.0, b"1"])
def test_an_invalid_boolean_is_refused_in_torchs_words(value: object) -> None:
    with pytest.raises(
        ValueError,
        match=r"^The rendezvous configuration option 'key' does not represent a valid boolean "
        r"value\. Got ",
    ):
        parameters(key=value).get_as_bool("key")


@pytest.mark.parametrize(
    ("value", "number"), [("0", 0), ("-10", -10), (" 5 ", 5), ("+4", 4), (4, 4)]
)
def test_integers_are_read(value: object, number: int) -> None:
    assert parameters(key=value).get_as_int("key") == number


@pytest.mark.parametrize("value", ["a", "0a", "3b", "abc", "", "1.5"])
def test_an_invalid_integer_is_refused_in_torchs_words(value: object) -> None:
    with pytest.raises(
        ValueError,
        match=r"^The rendezvous configuration option 'key' does not represent a valid integer "
        r"value\. Got ",
    ):
        parameters(key=value).get_as_int("key")


def test_defaults_stand_in_for_missing_keys() -> None:
    assert parameters().get_as_bool("key") is None
    assert parameters().get_as_bool("key", True) is True
    assert parameters().get_as_int("key") is None
    assert parameters().get_as_int("key", 3) == 3


# --- the registry


def test_a_registered_backend_is_created() -> None:
    registry = RendezvousHandlerRegistry()
    registry.register("mine", create_handler)
    assert isinstance(registry.create_handler(parameters()), PlainHandler)


def test_the_same_creator_may_be_registered_again_and_another_not() -> None:
    registry = RendezvousHandlerRegistry()
    registry.register("mine", create_handler)
    registry.register("mine", create_handler)
    with pytest.raises(ValueError, match=r"^The rendezvous backend 'mine' cannot be registered"):
        registry.register("mine", lambda params: PlainHandler("mine"))
    assert registry.create_handler(parameters()).get_backend() == "mine"


def test_a_backend_needs_a_name() -> None:
    with pytest.raises(ValueError, match="must be a non-empty string"):
        RendezvousHandlerRegistry().register("", create_handler)


def test_a_handler_of_another_backend_is_refused() -> None:
    registry = RendezvousHandlerRegistry()
    registry.register("other", create_handler)
    with pytest.raises(RuntimeError, match="'mine' does not match the requested backend 'other'"):
        registry.create_handler(parameters("other"))


def test_an_unknown_backend_is_refused_with_the_known_and_the_nearest() -> None:
    with pytest.raises(
        ValueError, match=r"^The rendezvous backend 'statik' is not registered\."
    ) as e:
        get_rendezvous_handler(parameters("statik"))
    assert "Known backends: c10d, etcd, etcd-v2, file, static" in str(e.value)
    assert str(e.value).endswith("Did you mean 'static'?")


def test_nothing_is_suggested_where_nothing_is_near() -> None:
    with pytest.raises(ValueError, match=r"Known backends: none\.$"):
        RendezvousHandlerRegistry().create_handler(parameters("zookeeper"))


def entry_point(function: str, group: str = "torchrun.handlers") -> EntryPoint:
    return EntryPoint("mine", f"{__name__}:{function}", group)


def test_a_plugin_is_loaded_when_its_name_is_requested() -> None:
    asked = []

    def plugins() -> dict[str, EntryPoint]:
        asked.append(1)
        return {"mine": entry_point("plugin")}

    registry = RendezvousHandlerRegistry(plugins)
    registry.register("built-in", lambda params: PlainHandler("built-in"))
    registry.create_handler(parameters("built-in"))
    assert asked == []
    assert registry.create_handler(parameters()).get_backend() == "mine"
    registry.create_handler(parameters())
    assert asked == [1]


@pytest.mark.parametrize("function", ["broken_plugin", "missing"])
def test_a_plugin_that_does_not_load_is_named_with_the_reason(function: str) -> None:
    registry = RendezvousHandlerRegistry(lambda: {"mine": entry_point(function)})
    with pytest.raises(RendezvousError, match=f"'mine' is a plug-in .*{function}") as e:
        registry.create_handler(parameters())
    assert e.value.__cause__ is not None


def test_plugins_are_found_in_both_groups_and_regrows_comes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups = {
        "regrow.handlers": [entry_point("plugin", "regrow.handlers")],
        "torchrun.handlers": [
            entry_point("broken_plugin"),
            EntryPoint("theirs", f"{__name__}:plugin", "torchrun.handlers"),
        ],
    }
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: groups[group])
    found = handler_registry.installed_plugins()
    assert {name: point.group for name, point in found.items()} == {
        "mine": "regrow.handlers",
        "theirs": "torchrun.handlers",
    }


def test_get_rendezvous_handler_uses_the_registry_of_the_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert rendezvous_handler_registry is handler_registry.rendezvous_handler_registry
    own = RendezvousHandlerRegistry()
    own.register("mine", create_handler)
    monkeypatch.setattr(handler_registry, "rendezvous_handler_registry", own)
    assert get_rendezvous_handler(parameters()).get_backend() == "mine"


# --- the result of a round


def test_the_result_of_a_round_unpacks_as_the_triple_of_old() -> None:
    kept = MemoryStore()
    info = RendezvousInfo(kept, 1, 2, RendezvousStoreInfo("host", 5))
    store, rank, world_size = info
    assert (store, rank, world_size) == (kept, 1, 2)
    assert (info.store, info.rank, info.world_size) == (kept, 1, 2)
    assert info.bootstrap_store_info == RendezvousStoreInfo("host", 5)
    assert "rank=1, world_size=2" in repr(info)


def test_rank_0_publishes_the_address_and_the_others_read_it() -> None:
    store = MemoryStore()
    assert RendezvousStoreInfo.build(0, store, "10.0.0.1", 1234) == RendezvousStoreInfo(
        "10.0.0.1", 1234
    )
    assert RendezvousStoreInfo.build(1, store, "10.0.0.2") == RendezvousStoreInfo("10.0.0.1", 1234)
    assert store.get("MASTER_ADDR") == b"10.0.0.1"
    assert store.get("MASTER_PORT") == b"1234"


def test_a_free_port_is_picked_where_none_is_given() -> None:
    assert 0 < RendezvousStoreInfo.build(0, MemoryStore(), "host").master_port < 2**16


def test_the_full_host_name_is_used_only_without_an_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("socket.getfqdn", lambda: "me.example")
    assert RendezvousStoreInfo.build(0, MemoryStore(), None, 1).master_addr == "me.example"
    assert RendezvousStoreInfo.build(0, MemoryStore(), "other", 1).master_addr == "other"


def test_the_wait_for_an_address_ends_with_the_timeout_of_the_store() -> None:
    with pytest.raises(StoreTimeout):
        RendezvousStoreInfo.build(1, MemoryStore(timedelta(seconds=0.01)), "host")


# --- handlers of users


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("", {}),
        ("  ", {}),
        ("a=1", {"a": "1"}),
        (" a = 1 , b=x ", {"a": "1", "b": "x"}),
        ("a=1,a=2", {"a": "2"}),
        ("a=b=c", {"a": "b=c"}),
    ],
)
def test_configurations_are_read(text: str, config: dict[str, str]) -> None:
    assert _parse_rendezvous_config(text) == config


@pytest.mark.parametrize("text", ["=1", ",", "a=1,", " =2,b=1"])
def test_a_configuration_without_a_key_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be in format <key1>=<value1>,"):
        _parse_rendezvous_config(text)


def test_an_invalid_configuration_is_shown_without_its_password() -> None:
    with pytest.raises(ValueError, match=r"Got 'user=u,password=\.\.\.,=1'"):
        _parse_rendezvous_config("user=u,password=secret,=1")


@pytest.mark.parametrize("text", ["a", "a=", "b=1,a= "])
def test_a_configuration_without_a_value_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="'a' must have a value specified"):
        _parse_rendezvous_config(text)


def test_unknown_keys_are_listed() -> None:
    assert unknown_config_keys("static", ["timeout", "rank", "timeuot"]) == ["timeuot"]
    assert unknown_config_keys("c10d", {"join_timeout": 1, "z": 2, "a": 3}) == ["a", "z"]
    assert unknown_config_keys("etcd", ["user", "password", "cacert", "pasword"]) == ["pasword"]
    assert unknown_config_keys("file", ["keep_alive_interval", "store_type"]) == ["store_type"]
    assert unknown_config_keys("a plug-in", ["anything"]) == []


def test_the_error_of_etcd_v2_names_the_backend_to_use() -> None:
    with pytest.raises(RendezvousError, match="use the backend 'etcd'"):
        get_rendezvous_handler(parameters("etcd-v2"))


@pytest.mark.parametrize(
    ("endpoint", "host", "port"),
    [
        (None, "localhost", 7),
        ("", "localhost", 7),
        ("  ", "localhost", 7),
        ("host", "host", 7),
        (" host:1 ", "host", 1),
        ("host.example:65535", "host.example", 65535),
        ("10.0.0.1:0", "10.0.0.1", 0),
        ("[::1]", "::1", 7),
        ("[fe80::1]:29400", "fe80::1", 29400),
        ("my_host-1:2", "my_host-1", 2),
    ],
)
def test_endpoints_are_read(endpoint: str | None, host: str, port: int) -> None:
    assert parse_rendezvous_endpoint(endpoint, 7) == (host, port)


@pytest.mark.parametrize(
    "endpoint", ["host:", "host:x", "host:-1", "host:65536", "[::1]:1x", "h:1 2"]
)
def test_an_invalid_port_is_refused_with_the_endpoint(endpoint: str) -> None:
    with pytest.raises(ValueError, match="The port number of the rendezvous endpoint") as e:
        parse_rendezvous_endpoint(endpoint, 7)
    assert endpoint in str(e.value)


@pytest.mark.parametrize("endpoint", ["~", "ho st", ":80", "[]", "a/b:1", "host\n.de:1"])
def test_an_invalid_host_is_refused_with_the_endpoint(endpoint: str) -> None:
    with pytest.raises(ValueError, match="The hostname of the rendezvous endpoint") as e:
        parse_rendezvous_endpoint(endpoint, 7)
    assert endpoint in str(e.value)


@UNHURRIED
@given(st.text("aé1:[]. -_/", max_size=12), st.integers(0, 65535))
def test_any_endpoint_is_read_as_torch_reads_it(endpoint: str, port: int) -> None:
    theirs = pytest.importorskip("torch.distributed.elastic.rendezvous.utils")

    def outcome(parse: Any) -> object:
        try:
            return parse(endpoint, port)
        except ValueError as error:
            return str(error).partition(" Got ")[0]

    assert outcome(parse_rendezvous_endpoint) == outcome(theirs.parse_rendezvous_endpoint)


@UNHURRIED
@given(st.text("ab=, 1", max_size=12))
def test_any_configuration_is_read_as_torch_reads_it(text: str) -> None:
    theirs = pytest.importorskip("torch.distributed.elastic.rendezvous.utils")

    def outcome(parse: Any) -> object:
        try:
            return parse(text)
        except ValueError as error:
            return str(error).partition(" Got ")[0]

    assert outcome(_parse_rendezvous_config) == outcome(theirs._parse_rendezvous_config)


# --- handlers built on torch's classes; tests/launch/test_torch_plugins.py has the real ones


class TorchsInfo:
    """Like torch's `RendezvousInfo`, which cannot be unpacked."""

    def __init__(self, store: object, rank: int, world_size: int, place: object) -> None:
        self.store, self.rank, self.world_size = store, rank, world_size
        self.bootstrap_store_info = place


def test_the_results_of_torchs_handlers_become_regrows() -> None:
    store, place = MemoryStore(), RendezvousStoreInfo("node7", 29500)
    for answer in (TorchsInfo(store, 1, 2, place), (store, 1, 2)):
        info = adapted(PlainHandler(round=answer)).next_rendezvous()
        assert (info.store, info.rank, info.world_size) == (store, 1, 2)
        assert info.bootstrap_store_info in (place, None)
        assert (info.round, info.failures) == (None, None)
    own = RendezvousInfo(store, 0, 1, place, 3, 1)
    assert adapted(PlainHandler(round=own)).next_rendezvous() is own


@pytest.mark.parametrize(
    ("module", "name", "becomes"),
    [
        (TORCH, "RendezvousClosedError", RendezvousClosedError),
        (TORCH, "RendezvousGracefulExitError", RendezvousGracefulExitError),
        (TORCH, "RendezvousTimeoutError", RendezvousTimeoutError),
        (TORCH, "EtcdTrouble", None),
        ("plugins", "RendezvousClosedError", None),
    ],
)
def test_torchs_errors_become_regrows(
    module: str, name: str, becomes: type[Exception] | None
) -> None:
    torchs = type(name, (Exception,), {"__module__": module})
    derived = type("OfThePlugin", (torchs,), {"__module__": "plugins"})

    class Failing(PlainHandler):
        def next_rendezvous(self) -> Any:
            raise derived("it is over")

    with pytest.raises(Exception, match=r"^it is over$") as caught:
        adapted(Failing()).next_rendezvous()
    assert type(caught.value) is (becomes or derived)


class WithLeave(PlainHandler):
    """A plug-in of torch's kind with `leave` as its only addition."""

    def __init__(self) -> None:
        super().__init__()
        self.left: list[str] = []

    def leave(self, why: str) -> None:
        self.left.append(why)


def test_a_plug_in_may_lack_all_methods_beyond_torchs() -> None:
    plugin = WithLeave()
    handler = adapted(plugin)
    handler.leave("the host is drained")
    assert plugin.left == ["the host is drained"]
    assert not handler.pushes
    handler.subscribe(print)()
    handler.keep_lease(print)()
    handler.interrupt()
    handler.leaving("it is done", full_grace=True)
    assert (handler.report_failure("x"), handler.others, handler.credentials) == (None, None, None)
    assert (handler.bounds, handler.serves, handler.max_nodes) == ({}, False, None)
    assert (handler.get_backend(), handler.get_run_id()) == ("plain", "job")
    assert (handler.is_closed(), handler.num_nodes_waiting(), handler.shutdown()) == (
        False,
        0,
        True,
    )


def test_a_handler_of_regrow_is_not_adapted() -> None:
    handler = get_rendezvous_handler(RendezvousParameters("c10d", "localhost:0", "job", 1, 1))
    assert adapted(handler) is handler
