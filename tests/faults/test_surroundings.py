"""In unusual environments, and after a person edits files, runs have the same result, or a message names the cause."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from faulty import OPTIONS, assert_equal_runs, begin, ended, go_on, sick_client, wait_for
from helpers import Experiment, start, wait_for_round

from flsim.runs.config import load
from flsim.runs.folder import Run

STRANGE = "Läufe [1] 試し (*)"
MISSING = ("HOME", "USER", "LOGNAME", "TERM", "LC_ALL", "PYTHONUTF8")  # variables that most processes have
BARE = {name: value for name, value in os.environ.items() if name not in MISSING}
BARE |= {"LANG": "C"}


def confined(umask: str, descriptors: int = 256) -> list[str]:
    """Return the command prefix with which `start` sets the umask and the limit of descriptors."""
    return ["sh", "-c", f'umask {umask}; ulimit -n {descriptors}; exec "$@"', "sh"]


@pytest.mark.nightly
def test_a_run_in_strange_surroundings_is_the_same(experiment: Experiment, undisturbed: Path) -> None:
    """A run with strange names, few variables, 256 descriptors and umasks is stopped; two commands resume it."""
    odd = moved(experiment, STRANGE)
    run = odd.folder / STRANGE
    begun = ("--out", str(run), *OPTIONS)
    process = start(odd, *begun, within=confined("077"), environment=BARE | {"TMPDIR": "/proc"})  # for root too
    code, said = ended(odd, process)
    assert (code, "/proc" in said) == (1, True)
    sick_client(odd, most=12)
    process = start(odd, *begun, "--resume", within=confined("077"), environment=BARE)
    wait_for_round(run, 7)
    process.send_signal(signal.SIGTERM)
    assert ended(odd, process)[0] == 143
    (run / "run.json").unlink()  # the commands resume without run.json
    go_on(odd)
    twin = Experiment(odd.folder / "twin")  # each of the two commands writes its messages to another folder
    twin.folder.mkdir()
    for name in ("corpus", "tiny.toml"):
        (twin.folder / name).symlink_to(odd.folder / name)
    both = [start(place, *begun, "--resume", within=confined("000"), environment=BARE) for place in (odd, twin)]
    assert [ended(place, process)[0] for place, process in zip((odd, twin), both, strict=True)] == [0, 0]
    assert_equal_runs(run, undisturbed)


def moved(experiment: Experiment, name: str) -> Experiment:
    """Move an experiment to a subfolder with this name."""
    (experiment.folder / name).mkdir()
    for part in ("corpus", "tiny.toml"):
        shutil.move(experiment.folder / part, experiment.folder / name)
    return Experiment(experiment.folder / name)


def flip(path: Path) -> None:
    """Change one bit; size and times stay as they are."""
    content, times = bytearray(path.read_bytes()), path.stat()
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def tree(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_resume_names_edited_files_and_changes_no_file(experiment: Experiment) -> None:
    """Comments and the order of the configuration may change. Settings, planted canaries and the corpus may not."""
    run, config = experiment.folder / "run", experiment.config
    Run.create(load(config), run)
    before, text = tree(run), config.read_text()
    resume_it = ("run", config, "--out", "run", "--resume")

    def refusal() -> str:
        done = experiment.call(*resume_it, check=False)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert tree(run) == changed
        return done.stderr

    changed = before
    for old, new, words in (
        ("[local]", "[local]\nlearning_rate = 0.7", "local.learning_rate was 0.3 and is now 0.7; resume"),
        ("[data]", "seed = 1\n[data]", "seed was 0 and is now 1; resume"),
    ):
        config.write_text(text.replace(old, new))
        assert f"run: this run was started with other settings: {words}" in refusal()
    tables = text.split("\n[")
    config.write_text("# edited\n[" + "\n[".join(reversed(tables[1:])) + "\n")
    assert Run.reopen(load(config), run).config == load(config)
    before = tree(run)
    for path in [*(run / "planted").iterdir(), *(experiment.folder / "corpus" / "train").iterdir()]:
        content = path.read_bytes()
        flip(path)
        changed = tree(run)
        named = path.name if path.name != "population.json" else "run/planted"  # which has the digests
        assert named in refusal()
        path.write_bytes(content)
    assert tree(run) == before
    Run.reopen(load(config), run)


@contextmanager
def away(run: Path) -> Iterator[None]:
    """Rename the folder for the duration of the context."""
    elsewhere = run.with_name("elsewhere")
    run.rename(elsewhere)
    yield
    elsewhere.rename(run)


@contextmanager
def read_only(run: Path) -> Iterator[None]:
    """Mount the folder read-only, because permissions do not restrict root."""
    mounted = subprocess.run(["mount", "--bind", run, run], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no folder can be made read-only for all here: {mounted.stderr.strip()}")
    subprocess.run(["mount", "-o", "remount,ro,bind", run], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", run], check=True)


@pytest.mark.nightly
def test_a_run_whose_folder_is_renamed_or_read_only_during_training_loses_nothing(
    experiment: Experiment, undisturbed: Path
) -> None:
    hurt = experiment.folder / "hurt"
    process, _ = begin(experiment, "hurt", until_round=5)
    for number, harm in enumerate((away, read_only), start=2):
        with harm(hurt):
            go_on(experiment)
            code, said = ended(experiment, process)
            assert (code, said[:7]) == (1, "flsim: ")
        (experiment.folder / "go_on").unlink()  # clients wait again
        process = start(experiment, "--out", "hurt", *OPTIONS, "--resume")
        wait_for(hurt / "log.jsonl", f'("event": "training"[^$]*){{{number}}}')
        wait_for_round(hurt, 9)
    go_on(experiment)
    assert ended(experiment, process)[0] == 0
    assert_equal_runs(hurt, undisturbed)
