"""Train a small language model, and replace each rank that is killed by one new process.

The model is a transformer that predicts the next character of Python's standard library, which
every machine has. The ranks share the work by DistributedDataParallel:

    regrow run --standalone --nproc-per-node 4 --max-restarts 3 --preload torch examples/gpt.py

Kill any of its processes: the others keep theirs, a new process takes the place of the dead one,
and all continue from the last complete step. `make demo-replace` does it twice. The training writes
no checkpoint; a real one also needs them, for faults that no rank survives.

With CUDA, each rank uses the device of its local rank, and NCCL; otherwise it uses gloo.
"""

from __future__ import annotations

import argparse
import math
import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import regrow
from regrow.inprocess import CallWrapper, Wrapper
from regrow.store import worker_store
from regrow.store.torch import TorchStore

SEED = 2024
CONTEXT = 64
CHARACTERS = 2_000_000
TEST_SHARE = 0.05


def library() -> tuple[torch.Tensor, int]:
    """Return the text as numbers of its characters, and how many different characters it has."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()[: CHARACTERS - len(text)]
    values = torch.frombuffer(text, dtype=torch.uint8).long()
    used, numbers = values.unique(return_inverse=True)
    return numbers, len(used)


class Block(nn.Module):  # type: ignore[misc]
    """Attention to the characters before, and a small network for each."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.before_attention, self.before_network = nn.LayerNorm(width), nn.LayerNorm(width)
        self.to_attention, self.from_attention = (
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.network = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the next layer's input, of the shape of `x`: (texts, characters, width)."""
        shape = (*x.shape[:2], self.heads, x.shape[2] // self.heads)
        parts = self.to_attention(self.before_attention(x)).chunk(3, dim=2)
        query, key, value = (part.view(shape).transpose(1, 2) for part in parts)
        dropout = self.dropout if self.training else 0.0
        found = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True
        )
        x = x + self.from_attention(found.transpose(1, 2).reshape(x.shape))
        return x + self.network(self.before_network(x))


class Transformer(nn.Module):  # type: ignore[misc]
    """Predicts each next character of a text from the characters before it."""

    def __init__(self, characters: int, width: int, layers: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, width)
        self.places = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, 4, 0.1) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, characters))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return scores of the shape (texts, characters, different characters)."""
        places = self.places(torch.arange(text.shape[1], device=text.device))
        scores: torch.Tensor = self.head(self.blocks(self.characters(text) + places))
        return scores


class Training:
    """State that a restart must keep; it lives outside the wrapped function.

    Nothing here depends on the rank, so that the process may also be a standby (`--standby`).
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        text, characters = library()
        held_out = int(len(text) * TEST_SHARE)
        self.train_text, self.test_text = text[held_out:], text[:held_out]
        self.net = Transformer(characters, args.width, args.layers)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=args.lr)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.factor)
        self.first_schedule = self.schedule.state_dict()
        self.store = TorchStore(worker_store())
        self.state = regrow.State(
            {"net": self.net, "optimizer": self.optimizer, "schedule": self.schedule},
            {"rng": regrow.rng()},  # the dropout of this rank
        )

    def begin(self) -> int:
        """Set the state of step 0, also in a process that has trained already; return the step."""
        torch.manual_seed(SEED)  # the same weights on all ranks
        for module in self.net.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        self.optimizer.state.clear()
        self.schedule.load_state_dict(self.first_schedule)
        torch.manual_seed(SEED + int(os.environ["RANK"]))  # another dropout on each
        return 0

    def factor(self, step: int) -> float:
        """Return the factor of the learning rate: it rises for 20 steps, then falls as a cosine."""
        return min((step + 1) / 20, 0.5 + 0.5 * math.cos(math.pi * step / self.args.steps))

    def texts(
        self, source: torch.Tensor, seed: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return random texts and their next characters; they follow from the seed alone."""
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(
            len(source) - CONTEXT, (self.args.batch_size, 1), generator=generator
        )
        at = starts + torch.arange(CONTEXT)
        return source[at].to(device), source[at + 1].to(device)


def loss_of(scores: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy per character, in nats."""
    return functional.cross_entropy(scores.flatten(0, 1), expected.flatten())


@Wrapper(replace=True)
def train(training: Training, call: CallWrapper) -> None:
    """Train from the last complete step; called again after each fault."""
    args, state = training.args, training.state
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    keys = dist.PrefixStore(f"groups/{call.iteration}", training.store)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(backend, store=keys, rank=rank, world_size=world_size)
    training.net.to(device)
    done = state.recover(call, default=training.begin)
    if rank == 0 and call.replaced:
        print(f"rank {sorted(call.replaced)} is replaced; continue after step {done}", flush=True)
    model = DistributedDataParallel(training.net)
    for step in range(done + 1, args.steps + 1):
        text, following = training.texts(
            training.train_text, SEED + step * world_size + rank, device
        )
        training.optimizer.zero_grad()
        loss = loss_of(model(text), following)
        state.prepare(step)  # the gradients of this step have not left this rank yet
        loss.backward()
        with state.commit(step):  # all or nothing, at any time that another rank fails
            training.optimizer.step()
            training.schedule.step()
        regrow.step(step)
        if rank == 0 and step % args.print_every == 0:
            print(f"step {step}, loss {loss.item():.3f}", flush=True)
    mean = evaluate(training, rank, device) / world_size
    dist.all_reduce(mean)
    if rank == 0:
        print(f"final test loss {mean.item():.3f}", flush=True)
    del model  # before its group: torch may hang in the other order
    dist.destroy_process_group()


def evaluate(training: Training, rank: int, device: torch.device) -> torch.Tensor:
    """Return the mean loss of this rank's texts of the test set."""
    training.net.eval()
    losses = []
    with torch.no_grad():
        for turn in range(8):
            text, following = training.texts(training.test_text, 1000 * rank + turn, device)
            losses.append(loss_of(training.net(text), following))
    training.net.train()
    return torch.stack(losses).mean()


def main() -> None:
    """Create the state, and train."""
    parser = argparse.ArgumentParser(description="Train a language model that may lose any rank.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=8, help="texts of a rank and a step")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3, help="AdamW's highest learning rate")
    parser.add_argument("--print-every", type=int, default=20, metavar="STEPS")
    args = parser.parse_args()

    torch.set_num_threads(1)
    train(Training(args))  # type: ignore[call-arg] # the wrapper adds `call`


if __name__ == "__main__":
    main()
