"""Three processes of a gloo group equal one; a resumed training equals one that went on; empty shares; refusals."""

import math
import pickle
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from smoothing import smooth_steps
from stepping import same, tensors
from torch.multiprocessing.spawn import spawn

from flsim.base.errors import Diverged, InputError
from flsim.base.rng import stream
from flsim.data.corpus import Split
from flsim.data.records import Records
from flsim.data.vocabulary import Layout
from flsim.models.hparams import ModelHParams
from flsim.privacy.mechanism import PrivacyHParams
from flsim.training.central import CentralHParams, CentralTraining, Log, init, train_central
from flsim.training.central.distributed import DistributedEngine, shared
from flsim.training.central.distributed_stacked import DistributedStackedEngine
from flsim.training.central.engines import has_kernels
from flsim.training.central.records import Order
from flsim.training.central.task import EngineName
from flsim.training.central.training import train_chunks
from flsim.training.state import State

LAYOUT, SIZES = Layout(12, record_words=6), ModelHParams(embedding=3, units=5)
WORKERS, STEPS = 3, 9


@dataclass(frozen=True)
class Case:
    """A training; one by stacked products takes the engine of GPUs, with its kernels in PyTorch."""

    hparams: CentralHParams
    engine: EngineName = "fused"
    order: Order = "iid"
    dtype: torch.dtype = torch.float64
    model: ModelHParams = SIZES
    is_stacked: bool = False

    @property
    def training(self) -> CentralTraining:
        """11 records of 0 to 6 words, so the last batch of an epoch of batches of 5 has one, and two shares none."""
        rng = stream(0, "test records")
        flat = Records.from_lists([rng.integers(1, 10, rng.integers(7)).tolist() for _ in range(11)])
        source = Split(LAYOUT, flat.tokens, flat.offsets, np.array([0, 11]), Path("nowhere"))
        return CentralTraining(source, self.hparams, 0, self.order, engine=self.engine, model=self.model)

    @property
    def start(self) -> State:
        state = init(LAYOUT.vocabulary_size, self.model, 0)
        return replace(state, params={name: value.to(self.dtype) for name, value in state.params.items()})


ALL = CentralHParams(
    batch_size=5,
    learning_rate=0.2,
    schedule="cosine",
    warmup=2,
    steps=9,
    gradient_clip=0.3,
    weight_decay=0.1,
    dropout=0.4,
)
ENGINES: tuple[EngineName, ...] = ("fused", "autograd")
KINDS: tuple[tuple[str, Order, CentralHParams], ...] = (
    ("plain", "sequence", CentralHParams(batch_size=5, learning_rate=0.2, steps=9)),
    ("one-by-one", "iid", CentralHParams(batch_size=1, learning_rate=0.2, steps=9)),
    ("momentum", "iid", replace(ALL, optimizer="momentum")),
    ("adam", "iid", replace(ALL, optimizer="adam")),
    ("rmsprop", "sequence", replace(ALL, optimizer="rmsprop", gradient_clip=None)),
)
CASES = {f"{name}-{engine}": Case(hparams, engine, order) for engine in ENGINES for name, order, hparams in KINDS}
CASES |= {f"{name}-stacked": Case(hparams, order=order, is_stacked=True) for name, order, hparams in KINDS}
CASES["lstm-fused"] = Case(replace(ALL, optimizer="rmsprop"), model=ModelHParams(3, 5, "lstm", layers=2))
FLOAT32 = {f"float32-{engine}": Case(ALL, engine, dtype=torch.float32) for engine in ENGINES}
FLOAT32["float32-stacked"] = Case(ALL, dtype=torch.float32, is_stacked=True)
WILD = Case(CentralHParams(batch_size=5, learning_rate=1e300, steps=9))


@dataclass(frozen=True)
class Outcome:
    state: State
    log: Log
    resumed: State


