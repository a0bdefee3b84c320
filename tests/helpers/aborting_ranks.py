"""Run by test_torch_abort.py in a process of its own, since it imports torch.

It loads torch once and forks three ranks. They block in one kind of call after the other, for rank
0, which never comes; are woken by an abort; and begin again, in new process groups. Prints what
each rank found as one JSON object.
"""

from __future__ import annotations

import gc
import json
import os
import re
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
from interrupting import Striker, blocked
from processes import wait_until

from regrow.inprocess import _torch_abort
from regrow.inprocess._interrupt import Interrupter
from regrow.inprocess._spared import RankShouldRestart
from regrow.inprocess._torch_connecting import complete_connections
from regrow.inprocess._torch_sockets import end_gloo_connections
from regrow.inprocess.abort import AbortTorchDistributed
from regrow.inprocess.state import FrozenState
from regrow.store import connect, make_token, start_server
from regrow.store.torch import TorchStore
from regrow.utils import PortReservation

SIZE = 3
PATIENCE = timedelta(seconds=60)

small, large = torch.ones(3), torch.ones(2_000_000)


def blocking(own: Any) -> dict[str, Callable[[], object]]:
    """Calls that wait for rank 0; `own` is a group that the user has made."""
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
    """A server of the user's, built as gloo's loop is, with a client: to be left alone."""

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
    """How many descriptors and threads this process has."""
    gc.collect()
    return [len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))]


def begin(store: Any, rank: int) -> Any:
    """Make the default group, and one of the user's; returns that."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE, timeout=PATIENCE)
    own = dist.new_group(list(range(SIZE)), timeout=PATIENCE)
    dist.barrier()
    dist.barrier(own)
    return own


def woken(name: str, store: Any, rank: int) -> str:
    """Block in a call, and say how it ended."""
    own = begin(store, rank)
    if rank == 0:
        store.wait(["1 is awake", "2 is awake"])
        _torch_abort.abort_process_groups()
        return "left"
    is_blocked = blocked(threading.get_native_id())

    def abort() -> None:
        wait_until(is_blocked, "blocked in the call")
        if rank == 2:  # rank 1 is woken by nobody but itself
            store.wait(["1 is awake"])
        _torch_abort.abort_process_groups()

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
    """Wait for ranks that never come, in a group that meets in a regrow store."""
    striker = Striker()
    with connect(endpoint, token=token) as client, Interrupter() as interrupter:
        call = interrupter.call()
        striker.strike(call, when=blocked(threading.get_native_id()))
        try:
            call.run(begin, TorchStore(client), 0)
        except RankShouldRestart:
            _torch_abort.abort_process_groups()
            striker.close()
            return "interrupted"
    return "returned"


class Expecting(dist.Store):  # type: ignore[misc] # torch is not followed by mypy
    """A store in which the others have told addresses, greater than this rank's, and are not there.

    So each of them is waited for.
    """

    def __init__(self) -> None:
        super().__init__()
        self._told: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        told = value.encode() if isinstance(value, str) else bytes(value)
        group = key.rpartition("/")[0]
        here = re.search(rb"\x02\x00..\x7f\x00\x00\x01", told, re.DOTALL)
        assert here is not None  # a sockaddr_in, of 127.0.0.1
        at_no_port = told.replace(here[0], b"\x02\x00\xff\xff\x7f\x00\x00\x01")
        self._told |= {f"{group}/{other}": at_no_port for other in range(SIZE)} | {key: told}

    def get(self, key: str) -> bytes:
        return self._told[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        assert all(key in self._told for key in keys)

    def add(self, key: str, amount: int) -> int:
        return amount


def interrupted(fn: Callable[[], object]) -> str:
    """Interrupt a call that waits in torch, and say how it ended."""
    waking = AbortTorchDistributed().waking(FrozenState(rank=0, world_size=SIZE))
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


def interrupted_while_connecting() -> list[Any]:
    """Wait for ranks that never connect, twice: how that ended, and whether all is as before."""
    found: list[Any] = []
    for _ in range(2):
        found.append(interrupted(lambda: begin(Expecting(), 0)))
        _torch_abort.abort_process_groups()
        found.append(holdings())
    return [{found[0], found[2]} <= {"interrupted", "RuntimeError"}, found[1] == found[3]]


def interrupted_in_torchs_store(port: int, outside: Any) -> list[str]:
    """Wait for workers or a key in a store that the function made, and in one from outside."""

    def made_in_it() -> None:
        dist.TCPStore("127.0.0.1", port, SIZE, False, PATIENCE).wait(["never"])

    def is_made_in_it() -> None:
        dist.TCPStore("127.0.0.1", 0, SIZE, True, PATIENCE)

    within = timedelta(seconds=0.5)
    calls = (made_in_it, is_made_in_it, lambda: outside.wait(["never"], within))
    return [interrupted(call) for call in calls]


def traced(store: Any, rank: int) -> list[str]:
    """What is written of an all-reduce in which this rank waits, and rank 0 does not come."""
    begin(store, rank)
    if rank == 0:
        store.wait(["1 is through", "2 is through"])
        _torch_abort.abort_process_groups()
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
    """Everything that one rank goes through."""
    stay: Any = dist.TCPStore("127.0.0.1", port, SIZE, rank == 0, PATIENCE)
    client, bystander = connect(endpoint, token=token), Bystander()
    found: dict[str, Any] = {"nothing to end": end_gloo_connections()}
    _torch_abort.abort_process_groups()
    for number, name in enumerate(blocking(None)):
        found[name] = woken(name, dist.PrefixStore(str(number), stay), rank)
        if number == 1:
            found["before"] = holdings()
    found["after"] = holdings()
    begin(dist.PrefixStore("connected", stay), rank)
    dist.barrier()
    found["nothing to complete"] = complete_connections(SIZE, set())
    found["connections"] = end_gloo_connections()
    _torch_abort.abort_process_groups()
    # What an interrupted init_process_group may leave.
    dist.distributed_c10d._world.group_count = 7
    _torch_abort.abort_process_groups()
    begin(dist.PrefixStore("half", stay), rank)
    world = dist.distributed_c10d.GroupMember.WORLD
    dist.distributed_c10d._update_default_pg(None)
    del world
    _torch_abort.abort_process_groups()
    found["half made"] = len(dist.distributed_c10d._world.pg_map)
    begin(dist.PrefixStore("again", stay), rank)
    _torch_abort.abort_process_groups()
    found["in init"] = interrupted_in_init(endpoint, token) if rank == 0 else "interrupted"
    found["trace"] = traced(dist.PrefixStore("traced", stay), rank)
    if rank == 0:
        found["while connecting"] = interrupted_while_connecting()
        found["in torch's stores"] = interrupted_in_torchs_store(port, stay)
    stay.set(f"survivor {rank}", "yes")
    found["torch's store"] = [stay.get(f"survivor {other}").decode() for other in range(SIZE)]
    client.set(f"survivor {rank}", "yes")
    found["regrow's store"] = client.get(f"survivor {rank}").decode()
    found["bystander"] = bystander.answers()
    if rank == 0:  # it hosts the store, so it is the last
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
