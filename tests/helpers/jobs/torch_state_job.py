"""Scripts of jobs with a `regrow.State` of torch: trainings on gloo with seeded faults."""

from __future__ import annotations

from helpers.jobs.state_job import FAULTS

POINTS = (
    "before forward",
    "within forward",
    "after forward",
    "within backward",
    "after backward",
    "begin of commit",
    "optimizer 0",
    "optimizer 2",
    "end of commit",
    "after commit",
)
"""Points of a step of `REPLICAS` at which a rank can be killed, in their order."""

_BEGIN = (
    FAULTS
    + """
import copy, hashlib
import torch
import torch.distributed as dist
import regrow
from regrow.inprocess import CallWrapper, Wrapper
from regrow.store import worker_store
from regrow.store.torch import TorchStore

torch.set_num_threads(1)
SIZE, STEPS = int(os.environ["WORLD_SIZE"]), int(os.environ["STEPS"])
store = TorchStore(worker_store())
torch.manual_seed(0)

def begin(call):
    keys = dist.PrefixStore(str(call.iteration), store)
    dist.init_process_group("gloo", store=keys, rank=RANK, world_size=SIZE)

def digest(tensors):
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().numpy().tobytes())
    return found.hexdigest()
"""
)

REPLICAS = (
    _BEGIN
    + """
model = torch.nn.Sequential(
    torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.3), torch.nn.ReLU(),
    torch.nn.Linear(16, 2),
)
parameters = list(model.parameters())
# One optimizer for each parameter, so that a rank can be killed between two of them.
optims = [torch.optim.AdamW([each], lr=0.01) for each in parameters]
scheduler = torch.optim.lr_scheduler.StepLR(optims[0], 3, 0.5)
inputs, targets = torch.randn(64, 6), torch.randn(64, 2)

class Loader:
    def __init__(self):
        self.generator = torch.Generator().manual_seed(RANK)
        self.order, self.place = torch.empty(0, dtype=torch.int64), 0
    def next(self):
        if self.place >= len(self.order):
            self.order, self.place = torch.randperm(64, generator=self.generator), 0
        found = self.order[self.place : self.place + 16]
        self.place += 16
        return inputs[found], targets[found]
    def state_dict(self):
        return {"generator": self.generator.get_state(), "order": [self.order], "at": self.place}
    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])
        (self.order,), self.place = state["order"], state["at"]

now = [0]
model[0].register_forward_hook(lambda *_: at(now[0], "within forward"))
def reduce(parameter):
    dist.all_reduce(parameter.grad)
    parameter.grad /= SIZE
    if parameter is parameters[3]:
        at(now[0], "within backward")
for each in parameters:
    each.register_post_accumulate_grad_hook(reduce)
for number, each in enumerate(optims):
    each.register_step_post_hook(lambda *_, n=number: at(now[0], f"optimizer {n}"))

torch.manual_seed(100 + RANK)
loader = Loader()
state = regrow.State(
    {"model": model, "scheduler": scheduler, **{f"o{n}": o for n, o in enumerate(optims)}},
    # The forward pass changes the statistics of BatchNorm1d, and each rank has its own.
    {"rng": regrow.rng(), "loader": loader, "statistics": dict(model.named_buffers())},
)

@Wrapper(replace=True)
def train(call: CallWrapper):
    begin(call)
    step = state.recover(call, lambda: report("default") or 0)
    while step < STEPS:
        step += 1
        now[0] = step
        at(step, "before forward")
        x, y = loader.next()
        loss = (model(x) - y).pow(2).mean()
        at(step, "after forward")
        state.prepare(step)
        model.zero_grad()
        loss.backward()
        at(step, "after backward")
        with state.commit(step):
            at(step, "begin of commit")
            for each in optims:
                each.step()
            scheduler.step()
            at(step, "end of commit")
        regrow.step(step)
        report("step", step)
        at(step, "after commit")
    dist.destroy_process_group()

train()
report("result", digest(parameters), digest(model.buffers()))
"""
)
"""All ranks have all of the model; gradients are exchanged in the backward pass."""

SHARDS = (
    _BEGIN
    + """
# Ranks 0 and 2 have one half of the columns of the weights, ranks 1 and 3 the other half.
weights = torch.randn(6, 8)[:, 4 * (RANK % 2) : 4 * (RANK % 2) + 4].clone().requires_grad_()
optim = torch.optim.Adam([weights], lr=0.02)
first = weights.detach().clone(), copy.deepcopy(optim.state_dict())
state = regrow.State(
    {"weights": weights, "optim": optim}, replicas=[[0, 2], [1, 3]]
)

def load():
    report("default")
    weights.data.copy_(first[0])
    optim.load_state_dict(copy.deepcopy(first[1]))
    return 0

@Wrapper(replace=True)
def train(call: CallWrapper):
    begin(call)
    across = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][RANK // 2]
    replicas = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][RANK % 2]
    step = state.recover(call, load)
    while step < STEPS:
        step += 1
        at(step, "before forward")
        # The data follow from the step and the pair of ranks that share them.
        data = torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + RANK // 2))
        local = data @ weights
        total = local.detach().sum(1)
        dist.all_reduce(total, group=across)
        at(step, "after forward")
        weights.grad = data.T @ (2 * (total - 1))[:, None].expand(5, 4)
        dist.all_reduce(weights.grad, group=replicas)
        at(step, "after backward")
        norm = weights.grad.pow(2).sum()
        dist.all_reduce(norm)
        weights.grad /= norm.sqrt().clamp(min=1)
        with state.commit(step):
            at(step, "begin of commit")
            optim.step()
            at(step, "end of commit")
        regrow.step(step)
        report("step", step)
        at(step, "after commit")
    dist.destroy_process_group()

train()
report("result", digest([weights]))
"""
)
"""Each half of the weights is on two ranks; the norm of the gradients is that of all ranks."""
SHARD_POINTS = (
    "before forward",
    "after forward",
    "after backward",
    "begin of commit",
    "end of commit",
    "after commit",
)
"""Points of a step of `SHARDS`."""