def trained(case: Case, start: State, until: int, stop: int = 0) -> tuple[dict[int, State], Log]:
    """States by step, of this process."""
    engine_of = DistributedStackedEngine if case.is_stacked else DistributedEngine
    engine, states, log = engine_of(case.training, start), {}, Log()
    for step, new, state in train_chunks(start, case.training, until, lambda step: step == stop, engine):
        log = log.merge(new)
        if state is not None:
            states[step] = state
    return states, log


@smooth_steps()
def worker(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORKERS)
    found: dict[str, object] = {}
    for name, case in {**CASES, **FLOAT32}.items():
        states, log = trained(case, shared(case.start if rank == 0 else None), STEPS, stop=4)
        (resumed,) = trained(case, states[4], STEPS)[0].values()
        found[name] = Outcome(states[STEPS], log, resumed)
    try:
        trained(WILD, WILD.start, STEPS)
    except Diverged as error:
        found["wild"] = str(error)
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Outcome]]:
    """Of each process."""
    folder = tmp_path_factory.mktemp("group")
    spawn(worker, (folder,), nprocs=WORKERS)  # type: ignore[no-untyped-call]
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(WORKERS)]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@smooth_steps()
def test_three_processes_are_one(outcomes: list[dict[str, Outcome]], name: str) -> None:
    """float64, to 1e-10."""
    case, found = CASES[name], outcomes[0][name]
    ((alone, log),) = train_central(case.start, case.training, STEPS)
    ours, theirs = tensors(found.state), tensors(alone)
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=0, atol=1e-10)
    assert (found.log.tokens, found.log.records) == (log.tokens, log.records)
    assert math.isclose(found.log.loss, log.loss, rel_tol=1e-8)
    assert found.state.ledger == alone.ledger


@pytest.mark.parametrize("name", FLOAT32)
def test_three_processes_are_one_in_float32(outcomes: list[dict[str, Outcome]], name: str) -> None:
    """A step moves the weights by at most the rate, 0.2, times the clip, 0.3, plus decay, which both round alike.

    A sum of n terms loses at most n u of the sum of their sizes (Higham, 2002, section 4.2). A gradient sums over 30
    positions at most, its chain of 6 times 10 operations adds 60 u, and the clip halves nothing: 90 u in each of two
    trainings. The steps add up, and errors of early ones are carried on by a smooth loss, which at most doubles them.
    """
    case, u = FLOAT32[name], 2.0**-24
    ((alone, _),) = train_central(case.start, case.training, STEPS)
    ours, theirs = tensors(outcomes[0][name].state), tensors(alone)
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=4 * u, atol=2 * STEPS * 0.2 * 0.3 * 2 * 90 * u)


@pytest.mark.parametrize("name", [*CASES, *FLOAT32])
def test_processes_agree_and_a_resumed_training_equals_one_that_went_on(
    outcomes: list[dict[str, Outcome]], name: str
) -> None:
    """Bit for bit. Three shares are summed, so that the order of sums would show."""
    first = outcomes[0][name]
    for each in outcomes:
        assert same(each[name].state, first.state)
        assert same(each[name].resumed, first.state)
        assert each[name].log == first.log


def test_dp_sgd_and_low_precision_are_refused_before_there_is_a_group() -> None:
    training = CASES["plain-fused"].training
    private = replace(training, order="iid", privacy=PrivacyHParams("clip", clip=1.0))
    with pytest.raises(InputError, match=r"DP-SGD trains in one process; set system\.workers = 1"):
        DistributedEngine(private, WILD.start)
    with pytest.raises(InputError, match=r'training\.precision "bf16" is of one process'):
        DistributedEngine(replace(training, hparams=replace(training.hparams, precision="bf16")), WILD.start)


def test_gpus_have_kernels_for_the_cell_of_the_paper_and_not_for_others() -> None:
    assert has_kernels(CASES["adam-fused"].training)
    assert not has_kernels(CASES["lstm-fused"].training)


def test_divergence_is_the_same_everywhere(outcomes: list[dict[str, object]]) -> None:
    for each in outcomes:
        assert each["wild"] == outcomes[0]["wild"]
        assert str(each["wild"]).startswith("step 2: ")
