"""A checkpoint that cannot be used never blocks a resume while an older good checkpoint exists."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from faulty import assert_equal_runs
from helpers import CENTRAL, PRIVATE, TINY, Experiment, Trained
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from flsim.algorithms.checkpoint import all_in, digest_of
from flsim.base.errors import InputError
from flsim.canaries.defences import DeduplicationHParams, deduplicate
from flsim.canaries.population import plant_corpus
from flsim.data.corpus import Corpus
from flsim.runs import recovery, roundlog
from flsim.runs.config import load
from flsim.runs.folder import Run
from flsim.runs.recovery import DRIVEN, TRAINED, hold_lock, recover
from flsim.runs.roundlog import FILE, append, copy, lost, read, settle
from server.cluster.start import environment_of

OPTIONS = ("--out", "run", "--in-process", *(part for text in PRIVATE for part in ("--set", text)))
BODY_STEP = 101  # a prime, so that the sample of tensor bytes meets every position within a float


@pytest.fixture
def run(copy_of_trained: Trained) -> Run:
    """Return a private run of four rounds with a checkpoint of each, trained with the command."""
    return Run.open(copy_of_trained(*PRIVATE))


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def positions(content: bytes) -> Iterator[int]:
    """Yield every byte of the header and of its length, and a sample of the bytes of tensors."""
    header = 8 + int.from_bytes(content[:8], "little")
    yield from range(header)
    yield from range(header, len(content), BODY_STEP)


def without_seal(path: Path, change: Callable[[dict[str, str]], None] = lambda metadata: None) -> None:
    """Write a checkpoint again without a seal and with changed metadata."""
    with safe_open(path, framework="pt") as file:
        metadata = {name: value for name, value in file.metadata().items() if name != "seal"}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    change(metadata)
    save_file(tensors, path, metadata)


def of_another_corpus(metadata: dict[str, str]) -> None:
    metadata["corpus"] = flipped(metadata["corpus"].encode(), 3).decode()


@pytest.mark.slow
def test_no_flipped_bit_blocks_recovery_or_changes_the_model(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """The newest checkpoint stays only if it has the state that was saved; otherwise the one before it is used."""
    *_, before, newest = all_in(run.path / "checkpoints")
    aside = newest.with_name(f"{newest.name}.damaged")
    log, content = (run.path / "rounds.jsonl").read_bytes(), newest.read_bytes()
    digests = {path.name: digest_of(run.load(path)) for path in (before, newest)}
    survived = 0
    for at in positions(content):
        (run.path / "rounds.jsonl").write_bytes(log)
        newest.write_bytes(flipped(content, at))
        aside.unlink(missing_ok=True)
        capsys.readouterr()
        recover(run)
        latest = all_in(run.path / "checkpoints")[-1]
        assert digest_of(run.latest_state()) == digests[latest.name], at
        if latest == newest:
            survived += 1
            continue
        assert latest == before, at
        assert aside.read_bytes() == flipped(content, at)
        said = capsys.readouterr().err
        assert " ".join(said.split()).count(newest.name) == 2, said  # its path, and its new name
    header = content[8 : 8 + int.from_bytes(content[:8], "little")]
    assert survived <= len("seal") + header.count(b" ")  # a flip in "seal" removes only the seal


def test_a_run_resumes_past_a_flipped_bit_to_the_same_bits(experiment: Experiment, run: Run) -> None:
    whole = shutil.copytree(run.path, experiment.folder / "whole")
    newest = all_in(run.path / "checkpoints")[-1]
    content = newest.read_bytes()
    newest.write_bytes(flipped(content, content.index(b'"ledger') + 8))
    said = experiment.call("run", experiment.config, *OPTIONS, "--resume").stderr
    assert f"{newest.name}.damaged" in " ".join(said.split())
    assert_equal_runs(run.path, whole)


@pytest.mark.parametrize("target", ["/nowhere/x", "round-000004.safetensors"])
def test_a_link_to_nothing_is_put_aside(experiment: Experiment, run: Run, target: str) -> None:
    """The second case is a link to itself."""
    whole = shutil.copytree(run.path, experiment.folder / "whole")
    newest = all_in(run.path / "checkpoints")[-1]
    assert newest.name == "round-000004.safetensors"
    newest.unlink()
    newest.symlink_to(target)
    experiment.call("run", experiment.config, *OPTIONS, "--resume")
    assert newest.with_name(f"{newest.name}.damaged").is_symlink()
    assert_equal_runs(run.path, whole)


def test_a_checkpoint_of_another_corpus_without_a_seal_is_put_aside(experiment: Experiment, run: Run) -> None:
    """Such a file may be damaged, or of another run; in both cases, the other checkpoints are of this run."""
    whole = shutil.copytree(run.path, experiment.folder / "whole")
    for path in all_in(run.path / "checkpoints"):
        without_seal(path)
    newest = all_in(run.path / "checkpoints")[-1]
    without_seal(newest, of_another_corpus)
    said = experiment.call("run", experiment.config, *OPTIONS, "--resume").stderr
    assert "trained on another corpus" in " ".join(said.split())
    assert newest.with_name(f"{newest.name}.foreign").exists()
    assert_equal_runs(run.path, whole)


def test_a_run_whose_checkpoints_are_all_of_another_run_is_refused_and_keeps_them(run: Run) -> None:
    """Training again from the beginning would treat the wrong folder as this run's folder."""
    for path in all_in(run.path / "checkpoints"):
        without_seal(path, of_another_corpus)
    before = {path: path.read_bytes() for path in (run.path / "checkpoints").iterdir()}
    with pytest.raises(InputError, match="trained on another corpus"):
        recover(run)
    assert before == {path: path.read_bytes() for path in (run.path / "checkpoints").iterdir()}


