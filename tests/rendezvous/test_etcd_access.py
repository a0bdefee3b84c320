"""Access to etcd: endpoints, TLS and passwords, and the errors when etcd refuses access."""

from __future__ import annotations

import json
import re
import shutil
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar
from urllib.request import urlopen

import pytest

from helpers.rendezvous.etcd_server import (
    Certificate,
    EtcdCluster,
    EtcdProcess,
    enable_passwords,
    etcd,
    require_etcd,
)
from helpers.stores.storing import PATIENCE, Background
from regrow.rendezvous import RendezvousConnectionError, RendezvousError, RendezvousParameters
from regrow.rendezvous.backends.etcd import etcd_client
from regrow.rendezvous.backends.etcd.etcd_backend import (
    EtcdRendezvousBackend,
    connect_job,
    create_backend,
    read_access,
    read_prefix,
)
from regrow.rendezvous.backends.etcd.etcd_client import (
    Access,
    EtcdClient,
    EtcdError,
    EtcdUnreachable,
)
from regrow.rendezvous.parameters import unknown_config_keys

SECRET = "correct horse"


def params(endpoint: str, **config: Any) -> RendezvousParameters:
    return RendezvousParameters("etcd", endpoint, "job", 1, 1, **config)


@pytest.mark.parametrize("config", [{}, {"protocol": "https"}, {"insecure": "0"}])
def test_an_etcd_of_other_hosts_that_nothing_is_proved_to_is_refused(
    config: dict[str, str],
) -> None:
    with pytest.raises(RendezvousError, match=r"neither a user nor a certificate.* --insecure"):
        connect_job(params("127.0.0.1:1,192.0.2.1:1", **config))


def test_a_user_a_certificate_or_insecure_permits_an_etcd_on_another_host() -> None:
    for proof in ({"user": "u", "password": SECRET}, {"insecure": "1"}):
        connect_job(params("192.0.2.1:1", **proof))
    connect_job(params("127.0.0.1:1"))


def access(endpoint: str = "h", environment: dict[str, str] | None = None, **config: Any) -> Access:
    assert unknown_config_keys("etcd", config) == []
    return read_access(params(endpoint, **config), environment or {})


@contextmanager
def backend(endpoint: str, **config: Any) -> Iterator[EtcdRendezvousBackend]:
    made, _ = create_backend(params(endpoint, **config))
    try:
        yield made
    finally:
        made.close()


# --- endpoints as users write them


@pytest.mark.parametrize(
    ("text", "endpoints"),
    [
        ("", (("localhost", 2379),)),
        ("a", (("a", 2379),)),
        ("a:1, b:2,c", (("a", 1), ("b", 2), ("c", 2379))),
        ("[::1]:7,10.0.0.1", (("::1", 7), ("10.0.0.1", 2379))),
        ("http://a:1,http://b", (("a", 1), ("b", 2379))),
        ("http://a:1/,http://b/", (("a", 1), ("b", 2379))),
        ("a:1,a:1", (("a", 1),)),
    ],
)
def test_an_endpoint_names_the_members(text: str, endpoints: tuple[tuple[str, int], ...]) -> None:
    assert access(text).endpoints == endpoints


@pytest.mark.parametrize(
    ("endpoint", "config", "why"),
    [
        ("a:x", {}, "port"),
        ("a:1,b..c:2", {}, r"'b\.\.c' in the endpoint cannot be the name of a host"),
        (f"https://root:{SECRET.replace(' ', '')}@a:1", {}, "names a user.*'password_file'"),
        ("a:1,,b", {"protocol": "ftp"}, "'http' or 'https'.*ftp"),
        ("http://a,https://b", {}, "http, https"),
        ("http://a", {"protocol": "https"}, "http, https"),
        ("a", {"protocol": "http", "ca_cert": "x"}, "need 'protocol=https'"),
        ("a", {"ca_cert": "/no/such/file"}, "'/no/such/file'.*No such file"),
        ("a", {"key": "k"}, "private key.*'k'.*no certificate"),
        ("a", {"user": "u"}, "a user and no password.*password_file"),
        ("a", {"password": SECRET}, "a password and no user"),
        ("a", {"user": "u", "password_file": "/no/such/file"}, "password.*'/no/such/file'"),
    ],
)
def test_an_invalid_option_is_refused_with_its_value(
    endpoint: str, config: dict[str, Any], why: str
) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        access(endpoint, **config)
    assert SECRET not in str(caught.value)
    assert SECRET.replace(" ", "") not in str(caught.value)


