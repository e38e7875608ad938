"""Checkpoints are complete or absent, name what they belong to, and are refused if they are damaged or do not fit."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from flsim.algorithms import fedavg
from flsim.algorithms.checkpoint import Provenance, checkpoint_name, latest, load, round_of, save
from flsim.base.errors import InputError
from flsim.models.architectures import ModelHParams
from flsim.models.language_model import Params
from flsim.privacy.ledger import Entry, Ledger
from flsim.training.update import State

PROVENANCE = Provenance("c0ffee", "beef", vocabulary_size=12, model=ModelHParams(3, 5))


def state_of(round_: int = 0) -> State:
    return State(round_, fedavg.init(12, ModelHParams(3, 5), seed=0).params)


def assert_same(one: Params, other: Params) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], value) and one[name].dtype == value.dtype for name, value in other.items())


@pytest.mark.parametrize("clip", [None, 0.2, 1 / 3, 5e-324])
def test_a_state_reads_back_bit_for_bit(tmp_path: Path, clip: float | None) -> None:
    """Moments, clip and ledger are equal too; therefore, a resumed run neither spends privacy twice nor skips any."""
    moments = {of: {n: value / 3 for n, value in state_of().params.items()} for of in ("m", "v")}
    moments["step"] = {n: torch.tensor(3.0) for n in state_of().params}  # counts of torch's Adam have no shape
    ledger = Ledger().record(Entry("fixed-size", 392_000, 5_000, 1 / 3, 7)).record(Entry("poisson", 9, 1, 2.0, 1))
    state = replace(state_of(8), moments=moments, values={} if clip is None else {"clip": clip}, ledger=ledger)
    read, provenance = load(save(tmp_path, state, PROVENANCE))
    assert (read.round, read.clip, read.ledger, provenance) == (8, clip, ledger, PROVENANCE)
    assert read.moments.keys() == moments.keys()
    for moment, tensors in moments.items():
        assert_same(read.moments[moment], tensors)
    assert_same(read.params, state.params)
    assert [path.name for path in tmp_path.iterdir()] == ["round-000008.safetensors"]


def test_moments_of_other_sizes_than_the_model_are_refused(tmp_path: Path) -> None:
    lacking = {name: value for name, value in state_of().params.items() if name != "gate_bias"}
    shapeless = {name: torch.tensor(3.0) for name in state_of().params}
    for moments in ({"m": lacking}, {"m": shapeless}, {"step": state_of().params}):
        with pytest.raises(InputError, match="its tensors do not fit the model that it names"):
            load(save(tmp_path, replace(state_of(), moments=moments), PROVENANCE))


def test_the_latest_checkpoint_is_that_of_the_most_rounds(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    for round_ in (9, 100, 11):
        save(tmp_path, state_of(round_), PROVENANCE)
    newest = latest(tmp_path)
    assert newest is not None
    assert newest.name == checkpoint_name(100)
    assert round_of(newest) == 100


def test_a_file_that_is_cut_or_has_another_header_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, state_of(), PROVENANCE)
    whole = path.read_bytes()
    cut = [whole[:size] for size in (0, 1, 8, 100, len(whole) // 2, -1)]
    sizes = (0, 1, 2, 2**31, 2**63, 2**64 - 1)
    for content in (b"hello", *cut, *(size.to_bytes(8, "little") + whole[8:] for size in sizes)):
        path.write_bytes(content)
        with pytest.raises(InputError, match="not a checkpoint of flsim, or damaged"):
            load(path)
    for other in (tmp_path / "missing.safetensors", tmp_path):
        with pytest.raises(InputError, match="not a checkpoint"):
            load(other)


def test_a_checkpoint_has_the_permissions_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        path = save(tmp_path, state_of(), PROVENANCE)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640


def test_tensors_of_other_sizes_than_named_are_refused(tmp_path: Path) -> None:
    for model in (ModelHParams(4, 5), ModelHParams(3, 5, "lstm")):
        lying = Provenance("c0ffee", "beef", vocabulary_size=12, model=model)
        with pytest.raises(InputError, match="its tensors do not fit the model that it names"):
            load(save(tmp_path, state_of(), lying))


def rewrite(path: Path, lacking: Sequence[str] = (), changed: Mapping[str, str] = {}) -> dict[str, str]:
    """Write a checkpoint with other metadata, and return its original metadata."""
    with safe_open(path, framework="pt") as file:
        metadata: dict[str, str] = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    save_file(tensors, path, {name: text for name, text in metadata.items() if name not in lacking} | dict(changed))
    return metadata


DIGESTS = ("digest", "seal")  # earlier formats have neither; every field must therefore be checked without them
HUGE = ("-1", "0", "999999999", "9" * 30, "9" * 5_000, "1e308", "", "x")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("vocabulary_size", value) for value in HUGE),
        *((key, "9" * 30) for key in ("embedding", "units", "layers", "heads", "filter_width")),
        *(("round", value) for value in ("-1", "9" * 30, "x", "")),
        *(("values", value) for value in ("", "3", "[]", '{"a": "x"}')),
        *(("values", f'{{"clip": {value}}}') for value in ("NaN", "Infinity", "0", "-1", '"x"')),
        *(("ledger", value) for value in ("", "x", "3", "[1]", "[" * 100_000 + "]" * 100_000)),
        ("ledger", '[{"sampler": "poisson", "population": 1e308, "cohort": 1, "noise_multiplier": 1, "rounds": 1}]'),
        ("ledger", '[{"sampler": "poisson", "population": 9, "cohort": 1, "noise_multiplier": NaN, "rounds": 1}]'),
        ("ledger", '[{"sampler": "poisson", "population": 9, "cohort": 1, "noise_multiplier": 1, "rounds": 1.5}]'),
    ],
)
def test_absurd_metadata_is_refused_and_takes_no_memory(tmp_path: Path, key: str, value: str) -> None:
    path = save(tmp_path, state_of(), PROVENANCE)
    rewrite(path, DIGESTS, {key: value})
    with pytest.raises(InputError, match="damaged"):
        load(path)


@pytest.mark.parametrize(
    ("lacking", "former", "values"),
    [
        (("round", "values", "seal"), {"round": "8", "clip": "0.1"}, {"clip": 0.1}),
        (("round", "values", "seal"), {"round": "8", "clip": ""}, {}),
        (("round", "values", "seal"), {"step": "8"}, {}),
        (("seal",), {}, {"clip": 1 / 3}),
        (DIGESTS, {}, {"clip": 1 / 3}),
    ],
)
def test_checkpoints_in_earlier_formats_are_read(
    tmp_path: Path, lacking: tuple[str, ...], former: dict[str, str], values: dict[str, float]
) -> None:
    """In earlier formats, states have no values, or checkpoints have no seal or no digest."""
    path = save(tmp_path, replace(state_of(8), values=values), PROVENANCE)
    rewrite(path, lacking, former)
    read, provenance = load(path)
    assert (read.round, read.values, provenance) == (8, values, PROVENANCE)


def test_metadata_other_than_those_written_are_refused(tmp_path: Path) -> None:
    """Every field counts: earlier formats omit settings at their defaults, and a missing field would mean a default."""
    path = save(tmp_path, state_of(8), PROVENANCE)
    whole, metadata = path.read_bytes(), rewrite(path)
    for name in metadata.keys() - {"seal"}:
        for lacking, changed in (((name,), {}), ((), {name: metadata[name] + " "})):
            path.write_bytes(whole)
            rewrite(path, lacking, changed)
            with pytest.raises(InputError, match="damaged"):
                load(path)
    path.write_bytes(whole)
    rewrite(path, changed={"more": ""})
    with pytest.raises(InputError, match="its metadata do not match its seal"):
        load(path)
