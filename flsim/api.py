"""The objects of the public names in `flsim.__all__`; `flsim` loads this module at their first use."""

import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

from flsim.algorithms.server_optimizers import ServerOptimizerHParams as ServerOptimizer
from flsim.attacks.audit.audit import audit, audit_simulation
from flsim.attacks.extraction.extract import Extraction, extract
from flsim.attacks.extraction.personal import extract_personal_data
from flsim.attacks.forgetting.measure import Forgetting, measure_forgetting
from flsim.attacks.membership.inference import ElsewhereHParams as Elsewhere
from flsim.attacks.membership.inference import infer_membership
from flsim.attacks.membership.shadows import infer_by_shadows, infer_users
from flsim.attacks.reveal.reveal import Revealed, reveal
from flsim.base.errors import Diverged, InputError, RunFailed, as_list, at_least_one, not_negative
from flsim.canaries.spec import CanaryHParams as Canaries
from flsim.data.corpus import Corpus
from flsim.data.importing.gather import ImportHParams as ImportSettings
from flsim.data.importing.tasks import import_corpus
from flsim.data.stores import located
from flsim.data.synthetic import SyntheticHParams, make_synthetic
from flsim.models.architectures import ModelHParams as Model
from flsim.models.architectures import restore
from flsim.models.language_model import LanguageModel
from flsim.models.language_model import LoraHParams as Lora
from flsim.privacy.ledger import AuditHParams as CanaryUsers
from flsim.privacy.ledger import PrivacyHParams as Privacy
from flsim.results.frames import frames
from flsim.results.rows import frame, read_run
from flsim.results.sweeps import expanded, read_shown
from flsim.results.tables import memorization_table
from flsim.runs import recovery
from flsim.runs.config import Config, load
from flsim.runs.evaluate import EvaluationHParams, from_forward
from flsim.runs.evaluate import audit as measure_any_model
from flsim.runs.evaluate import evaluate as measure_our_model
from flsim.runs.folder import Run, evaluate_where_writable, load_model, newest_checkpoint
from flsim.runs.recovery import discard
from flsim.runs.simulation import Central, FedAvg, Planted, epsilon, plant, refuse_impossible, simulate
from flsim.runs.sweeps import definition, folder
from flsim.training.central import CentralHParams as CentralSGD
from flsim.training.own_model import settled
from flsim.training.update import LocalHParams as LocalSGD
from flsim.training.update import State
from flsim.training.update import threads as threads_of_torch

if TYPE_CHECKING:
    from flsim.results.differences import Comparison


def open_corpus(path: Path | str, verify: bool = True) -> Corpus:
    """Open a corpus that `flsim data` made, or fetch one from an object store.

    Args:
        path: the corpus' folder, or a URI such as ``s3://bucket/corpus``.
        verify: whether to read every file again and compare it with the digest in the manifest.

    Returns:
        The corpus. Its files are memory-mapped, so an open corpus needs little memory.

    Raises:
        InputError: the path is not a corpus, or a file is missing or changed.

    Examples:
        >>> corpus = flsim.open_corpus("corpora/demo")                         # doctest: +SKIP
    """
    return Corpus.open(path, verify=verify)


def make_corpus(out: Path | str, seed: int = 0, **options: Any) -> Corpus:
    """Write a corpus of random text, like `flsim data synthetic`; it is a function of these arguments.

    Args:
        out: a new folder.
        seed: seed of everything that is drawn.
        options: settings of `flsim.data.synthetic.SyntheticHParams`, such as ``users=400``.

    Raises:
        InputError: `out` exists, or an option is wrong.

    Examples:
        >>> corpus = flsim.make_corpus("corpora/demo", seed=1, users=400, vocabulary_size=600)     # doctest: +SKIP
    """
    not_negative(seed=seed)
    return make_synthetic(Path(out), SyntheticHParams(**options), seed)


