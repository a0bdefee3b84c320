"""Program of test_torch_abort.py: a process of its own, because it imports torch.

It loads torch once and forks three ranks. In one kind of call after the other, they block and wait
for rank 0, which never joins. An abort wakes them, and they begin again in new process groups. The
program prints each rank's results as one JSON object.
"""

from __future__ import annotations

import gc
import json
import os
import select
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from regrow.inprocess.monitor_thread import RankShouldRestart

from helpers.processes import wait_until
from helpers.ranks.interrupting import Striker, blocked
from regrow.inprocess.abort import AbortTorchDistributed
from regrow.inprocess.interrupt.interrupt import Interrupter
from regrow.inprocess.state import FrozenState
from regrow.inprocess.torch import torch_abort
from regrow.inprocess.torch.torch_abort import end_gloo_connections
from regrow.store import connect, make_token, start_server
from regrow.store.torch import TorchStore
from regrow.utils import PortReservation

SIZE = 3
PATIENCE = timedelta(seconds=60)

small, large = torch.ones(3), torch.ones(2_000_000)


def blocking(own: Any) -> dict[str, Callable[[], object]]:
    """Return calls that wait for rank 0; `own` is a group that the user has created."""
    return {
        "all_reduce": lambda: dist.all_reduce(small),
        "large all_reduce": lambda: dist.all_reduce(large),
        "all_reduce in a group of the user's": lambda: dist.all_reduce(small, group=own),
        "barrier": dist.barrier,
        "monitored_barrier": dist.monitored_barrier,
        "send": lambda: dist.send(large, 0),
        "recv": lambda: dist.recv(small, 0),
        "broadcast_object_list": lambda: dist.broadcast_object_list([None], 0),
        "all_gather_object": lambda: dist.all_gather_object([None] * SIZE, {}),
        "wait": lambda: dist.all_reduce(small, async_op=True).wait(),
    }


class Bystander:
    """A user's server with the structure of gloo's loop, and a client; aborts leave it alone."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        enter = self._stack.enter_context
        listening = enter(socket.create_server(("127.0.0.1", 0)))
        self._client = enter(socket.create_connection(listening.getsockname()))
        self._served = enter(listening.accept()[0])
        reading, writing = os.pipe()
        enter(os.fdopen(reading))
        enter(os.fdopen(writing, "w"))
        self._loop = enter(select.epoll())
        for fd in (listening.fileno(), self._served.fileno(), reading):
            self._loop.register(fd, select.EPOLLIN)

    def answers(self) -> bool:
        self._client.sendall(b"ping")
        assert self._loop.poll(PATIENCE.seconds) == [(self._served.fileno(), select.EPOLLIN)]
        return self._served.recv(4) == b"ping"

    def close(self) -> None:
        self._stack.close()


def holdings() -> list[int]:
    """Return the numbers of this process's descriptors and threads."""
    gc.collect()
    return [len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))]


