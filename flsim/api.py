"""The public names of `flsim`; `import flsim` loads this module when one of them is used."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

from flsim.algorithms.server_optimizers import ServerOptimizerHParams as ServerOptimizer
from flsim.base.errors import Diverged, InputError, RunFailed
from flsim.canaries.spec import CanaryHParams as Canaries
from flsim.data.corpus import Corpus
from flsim.data.importing.run import import_corpus
from flsim.data.importing.settings import ImportHParams as ImportSettings
from flsim.data.making import make_corpus as make_by_code
from flsim.evaluation.audit import audit as measure_any_model
from flsim.evaluation.evaluate import EvaluationHParams
from flsim.evaluation.evaluate import evaluate as measure_our_model
from flsim.evaluation.loading import load_model
from flsim.models.architectures import restore
from flsim.models.hparams import ModelHParams as Model
from flsim.models.language_model import LanguageModel
from flsim.privacy.mechanism import PrivacyHParams as Privacy
from flsim.results.frames import frames
from flsim.results.paths import expanded
from flsim.results.rows import frame
from flsim.results.store import read_run
from flsim.results.sweeps import read_shown
from flsim.results.tables import memorization_table
from flsim.runs.config import Config, load
from flsim.runs.folder import Run
from flsim.runs.locks import discard
from flsim.runs.measuring import evaluate_checkpoint
from flsim.simulation import Central, FedAvg, Planted, plant, simulate
from flsim.training.central import CentralHParams as CentralSGD
from flsim.training.hparams import LocalHParams as LocalSGD
from flsim.training.state import State
from flsim.training.threads import threads as threads_of_torch

if TYPE_CHECKING:
    from flsim.results.compare_runs import RunsCompared

__all__ = [
    "Canaries",
    "Central",
    "CentralSGD",
    "Corpus",
    "Diverged",
    "FedAvg",
    "ImportSettings",
    "InputError",
    "LocalSGD",
    "Model",
    "Planted",
    "Privacy",
    "Run",
    "RunFailed",
    "ServerOptimizer",
    "State",
    "compare",
    "evaluate",
    "frames",
    "import_corpus",
    "load_model",
    "make_corpus",
    "open_corpus",
    "open_run",
    "plant",
    "plot",
    "run",
    "simulate",
    "table",
    "write_report",
]


def open_corpus(path: Path | str, verify: bool = True) -> Corpus:
    """Open a corpus that `flsim data` made, or fetch one from an object store.

    Args:
        path: its folder, or a URI such as ``s3://bucket/corpus``.
        verify: whether every file is read again and compared with the digest that it was written with.

    Raises:
        InputError: not a corpus, or a file is missing or changed.
    """
    return Corpus.open(path, verify=verify)


def make_corpus(
    out: Path | str,
    seed: int = 0,
    *,
    maker: str = "synthetic",
    writing: Mapping[str, Any] | None = None,
    **options: Any,
) -> Corpus:
    """Write a corpus that code makes, as `flsim data make` does, as a function of the code and these arguments.

    Args:
        out: a new folder.
        seed: of everything that is drawn.
        maker: "synthetic", whose options are those of `flsim.data.synthetic.SyntheticHParams`, such as ``users=400``;
            or ``"path/to/file.py:NAME"``, a function that yields (user, sentences) or (user, sentences, split).
        writing: settings of `ImportSettings` for what a maker of one's own yields, such as
            ``{"vocabulary_size": 500}``.
        options: of the maker.

    Raises:
        InputError: `out` exists, an option is wrong, or a maker of one's own failed.
    """
    return make_by_code(maker, Path(out), seed, options, writing)


def open_run(path: Path | str) -> Run:
    """Open a run folder. Raises InputError where it is none."""
    return Run.open(Path(path))


def run(
    config: Config | Path | str,
    out: Path | str,
    *,
    overrides: Iterable[str] = (),
    resume: bool = False,
    retrain_lost: bool = False,
    address: str | None = None,
    cpus: int | None = None,
    head: str | None = None,
) -> Run:
    """Train a run on Ray and evaluate its checkpoints meanwhile, as `flsim run` does.

    Args:
        config: settings, or a TOML file with them.
        out: the run folder; new, unless `resume`.
        overrides: of a file's settings, as ``"section.key=value"``; relative paths in them are the working directory's.
        resume: whether to continue the run in `out` from its newest valid checkpoint.
        retrain_lost: with `resume`, whether to train rounds again that the log of rounds has lost.
        address: of a Ray cluster that runs already, such as "auto"; a local one is started where this is None.
        cpus: cores of the local cluster, or of the head; all where this is None.
        head: "HOST:PORT" of this machine, to start a Ray head there that other machines can join.

    Returns:
        The completed run.

    Raises:
        InputError: what can be known to be wrong before training.
        Diverged: values are not finite; names the round and the last good checkpoint.
        Interrupted: by SIGTERM or Ctrl-C; the same call with `resume` goes on.
        RunFailed: training or an evaluation failed; the same call with `resume` goes on.
    """
    from server.launch import train

    settings, path = config if isinstance(config, Config) else load(Path(config), overrides), Path(out)
    if retrain_lost and not resume:
        raise InputError("--retrain-lost: goes on with a run; give --resume too")
    opened = Run.reopen(settings, path) if resume else Run.create(settings, path)
    try:
        train(opened, address, cpus, head, retrain_lost)
    except InputError:  # no cluster there, or none large enough
        if not resume:
            discard(opened)
        raise
    return opened


def evaluate(
    model: State | LanguageModel | Path | str,
    planted: Planted | None = None,
    architecture: Model | None = None,
    *,
    seed: int = 0,
    device: str = "cpu",
    threads: int = 1,
    **settings: Any,
) -> pd.DataFrame:
    """Measure what a model memorized of the planted canaries, and its utility on the corpus' test users.

    Args:
        model: a state of `simulate`, with its `architecture`; a checkpoint's file, which is measured as its run's
            settings say, and whose rows are stored there too; or any other model: an object that starts and steps as
            `flsim.models.language_model.LanguageModel` asks, or ``path/to/model.py:factory``.
        planted: the users and canaries; not of a checkpoint, whose run knows them.
        architecture: of a state.
        seed: of the references R and of the test users that are chosen; not of a checkpoint.
        device: of torch.
        threads: of torch; one, as a run's evaluators have, gives the bits of their rows.
        settings: of `flsim.evaluation.evaluate.EvaluationHParams`, such as ``references=20_000``.

    Returns:
        A row per measurement with columns run, round, metric, canary and value; see `flsim.results.rows.Row`.

    Raises:
        InputError: an argument is missing or does not fit, or the model is not what it must be.
        Diverged: its parameters are not finite.
    """
    if isinstance(model, Path | str) and str(model).endswith(".safetensors"):
        if planted is not None or architecture is not None:
            raise InputError(f"{model}: a checkpoint's run knows what is planted, and the model; leave them out")
        path = Path(model)
        with threads_of_torch(threads):
            return frame(evaluate_checkpoint(path.resolve().parent.parent, path, device, **settings))
    if planted is None:
        raise InputError("evaluate: name what is planted, as `flsim.plant` returns it")
    how, test = EvaluationHParams(**settings), planted.corpus.split("test")
    if isinstance(model, State):
        if architecture is None:
            raise InputError("evaluate: a state does not know its model; give the one that it was trained with")
        network = restore(model.params, architecture, planted.corpus.layout.vocabulary_size).to(device)
        with threads_of_torch(threads):
            return frame(measure_our_model(network, planted.canaries, test, how, seed, "simulation", model.round))
    name = model if isinstance(model, str) else type(model).__name__
    other = load_model(str(model)) if isinstance(model, Path | str) else model
    layout = planted.corpus.layout
    with threads_of_torch(threads):
        return frame(
            measure_any_model(other, planted.canaries, layout, how, seed, str(name), torch.device(device), test)
        )


def table(*runs: Path | str, round: int | None = None, epoch: float | None = None) -> pd.DataFrame:
    """The memorization table of runs, with the columns of `flsim.results.tables`.

    Args:
        runs: run folders, and folders of sweeps; or folders that hold some, such as that of a demo.
        round: the evaluated round to show; default each run's last.
        epoch: in place of it, so many passes over all records.

    Raises:
        InputError: not runs, damaged ones, or none was evaluated then.
    """
    return memorization_table(list(read_shown(_paths(runs)).values()), round, epoch)


def plot(*runs: Path | str, out: Path | str, over_seeds: bool = False) -> None:
    """Draw RS, BS, mean exposure and perplexity over epochs into a .png, .svg or .pdf file.

    Args:
        runs: run folders, and folders of sweeps; or folders that hold some, such as that of a demo.
        out: the file; replaced if it is there.
        over_seeds: whether runs that differ in nothing but the seed are one curve.

    Raises:
        InputError: not runs, or another kind of file.
    """
    from flsim.results.plots import plot_rounds  # matplotlib, which nothing else here needs

    plot_rounds(list(read_shown(_paths(runs)).values()), Path(out), over_seeds)


def write_report(*runs: Path | str, out: Path | str) -> None:
    """Write one HTML file about runs or a sweep. Raises InputError where there are none."""
    from flsim.report.page import write_report as write_page  # matplotlib, too

    write_page(_paths(runs), Path(out))


def compare(a: Path | str, b: Path | str, round: int | None = None, epoch: float | None = None) -> "RunsCompared":
    """Compare two runs over the same canaries, at a round or after so many epochs; default each run's last evaluation.

    Raises:
        InputError: not runs, or runs over other canaries.
    """
    from flsim.results.compare_runs import compare_runs  # scipy

    return compare_runs(read_run(Path(a)), read_run(Path(b)), round, epoch)


def _paths(runs: Sequence[Path | str]) -> list[Path]:
    return expanded([Path(path) for path in runs])
