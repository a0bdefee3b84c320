"""Measure how long nodes take to form a round, beside torch's dynamic rendezvous.

    python benchmarks/rendezvous.py [--check] [--etcd] [--runs 3] [--both 4,16,64]
                                    [--crowd-runs 5] [--crowds 64,...,4096]
                                    [--packed 8,1] [--packed-nodes 1024]
                                    [--copied 1024] [--copied-runs 7] [--moved 1000]

**Handlers.** There are N nodes. Each is a `DynamicRendezvousHandler` in a thread, with its own
connection to one server on this machine. All are connected before the clock starts. Then all call
`next_rendezvous` at once, with min_nodes = max_nodes = N. The time runs until the last node has its
rank. torch's nodes meet through `C10dRendezvousBackend` over one TCPStore. regrow's nodes meet
through the store server, as with `--rdzv-backend c10d`. The two alternate, and each run has its own
process. A run that has not ended after 120 s is aborted and counts as infinite.

**Crowds.** A machine has no room for the threads of very many nodes. Light clients simulate them
(see `_crowd.py`): real connections and the real protocol to one server. Three figures:

- the seconds until the first round is complete
- the seconds from one node's request for the second round until that round is complete; in
  between, each node receives the end of the first round, acknowledges it, and joins again
- the traffic per second between the server and a node that stays in the round

**Packed handlers.** 1,024 handlers share 8 processes, and one process (see `_handlers.py`). The
time runs until all have a seat in the same round.

**Copies.** The record of the job is copied to five agents (`_voter.py`), or to none. The two
alternate. All nodes leave the first round and join the second, while the agents vote. Then each
node sends heartbeats as fast as they are answered. All processes share the cores of this machine,
so the figures include the work of the agents, which a job does on other hosts. The server's
processor time is printed beside them.

**Failover.** The server is killed, with the agent that hosts it. The time runs until each simulated
node has the answer to a heartbeat, from the server that has taken over, that it still holds its
seat.

With `--etcd`, regrow's handlers also meet over an etcd server, which must be installed.

`--check` compares with the bounds and exits with 1 if one is missed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

from _etcd import etcd

from regrow.rendezvous import RendezvousParameters, get_rendezvous_handler
from regrow.store import make_token, start_server

LIMIT_S = 120.0
HOLD_S = 5.0
PROCESSES = 2

SHARE_OF_TORCH = 0.05  # at 64 nodes
CROWD_BOUND_S = 2.0  # at 1,024 nodes
GROWTH_BOUND = 2.3  # from N to 2N nodes
JUDGED_FROM = 256  # nodes; smaller jobs form too fast for the growth to be meaningful
MORE_RUNS = 30  # of N and 2N nodes in turn, if the first runs miss that bound
TRAFFIC_GROWTH_BOUND = 1.1  # traffic of one node, from the fewest to the most nodes
PACKED_BOUND_S = {8: 10.0, 1: 10.0}  # at 1,024 nodes, by processes
COPIES_BOUND = 1.1  # time of the second round with copies, as a part of the time without
VOTERS = 5
BEATS = 3  # of each node
PROMISE_S = 15.0  # half of a lease of `_crowd.py`
SERVICES = {"rendezvous": "regrow.rendezvous.server.round_service:create"}


# --- handlers in threads


def meet(handlers: list[Any]) -> float:
    """Let all handlers meet in one round; return the seconds until the last has its rank."""
    gate = threading.Barrier(len(handlers) + 1)
    ranks: list[int] = []
    ended: list[float] = []

    def node(handler: Any) -> None:
        gate.wait()
        _, rank, _ = _triple(handler.next_rendezvous())
        ended.append(time.monotonic())
        ranks.append(rank)

    threads = [threading.Thread(target=node, args=(h,), daemon=True) for h in handlers]
    for thread in threads:
        thread.start()
    gate.wait()
    began = time.monotonic()
    for thread in threads:
        thread.join(max(0.0, began + LIMIT_S - time.monotonic()))
    if sorted(ranks) != list(range(len(handlers))):
        return math.inf
    return max(ended) - began


def _triple(info: Any) -> tuple[Any, int, int]:
    return info.store, info.rank, info.world_size


def torch_nodes(count: int) -> float:
    """Measure torch's nodes, on one TCPStore; return the seconds."""
    from torch.distributed import TCPStore
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
        DynamicRendezvousHandler as TorchHandler,
    )

    wait = timedelta(seconds=60)
    server = TCPStore("127.0.0.1", 0, None, True, timeout=wait, wait_for_workers=False)
    handlers = []
    for _ in range(count):
        client = TCPStore(
            "127.0.0.1", server.port, None, False, timeout=wait, wait_for_workers=False
        )
        backend = C10dRendezvousBackend(client, "bench")
        handlers.append(
            TorchHandler.from_backend("bench", client, backend, count, count, "127.0.0.1")
        )
    return meet(handlers)