def begin(store: Any, rank: int) -> Any:
    """Create the default group and a user's group; return the user's group."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE, timeout=PATIENCE)
    own = dist.new_group(list(range(SIZE)), timeout=PATIENCE)
    dist.barrier()
    dist.barrier(own)
    return own


def woken(name: str, store: Any, rank: int) -> str:
    """Block in a call, and return how it ended."""
    own = begin(store, rank)
    if rank == 0:
        store.wait(["1 is awake", "2 is awake"])
        torch_abort.abort_process_groups()
        return "left"
    is_blocked = blocked(threading.get_native_id())

    def abort() -> None:
        wait_until(is_blocked, "blocked in the call")
        if rank == 2:  # rank 1 wakes only by its own abort
            store.wait(["1 is awake"])
        torch_abort.abort_process_groups()

    aborting = threading.Thread(target=abort)
    aborting.start()
    try:
        blocking(own)[name]()
        ended = "returned"
    except RuntimeError as error:
        ended = type(error).__name__
    store.set(f"{rank} is awake", "")
    aborting.join()
    return ended


def interrupted_in_init(endpoint: str, token: bytes) -> str:
    """Wait for ranks that never join, in a group over a regrow store."""
    striker = Striker()
    with connect(endpoint, token=token) as client, Interrupter() as interrupter:
        call = interrupter.call()
        striker.strike(call, when=blocked(threading.get_native_id()))
        try:
            call.run(begin, TorchStore(client), 0)
        except RankShouldRestart:
            torch_abort.abort_process_groups()
            striker.close()
            return "interrupted"
    return "returned"


def interrupted(fn: Callable[[], object]) -> str:
    """Interrupt a call that waits in torch, and return how it ended."""
    waking = AbortTorchDistributed().waking()
    is_blocked = blocked(threading.get_native_id())
    with Interrupter() as interrupter:
        call = interrupter.call()

        def strike() -> None:
            wait_until(is_blocked, "blocked in torch")
            call.interrupt(waking)

        striking = threading.Thread(target=strike)
        striking.start()
        try:
            call.run(fn)
        except RankShouldRestart as error:
            ended = "interrupted" if error.__cause__ is None else type(error.__cause__).__name__
        else:
            ended = "returned"
        striking.join()
    return ended


def interrupted_in_torchs_store(port: int, outside: Any) -> list[str]:
    """Wait for workers or a key in a store of the function's own, and in a store from outside.

    The store from outside is at `port`, and so is the first one.
    """

    def made_in_it() -> None:
        dist.TCPStore("127.0.0.1", port, SIZE, False, PATIENCE).wait(["never"])

    def is_made_in_it() -> None:
        dist.TCPStore("127.0.0.1", own.port, SIZE, True, PATIENCE)

    within = timedelta(seconds=0.5)
    with PortReservation() as own:
        calls = (
            (port, made_in_it),
            (own.port, is_made_in_it),
            (port, lambda: outside.wait(["never"], within)),
        )
        ended = []
        for master_port, call in calls:
            os.environ["MASTER_PORT"] = str(master_port)
            ended.append(interrupted(call))
    return ended


def traced(store: Any, rank: int) -> list[str]:
    """Return the trace of an all-reduce in which this rank waits for rank 0, which never joins."""
    begin(store, rank)
    if rank == 0:
        store.wait(["1 is through", "2 is through"])
        torch_abort.abort_process_groups()
        return []
    is_blocked = blocked(threading.get_native_id())
    with tempfile.TemporaryDirectory() as folder:
        state = FrozenState(rank=rank, world_size=SIZE, iteration=7)

        def abort() -> None:
            wait_until(is_blocked, "blocked in the collective")
            AbortTorchDistributed(torch_fr_trace_path=folder)(state)

        aborting = threading.Thread(target=abort)
        begun = dist.all_reduce(small, async_op=True)
        aborting.start()
        with suppress(RuntimeError):
            begun.wait()
        aborting.join()
        trace = json.loads(Path(folder, "iter_7", f"_dump_{rank}.json").read_text())
    store.set(f"{rank} is through", "")
    return [entry["profiling_name"] for entry in trace["entries"]]


def rank_main(rank: int, port: int, endpoint: str, token: bytes) -> dict[str, Any]:
    """Run all cases on one rank."""
    stay: Any = dist.TCPStore("127.0.0.1", port, SIZE, rank == 0, PATIENCE)
    client, bystander = connect(endpoint, token=token), Bystander()
    found: dict[str, Any] = {"nothing to end": end_gloo_connections()}
    torch_abort.abort_process_groups()
    for number, name in enumerate(blocking(None)):
        found[name] = woken(name, dist.PrefixStore(str(number), stay), rank)
        if number == 1:
            found["before"] = holdings()
    found["after"] = holdings()
    begin(dist.PrefixStore("connected", stay), rank)
    dist.barrier()
    found["connections"] = end_gloo_connections()
    torch_abort.abort_process_groups()
    # The state that an interrupted init_process_group may leave.
    dist.distributed_c10d._world.group_count = 7
    torch_abort.abort_process_groups()
    begin(dist.PrefixStore("half", stay), rank)
    world = dist.distributed_c10d.GroupMember.WORLD
    dist.distributed_c10d._update_default_pg(None)
    del world
    torch_abort.abort_process_groups()
    found["half made"] = len(dist.distributed_c10d._world.pg_map)
    begin(dist.PrefixStore("again", stay), rank)
    torch_abort.abort_process_groups()
    found["in init"] = interrupted_in_init(endpoint, token) if rank == 0 else "interrupted"
    found["trace"] = traced(dist.PrefixStore("traced", stay), rank)
    if rank == 0:
        found["in torch's stores"] = interrupted_in_torchs_store(port, stay)
    stay.set(f"survivor {rank}", "yes")
    found["torch's store"] = [stay.get(f"survivor {other}").decode() for other in range(SIZE)]
    client.set(f"survivor {rank}", "yes")
    found["regrow's store"] = client.get(f"survivor {rank}").decode()
    found["bystander"] = bystander.answers()
    if rank == 0:  # it hosts the store, so it ends last
        stay.wait([f"{other} is through" for other in range(1, SIZE)])
    else:
        stay.set(f"{rank} is through", "")
    client.close()
    bystander.close()
    return found


def main() -> None:
    token, pipes = make_token(), []
    with PortReservation() as held, start_server(token=token) as server:
        for rank in range(SIZE):
            read, write = os.pipe()
            if os.fork() == 0:
                try:
                    result = rank_main(rank, held.port, server.endpoint, token)
                except BaseException:  # noqa: BLE001 - reported to the test
                    result = {"error": traceback.format_exc()}
                os.write(write, json.dumps(result).encode())
                os._exit(0)
            os.close(write)
            pipes.append(read)
        results = []
        for read in pipes:
            with open(read, "rb") as pipe:
                results.append(json.loads(pipe.read() or b'{"error": "it was killed"}'))
            os.wait()
    print(json.dumps(results))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
