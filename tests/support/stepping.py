"""Helpers for tests of central training's engines."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from hypothesis import strategies as st

from flsim.data.corpus import Split
from flsim.data.records import Layout, Records, batch
from flsim.models.architectures import ModelHParams
from flsim.training.central import CentralHParams, CentralTraining, init, train_central
from flsim.training.central.training import EngineName
from flsim.training.update import State

LAYOUT = Layout(12, record_words=6)
SIZES = ModelHParams(embedding=3, units=5)

records_strategy = st.lists(st.lists(st.integers(1, 9), max_size=6), min_size=1, max_size=9)
hparams_strategy = st.builds(
    CentralHParams,
    batch_size=st.integers(1, 5),
    optimizer=st.sampled_from(("sgd", "momentum", "adam", "rmsprop")),
    learning_rate=st.sampled_from((0.01, 0.2)),
    steps=st.just(7),
    tuned_at=st.none() | st.just(2),
    schedule=st.sampled_from(("constant", "linear", "cosine")),
    warmup=st.sampled_from((0, 3)),
    gradient_clip=st.none() | st.sampled_from((0.01, 0.3, 100.0)),
    weight_decay=st.sampled_from((0.0, 0.1)),
    dropout=st.sampled_from((0.0, 0.4)),
)


def source(records: list[list[int]]) -> Split:
    flat = Records.from_lists(records)
    return Split(LAYOUT, flat.tokens, flat.offsets, np.array([0, len(records)]), Path("nowhere"))


def batch_of(records: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    read = batch(Records.from_lists(records), np.arange(len(records)), LAYOUT)
    return torch.from_numpy(read.inputs), torch.from_numpy(read.targets)


def start(model: ModelHParams = SIZES) -> State:
    state = init(LAYOUT.vocabulary_size, model, 0)
    return replace(state, params={name: value.double() for name, value in state.params.items()})


def training_of(records: list[list[int]], hparams: CentralHParams, engine: EngineName = "fused") -> CentralTraining:
    return CentralTraining(source(records), hparams, 0, engine=engine)


def trained(records: list[list[int]], hparams: CentralHParams, engine: EngineName, until: int = 7) -> State:
    ((state, _),) = train_central(start(), training_of(records, hparams, engine), until)
    return state


def tensors(state: State) -> dict[str, torch.Tensor]:
    moments = {f"{slot}/{name}": value for slot, tensors in state.moments.items() for name, value in tensors.items()}
    return state.params | moments


def same(one: State, other: State) -> bool:
    """Return whether two states are equal, bit for bit."""
    ours, theirs = tensors(one), tensors(other)
    return (one.round, one.ledger, ours.keys()) == (other.round, other.ledger, theirs.keys()) and all(
        torch.equal(value, theirs[name]) for name, value in ours.items()
    )
