"""Tests measure the memory that ranks need on a GPU."""

import pytest
import torch

from flsim.data.records import Layout
from flsim.measures.memorization import score
from flsim.measures.memorization.score import RandomSampler, references
from flsim.models.architectures import CIFGLanguageModel, ModelHParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, of which there is none")


def test_a_step_on_a_gpu_stays_within_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit holds for a model that memorized nothing, because most references are then read to their end."""
    layout, floats = Layout(10_000), 2**24
    monkeypatch.setattr(score, "GPU_FLOATS", floats)
    model = CIFGLanguageModel(layout.vocabulary_size, ModelHParams()).initialize(0).cuda()
    among = references(0, 400_000, 4, layout).cuda()
    sampler = RandomSampler(model, among)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    sampler.rank(torch.tensor([layout.bos, 5]).cuda(), torch.tensor([6, 7, 8, 9]).cuda())
    own = 6 * among.numel() * among.element_size()  # copies of references for sorting and selection
    assert torch.cuda.max_memory_allocated() - before <= score.BYTES * floats + own