def test_an_unusable_checkpoint_that_was_not_evaluated_is_trained_again(experiment: Experiment, run: Run) -> None:
    whole = shutil.copytree(run.path, experiment.folder / "whole")
    due = run.path / "checkpoints" / "round-000002.safetensors"
    without_seal(due, of_another_corpus)
    (run.path / "rows" / "round-000002.parquet").unlink()
    said = experiment.call("run", experiment.config, *OPTIONS, "--resume").stderr
    assert "an unusable checkpoint had not been evaluated" in " ".join(said.split())
    assert_equal_runs(run.path, whole)
    assert json.loads((run.path / "run.json").read_text())["round"] == run.rounds


Damaged = Callable[[str, str], Path]
LOCKS = {TRAINED, DRIVEN, "log.jsonl"}  # files that a process may write while it waits for the lock
FEDERATED = (TINY, "training.rounds")


def tree(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name not in LOCKS}


@pytest.fixture
def damaged(experiment: Experiment, copy_of_trained: Trained) -> Damaged:
    """Return a maker of a run of four rounds with a damaged newest checkpoint, which a resume has to put aside."""

    def make(config: str, length: str) -> Path:
        experiment.config.write_text(config)
        run = copy_of_trained(f"{length}=4", "system.checkpoint_every=1")
        newest = max((run / "checkpoints").iterdir())
        newest.write_bytes(newest.read_bytes()[:-1])
        return run

    return make


@pytest.mark.parametrize(("config", "length"), [FEDERATED, (CENTRAL, "training.steps")], ids=["federated", "central"])
def test_a_refused_resume_changes_nothing(experiment: Experiment, damaged: Damaged, config: str, length: str) -> None:
    run = damaged(config, length)
    before = tree(run)
    more = ("--set", "system.checkpoint_every=1", "--set", f"{length}=6")
    for options, message in (
        (("--address", "127.0.0.1:1"), "no Ray cluster answers there"),
        (("--in-process", "--cpus", "2"), "--in-process does not use Ray"),
        (("--in-process", "--set", "seed=5"), "seed was 0 and is now 5"),
        (("--in-process", "--begin-from", "run"), "has already started"),
        (("--in-process", "--set", f"{length}=3"), "4 rounds are trained already, and the settings have 3"),
    ):
        refused = experiment.call("run", "tiny.toml", "--out", "run", "--resume", *more, *options, check=False)
        assert refused.returncode == 2, refused.stderr
        assert message in refused.stderr
        assert tree(run) == before


