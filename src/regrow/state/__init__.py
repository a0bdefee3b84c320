"""The state of a training in the memory of its ranks: `State` and `rng`.

A process that replaces a lost rank has no state. The other ranks have it. `State.recover` brings
all ranks to one step, without a disk. It needs `regrow.inprocess.Wrapper`, which calls the function
again after a fault.

    commit(n)     a section that changes the state from step n - 1 to step n
    prepare(n)    keeps the private parts of step n; see below
    recover()     every rank reports ─► choose() ─► holders send ─► private parts are restored

**Two kinds of parts.** A replicated part is equal on all ranks of a replica group after each
commit, for example the model. Any rank of the group can send it. A private part belongs to one
rank, for example its random numbers. No other rank has it, so each rank keeps two versions of it in
memory that the agent holds. This memory survives the SIGKILL of the rank.

**Why a rank does not keep two versions of everything.** It would double the memory of a training.
Ranks differ by at most one step, because each step needs the gradients of all ranks. So one of the
two steps is complete: a rank can commit step n only after all ranks have computed their gradients
for it. The rule `choice.choose` searches that step.

**Why `prepare` exists.** A rank may die after its gradients are with the other ranks and before its
own commit. The other ranks then have step n, and the rank's random numbers of step n are needed. So
they have to be kept before the gradients leave the rank. `prepare` does that. Without it, `commit`
keeps them, which is too late for such a rank: no step is complete then, and `recover` calls
`default`.

**Limits.** With several replica groups, two groups may be a step apart when a rank
dies between two optimizer steps. Neither group can go back, so `recover` calls `default`. A holder
sends to its receivers one after the other.

| module | content |
|---|---|
| `choice` | the rule: which step, and which rank sends to which rank; no I/O |
| `tree` | a state as a structure in msgpack and a list of arrays |
| `arrays`, `torch_arrays` | the bytes of an array of numpy or torch |
| `transport` | bytes from one rank to another, over TCP |
| `parcel` | a part over a transport, with checksums |
| `private` | two versions of the private parts, in memory |
| `api` | `State` |
| `random_state` | `rng` |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from regrow.utils import lazily

if TYPE_CHECKING:
    from regrow.state.api import State
    from regrow.state.choice import StateError
    from regrow.state.random_state import rng
    from regrow.state.transport import Transport

__all__ = ["State", "StateError", "Transport", "rng"]

__getattr__, __dir__ = lazily(
    globals(),
    {
        "api": "State",
        "choice": "StateError",
        "random_state": "rng",
        "transport": "Transport",
    },
)
