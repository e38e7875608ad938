"""An evaluator takes no more of a GPU's memory than its share."""

from types import SimpleNamespace

import pytest
import torch

from server.pool import evaluations
from server.pool.evaluations import limit_memory


@pytest.mark.parametrize(
    ("gigabytes", "share", "expected"),
    [(140, 0.05, 0.05), (140, 1.0, 1.0), (140, 2.0, 1.0), (8, 0.05, 2**30 / 8e9), (0.5, 0.05, 1.0)],
)
def test_the_share_counts_but_1_gibibyte_is_the_least(
    gigabytes: float, share: float, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    fractions: list[float] = []
    about = SimpleNamespace(total_memory=int(gigabytes * 1e9))
    fakes = {"is_available": lambda: True, "get_device_properties": lambda _: about}
    for name, fake in {**fakes, "set_per_process_memory_fraction": fractions.append}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    limit_memory(share)
    assert fractions == [pytest.approx(expected)]


def test_without_a_gpu_nothing_is_set() -> None:
    """Where Ray claims a GPU that torch does not find, the work itself fails, with a message of its own."""
    if not torch.cuda.is_available():
        limit_memory(0.05)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, of which there is none")
def test_more_than_the_share_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluations, "MEMORY", 0)
    whole = torch.cuda.get_device_properties(0).total_memory
    try:
        limit_memory(0.02)
        torch.empty(int(0.01 * whole), dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(int(0.03 * whole), dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
