"""The refusal of runs of a sweep that no machine could train, before the sweep has a folder."""

from collections.abc import Iterable
from pathlib import Path

from flsim.base.errors import InputError
from flsim.data.corpus import Corpus, Split
from flsim.data.synthetic import SyntheticHParams
from flsim.runs.foresight import refuse_impossible, refuse_impossible_in
from flsim.sweeps.definition import Planned, Tier
from flsim.sweeps.folder import makes_corpus


def refuse_impossible_runs(
    planned: Iterable[Planned], corpus: Corpus | SyntheticHParams | Split, is_trained_here: bool = True
) -> None:
    """Refuse runs that could not be trained or measured, as `flsim.runs.foresight.refuse_impossible` does.

    Args:
        planned: the runs.
        corpus: their corpus, or the settings of the one that is yet to be made, or users that stand for it.
        is_trained_here: whether the memory of this machine bounds them.

    Raises:
        InputError: a run is impossible; the message names it.
    """
    for run in planned:
        try:
            if isinstance(corpus, Corpus):
                refuse_impossible_in(run.config, corpus, is_trained_here)
            elif isinstance(corpus, Split):
                refuse_impossible(run.config, corpus.layout, corpus.records, is_trained_here)
            else:
                refuse_impossible(run.config, corpus.token_layout, corpus.most_records, is_trained_here)
        except InputError as error:
            raise InputError(f"{run.name}: {error}") from error


def corpus_or_its_settings(tier: Tier, path: Path | str, folder: Path) -> Corpus | SyntheticHParams:
    """Return the corpus of a tier, or the settings of the one that its sweep will make; see `open_corpus`.

    Raises:
        InputError: the corpus neither exists nor is to be made.
    """
    if makes_corpus(tier, path, folder) and tier.corpus.synthetic is not None:
        return tier.corpus.synthetic
    return Corpus.open(path)