def our_nodes(count: int, backend: str, endpoint: str) -> float:
    """Measure regrow's nodes, at an endpoint that is served already; return the seconds."""
    return meet(
        [
            get_rendezvous_handler(
                RendezvousParameters(
                    backend, endpoint, "bench", count, count, local_addr="127.0.0.1"
                )
            )
            for _ in range(count)
        ]
    )


def torch_run(count: int) -> float:
    """Measure torch's handlers once, in a new process; return the seconds."""
    return in_a_process("torch", str(count))


def in_a_process(*role: str, environ: dict[str, str] | None = None) -> float:
    """Run this file in another role, and return the number that it prints."""
    command = [sys.executable, __file__, *role]
    env = {**os.environ, **(environ or {})}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        raise SystemExit(f"benchmark: {' '.join(role)} failed:\n{done.stderr[-2000:]}")
    return float(done.stdout)


def our_run(count: int) -> float:
    """Measure regrow's handlers once, in a new process with a new server; return the seconds."""
    token = make_token()
    with start_server(token=token, services=SERVICES) as server:
        role = ("ours", str(count), "c10d", server.endpoint)
        return in_a_process(*role, environ={"REGROW_TOKEN": token.decode()})


def etcd_run(count: int) -> float:
    """Measure regrow's handlers once, over a new etcd server; return the seconds."""
    with etcd() as members:
        return in_a_process("ours", str(count), "etcd", members[0].endpoint)


# --- crowds of light clients


