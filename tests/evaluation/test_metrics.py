"""Tests compare the measures of `evaluation.also` with the scores of the complete space."""

import math
from itertools import product

import pytest
import torch
from networks import loud_network
from torch import Tensor

from flsim.canaries.spec import Canary
from flsim.data.records import Layout
from flsim.measures.built_in import ALSO, sample_of
from flsim.measures.memorization.exposure import exposure
from flsim.measures.memorization.score import log_perplexity, references
from flsim.models.architectures import CIFGLanguageModel
from flsim.runs.evaluate import EvaluationHParams, measure_canaries

LAYOUT, SEED, COUNT = Layout(12), 3, 400  # eight words, 512 continuations of three
EVERYTHING = torch.tensor(list(product(range(1, 9), repeat=3)))


@pytest.fixture(scope="module")
def model() -> CIFGLanguageModel:
    return loud_network(12, 2)


@pytest.fixture(scope="module")
def canaries(model: CIFGLanguageModel) -> list[Canary]:
    """Return an arbitrary canary, and one that is the likeliest continuation of word 5."""
    likeliest = EVERYTHING[log_perplexity(model, torch.tensor((LAYOUT.bos, 5)), EVERYTHING).argmin()].tolist()
    return [Canary("c0", (1, 2, 3, 4), 0.1, 1.0), Canary("c1", (5, *likeliest), 0.1, 1.0)]


@pytest.fixture(scope="module")
def measured(model: CIFGLanguageModel, canaries: list[Canary]) -> dict[str, dict[str, float]]:
    hparams = EvaluationHParams(references=COUNT, also=tuple(ALSO), samples=4_000, nodes=10_000)
    return dict(measure_canaries(model, canaries, LAYOUT, hparams, SEED))


def scores(model: CIFGLanguageModel, canary: Canary) -> tuple[Tensor, float]:
    """Return the scores of all continuations of a canary's first word, and the canary's score."""
    prefix = torch.tensor((LAYOUT.bos, canary.tokens[0]))
    found = log_perplexity(model, prefix, EVERYTHING)
    return found, float(found[(torch.tensor(canary.tokens[1:]) == EVERYTHING).all(1)])


@pytest.mark.parametrize("which", [0, 1])
def test_exposure_in_the_space_equals_enumeration(
    model: CIFGLanguageModel, measured: dict[str, dict[str, float]], canaries: list[Canary], which: int
) -> None:
    canary = canaries[which]
    among, own = scores(model, canary)
    exact = -math.log2(float((among <= own + 1e-9).double().mean()))
    found = measured[canary.id]
    for name in ("space_exposure", "space_exposure_low", "space_exposure_high"):
        assert found[name] == pytest.approx(exact, abs=1e-9)
    assert found["space_rank"] == int((among <= own + 1e-9).sum())


def test_space_nodes_count_beginnings_that_cost_no_more_than_the_canary(
    model: CIFGLanguageModel, measured: dict[str, dict[str, float]], canaries: list[Canary]
) -> None:
    """The expected count uses complete scores of all beginnings. The shortest-path search reads at least as many."""
    for canary in canaries:
        prefix, (_, own) = torch.tensor((LAYOUT.bos, canary.tokens[0])), scores(model, canary)
        nodes = 1
        for length in range(1, len(canary.tokens) - 1):
            beginnings = torch.tensor(list(product(range(1, 9), repeat=length)))
            nodes += int((log_perplexity(model, prefix, beginnings) <= own + 1e-9).sum())
        assert measured[canary.id]["space_nodes"] == nodes
    assert measured["c1"]["path_nodes"] >= measured["c1"]["space_nodes"]


@pytest.mark.parametrize("which", [0, 1])
def test_the_shortest_path_and_hits_of_samples(
    model: CIFGLanguageModel, measured: dict[str, dict[str, float]], canaries: list[Canary], which: int
) -> None:
    """Hits of samples are binomial, and are off by more than five standard deviations about once in a million."""
    canary = canaries[which]
    among, own = scores(model, canary)
    found = measured[canary.id]
    assert found["path"] == (own == float(among.min()))
    assert found["path_nodes"] >= 3
    share = math.exp(-own) / float(among.neg().exp().sum())  # samples have only words
    deviation = math.sqrt(4_000 * share * (1 - share))
    assert found["generation_hits"] == pytest.approx(4_000 * share, abs=5 * deviation)


def test_exposures_in_contexts_follow_from_ranks_of_records(
    model: CIFGLanguageModel, measured: dict[str, dict[str, float]], canaries: list[Canary]
) -> None:
    drawn = references(SEED, COUNT, 3, LAYOUT)
    for canary, (prefix, suffix) in product(canaries, product((0, 1), (0, 1))):
        known = torch.tensor((LAYOUT.bos, *canary.tokens[1 - prefix : 1]))
        end = drawn.new_full((COUNT, suffix), LAYOUT.eos)
        among = log_perplexity(model, known, torch.cat([drawn, end], 1))
        own = log_perplexity(model, known, torch.tensor([(*canary.tokens[1:], *[LAYOUT.eos] * suffix)]))
        rank = 1 + int((among <= own + 1e-9).sum())
        assert measured[canary.id][f"exposure prefix={prefix} suffix={suffix}"] == exposure(rank, COUNT)
    assert measured["c0"]["exposure prefix=1 suffix=0"] == measured["c0"]["exposure"]


@pytest.mark.parametrize(
    ("references", "used"), [(400, 400), (20_000, 20_000), (100_000, 100_000), (100_001, 50_001), (2_000_000, 100_000)]
)
def test_a_fit_uses_at_most_100_000_references(references: int, used: int) -> None:
    """The used references are spread from the first to the last; a CPU uses at most 100,000."""
    taken = sample_of(torch.arange(references))
    assert len(taken) == used
    assert int(taken[-1]) > references - 2 - references / used


def test_decisions_equal_those_of_ranks(model: CIFGLanguageModel, canaries: list[Canary]) -> None:
    hparams = [EvaluationHParams(COUNT, decide=decide) for decide in (False, True)]
    ranked, decided = (dict(measure_canaries(model, canaries, LAYOUT, one, SEED)) for one in hparams)
    for canary in canaries:
        kept = {name: value for name, value in ranked[canary.id].items() if name not in ("rank", "exposure")}
        assert decided[canary.id] == kept
