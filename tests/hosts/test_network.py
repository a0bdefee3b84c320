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
            print("said", flush=True)
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
        self.hears("ready")

    def say(self, word: str, to: Talker) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word} {to.host.addr}\n")
        self.hears("said")

    def hears(self, word: str) -> None:
        """Check that this is the next word that it receives."""
        assert self._process.stdout is not None
        assert select.select([self._process.stdout], [], [], DEADLINE_S)[0], f"{word} is not heard"
        assert self._process.stdout.readline() == f"{word}\n"


@pytest.fixture
def talkers(network: Network) -> tuple[Talker, Talker]:
    """Two programs that know each other's hardware address."""
    one, two = Talker(network.host()), Talker(network.host())
    one.say("hello", two)
    two.hears("hello")
    two.say("hello", one)
    one.hears("hello")
    return one, two


def test_a_line_that_is_cut_one_way_still_leads_the_other_way(
    network: Network, talkers: tuple[Talker, Talker]
) -> None:
    one, two = talkers
    network.cut(two.host, "in")
    one.say("lost", two)
    two.say("first", one)
    one.hears("first")
    network.mend(two.host)
    network.cut(two.host, "out")
    two.say("lost", one)
    one.say("second", two)
    two.hears("second")
    network.mend(two.host)
    two.say("third", one)
    one.hears("third")


def test_what_was_on_its_way_when_a_line_was_cut_does_not_arrive(
    network: Network, talkers: tuple[Talker, Talker]
) -> None:
    one, two = talkers
    network.impair(two.host, delay_s=0.5, loss=0.0)
    one.say("slow", two)
    two.hears("slow")
    one.say("lost", two)
    network.cut(two.host, "in")
    two.say("after", one)
    one.hears("after")
    network.mend(two.host)
    one.say("later", two)
    two.hears("later")


def test_a_lossy_line_loses_some_and_not_all(
    network: Network, talkers: tuple[Talker, Talker]
) -> None:
    one, two = talkers
    network.impair(two.host, delay_s=0.0, loss=0.5)
    heard = one.host.run(sys.executable, "-S", "-c", _COUNT_ECHOES, one.host.addr, two.host.addr)
    assert 0 < int(heard) < 50


def test_what_is_said_of_all_lines_holds_for_each_but_those_of_which_more_was_said(
    network: Network, talkers: tuple[Talker, Talker]
) -> None:
    one, two = talkers
    network.impair_all(delay_s=0.0, loss=1.0)
    one.say("lost", two)
    two.say("lost", one)
    network.impair(two.host, delay_s=0.0, loss=0.0, directions="in")
    one.say("heard", two)
    two.hears("heard")
    two.say("lost", one)
    network.impair_all(delay_s=0.0, loss=0.0)
    two.say("heard", one)
    one.hears("heard")


# Sends datagrams to a port without a listener, and counts the refusals.
_COUNT_ECHOES = """
import socket, sys
heard = 0
for _ in range(50):
    talk = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    talk.bind((sys.argv[1], 0))
    talk.connect((sys.argv[2], 9))
    talk.settimeout(0.02)
    talk.send(b"anyone there?")
    try:
        talk.recv(1)
    except ConnectionRefusedError:
        heard += 1
    except TimeoutError:
        pass
print(heard)
"""


def test_a_host_is_gone_with_everything_on_it_when_its_test_is_killed(network: Network) -> None:
    host = network.host()
    sleeper = host.popen(["sh", "-c", "echo asleep; exec sleep 1000"], stdout=subprocess.PIPE)
    assert sleeper.stdout is not None
    assert sleeper.stdout.readline() == b"asleep\n"
    host.hang_up()
    assert sleeper.wait(DEADLINE_S) == -9