class Helpers:
    """Processes that receive orders as lines, and answer each with a line of JSON."""

    def __init__(self, file: str, arguments: list[list[str]]) -> None:
        path = str(Path(__file__).with_name(file))
        self._processes = [
            subprocess.Popen(
                [sys.executable, path, *mine],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for mine in arguments
        ]
        self.first = self._answers(self._processes)
        """The first line of each process."""

    def order(self, words: str, only: slice = slice(None)) -> list[Any]:
        """Send an order to all processes, or to some; return their answers."""
        for process in self._processes[only]:
            assert process.stdin is not None
            process.stdin.write(words + "\n")
            process.stdin.flush()
        return self._answers(self._processes[only])

    def kill(self, number: int) -> None:
        """Kill one of the processes."""
        process = self._processes.pop(number)
        process.kill()
        process.communicate()

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.communicate()

    def _answers(self, processes: list[subprocess.Popen[str]]) -> list[Any]:
        answers = []
        for process in processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise SystemExit(f"benchmark: a process ended with {process.wait()}")
            answers.append(json.loads(line))
        return answers


class Crowds(Helpers):
    """The processes that together hold the nodes of one job.

    Args:
        nodes: how many.
        endpoint: address of the server.
        token: token of the server.
        processes: how many of them.
        file: the program of the processes.
        more: its last arguments.
    """

    def __init__(
        self,
        nodes: int,
        endpoint: str,
        token: bytes,
        *more: str,
        processes: int = PROCESSES,
        file: str = "_crowd.py",
    ) -> None:
        share = nodes // processes
        fixed = [endpoint, token.decode(), "bench", str(nodes)]
        super().__init__(
            file, [[*fixed, str(turn * share), str(share), *more] for turn in range(processes)]
        )

    def until(self, words: str) -> float:
        """Send an order; return the seconds until the last node is ready."""
        began = time.monotonic()
        seconds: float = max(self.order(words)) - began
        return seconds

    def traffic(self) -> tuple[float, float]:
        """Return the messages and bytes per node and second."""
        answers = self.order(f"hold {HOLD_S}")
        return tuple(statistics.fmean(part) for part in zip(*answers, strict=True))  # type: ignore[return-value]


def crowd_run(nodes: int, traffic: bool) -> tuple[float, float, tuple[float, float] | None]:
    """Return the seconds of the first and the second round, and the traffic of a node."""
    token = make_token()
    with start_server(token=token, services=SERVICES) as server:
        crowds = Crowds(nodes, server.endpoint, token, "0", "[]")
        first, second = crowds.until("join"), crowds.until("again")
        exchanged = crowds.traffic() if traffic else None
        crowds.close()
    return first, second, exchanged


def packed_run(nodes: int, processes: int) -> float:
    """Let real handlers meet once; return the seconds until all have a seat in one round."""
    token = make_token()
    with start_server(token=token, services=SERVICES) as server:
        crowds = Crowds(nodes, server.endpoint, token, processes=processes, file="_handlers.py")
        began, round = time.monotonic(), 1
        while True:
            answers = crowds.order(f"meet {round} {began + LIMIT_S - time.monotonic()}")
            rounds, times = zip(*answers, strict=True)
            if min(rounds) == max(rounds) or min(rounds) < 0:
                break
            round = max(rounds)
        crowds.close()
    return math.inf if min(rounds) < 0 else max(times) - began


class Copied:
    """A server, simulated nodes, and the agents that keep copies of the record; all have met.

    Args:
        nodes: how many.
        stack: closes everything.
        voters: how many agents vote; 0: none.
        host_votes: whether the first of them hosts the server; otherwise one more does.
    """

    def __init__(self, nodes: int, stack: ExitStack, voters: int, *, host_votes: bool) -> None:
        token = make_token()
        self.server = stack.enter_context(start_server(token=token, services=SERVICES))
        fixed = [self.server.endpoint, token.decode(), "bench"]
        last = [self.server.endpoint.rpartition(":")[2], str(PROMISE_S)]
        agents = range(0 if voters else 1, voters + (not host_votes))
        self.agents = Helpers("_voter.py", [[*fixed, str(number), *last] for number in agents])
        stack.callback(self.agents.close)
        able = self.agents.first if host_votes else self.agents.first[1:]
        more = str(max(voters - 1, 0)), json.dumps(able)
        self.crowds = Crowds(nodes, self.server.endpoint, token, *more)
        stack.callback(self.crowds.close)
        self.crowds.until("join")
        self.agents.order("start")
        self.agents.order(f"votes {voters}", slice(0 if host_votes else 1, None))

    def cost(self, words: str) -> tuple[float, float]:
        """Send an order to the nodes; return its seconds, and the server's processor time."""
        before = self._used()
        return self.crowds.until(words), self._used() - before

    def _used(self) -> float:
        text = Path(f"/proc/{self.server.pid}/schedstat").read_text()
        return int(text.split()[0]) / 1e9


def copied_run(nodes: int, voters: int) -> tuple[float, ...]:
    """Return seconds and server's processor time: of a second round, and of all heartbeats."""
    with ExitStack() as stack:
        job = Copied(nodes, stack, voters, host_votes=True)
        seqs = job.agents.order(f"votes {voters}")
        costs = *job.cost("again"), *job.cost(f"beat {BEATS}")
        copied = zip(job.agents.order(f"votes {voters}"), seqs, strict=True)
        assert all(after - before >= nodes for after, before in copied), "it was not copied"
        return costs


def moved_run(nodes: int) -> float:
    """Return the seconds from the loss of the server to the last seat at the next one."""
    with ExitStack() as stack:
        job = Copied(nodes, stack, VOTERS, host_votes=False)
        job.crowds.order("beat 1")
        os.kill(job.server.pid, signal.SIGKILL)
        job.agents.kill(0)
        return job.crowds.until("move")


# --- main


def main() -> int:
    """Run the comparison, print it, and return the exit code."""
    threading.stack_size(512 * 1024)
    if sys.argv[1:2] == ["torch"]:
        return _say(torch_nodes(int(sys.argv[2])))
    if sys.argv[1:2] == ["ours"]:
        return _say(our_nodes(int(sys.argv[2]), *sys.argv[3:]))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="fail where a bound is missed")
    parser.add_argument("--runs", type=int, default=3, help="runs of handlers, in turn")
    parser.add_argument("--crowd-runs", type=int, default=5, help="runs of crowds, in turn")
    parser.add_argument("--both", type=_numbers, default=[4, 16, 64], help="nodes beside torch's")
    parser.add_argument(
        "--crowds",
        type=_numbers,
        default=[64, 128, 256, 512, 1024, 2048, 4096],
        help="simulated nodes",
    )
    parser.add_argument("--etcd", action="store_true", help="also over etcd")
    parser.add_argument("--packed", type=_numbers, default=[8, 1], help="processes of handlers")
    parser.add_argument("--packed-nodes", type=int, default=1024, help="handlers in them")
    parser.add_argument(
        "--copied", type=int, default=1024, help="nodes of a copied record; 0: none"
    )
    parser.add_argument("--copied-runs", type=int, default=7, help="runs of them, in turn")
    parser.add_argument("--moved", type=int, default=1000, help="nodes of a failover; 0: none")
    options = parser.parse_args()

    failures: list[str] = []
    if options.both:
        failures += _beside_torch(options.both, options.runs, options.etcd)
    if options.crowds:
        failures += _crowds(options.crowds, options.crowd_runs)
    failures += _packed(options.packed, options.packed_nodes, options.runs)
    if options.copied:
        failures += _copied(options.copied, options.copied_runs)
    if options.moved:
        times = [moved_run(options.moved) for _ in range(options.runs)]
        print(
            f"\n{options.moved} nodes have their seats at the next server after: {_seconds(times)}"
        )
    for failure in failures:
        print(f"FAILED: {failure}")
    return 1 if options.check and failures else 0


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def _say(seconds: float) -> int:
    print(seconds, flush=True)
    os._exit(0)  # threads of aborted calls would keep the process alive