def test_a_resume_of_a_live_run(experiment: Experiment, damaged: Damaged, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resume is refused while this process holds the lock. Later the same command records its settings."""
    run = damaged(*FEDERATED)
    before = tree(run)
    again = ("run", "tiny.toml", "--out", "run", "--resume", "--in-process", "--set", "training.rounds=6")
    with hold_lock(Run.open(run)), monkeypatch.context() as patch:
        patch.setattr(recovery, "LOCK_DEADLINE", 0.3)
        refused = experiment.call(*again, check=False)
    assert refused.returncode == 1
    assert "trains this run" in refused.stderr
    assert tree(run) == before
    experiment.call(*again)
    assert Run.open(run).rounds == 6
    assert [path.name for path in (run / "checkpoints").glob("*.damaged")] == ["round-000004.safetensors.damaged"]


def test_a_custom_file_of_another_name_and_the_same_content_is_not_copied_again(experiment: Experiment) -> None:
    source = "def plain(done, total):\n    return 1.0\n"
    for name in ("one.py", "other.py"):
        (experiment.folder / name).write_text(source)
    options = ("run", "tiny.toml", "--out", "run", "--in-process", "--set")
    experiment.call(*options, "local.schedule=one.py:plain")
    (copy,) = (experiment.folder / "run" / "code").iterdir()
    experiment.call(*options, "local.schedule=other.py:plain", "--resume")
    assert [*(experiment.folder / "run" / "code").iterdir()] == [copy]
    assert copy.name.startswith("one.")


def test_nodes_that_join_after_a_resume_have_the_same_environment(experiment: Experiment, damaged: Damaged) -> None:
    """A node that joins later reads the config.toml that the resume wrote, with the same digest."""
    run = damaged(*FEDERATED)
    corpus = experiment.folder / "corpus"
    before = environment_of(run, corpus)
    experiment.call("run", "tiny.toml", "--out", "run", "--resume", "--in-process", "--set", "training.rounds=6")
    assert before.run is not None
    assert environment_of(run, corpus).run == before.run


GARBAGE = (b"", b"{", b"\xff\xfe\x00", b"[]", b'{"round": "7"}', b'{"round": 0}', b'{"round": true}', b'{"loss": 1}')


def write(folder: Path, lines: list[bytes]) -> None:
    (folder / FILE).write_bytes(b"".join(line + b"\n" for line in lines))


def numbers(folder: Path) -> list[int]:
    """Return the rounds of all lines, in the order of the file."""
    return [json.loads(line)["round"] for line in (folder / FILE).read_text().splitlines()]


@given(
    lines=st.lists(st.integers(1, 30) | st.sampled_from(GARBAGE), max_size=60),
    reached=st.integers(0, 25),
    twice=st.booleans(),
)
def test_a_settled_log_has_every_round_once(
    tmp_path_factory: pytest.TempPathFactory, lines: list[int | bytes], reached: int, twice: bool
) -> None:
    folder = tmp_path_factory.mktemp("run")
    write(folder, [line if isinstance(line, bytes) else json.dumps({"round": line}).encode() for line in lines])
    missing = settle(folder, reached, by_round=True)
    if twice:
        assert settle(folder, reached, by_round=True) == []
    known = {line for line in lines if isinstance(line, int) and line <= reached}
    assert numbers(folder) == list(range(1, reached + 1))
    assert [line["round"] for line in read(folder)] == sorted(known)
    assert [round_ for part in lost(folder) for round_ in part] == sorted({*range(1, reached + 1)} - known)
    assert lost(folder) == missing


def test_of_two_lines_of_a_round_the_later_one_is_used(tmp_path: Path) -> None:
    for loss in (1.0, 2.0):
        append(tmp_path, round=1, loss=loss)
    settle(tmp_path, 1, by_round=True)
    assert read(tmp_path) == [{"round": 1, "loss": 2.0}]


def test_a_complete_log_is_not_rewritten(tmp_path: Path) -> None:
    for round_ in (1, 2):
        append(tmp_path, round=round_)
    before = (tmp_path / FILE).stat()
    assert settle(tmp_path, 2, by_round=True) == []
    assert (tmp_path / FILE).stat().st_ino == before.st_ino


def test_lines_of_central_training_follow_each_other(tmp_path: Path) -> None:
    """A line has the steps since the line before it. Logs without `since` are taken to be complete."""
    for since, step in ((0, 10), (10, 15), (20, 30)):
        append(tmp_path, round=step, since=since)
    assert settle(tmp_path, 40, by_round=False) == [range(16, 21), range(31, 41)]
    assert numbers(tmp_path) == [10, 15, 20, 30, 40]
    assert lost(tmp_path) == [range(16, 21), range(31, 41)]
    assert settle(tmp_path, 40, by_round=False) == []
    write(tmp_path, [b'{"round": 10}', b'{"round": 30}'])
    assert settle(tmp_path, 30, by_round=False) == []


def test_a_copied_log_ends_at_the_given_round(tmp_path: Path) -> None:
    for round_ in range(1, 6):
        append(tmp_path, round=round_)
    copy(tmp_path, tmp_path, 3)
    assert numbers(tmp_path) == [1, 2, 3]


def test_training_losses_are_means_between_the_given_rounds() -> None:
    """Steps are the weights: (3 * 2 + 1 * 6) / 4 = 3 up to step 4. Federated lines count one round each."""
    steps = ((0, 3, 2.0), (3, 4, 6.0), (4, 6, None), (6, 8, 1.0), (8, 9, 5.0))
    central: list[roundlog.Line] = [{"since": since, "round": step, "loss": loss} for since, step, loss in steps]
    assert roundlog.mean_losses(central, [8, 4]) == {4: 3.0, 8: 1.0}
    assert roundlog.mean_losses(central, [6, 9]) == {6: 3.0, 9: (2 * 1.0 + 5.0) / 3}
    federated: list[roundlog.Line] = [{"round": round_, "loss": float(round_)} for round_ in (1, 2, 3, 4)]
    assert roundlog.mean_losses(federated, [2, 4]) == {2: 1.5, 4: 3.5}


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
    assert found[0] != found[1]  # the finding of a step depends on its seed
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
