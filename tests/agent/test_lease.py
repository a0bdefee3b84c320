"""A real agent that is suspended: its guardian enforces the lease; the agent continues later."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from time import monotonic

from helpers.processes import alive, wait_until
from regrow.agent.attempt.lease import Lease

#: An agent with a lease of 3 s, which is renewed every 50 ms while the agent runs.
AGENT = """
import sys, threading, time
from regrow.agent import LocalElasticAgent, WorkerSpec
from regrow.rendezvous import SoloRendezvousHandler
from regrow.workers import DefaultLogsSpecs

directory = sys.argv[1]

class Leased(SoloRendezvousHandler):
    def keep_lease(self, renewed):
        def beat():
            while True:
                renewed(time.monotonic() + 3)
                time.sleep(0.05)
        threading.Thread(target=beat, daemon=True).start()
        return lambda: None

handler = Leased("job")
worker = f"sh -c 'echo $PPID' > {directory}/new.$REGROW_ATTEMPT;"
worker += f" mv {directory}/new.$REGROW_ATTEMPT {directory}/pid.$REGROW_ATTEMPT; sleep 1000"
spec = WorkerSpec("w", 1, handler, entrypoint="sh", args=("-c", worker), max_restarts=0)
LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=directory)).run()
"""


def test_workers_of_a_suspended_agent_end_with_its_lease_and_restart_after_it(
    tmp_path: Path,
) -> None:
    agent = subprocess.Popen([sys.executable, "-c", AGENT, str(tmp_path)])
    try:
        wait_until((tmp_path / "pid.0").exists, "the first attempt")
        worker = int((tmp_path / "pid.0").read_text())
        os.kill(agent.pid, signal.SIGSTOP)
        wait_until(lambda: not alive(worker), "the end of the worker while its agent is held")
        assert not (tmp_path / "pid.1").exists()
        os.kill(agent.pid, signal.SIGCONT)
        wait_until((tmp_path / "pid.1").exists, "the next attempt, which the failure does not cost")
    finally:
        os.kill(agent.pid, signal.SIGCONT)
        agent.send_signal(signal.SIGTERM)
        agent.wait(30)


def test_a_wait_for_the_lease_ends_when_the_lease_is_renewed() -> None:
    lease, answers = Lease(), []
    lease.renew(monotonic())
    waiting = threading.Thread(target=lambda: answers.append(lease.wait(lambda: False)))
    waiting.start()
    lease.renew(monotonic() + 1000)
    waiting.join(30)
    assert answers == [True]


def test_a_wait_for_the_lease_ends_when_the_round_is_over() -> None:
    lease, over, answers = Lease(), threading.Event(), []
    lease.renew(monotonic())
    waiting = threading.Thread(target=lambda: answers.append(lease.wait(over.is_set)))
    waiting.start()
    over.set()
    lease.wake()
    waiting.join(30)
    assert answers == [False]
