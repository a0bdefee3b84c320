"""Measure how long nodes take to form a round, beside torch's dynamic rendezvous.

    python benchmarks/rendezvous.py [--check] [--etcd] [--runs 3] [--both 4,16,64]
                                    [--crowd-runs 5] [--crowds 64,...,4096]

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

With `--etcd`, regrow's handlers also meet over an etcd server, which must be installed.

`--check` compares with the bounds and exits with 1 if one is missed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

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
    services = {"rendezvous": "regrow.rendezvous.server.round_service:create"}
    with start_server(token=token, services=services) as server:
        role = ("ours", str(count), "c10d", server.endpoint)
        return in_a_process(*role, environ={"REGROW_TOKEN": token.decode()})


def etcd_run(count: int) -> float:
    """Measure regrow's handlers once, over a new etcd server; return the seconds."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        endpoint = _start_etcd(folder, stack)
        return in_a_process("ours", str(count), "etcd", endpoint)


def _start_etcd(folder: str, stack: ExitStack) -> str:
    from regrow.utils import PortReservation

    ports = [stack.enter_context(PortReservation()).port for _ in range(2)]
    client, peer = (f"http://127.0.0.1:{port}" for port in ports)
    command = [
        *("etcd", "--data-dir", folder, "--name", "bench"),
        *("--listen-client-urls", client, "--advertise-client-urls", client),
        *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
        *("--initial-cluster", f"bench={peer}"),
    ]
    log_path = Path(folder, "log")
    with log_path.open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    stack.callback(process.wait)
    stack.callback(process.kill)
    deadline = time.monotonic() + 30
    while subprocess.run(
        ["etcdctl", "--endpoints", client, "endpoint", "health"],
        env={**os.environ, "ETCDCTL_API": "3"},
        capture_output=True,
        check=False,
    ).returncode:
        if time.monotonic() > deadline:
            raise SystemExit(f"benchmark: etcd does not start: {log_path.read_text()[-500:]}")
    return client.removeprefix("http://")


# --- crowds of light clients


class Crowds:
    """The processes that together hold the nodes of one job."""

    def __init__(self, nodes: int, endpoint: str, token: bytes) -> None:
        share = nodes // PROCESSES
        file = Path(__file__).with_name("_crowd.py")
        self._processes = [
            subprocess.Popen(
                [
                    *(sys.executable, str(file), endpoint, token.decode(), "bench", str(nodes)),
                    *(str(turn * share), str(share)),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for turn in range(PROCESSES)
        ]
        self.connected = max(self._answers())

    def until(self, word: str) -> float:
        """Send an order; return the seconds until the last node has its rank."""
        began = time.monotonic()
        seconds: float = max(self._order(word)) - began
        return seconds

    def traffic(self) -> tuple[float, float]:
        """Return the messages and bytes per node and second."""
        answers = self._order(f"hold {HOLD_S}")
        return tuple(statistics.fmean(part) for part in zip(*answers, strict=True))  # type: ignore[return-value]

    def _order(self, words: str) -> list[Any]:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(words + "\n")
            process.stdin.flush()
        return self._answers()

    def _answers(self) -> list[Any]:
        answers = []
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise SystemExit(f"benchmark: a crowd ended with {process.wait()}")
            answers.append(json.loads(line))
        return answers

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.communicate()


def crowd_run(nodes: int, traffic: bool) -> tuple[float, float, tuple[float, float] | None]:
    """Return the seconds of the first and the second round, and the traffic of a node."""
    token = make_token()
    services = {"rendezvous": "regrow.rendezvous.server.round_service:create"}
    with start_server(token=token, services=services) as server:
        crowds = Crowds(nodes, server.endpoint, token)
        first, second = crowds.until("join"), crowds.until("again")
        exchanged = crowds.traffic() if traffic else None
        crowds.close()
    return first, second, exchanged


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
    options = parser.parse_args()

    failures = _beside_torch(options.both, options.runs, options.etcd)
    failures += _crowds(options.crowds, options.crowd_runs)
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


def _medians(pairs: list[tuple[float, float]]) -> list[float]:
    return [statistics.median(values) for values in zip(*pairs, strict=True)]


def _is_too_much(count: int, growth: float) -> bool:
    return count >= JUDGED_FROM and growth > GROWTH_BOUND


if __name__ == "__main__":
    sys.exit(main())