def test_the_prefix_is_torchs_unless_it_is_given() -> None:
    assert read_prefix(params("a")) == "/torch/elastic/rendezvous"
    assert read_prefix(params("a", etcd_prefix="/mine/")) == "/mine"
    with pytest.raises(ValueError, match="etcd_prefix"):
        read_prefix(params("a", etcd_prefix="/"))


def test_a_password_comes_from_a_key_a_file_or_a_variable(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text(SECRET + "\n")
    file.chmod(0o600)
    variables = {"REGROW_ETCD_USER": "u", "REGROW_ETCD_PASSWORD": SECRET}
    in_file = {"REGROW_ETCD_USER": "u", "REGROW_ETCD_PASSWORD_FILE": str(file)}
    for found in (
        access(user="u", password=SECRET),
        access(user="u", password_file=str(file)),
        access(environment=variables),
        access(environment=in_file),
        access(environment={**variables, "REGROW_ETCD_PASSWORD": "x"}, password=SECRET),
    ):
        assert (found.user, found.password) == ("u", SECRET)
        assert SECRET not in repr(found)
    file.write_text("\n")
    with pytest.raises(ValueError, match="is empty"):
        access(user="u", password_file=str(file))


def test_a_password_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text(SECRET)
    file.chmod(0o644)
    with pytest.raises(ValueError, match=r"other users may read .* Type: chmod 600") as caught:
        access(user="u", password_file=str(file))
    assert SECRET not in str(caught.value)


def test_no_certificate_means_no_tls() -> None:
    assert access().tls is None
    assert access(protocol="https").tls is not None
    assert access("https://a").tls is not None


# --- TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    return Certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def secured(certificate: Certificate) -> Iterator[EtcdCluster]:
    """An etcd that requires a client certificate."""
    with etcd(1, certificate) as cluster:
        yield cluster


@pytest.mark.parametrize(
    "names", [("ca_cert", "ssl_cert", "ssl_cert_key"), ("cacert", "cert", "key")], ids=str
)
def test_certificates_are_shown_and_checked(
    secured: EtcdCluster, certificate: Certificate, names: tuple[str, str, str]
) -> None:
    files = (certificate.cert, certificate.cert, certificate.key)
    config = dict(zip(names, files, strict=True))
    with (
        backend(secured.endpoint, etcd_prefix=names[0], **config) as one,
        backend(f"https://{secured.endpoint}", etcd_prefix=names[0], **config) as other,
    ):
        one.beat("node", 1, PATIENCE)
        _, token, _ = one.set_state(bytes(100_000)) or pytest.fail("no state")
        waiting = Background(other.wait_state, token, PATIENCE)
        one.set_state(b"2", token)
        waiting.result()
        assert (other.get_state() or pytest.fail("no state"))[0] == b"2"


def test_a_missing_client_certificate_is_reported(
    secured: EtcdCluster, certificate: Certificate
) -> None:
    with (
        pytest.raises(RendezvousConnectionError, match=r"(?i)certificate"),
        backend(secured.endpoint, ca_cert=certificate.cert, read_timeout="1"),
    ):
        pass


def test_a_certificate_of_an_unknown_authority_is_refused(secured: EtcdCluster) -> None:
    with (
        pytest.raises(RendezvousConnectionError, match="certificate verify failed"),
        backend(secured.endpoint, protocol="https", read_timeout="2"),
    ):
        pass


def test_a_missing_protocol_https_is_reported(secured: EtcdCluster) -> None:
    with (
        pytest.raises(RendezvousConnectionError, match=secured.endpoint),
        backend(secured.endpoint, read_timeout="1"),
    ):
        pass


# --- passwords


@pytest.mark.thorough
def test_a_user_is_let_in_and_stays_in_when_etcd_forgets_it() -> None:
    with etcd() as cluster:
        member = cluster.members[0]
        job = connect_job(params(cluster.endpoint))
        enable_passwords(
            lambda path, message: job.client.call(path, message),
            "trainer",
            SECRET,
        )
        job.close()
        trainer = {"user": "trainer", "password": SECRET, "read_timeout": f"{PATIENCE}"}
        with (
            backend(cluster.endpoint, **trainer) as one,
            backend(cluster.endpoint, **trainer) as other,
        ):
            one.beat("node", 1, PATIENCE)
            _, token, _ = one.set_state(b"1") or pytest.fail("no state")
            waiting = Background(other.wait_state, token, PATIENCE)
            other.beats([])
            member.kill()  # its tokens are in memory and are lost with it
            member.start()
            member.wait_until_healthy()
            one.beat("node", 2, PATIENCE)
            _, token, has_set = one.set_state(b"2", token) or pytest.fail("no state")
            assert has_set
            waiting.result()
            assert other.get_state() == (b"2", token)
        for config, why in (
            (trainer | {"password": "wrong " + SECRET}, "refuses the user 'trainer'"),
            ({}, "requires a user.*password_file"),
        ):
            with (
                pytest.raises(RendezvousConnectionError, match=why) as caught,
                backend(cluster.endpoint, **config),
            ):
                pass
            assert SECRET not in str(caught.value)


class SlowCheck(BaseHTTPRequestHandler):
    """An etcd that checks passwords one by one, also those of clients that have given up."""

    protocol_version = "HTTP/1.1"
    checking = threading.Lock()
    asked = threading.Event()
    checked: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        found: dict[str, Any] = {"kvs": []}
        if self.path.endswith("authenticate"):
            self.asked.set()
            with self.checking:
                time.sleep(0.3)
            self.checked.append(self.path)
            found = {"token": "let in"}
        content = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        with suppress(OSError):  # the client has given up
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("members", [1, 2])
def test_a_password_that_etcd_takes_long_to_check_is_sent_once(
    members: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_client, "ATTEMPT", 0.1)
    with slow_client(members, monkeypatch) as http:
        assert http.call("kv/range", {}) == [{"kvs": []}]
        assert len(SlowCheck.checked) == 1


def test_a_login_that_timed_out_succeeds_in_the_next_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with slow_client(1, monkeypatch) as http:
        with http.within(0.1), pytest.raises(EtcdUnreachable):
            http.call("kv/range", {})
        assert http.call("kv/range", {}) == [{"kvs": []}]


def test_a_call_that_waits_for_the_login_of_another_call_times_out_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with slow_client(1, monkeypatch) as http:
        with SlowCheck.checking:
            asking = Background(http.call, "kv/range", {})
            assert SlowCheck.asked.wait(PATIENCE)
            with (
                http.within(0.1),
                pytest.raises(EtcdUnreachable, match=r"login of the user .u.*within 0"),
            ):
                http.call("kv/range", {})
        assert asking.result() == [{"kvs": []}]
        assert len(SlowCheck.checked) == 1


@contextmanager
def slow_client(members: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[EtcdClient]:
    """A client of an etcd that checks passwords slowly."""
    monkeypatch.setattr(SlowCheck, "checked", [])
    SlowCheck.asked.clear()
    with ExitStack() as etcd:
        endpoints = [etcd.enter_context(serving(SlowCheck)) for _ in range(members)]
        http = EtcdClient(access(",".join(endpoints), user="u", password=SECRET), PATIENCE)
        etcd.callback(http.close)
        yield http


# --- servers that are not etcd


class NoEtcd(BaseHTTPRequestHandler):
    """A web server that is not etcd."""

    def do_POST(self) -> None:
        self.send_error(404, "nothing here")

    do_GET = do_POST

    def log_message(self, *_: object) -> None:
        pass


class Silent(socketserver.BaseRequestHandler):
    """A server of another protocol that sends first."""

    def handle(self) -> None:
        self.request.sendall(b"\x00\x01\x02 what?\n")
        self.request.recv(1 << 16)


@pytest.fixture(params=[NoEtcd, Silent])
def other_server(request: pytest.FixtureRequest) -> Iterator[str]:
    with serving(request.param) as endpoint:
        yield endpoint


@contextmanager
def serving(handler: type[socketserver.BaseRequestHandler]) -> Iterator[str]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def test_another_server_is_named_with_its_answer(other_server: str) -> None:
    with (
        pytest.raises(RendezvousConnectionError, match=rf"{other_server}.*(404|what\?)"),
        backend(other_server, read_timeout="1"),
    ):
        pass


ANSWERS = [
    '{"status": "ok"}',
    '{"result": "ok"}',
    '{"header": {"revision": "new"}, "ID": "new"}',
    '{"header": {"revision": "3"}, "responses": ["ok"]}',
    '{"created": true}',
    '{"events": [{"type": "PUT"}]}',
]


@pytest.mark.parametrize("answer", ANSWERS)
def test_another_server_that_answers_in_json_is_named_with_its_answer(answer: str) -> None:
    class Json(NoEtcd):
        """A service that answers every request alike."""

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer.encode())

    with serving(Json) as endpoint:
        with pytest.raises(RendezvousConnectionError, match="no etcd"), backend(endpoint):
            pass
        client = EtcdClient(access(endpoint), PATIENCE)
        with pytest.raises(EtcdError):
            client.renew([7])
        with pytest.raises(EtcdError):
            list(client.watch("a prefix", 5))
        client.close()


def test_a_proxy_without_a_server_behind_it_is_retried() -> None:
    class Proxy(NoEtcd):
        """A proxy that refuses twice, then forwards requests."""

        refusals = 2

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if Proxy.refusals:
                Proxy.refusals -= 1
                self.send_error(503, "no server is available")
                return
            with urlopen(f"http://{cluster.endpoint}{self.path}", body) as answer:
                content = answer.read()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    with etcd() as cluster, serving(Proxy) as endpoint, backend(endpoint) as made:
        assert made.get_state() is None
        assert not Proxy.refusals


def test_an_error_shows_the_last_answer_also_if_a_later_attempt_timed_out() -> None:
    class Proxy(NoEtcd):
        """A proxy that answers once."""

        answered = False

        def do_POST(self) -> None:
            if Proxy.answered:
                over.wait(PATIENCE)
                return
            Proxy.answered = True
            self.send_error(503, "no server is available")

    over = threading.Event()
    with serving(Proxy) as endpoint:
        http = EtcdClient(access(endpoint), 0.3)
        with pytest.raises(EtcdUnreachable, match="status 503"):
            http.call("kv/range", {})
        over.set()
        http.close()


def test_an_etcd_without_the_v3_gateway_is_reported() -> None:
    require_etcd()
    member = EtcdProcess("old", None, "", None, "--enable-grpc-gateway=false", "--enable-v2")
    try:
        member.wait_until_healthy()
        with (
            pytest.raises(
                RendezvousConnectionError, match=r"status 404 .*etcd 3\.4 or newer.*gateway"
            ),
            backend(member.endpoint),
        ):
            pass
    finally:
        member.remove()


def test_the_error_of_a_full_etcd_shows_how_to_make_room() -> None:
    require_etcd()
    member = EtcdProcess("full", None, "", None, "--quota-backend-bytes", "1")
    try:
        member.wait_until_healthy()
        with (
            backend(member.endpoint) as made,
            pytest.raises(RendezvousConnectionError, match=r"space exceeded; .*alarm disarm"),
        ):
            made.set_state(b"1")
    finally:
        member.remove()


def test_an_error_names_every_endpoint_that_does_not_answer(unused_ports: str) -> None:
    first, second = unused_ports.split(",")
    with (
        pytest.raises(
            RendezvousConnectionError, match=r"within 0\.5 s.*refused.*refused"
        ) as caught,
        backend(unused_ports, read_timeout="0.5"),
    ):
        pass
    assert first in str(caught.value)
    assert second in str(caught.value)


@pytest.fixture
def unused_ports() -> Iterator[str]:
    """Two endpoints without a listener, reserved as long as the test lasts."""
    from regrow.utils import PortReservation

    with PortReservation() as one, PortReservation() as other:
        yield f"127.0.0.1:{one.port},127.0.0.1:{other.port}"


def test_the_page_on_etcd_names_the_keys_that_there_are() -> None:
    page = Path(__file__).parents[2] / "docs" / "guides" / "etcd.md"
    rows = [line.split("|") for line in page.read_text().splitlines() if line.startswith("| `")]
    named = {key for row in rows for key in re.findall("`([a-z_]+)`", row[1])}
    assert {"etcd_prefix", "ca_cert", "password_file", "read_timeout"} <= named
    assert unknown_config_keys("etcd", named) == []