def open_run(path: Path | str) -> Run:
    """Open a run folder.

    Args:
        path: the folder.

    Returns:
        The run, with its settings, rounds and checkpoints.

    Raises:
        InputError: the path is not a run folder.

    Examples:
        >>> flsim.open_run("runs/demo").setting                                # doctest: +SKIP
    """
    return Run.open(Path(path))


def run(
    config: Config | Path | str,
    out: Path | str,
    *,
    overrides: Iterable[str] = (),
    resume: bool = False,
    retrain_lost: bool = False,
    begin_from: Path | str | None = None,
    address: str | None = None,
    cpus: int | None = None,
    head: str | None = None,
    in_process: bool = False,
) -> Run:
    """Train a run on Ray and evaluate its checkpoints at the same time, like `flsim run`.

    Args:
        config: the settings, or a TOML file of settings.
        out: the run folder; it must be new, unless `resume` is set.
        overrides: changes of the settings in the file, as ``"section.key=value"``; relative paths in them are relative
            to the working directory.
        resume: whether to continue the run in `out` from its newest valid checkpoint.
        retrain_lost: with `resume`, whether to train the rounds again that are missing in the log.
        begin_from: a run of the other `canaries.arm`, whose rounds before the first window are copied.
        address: address of a running Ray cluster, such as "auto"; by default a local cluster is started.
        cpus: cores of the local cluster, or of the head; all by default.
        head: "HOST:PORT" of this machine, to start a Ray head that other machines can join.
        in_process: whether to train in this process, without Ray, each checkpoint evaluated before training continues.

    Returns:
        The completed run.

    Raises:
        InputError: a setting or an argument is wrong; raised before training.
        Diverged: values are not finite; the message names the round and the last good checkpoint.
        Interrupted: SIGTERM or Ctrl-C ended the run; the same call with `resume` continues it.
        RunFailed: training or an evaluation failed; the same call with `resume` continues the run.

    Examples:
        >>> run = flsim.run("paper.toml", "runs/paper", overrides=["training.rounds=20"])          # doctest: +SKIP
    """
    from server.launch import train

    changes, path = as_list("overrides", overrides), Path(out)
    settings = config if isinstance(config, Config) else load(Path(config), changes)
    if retrain_lost and not resume:
        raise InputError("--retrain-lost: continues a run; add --resume")
    opened = Run.reopen(settings, path) if resume else Run.create(settings, path)
    try:
        if begin_from is not None:
            opened = recovery.begin_from(opened, Run.open(Path(begin_from)))
        train(opened, address, cpus, head, retrain_lost, in_process)
    except InputError:  # there is no cluster, or no cluster that is large enough
        if not resume:
            discard(opened)
        raise
    return Run.open(path)  # with the settings that were chosen at the start of training


