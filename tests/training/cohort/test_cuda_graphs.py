"""CUDA graphs without a GPU: what they ask of torch, recorded by stand-ins for its streams and graphs."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from flsim.training.cohort.cuda_graphs import Graphs, capture_stream
from flsim.training.cohort.packing import Shape


class FakeStream:
    made = 0

    def __init__(self, device: torch.device) -> None:
        FakeStream.made += 1

    def wait_stream(self, other: object) -> None:
        pass


class FakeGraph:
    def replay(self) -> None:
        pass


@pytest.fixture
def captured_on(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The streams of all captures, in their order."""
    streams: list[object] = []

    @contextmanager
    def graph(_graph: FakeGraph, _pool: object, stream: object, **_: Any) -> Iterator[None]:
        streams.append(stream)
        yield

    FakeStream.made = 0
    fakes = {"Stream": FakeStream, "CUDAGraph": FakeGraph, "graph": graph, "graph_pool_handle": object}
    fakes |= {"current_stream": FakeStream, "stream": lambda _: nullcontext()}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    capture_stream.cache_clear()
    return streams


def test_all_shapes_are_captured_on_one_stream(captured_on: list[object]) -> None:
    """Also after graphs were dropped, and in another engine: libraries keep memory for each stream."""
    device, buffer, calls = torch.device("cuda", 0), torch.ones(3), list[Shape]()
    shapes = [Shape(users, 4, 16, 32) for users in (16, 32, 48)]
    graphs = Graphs(device)
    for shape in (*shapes, *shapes):
        graphs.run(lambda shape, _: calls.append(shape), shape, (buffer,), (torch.zeros(3),))
    assert calls == [shape for shape in shapes for _ in range(2)]  # compiled and captured once each, then replayed
    graphs.forget()
    for others in (graphs, Graphs(device)):
        others.run(lambda *_: None, shapes[0], (buffer,), (torch.zeros(3),))
    assert len(captured_on) == 5
    assert len(set(map(id, captured_on))) == 1
    capture_stream.cache_clear()
