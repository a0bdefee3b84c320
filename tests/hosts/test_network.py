"""The simulated network of these tests: it loses exactly the frames that a test names."""

from __future__ import annotations

import select
import subprocess
import sys

import pytest

from helpers.hosts.netns import Host, Network

pytestmark = pytest.mark.hosts

DEADLINE_S = 30.0

# A host's end of a conversation: prints words that arrive by UDP, sends words from stdin.
_TALK = """
import select, socket, sys
talk = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
talk.bind((sys.argv[1], 5000))
print("ready", flush=True)
while True:
    for end in select.select([talk, 0], [], [])[0]:
        if end is talk:
            print(*talk.recvfrom(2000)[0].decode().split(), flush=True)
        else:
            word, to = input().split()
            talk.sendto(word.encode(), (to, 5000))
            print("sent", flush=True)
"""


class Talker:
    """A program on a host that sends words to others and prints the words that it receives."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self._process = host.popen(
            [sys.executable, "-S", "-c", _TALK, host.addr],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.receives("ready")

    def send(self, word: str, to: Talker) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word} {to.host.addr}\n")
        self.receives("sent")

    def receives(self, word: str) -> None:
        """Check that this is the next word that it receives."""
        assert self._process.stdout is not None
        assert select.select([self._process.stdout], [], [], DEADLINE_S)[0], (
            f"{word} is not received"
        )
        assert self._process.stdout.readline() == f"{word}\n"


@pytest.fixture
def talkers(network: Network) -> tuple[Talker, Talker]:
    """Two programs that know each other's hardware address."""
    one, two = Talker(network.host()), Talker(network.host())
    one.send("hello", two)
    two.receives("hello")
    two.send("hello", one)
    one.receives("hello")
    return one, two


def test_a_line_that_is_cut_one_way_still_leads_the_other_way(
    network: Network, talkers: tuple[Talker, Talker]
) -> None:
    one, two = talkers
    network.cut(two.host, "in")
    one.send("lost", two)
    two.send("first", one)
    one.receives("first")
    network.mend(two.host)
    network.cut(two.host, "out")
    two.send("lost", one)
    one.send("second", two)
    two.receives("second")
    network.mend(two.host)
    two.send("third", one)
    one.receives("third")


def test_what_was_on_its_way_when_a_line_was_cut_does_not_arrive(
    network: Network, talkers: tuple[Talker, Talker]
) -> None:
    one, two = talkers
    network.impair(two.host, delay_s=0.5, loss=0.0)
    one.send("slow", two)
    two.receives("slow")
    one.send("lost", two)
    network.cut(two.host, "in")
    two.send("after", one)
    one.receives("after")
    network.mend(two.host)
    one.send("later", two)
    two.receives("later")


def test_a_lossy_line_loses_some_and_not_all(
    network: Network, talkers: tuple[Talker, Talker]
) -> None:
    one, two = talkers
    network.impair(two.host, delay_s=0.0, loss=0.5)
    count = one.host.run(sys.executable, "-S", "-c", _COUNT_ECHOES, one.host.addr, two.host.addr)
    assert 0 < int(count) < 50


def test_settings_of_all_lines_apply_to_each_line_without_settings_of_its_own(
    network: Network, talkers: tuple[Talker, Talker]
) -> None:
    one, two = talkers
    network.impair_all(delay_s=0.0, loss=1.0)
    one.send("lost", two)
    two.send("lost", one)
    network.impair(two.host, delay_s=0.0, loss=0.0, directions="in")
    one.send("passes", two)
    two.receives("passes")
    two.send("lost", one)
    network.impair_all(delay_s=0.0, loss=0.0)
    two.send("passes", one)
    one.receives("passes")


# Sends datagrams to a port without a listener, and counts the refusals.
_COUNT_ECHOES = """
import socket, sys
count = 0
for _ in range(50):
    talk = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    talk.bind((sys.argv[1], 0))
    talk.connect((sys.argv[2], 9))
    talk.settimeout(0.02)
    talk.send(b"anyone there?")
    try:
        talk.recv(1)
    except ConnectionRefusedError:
        count += 1
    except TimeoutError:
        pass
print(count)
"""


def test_a_host_is_gone_with_everything_on_it_when_its_test_is_killed(network: Network) -> None:
    host = network.host()
    sleeper = host.popen(["sh", "-c", "echo asleep; exec sleep 1000"], stdout=subprocess.PIPE)
    assert sleeper.stdout is not None
    assert sleeper.stdout.readline() == b"asleep\n"
    host.hang_up()
    assert sleeper.wait(DEADLINE_S) == -9
