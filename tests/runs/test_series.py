"""What a run is called, and which runs differ in nothing but a seed."""

from pathlib import Path

from helpers import Experiment

from flsim.canaries.in_corpus import plant_corpus
from flsim.data.corpus import Corpus
from flsim.defences import DeduplicationHParams, deduplicate
from flsim.runs.config import load
from flsim.runs.folder import Run


def test_a_defence_is_in_the_name_and_in_the_series_and_a_seed_is_not(experiment: Experiment) -> None:
    folder = experiment.folder
    settings = load(experiment.config)

    def run(name: str, corpus: Path, seed: int = 0) -> Run:
        return Run.create(load(experiment.config, [f"data.corpus='{corpus}'", f"seed={seed}"]), folder / name)

    corpus = Corpus.open(folder / "corpus")
    planted = [plant_corpus(corpus, folder / f"planted{seed}", settings.canaries, seed) for seed in (0, 3)]
    deduplicated = [
        deduplicate(each, folder / f"deduplicated{seed}", DeduplicationHParams()) for seed, each in enumerate(planted)
    ]
    found = [each.manifest["parameters"]["steps"][-1]["planted"] for each in deduplicated]
    assert found[0] != found[1]  # what a step found is of its seed
    near = deduplicate(planted[0], folder / "near", DeduplicationHParams(near=0.8))
    lazily, by_hand = run("a", corpus.path), run("b", planted[0].path)
    first, second = (run(f"c{seed}", each.path, seed) for seed, each in enumerate(deduplicated))
    other = run("d", near.path)
    assert lazily.setting == by_hand.setting == settings.setting
    assert lazily.series == by_hand.series
    assert first.setting == second.setting == f"{settings.setting}, deduplicated"
    assert other.setting == f"{settings.setting}, deduplicated at 0.8"
    assert first.series == second.series
    assert len({lazily.series, first.series, other.series}) == 3