def sweep(
    file: Path | str,
    out: Path | str,
    *,
    tier: str = "smoke",
    seeds: Sequence[int] | None = None,
    only: Iterable[str] = (),
    corpus: Path | str | None = None,
    overrides: Iterable[str] = (),
    address: str | None = None,
    at_once: int | None = None,
) -> Path:
    """Train all runs of a sweep file on Ray, like `flsim sweep`; the same call continues an interrupted sweep.

    Args:
        file: the TOML file.
        out: the sweep folder.
        tier: a tier of the file.
        seeds: seeds of the runs, such as ``range(5)``; by default the tier's.
        only: grids of the file to train; all by default.
        corpus: folder or URI of the corpus; by default the one that the file names.
        overrides: changes of the runs' settings, as in `run`.
        address: address of a running Ray cluster, such as "auto"; by default a local cluster is started.
        at_once: most runs to train at the same time; by default as many as fit.

    Returns:
        The sweep folder, for `table`, `frames`, `compare`, `plot` and `write_report`.

    Raises:
        InputError: a setting or an argument is wrong; raised before training.
        Interrupted: SIGTERM or Ctrl-C ended the sweep.
        RunFailed: runs failed, and all others are complete; the same call tries them again.

    Examples:
        >>> folder = flsim.sweep("my-sweep.toml", "runs/my-sweep", seeds=range(5))                 # doctest: +SKIP
    """
    from server.sweep import sweep as train

    if at_once is not None:
        at_least_one(at_once=at_once)
    if seeds is not None and not isinstance(seeds, range):  # a range can be too long for a list
        seeds = as_list("seeds", seeds)
    file, out, changes = Path(file), Path(out).absolute(), as_list("overrides", overrides)
    planning = definition.load(file)
    at = definition.tier_of(planning, tier, str(file))
    opened = folder.SweepFolder(out)
    path = folder.corpus_of(at, file, out) if corpus is None else located(str(corpus))
    planned = definition.planned_runs(planning, at, path, str(file), seeds, as_list("only", only), changes)
    tuned = definition.tuned_of(planning, at, str(file))
    if tuned and path != out / folder.CORPUS:
        tuned.refuse_corpus(Corpus.open(path).digest, path)  # this check precedes all writes
    # Runs that have started were checked before, possibly on a machine with more memory.
    new = [entry for entry in planned if not opened.run(entry.name).exists()]
    folder.refuse_impossible_runs(new, folder.corpus_or_its_settings(at, path, out), is_trained_here=address is None)
    with opened.hold_lock():
        data = folder.open_corpus(at, path, out)
        if tuned:
            tuned.refuse_corpus(data.digest, path)
        program = Path(sys.argv[0]).name.replace("__main__.py", "flsim")
        shared = folder.shared_settings(planning, at, changes, data.digest, tuned)
        opened.refuse_shorter(planned, data.split("train"))
        opened.write(file, planning, tier, planned, shlex.join([program, *sys.argv[1:]]), tuned, shared)
        failed = train(opened, planned, data.split("train"), address, at_once, at.whole_cluster)
    if failed:
        name, why = next(iter(failed.items()))
        raise RunFailed(
            f"{len(failed)} of {len(planned)} runs failed, the first {name}: {why}; read {opened.log(name)}, and "
            "repeat the command to try again"
        )
    return out


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
    """Measure which planted canaries a model memorized, and the utility of the model on the corpus' test users.

    Args:
        model: one of three kinds. A state of `simulate` needs its `architecture`. A checkpoint's file (.safetensors),
            or the newest checkpoint of a run folder, is measured with the settings of its run, and its rows are also
            stored in the run folder. Any other model is an object that implements
            `flsim.models.language_model.LanguageModel`, or ``path/to/model.py:factory``.
        planted: the users and canaries; omitted for a checkpoint, which uses those of its run.
        architecture: the model settings that a state was trained with.
        seed: seed of the references R and of the choice of test users; ignored for a checkpoint.
        device: torch device, such as "cuda".
        threads: torch threads; the default of 1 gives the same bits as a run's evaluators.
        settings: fields of `flsim.runs.evaluate.EvaluationHParams`, such as ``references=20_000``.

    Returns:
        One row per measurement, with columns run, round, metric, canary and value; see `flsim.results.rows.Row`.

    Raises:
        InputError: an argument is missing or does not fit, or the model does not implement the interface.
        Diverged: the model's parameters are not finite.

    Examples:
        >>> rows = flsim.evaluate(state, users, flsim.Model(32, 64), references=20_000)            # doctest: +SKIP
    """
    refuse_impossible(seed, threads, device)
    if isinstance(model, Path | str) and Path(model).is_dir():
        model = newest_checkpoint(Run.open(Path(model)).path)
    if isinstance(model, Path | str) and str(model).endswith(".safetensors"):
        if planted is not None or architecture is not None:
            raise InputError(
                f"{model}: a checkpoint uses the canaries and the model of its run; remove these arguments"
            )
        path = Path(model)
        with threads_of_torch(threads):
            return frame(evaluate_where_writable(path.resolve().parent.parent, path, device, **settings))
    if not isinstance(planted, Planted):
        raise InputError("evaluate: pass the result of `flsim.plant`, or name a run or a checkpoint (.safetensors)")
    how, test = EvaluationHParams(**settings), planted.corpus.test_users
    if isinstance(model, State):
        if not isinstance(architecture, Model):
            raise InputError(
                "evaluate: a state does not contain its model; pass the flsim.Model that the state was trained with"
            )
        architecture = settled(architecture, planted.corpus)
        network = restore(model.params, architecture, planted.corpus.layout.vocabulary_size).to(device)
        with threads_of_torch(threads):
            return frame(measure_our_model(network, planted.canaries, test, how, seed, "simulation", model.round))
    name = model if isinstance(model, str) else type(model).__name__
    other = load_model(str(model)) if isinstance(model, Path | str) else model
    layout, on = planted.corpus.layout, torch.device(device)
    with threads_of_torch(threads):
        return frame(measure_any_model(other, planted.canaries, layout, how, seed, str(name), on, test))


