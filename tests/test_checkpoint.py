"""Checkpoints are whole or absent, say what they belong to, and are refused where they do not."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flsim import federated
from flsim.checkpoint import Provenance, checkpoint_name, latest, load, round_of, save
from flsim.errors import InputError
from flsim.federated import ServerState
from flsim.model.cifg import ModelHParams
from flsim.privacy.ledger import Entry, Ledger

PROVENANCE = Provenance("run", "c0ffee", "beef", vocabulary_size=12, embedding=3, units=5)


def state_of(round_: int = 0) -> ServerState:
    return ServerState(round_, federated.init(12, ModelHParams(3, 5), seed=0).params)


def test_a_state_reads_back_bit_for_bit(tmp_path: Path) -> None:
    state = state_of(7)
    path = save(tmp_path, state, PROVENANCE)
    read, provenance = load(path)
    assert provenance == PROVENANCE
    assert read.round == 7
    assert all(torch.equal(read.params[name], value) for name, value in state.params.items())
    assert [path.name for path in tmp_path.iterdir()] == ["round-000007.safetensors"]


@pytest.mark.parametrize("clip", [None, 0.2, 1 / 3, 5e-324])
def test_moments_clip_and_ledger_read_back_bit_for_bit(tmp_path: Path, clip: float | None) -> None:
    """So that a resumed run neither spends twice nor skips."""
    moments = {of: {n: value / 3 for n, value in state_of().params.items()} for of in ("m", "v")}
    ledger = Ledger.zero().record(Entry("fixed-size", 392_000, 5_000, 1 / 3, 7)).record(Entry("poisson", 9, 1, 2.0, 1))
    state = replace(state_of(8), moments=moments, clip=clip, ledger=ledger)
    read, _ = load(save(tmp_path, state, PROVENANCE))
    assert (read.round, read.clip, read.ledger) == (8, clip, ledger)
    assert read.moments.keys() == moments.keys()
    for moment, tensors in moments.items():
        assert read.moments[moment].keys() == tensors.keys()
        assert all(torch.equal(read.moments[moment][name], value) for name, value in tensors.items())
    assert all(torch.equal(read.params[name], value) for name, value in state.params.items())


def test_moments_of_other_sizes_than_the_model_are_refused(tmp_path: Path) -> None:
    lacking = {name: value for name, value in state_of().params.items() if name != "gate_bias"}
    with pytest.raises(InputError, match="its tensors are not those of the model that it names"):
        load(save(tmp_path, replace(state_of(), moments={"m": lacking}), PROVENANCE))


def test_the_latest_is_that_of_most_rounds(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    for round_ in (9, 100, 11):
        save(tmp_path, state_of(round_), PROVENANCE)
    newest = latest(tmp_path)
    assert newest is not None
    assert newest.name == checkpoint_name(100)
    assert round_of(newest) == 100


@pytest.mark.parametrize("keep", [0, 1, 8, 100, 0.5, -1])
def test_a_cut_file_is_refused(tmp_path: Path, keep: float) -> None:
    path = save(tmp_path, state_of(), PROVENANCE)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep * len(whole)) if isinstance(keep, float) else keep])
    with pytest.raises(InputError, match="not a checkpoint of flsim, or damaged"):
        load(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "round-000001.safetensors"
    other.write_text("hello")
    for path in (other, tmp_path / "missing.safetensors", tmp_path):
        with pytest.raises(InputError, match="not a checkpoint"):
            load(path)


def test_tensors_of_other_sizes_than_named_are_refused(tmp_path: Path) -> None:
    lying = Provenance("run", "c0ffee", "beef", vocabulary_size=12, embedding=4, units=5)
    with pytest.raises(InputError, match="its tensors are not those of the model that it names"):
        load(save(tmp_path, state_of(), lying))