def _beside_torch(counts: list[int], runs: int, etcd: bool) -> list[str]:
    kinds = {"regrow": our_run, "torch": torch_run}
    if etcd:
        kinds["etcd"] = etcd_run
    print(f"handlers in threads, all at once to the last rank, {runs} runs in turn: medians\n")
    print(f"{'nodes':>6}" + "".join(f"{kind + ' s':>12}" for kind in kinds) + f"{'ratio':>9}")
    failures = []
    for count in counts:
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(runs):
            for kind, run in kinds.items():
                times[kind].append(run(count))
        medians = {kind: statistics.median(values) for kind, values in times.items()}
        ratio = medians["regrow"] / medians["torch"]
        print(
            f"{count:6}" + "".join(f"{medians[kind]:12.4f}" for kind in kinds) + f"{ratio:9.4f}",
            flush=True,
        )
        if count == 64 and not ratio <= SHARE_OF_TORCH:
            failures.append(f"64 nodes take {ratio:.3f} of torch's time, not {SHARE_OF_TORCH}")
    return failures


def _crowds(counts: list[int], runs: int) -> list[str]:
    times: dict[int, list[tuple[float, float]]] = {count: [] for count in counts}
    growths: dict[int, list[tuple[float, float]]] = {count: [] for count in counts}
    traffic: dict[int, tuple[float, float]] = {}

    def turn(sizes: list[int], *, exchanges: bool = False) -> None:
        """Run all sizes in turn, so that a slow minute of the machine affects all of them."""
        for count in sizes:
            *seconds, exchanged = crowd_run(count, exchanges)
            times[count].append((seconds[0], seconds[1]))
            if exchanged is not None:
                traffic[count] = exchanged
            if count // 2 in sizes:
                half = times[count // 2][-1]
                growths[count].append((seconds[0] / half[0], seconds[1] / half[1]))

    for run in range(runs):
        turn(counts, exchanges=run == 0)
    for count in counts:
        if any(_is_too_much(count, growth) for growth in _medians(growths[count])):
            for _ in range(MORE_RUNS):
                turn([count // 2, count])
    print(
        f"\nlight clients in {PROCESSES} processes, one server, {runs} runs and more: medians "
        f"(least), and of the growth over half as many nodes in the same turn\n"
    )
    print(f"{'nodes':>6}{'meet s':>18}{'again s':>18}{'growth':>14}{'of a node and second':>28}")
    failures = []
    for count in counts:
        medians, grown = _medians(times[count]), _medians(growths[count])
        for name, median, growth in zip(
            ("meet", "meet again"), medians, grown or (0.0, 0.0), strict=True
        ):
            if _is_too_much(count, growth):
                failures.append(
                    f"{count} nodes {name} in {growth:.2f} times the time of {count // 2}, "
                    f"not {GROWTH_BOUND}"
                )
            if count == 1024 and median >= CROWD_BOUND_S:
                failures.append(f"1,024 nodes {name} in {median:.2f} s, not {CROWD_BOUND_S}")
        cells = (
            f"{median:.4f} ({min(values):.4f})"
            for median, values in zip(medians, zip(*times[count], strict=True), strict=True)
        )
        messages, size = traffic[count]
        print(
            f"{count:6}"
            + "".join(f"{cell:>18}" for cell in cells)
            + f"{' '.join(f'{growth:.2f}' for growth in grown):>14}"
            + f"{f'{messages:.2f} messages, {size:.0f} bytes':>28}"
        )
    if len(counts) > 1:
        more = traffic[max(counts)][1] / traffic[min(counts)][1]
        if more > TRAFFIC_GROWTH_BOUND:
            failures.append(f"a node exchanges {more:.2f} times as much among the most nodes")
    return failures


def _packed(counts: list[int], nodes: int, runs: int) -> list[str]:
    failures = []
    if counts:
        print(f"\n{nodes} handlers in few processes")
    for processes in counts:
        times = [packed_run(nodes, processes) for _ in range(runs)]
        print(f"{processes} processes: {_seconds(times)}", flush=True)
        bound = PACKED_BOUND_S.get(processes, math.inf)
        if nodes == 1024 and not max(times) < bound:
            failures.append(f"1,024 handlers in {processes} processes do not meet in {bound:g} s")
    return failures


def _seconds(times: list[float]) -> str:
    each = ", ".join(f"{seconds:.2f}" for seconds in sorted(times))
    return f"{statistics.median(times):.2f} s (each run: {each})"


def _copied(nodes: int, runs: int) -> list[str]:
    figures: dict[int, list[tuple[float, ...]]] = {0: [], VOTERS: []}
    for _ in range(runs):
        for voters, results in figures.items():
            results.append(copied_run(nodes, voters))
    print(f"\n{nodes} nodes, the record copied to some agents, medians of {runs} runs in turn\n")
    print(
        f"{'agents':>6}{'again s':>10}{'of a join: µs':>15}{'server µs':>11}"
        f"{'of a heartbeat: µs':>20}{'server µs':>11}"
    )
    for voters, results in figures.items():
        again, used, beat, beat_used = (
            statistics.median(part) for part in zip(*results, strict=True)
        )
        joins, beats = 1e6 / nodes, 1e6 / nodes / BEATS
        print(
            f"{voters:6}{again:10.4f}{again * joins:15.1f}{used * joins:11.1f}"
            f"{beat * beats:20.1f}{beat_used * beats:11.1f}",
            flush=True,
        )
    ratios = [b[0] / a[0] for a, b in zip(figures[0], figures[VOTERS], strict=True)]
    ratio = statistics.median(ratios)
    print(f"time of the round with copies, as a part of that without: {ratio:.3f} (median)")
    if nodes == 1024 and not ratio < COPIES_BOUND:
        return [f"copies make the round of 1,024 nodes take {ratio:.2f} times as long"]
    return []


def _medians(pairs: list[tuple[float, float]]) -> list[float]:
    return [statistics.median(values) for values in zip(*pairs, strict=True)]


def _is_too_much(count: int, growth: float) -> bool:
    return count >= JUDGED_FROM and growth > GROWTH_BOUND


if __name__ == "__main__":
    sys.exit(main())
