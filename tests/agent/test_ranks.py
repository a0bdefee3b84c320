"""Ranks over agents of any size and role."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.agent.decisions import ranks as _ranks
from regrow.agent.decisions.ranks import RoleInfo
from regrow.store import MemoryStore

INFOS = st.lists(
    st.tuples(st.sampled_from(["trainer", "reader", "ps"]), st.integers(1, 9)), min_size=1
).map(lambda rows: [RoleInfo(role, i, size) for i, (role, size) in enumerate(rows)])


@given(INFOS)
def test_global_ranks_are_contiguous_per_agent_and_cover_the_world(infos: list[RoleInfo]) -> None:
    ranks = []
    for info, assignment in zip(infos, _ranks.compute(infos), strict=True):
        workers = _ranks.workers(assignment, info.local_world_size)
        assert [worker.local_rank for worker in workers] == list(range(info.local_world_size))
        ranks += [worker.global_rank for worker in workers]
        assert {worker.world_size for worker in workers} == {sum(i.local_world_size for i in infos)}
    assert ranks == list(range(len(ranks)))


@given(INFOS)
def test_role_ranks_count_within_the_role(infos: list[RoleInfo]) -> None:
    by_role: dict[str, list[int]] = {}
    for info, assignment in zip(infos, _ranks.compute(infos), strict=True):
        for worker in _ranks.workers(assignment, info.local_world_size):
            by_role.setdefault(info.role, []).append(worker.role_rank)
            same = sum(i.local_world_size for i in infos if i.role == info.role)
            assert worker.role_world_size == same
    for ranks in by_role.values():
        assert ranks == list(range(len(ranks)))


def test_agents_of_different_sizes_agree_over_the_store() -> None:
    store = MemoryStore()
    infos = [RoleInfo("trainer", 0, 2), RoleInfo("reader", 1, 1), RoleInfo("trainer", 2, 4)]
    agreed: dict[int, _ranks.Assignment] = {}

    def agent(info: RoleInfo) -> None:
        agreed[info.rank] = _ranks.exchange(store, info, len(infos))

    threads = [threading.Thread(target=agent, args=(info,)) for info in infos]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [agreed[i] for i in range(3)] == _ranks.compute(infos)


@pytest.mark.parametrize(
    "data", [b"", b"[]", b'{"role": "x"}', b"\xff", b'{"role":"x","rank":"a"}']
)
def test_what_is_no_role_info_is_refused_with_its_value(data: bytes) -> None:
    with pytest.raises(ValueError, match="not an agent's role info"):
        RoleInfo.decode(data)
