"""Moving batches: every kind of container comes out as it went in."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from raytrain.data import Batch, move
from raytrain.data.device import ahead

META = torch.device("meta")  # a device other than the CPU that is there on every machine


class Pair(NamedTuple):
    x: torch.Tensor
    name: str


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    length: int
    made: list[int] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.made.append(1)


class Graph:
    """A class of the user's that moves itself."""

    device = "cpu"

    def to(self, device: torch.device) -> Graph:
        moved = Graph()
        moved.device = str(device)
        return moved


class Encoding(UserDict[str, torch.Tensor]):
    """Holds more than its items."""

    lengths = (1, 2)


def tensor() -> torch.Tensor:
    return torch.ones(2)


@pytest.mark.parametrize(
    "data",
    [
        tensor(),
        [tensor(), 1],
        (tensor(), "text"),
        {"x": tensor()},
        OrderedDict(x=tensor(), y=tensor()),
        {"x": {"y": [tensor()]}},
        MappingProxyType({"x": tensor()}),
        Pair(tensor(), "name"),
        namedtuple("Old", "x y")(tensor(), None),
        Encoding(x=tensor()),
    ],
    ids=lambda data: type(data).__name__,
)
def test_containers_keep_their_type_and_their_tensors_move(data: Any) -> None:
    moved = move(data, META)
    assert type(moved) is type(data)
    assert _devices(moved) == {"meta"}
    assert _devices(data) == {"cpu"}


def _devices(data: Any) -> set[str]:
    if isinstance(data, torch.Tensor):
        return {data.device.type}
    values = data.values() if hasattr(data, "values") else data if isinstance(data, (list, tuple)) else []
    return set().union(*(_devices(value) for value in values))


def test_order_and_what_else_a_container_holds_stay() -> None:
    ordered = move(OrderedDict([("b", tensor()), ("a", tensor())]), META)
    assert list(ordered) == ["b", "a"]
    counted: defaultdict[str, Any] = defaultdict(list, x=tensor())
    moved = move(counted, META)
    assert moved.default_factory is list
    assert moved["x"].device == META
    assert counted["x"].device.type == "cpu"
    encoding = Encoding(x=tensor())
    encoding.lengths = (5,)
    assert move(encoding, META).lengths == (5,)


def test_dataclasses_are_copied_without_being_made_anew() -> None:
    data = Frozen(tensor(), 2)
    moved = move(data, META)
    assert (type(moved), moved.x.device, moved.length, moved.made) == (Frozen, META, 2, [1])
    assert data.x.device.type == "cpu"


def test_objects_that_move_themselves_do() -> None:
    assert move([Graph()], META)[0].device == "meta"
    assert move(Graph, META) is Graph
    packed = move(pack_sequence([torch.ones(3), torch.ones(2)]), META)
    assert type(packed) is PackedSequence
    assert (packed.data.device, packed.batch_sizes.device.type) == (META, "cpu")  # as torch demands


@pytest.mark.parametrize("value", [None, 3, "text", b"bytes", 2.5, {1, 2}])
def test_other_values_pass(value: Any) -> None:
    assert move(value, META) is value


def batches() -> list[Batch]:
    return [Batch({"x": torch.full((3,), float(k))}, 0, k, 0, 1, 3, 3, 1) for k in range(4)]


def test_on_a_cpu_nothing_stands_between() -> None:
    iterator = iter(batches())
    assert ahead(iterator, torch.device("cpu")) is iterator


def test_on_another_device_the_batches_come_moved_and_in_order() -> None:
    moved = list(ahead(iter(batches()), META))
    assert [(batch.index, batch.data["x"].device) for batch in moved] == [(k, META) for k in range(4)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_copies_are_whole_when_they_are_read() -> None:
    """Each batch is overwritten at once by later ones if a copy, or the reuse of its memory, were not waited for."""
    device = torch.device("cuda")
    source = ([torch.full((1 << 20,), float(k)), Pair(torch.full((5,), float(k)), "n")] for k in range(60))
    stream = ahead((Batch(data, 0, k, 0, 1, 1, 1, 1) for k, data in enumerate(source)), device)
    sums = []
    for batch in stream:
        torch.cuda._sleep(200_000)  # the work of a step, so that the copies run ahead of it
        sums.append((batch.data[0].sum(), batch.data[1].x.sum()))
    assert [(float(a), float(b)) for a, b in sums] == [(k * float(1 << 20), k * 5.0) for k in range(60)]
