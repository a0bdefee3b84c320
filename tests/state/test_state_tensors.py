"""Tensors of each kind arrive bitwise, also in an optimizer that has none yet."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

import regrow
from regrow.state import StateError
from regrow.state.parcel import Courier
from regrow.state.parts import Part
from regrow.state.private import pack, unpack

pytestmark = pytest.mark.training


class Pipe:
    def __init__(self) -> None:
        self.messages: list[bytes] = []

    def send(self, rank: int, data: memoryview) -> None:
        self.messages.append(bytes(data))

    def receive(self, rank: int, into: memoryview) -> None:
        into[:] = self.messages.pop(0)


def carry(source: Any, target: Any) -> None:
    pipe = Pipe()
    Courier(pipe, 1).send(Part("replicated", "x", source))
    Courier(pipe, 0).receive(Part("replicated", "x", target))


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch")


def test_every_dtype_arrives_bitwise(torch: Any) -> None:
    for name in ("bfloat16", "float16", "float64", "complex64", "bool", "int8", "float8_e4m3fn"):
        source = torch.randn(3, 5).to(getattr(torch, name))
        target: dict[str, Any] = {}
        carry({"t": source, "empty": source[:0], "scalar": source[0, 0]}, target)
        assert target["t"].dtype is source.dtype
        assert target["scalar"].shape == ()
        assert target["empty"].shape == (0, 5)
        assert bool((target["t"].view(torch.uint8) == source.view(torch.uint8)).all())


def test_a_tensor_is_filled_in_place_whatever_its_layout(torch: Any) -> None:
    source = torch.randn(2, 3, 4, 5)
    target = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    place = target.data_ptr()
    carry(source, target)
    assert torch.equal(source, target)
    assert target.data_ptr() == place
    view = torch.zeros(4, 6).t()
    carry(torch.arange(24.0).reshape(6, 4), view)
    assert torch.equal(view, torch.arange(24.0).reshape(6, 4))


def test_a_tensor_that_is_kept_or_sent_is_not_changed(torch: Any) -> None:
    """Autograd refuses a backward pass whose tensors have another version."""
    tensors = {
        "transposed": torch.zeros(4, 6).t(),
        "expanded": torch.zeros(1, 3).expand(4, 3),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
    }
    versions = [each._version for each in tensors.values()]
    pack([Part("private", "x", tensors)])
    carry(tensors, {})
    assert [each._version for each in tensors.values()] == versions


def test_views_of_every_kind_arrive(torch: Any) -> None:
    values = torch.randn(4, 3, dtype=torch.complex64)
    source = {"conj": values.conj(), "neg": values.conj().imag, "row": values[:1].expand(4, 3)}
    new: dict[str, Any] = {}
    old = {
        "conj": torch.zeros(4, 3, dtype=torch.complex64).conj(),
        "neg": torch.zeros(4, 3, dtype=torch.complex64).conj().imag,
        "row": torch.zeros(1, 3, dtype=torch.complex64).expand(4, 3),
    }
    places = {name: each.data_ptr() for name, each in old.items()}
    for target in (new, old):
        carry(source, target)
        for name, value in source.items():
            assert torch.equal(target[name], value), name
    assert {name for name, each in old.items() if each.data_ptr() == places[name]} == {
        "conj",
        "neg",
    }  # the elements of an expanded tensor share memory, so a new one takes its place


def build(torch: Any) -> tuple[Any, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(torch: Any, model: Any, optim: Any, seed: int) -> None:
    torch.manual_seed(seed)
    optim.zero_grad()
    model(torch.randn(8, 3)).pow(2).sum().backward()
    optim.step()


@pytest.mark.parametrize("steps", [0, 1])
def test_a_model_and_its_optimizer_continue_as_those_of_the_sender(torch: Any, steps: int) -> None:
    """With 0 steps, the receiver's optimizer has no tensors yet."""
    model, optim = build(torch)
    train(torch, model, optim, 1)
    optim.param_groups[0]["lr"] = 0.05
    other, theirs = build(torch)
    for _ in range(steps):
        train(torch, other, theirs, 9)
    weights = [each.data_ptr() for each in other.parameters()]
    carry(model, other)
    carry(optim, theirs)
    assert [each.data_ptr() for each in other.parameters()] == weights
    train(torch, model, optim, 2)
    train(torch, other, theirs, 2)
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
    assert theirs.param_groups[0]["lr"] == 0.05


def test_a_module_of_another_shape_is_refused_with_the_key(torch: Any) -> None:
    target = torch.nn.Linear(3, 5)
    before = copy.deepcopy(target.state_dict())
    with pytest.raises(StateError, match=r"\['weight'\] is torch float32 \[5, 3\] on this rank"):
        carry(torch.nn.Linear(3, 4), target)
    assert torch.equal(target.weight, before["weight"])
    with pytest.raises(StateError, match=r"\['bias'\] exists on this rank, and does not on rank 0"):
        carry(torch.nn.Linear(3, 5, bias=False), target)


def test_a_tensor_without_plain_bytes_is_refused_with_the_key(torch: Any) -> None:
    with pytest.raises(TypeError, match=r"replicated\['x'\]\['s'\]: a tensor of torch.sparse_coo"):
        carry({"s": torch.eye(3).to_sparse()}, {})


def test_the_random_numbers_of_torch_continue_from_a_kept_state(torch: Any) -> None:
    part = Part("private", "rng", regrow.rng())
    kept = pack([part])
    drawn = torch.randn(3), torch.nn.functional.dropout(torch.ones(9))
    unpack(kept, [part], 0)
    again = torch.randn(3), torch.nn.functional.dropout(torch.ones(9))
    assert all(map(torch.equal, drawn, again))


@pytest.fixture
def mesh(torch: Any) -> Iterator[Any]:
    """A mesh of one process, which holds whole DTensors."""
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    from torch.distributed.device_mesh import init_device_mesh

    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def test_the_shard_of_a_dtensor_is_filled_in_place(torch: Any, mesh: Any) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    source, target = (
        torch.nn.ParameterDict({"w": distribute_tensor(values, mesh, [Shard(0)])})
        for values in (torch.randn(4, 3), torch.zeros(4, 3))
    )
    carry(source, target)
    assert torch.equal(source["w"].to_local(), target["w"].to_local())
    with pytest.raises(StateError, match=r"\['w'\]: this rank has no DTensor here yet"):
        carry({"w": source["w"].detach()}, {})
