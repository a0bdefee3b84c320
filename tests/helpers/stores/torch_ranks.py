"""Program of test_store_torch.py: a process of its own, because it imports torch.

It loads torch once, forks the ranks, and prints their results as one JSON object.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from regrow.store import (
    PrefixStore,
    StoreError,
    StoreProtocolError,
    connect,
    make_token,
    start_server,
)
from regrow.store.torch import TorchStore

PATIENCE = timedelta(seconds=30)


def rank_main(rank: int, size: int, endpoint: str, token: bytes) -> dict[str, Any]:
    """One rank of a job with its process groups in a regrow store."""
    faulthandler.dump_traceback_later(60, exit=True)

    def begin() -> TorchStore:
        # The caller's own reference to the store is gone when this returns.
        # Each job has keys of its own; gloo would otherwise use the keys of another job.
        job = PrefixStore(f"job of {size}", connect(endpoint, token=token))
        store = TorchStore(job)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=PATIENCE)
        return store

    begin().underlying_store.set_timeout(PATIENCE)
    gc.collect()
    found: dict[str, Any] = {}
    tensor = torch.full((3,), float(rank + 1))
    dist.all_reduce(tensor)
    found["sum"] = tensor.tolist()
    pairs = [dist.new_group([i, i + 1]) for i in range(0, size, 2)]
    tensor = torch.full((1,), float(rank))
    dist.all_reduce(tensor, group=pairs[rank // 2])
    found["pair"] = tensor.item()
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank})
    found["objects"] = gathered
    dist.monitored_barrier(timeout=PATIENCE)

    # Several threads make as many store calls at once as process groups would.
    store = TorchStore(connect(endpoint, token=token))
    inner = dist.PrefixStore(f"threads of {size}", dist.PrefixStore("inner", store))
    errors: list[str] = []

    def meet(thread: int) -> None:
        try:
            mine = inner.clone()
            for step in range(10):
                mine.set(f"{thread} {step} {rank}", "x")
                mine.wait([f"{thread} {step} {other}" for other in range(size)], PATIENCE)
            mine.barrier(f"barrier {thread}", size, PATIENCE)
            mine.add("met", 1)
        except Exception:  # noqa: BLE001 - reported to the test
            errors.append(traceback.format_exc())

    threads = [threading.Thread(target=meet, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    dist.barrier()
    found["met"] = int(inner.get("met"))
    found["errors"] = errors
    dist.barrier()
    dist.destroy_process_group()
    store.release()
    return found


def fork_ranks(size: int, endpoint: str, token: bytes) -> list[dict[str, Any]]:
    """Run `rank_main` in `size` processes and return their results."""
    pipes = []
    for rank in range(size):
        read, write = os.pipe()
        if os.fork() == 0:
            try:
                result = rank_main(rank, size, endpoint, token)
            except BaseException:  # noqa: BLE001 - reported to the test
                result = {"errors": [traceback.format_exc()]}
            os.write(write, json.dumps(result).encode())
            os._exit(0)
        os.close(write)
        pipes.append(read)
    results = []
    for read in pipes:
        with open(read, "rb") as pipe:
            results.append(json.loads(pipe.read()))
        os.wait()
    return results


def transcript(store: Any) -> list[str]:
    """Return a store's answers to calls that the documentation does not define fully."""
    short = timedelta(seconds=0.05)
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("set", lambda: store.set("a", "1")),
        ("get", lambda: store.get("a")),
        ("add", lambda: store.add("a", 5)),
        ("get", lambda: store.get("a")),
        ("add new", lambda: store.add("n", -5)),
        ("get new", lambda: store.get("n")),
        ("compare_set absent", lambda: store.compare_set("c", "old", "new")),
        ("check", lambda: store.check(["c"])),
        ("compare_set absent, empty", lambda: store.compare_set("c", "", "new")),
        ("compare_set empty", lambda: store.compare_set("c", "", "newer")),
        ("compare_set wrong", lambda: store.compare_set("c", "wrong", "newer")),
        ("compare_set right", lambda: store.compare_set("c", "new", "newer")),
        ("set empty", lambda: store.set("e", "")),
        ("get empty", lambda: store.get("e")),
        ("compare_set on empty", lambda: store.compare_set("e", "", "x")),
        ("delete", lambda: store.delete_key("e")),
        ("delete again", lambda: store.delete_key("e")),
        ("append", lambda: store.append("p", "x")),
        ("append", lambda: store.append("p", "y")),
        ("get", lambda: store.get("p")),
        ("multi_set", lambda: store.multi_set(["m", "o"], ["1", "2"])),
        ("multi_get", lambda: store.multi_get(["o", "m", "a"])),
        ("check", lambda: store.check(["a", "nothing"])),
        ("check none", lambda: store.check([])),
        ("wait", lambda: store.wait(["a"], short)),
        ("wait none", lambda: store.wait([], short)),
        ("wait that times out", lambda: store.wait(["a", "nothing"], short)),
        ("wait not at all", lambda: store.wait(["nothing"], timedelta(0))),
        ("set_timeout", lambda: store.set_timeout(short)),
        ("get that times out", lambda: store.get("nothing")),
        ("multi_get that times out", lambda: store.multi_get(["a", "nothing"])),
        ("timeout", lambda: store.timeout),
        ("has_extended_api", lambda: store.has_extended_api()),
        ("set bytes", lambda: store.set("b", b"\xff\x00")),
        ("get bytes", lambda: store.get("b")),
        ("num_keys", lambda: store.num_keys()),
    ]
    lines = []
    for name, call in calls:
        try:
            lines.append(f"{name}: {call()!r}")
        except dist.DistStoreError:
            lines.append(f"{name}: DistStoreError")
    return lines


def main() -> None:

    token = make_token()
    found: dict[str, Any] = {}
    with start_server(token=token) as server:
        for size in map(int, sys.argv[1:]):
            found[f"ranks {size}"] = fork_ranks(size, server.endpoint, token)
    quiet = {"wait_for_workers": False, "timeout": timedelta(seconds=0.5)}
    theirs = dist.TCPStore("127.0.0.1", 0, None, True, **quiet)
    with start_server(token=token) as server:
        client = connect(server.endpoint, token=token)
        for prefix in ("", "prefix"):
            ours: Any = TorchStore(client)
            reference: Any = theirs
            if prefix:
                ours = dist.PrefixStore(prefix, ours)
                reference = dist.PrefixStore(prefix, theirs)
            found[f"ours {prefix}"] = transcript(ours)
            found[f"theirs {prefix}"] = transcript(reference)
            client.set_timeout(PATIENCE)
            theirs.set_timeout(PATIENCE)
        client.close()
        host, _, port = server.endpoint.rpartition(":")
        try:
            dist.TCPStore(host, int(port), None, False, **quiet)
        except dist.DistError as error:
            found["TCPStore at our port"] = str(error)
    below = PrefixStore("ours", theirs)
    below.set("k", "1")
    found["prefix over TCPStore"] = [below.add("k", 4), theirs.get("ours/k").decode()]
    try:
        below.delete_prefix("k")
    except AttributeError as error:
        found["delete_prefix over TCPStore"] = str(error)
    old = dist.TCPStore("127.0.0.1", 0, None, True, use_libuv=False, **quiet)
    for name, store, kind in (("libuv", theirs, StoreError), ("old", old, StoreProtocolError)):
        try:
            connect(f"127.0.0.1:{store.port}", token=token, timeout=0.5)
        except kind as error:
            found[f"we at TCPStore, {name}"] = str(error)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