def table(*runs: Path | str, round: int | None = None, epoch: float | None = None) -> pd.DataFrame:
    """Return the memorization table of runs, with the columns of `flsim.results.tables`.

    Args:
        runs: run folders and folders of sweeps; or folders that hold some, such as the folder of a demo.
        round: the evaluated round to show; by default the last round of each run.
        epoch: the number of passes over all records to show, instead of `round`.

    Raises:
        InputError: a folder is not a run, a run is damaged, or no run was evaluated at that round or epoch.

    Examples:
        >>> flsim.table("runs/iid", "runs/non-iid", round=100)                 # doctest: +SKIP
    """
    return memorization_table(list(read_shown(expanded(runs)).values()), round, epoch)


def plot(*runs: Path | str, out: Path | str, over_seeds: bool | None = None) -> None:
    """Draw RS, BS, mean exposure and perplexity over epochs into a .png, .svg or .pdf file.

    Args:
        runs: run folders and folders of sweeps; or folders that hold some, such as the folder of a demo.
        out: the file; an existing file is replaced.
        over_seeds: whether runs that differ only in their seed share one curve; None if a setting has two seeds.

    Raises:
        InputError: a folder is not a run, or `out` has another suffix.

    Examples:
        >>> flsim.plot("runs/iid", "runs/non-iid", out="rounds.svg")           # doctest: +SKIP
    """
    from flsim.show.plots import plot as write_plot  # matplotlib, which no other function of this module needs

    write_plot(list(read_shown(expanded(runs)).values()), Path(out), over_seeds)


def write_report(*runs: Path | str, out: Path | str) -> None:
    """Write one HTML file that reports on runs or a sweep.

    Args:
        runs: run folders and folders of sweeps.
        out: the file; an existing file is replaced.

    Raises:
        InputError: a folder is not a run, or there are no runs in it.

    Examples:
        >>> flsim.write_report("runs/iid", "runs/non-iid", out="report.html")  # doctest: +SKIP
    """
    from flsim.report.page import write_report as write_page  # matplotlib

    write_page(expanded(runs), Path(out))


def compare(
    a: Path | str, b: Path | str | None = None, round: int | None = None, epoch: float | None = None
) -> "Comparison":
    """Compare two runs, the partitions of a sweep, or two sweeps, like `flsim compare`.

    Two runs are compared over the same canaries, with tests over the canaries. Sweeps have rows for each pair of
    settings, with tests over seeds.

    Args:
        a: a run folder, or the folder of a sweep.
        b: another folder of the same kind; for IID minus non-IID within one sweep, None.
        round: the evaluated round to compare; by default the last round of each run.
        epoch: the number of passes over all records for the comparison, instead of `round`.

    Raises:
        InputError: a folder is neither a run nor a sweep, the runs have different canaries, or no pair is complete.

    Examples:
        >>> flsim.compare("runs/iid", "runs/non-iid")                          # doctest: +SKIP
    """
    from flsim.results.differences import compare_folders  # scipy

    return compare_folders(Path(a), None if b is None else Path(b), round, epoch)
