"""Imports that are killed, run twice, fill the disk, or read changing sources make the complete corpus, or one line."""

import bz2
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from dumps import alive, children, folder_bytes, write_jsonl
from waiting import hear_ctrl_c, wait_until

from flsim.base.rng import stream

# The real command with pieces small enough for a test; other tests show that sizes of pieces do not change a corpus.
# At MOST pieces, the import waits to be killed or released; otherwise it might end before the test looks.
COMMAND = """
import os, time
from pathlib import Path
from flsim.cli import main
from flsim.data.formats import posts
from flsim.data.importing import tasks
from flsim.base.pool import Pool
posts.PART_BYTES, tasks.PIECE, tasks.BUCKET, tasks.COUNTED = 60_000, 40_000, 60_000, 500
scratch, most, run = Path(os.environ["SCRATCH"]), float(os.environ["MOST"]), Pool.run

def run_until_most(pool, tasks, done, *report):
    def done_unless_most(index, value):
        while len(list(scratch.glob("*/*.json"))) >= most and not scratch.with_name("go").exists():
            time.sleep(0.01)
        done(index, value)
    run(pool, tasks, done_unless_most, *report)

Pool.run = run_until_most
main()
"""
FURTHER = 5  # pieces that an import may finish after the awaited pieces; a kill then usually interrupts its work


class Imports:
    """An import of 23 pieces, which a test can start repeatedly."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        rng = stream(0, "test", "restart")
        self.sources = []
        for name in ("one", "two", "three"):
            posts = [
                (int(user), " ".join(f"w{word}" for word in rng.zipf(1.4, 60)) + ".")
                for user in rng.integers(0, 90, 600)
            ]
            self.sources.append(write_jsonl(folder / f"{name}.jsonl", posts))
        self.out = folder / "corpus"
        self.scratch = folder / ".corpus.importing"

    def start(
        self, *sources: Path, out: Path | None = None, most: float = float("inf"), **options: object
    ) -> subprocess.Popen[str]:
        arguments = [*(sources or self.sources), "--out", out or self.out, "--vocabulary", 300, "--words-per-user", 200]
        process: subprocess.Popen[str] = subprocess.Popen(
            [sys.executable, "-c", COMMAND, "data", "import", *map(str, arguments), "--workers", "2"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "SCRATCH": str(self.scratch), "MOST": str(most)},
            preexec_fn=hear_ctrl_c,
            **options,  # type: ignore[call-overload]
        )
        return process

    def run(self) -> str:
        """Import to the end, and return what the command printed."""
        return self.finish(self.start())

    def finish(self, process: subprocess.Popen[str], code: int = 0) -> str:
        printed = process.communicate()[1]
        assert process.returncode == code, printed
        assert "Traceback" not in printed
        return printed

    def started(
        self, pieces: int, *sources: Path, further: int = FURTHER, start_new_session: bool = False
    ) -> subprocess.Popen[str]:
        """Start an import that waits for a release, and return its process once it has so many pieces."""
        process = self.start(*sources, most=pieces + further, start_new_session=start_new_session)
        wait_until(lambda: self.pieces() >= pieces or process.poll() is not None)
        assert process.poll() is None
        return process

    def go(self) -> None:
        """Let a waiting import continue to its end."""
        (self.folder / "go").touch()

    def pieces(self) -> int:
        return len(list(self.scratch.glob("*/*.json")))


def kill(process: subprocess.Popen[str]) -> None:
    """Kill only the parent, with SIGKILL; its workers must end by themselves."""
    workers = children(process.pid)
    process.kill()
    process.communicate()
    wait_until(lambda: not any(map(alive, workers)))


@pytest.fixture
def imports(tmp_path: Path) -> Imports:
    return Imports(tmp_path)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    imports = Imports(tmp_path_factory.mktemp("expected"))
    imports.run()
    assert not imports.scratch.exists()
    return folder_bytes(imports.out)


@pytest.mark.slow
def test_five_kills_change_nothing(imports: Imports, expected: dict[str, bytes]) -> None:
    """Each kill follows 0 to 7 further pieces, at most 14 of 23 in all: the last pieces are written too fast."""
    rng = stream(0, "test", "kills")
    for number in range(5):
        kill(imports.started(min(imports.pieces() + int(rng.integers(8)), 14)))
        assert not imports.out.exists(), number
    assert "continuing an interrupted import" in imports.run()
    assert folder_bytes(imports.out) == expected
    assert not imports.scratch.exists()


@pytest.mark.slow
@pytest.mark.parametrize("seen", ["*/corpus", "*/corpus/train/tokens.u16", "*/corpus/manifest.json"])
def test_a_kill_at_the_end_changes_nothing(imports: Imports, expected: dict[str, bytes], seen: str) -> None:
    process = imports.start()
    wait_until(lambda: any(imports.scratch.glob(seen)) or process.poll() is not None)
    kill(process)
    if not imports.out.exists():  # otherwise the import ended before the kill, and its corpus is complete
        imports.run()
        assert not imports.scratch.exists()
    assert folder_bytes(imports.out) == expected


@pytest.mark.slow
def test_pieces_remain_if_the_folder_of_the_corpus_appears(imports: Imports, expected: dict[str, bytes]) -> None:
    process = imports.started(6, further=0)
    imports.out.mkdir()
    imports.go()
    printed = imports.finish(process, code=2).splitlines()
    assert printed[-2].endswith(
        "finished pieces remain in this folder; fix the cause, and repeat the command to continue"
    )
    assert printed[-1] == f"flsim: {imports.out}: already exists; remove it or rename it"
    (pieces,) = (path for path in imports.scratch.iterdir() if path.is_dir())
    assert (pieces / "corpus" / "manifest.json").exists()
    assert "already exists" in imports.finish(imports.start(), code=2)
    imports.out.rmdir()
    assert "continuing an interrupted import" in imports.run()
    assert folder_bytes(imports.out) == expected
    assert not imports.scratch.exists()


@pytest.mark.slow
def test_pieces_of_another_import_stay(imports: Imports, expected: dict[str, bytes]) -> None:
    """An import with other sources is refused and keeps the pieces: they may be hours of work, and a source a typo."""
    kill(imports.started(6, further=0))
    (pieces,) = (path for path in imports.scratch.iterdir() if path.is_dir())
    printed = imports.finish(imports.start(*imports.sources[:2]), code=2).splitlines()[-1]
    assert "an interrupted import had other sources or options; repeat its command" in printed
    assert f"or remove {pieces} to start" in printed
    assert "continuing an interrupted import" in imports.run()
    assert folder_bytes(imports.out) == expected
    assert not imports.scratch.exists()


def test_pieces_remain_after_a_missing_source_and_after_ctrl_c(imports: Imports, expected: dict[str, bytes]) -> None:
    """A source is missing, as on an unmounted disk; then a terminal sends Ctrl-C to all processes of the import."""
    process = imports.started(6, further=0)
    away = imports.sources[0].rename(imports.folder / "away")
    imports.go()
    assert imports.finish(process, code=1).splitlines()[-1].startswith(f"flsim: {imports.sources[0]}: ")
    away.rename(imports.sources[0])
    (imports.folder / "go").unlink()
    process = imports.started(8, start_new_session=True)
    workers = children(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    printed = imports.finish(process, code=130)
    assert printed.splitlines()[-1] == f"{imports.scratch}: interrupted; repeat the command to continue"
    assert not any(map(alive, workers))
    assert "continuing an interrupted import" in imports.run()
    assert folder_bytes(imports.out) == expected


@pytest.mark.slow
def test_workers_that_are_always_killed_end_the_import_in_one_line(
    imports: Imports, expected: dict[str, bytes]
) -> None:
    process = imports.start()
    while process.poll() is None:
        for worker in children(process.pid):
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
    printed = imports.finish(process, code=2)
    assert "its process died 2 times (signal 9)" in printed.splitlines()[-1]
    assert str(imports.folder) in printed.splitlines()[-1]
    imports.run()
    assert folder_bytes(imports.out) == expected


def test_a_second_import_into_the_same_folder_is_refused(imports: Imports, expected: dict[str, bytes]) -> None:
    """The first import waits after six pieces; a new hard link or permission of a source is not a change of content."""
    first = imports.started(6, further=0)
    printed = imports.finish(imports.start(), code=2)
    assert printed.splitlines()[-1].startswith(f"flsim: {imports.out}: another import into this folder is running; ")
    for source in imports.sources:
        source.chmod(0o600)
        source.with_suffix(".link").hardlink_to(source)
    imports.go()
    imports.finish(first)
    assert folder_bytes(imports.out) == expected
    assert not imports.scratch.exists()


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_the_same_command_continues(
    imports: Imports, expected: dict[str, bytes], disk: Callable[[str], Path]
) -> None:
    """An import on a disk of 100 kB, which grows by 900 kB each time, fails in one line until the corpus fits."""
    failures = 0
    for kilobytes in range(100, 10_000, 900):
        out = disk(f"size={kilobytes}k") / "corpus"
        process = imports.start(out=out)
        printed = process.communicate()[1]
        if process.returncode == 0:
            break
        assert process.returncode == 1
        assert printed.splitlines()[-1] == (
            f"flsim: {out.with_name('.corpus.importing')}: No space left on device; free space on this disk, "
            "then repeat the command to continue"
        )
        assert not out.exists()
        failures += 1
    assert failures > 1
    assert folder_bytes(out) == expected
    assert [path.name for path in out.parent.iterdir()] == ["corpus"]


def test_the_rest_of_an_interrupted_removal_is_removed(imports: Imports, expected: dict[str, bytes]) -> None:
    (imports.scratch / "removed-0f").mkdir(parents=True)
    (imports.scratch / "lock").touch()
    imports.run()
    assert folder_bytes(imports.out) == expected
    assert not imports.scratch.exists()


# Sources whose content changes during an import are refused, even with equal times, and no files remain.


def overwrite(path: Path, offset: int, data: bytes) -> None:
    """Overwrite bytes in place, as `dd conv=notrunc` does."""
    descriptor = os.open(path, os.O_WRONLY)
    os.pwrite(descriptor, data, offset)
    os.close(descriptor)


def overwrite_mapped(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[offset : offset + len(data)] = data


def first_word(path: Path, posts: int) -> int:
    """Return the offset of the first word after so many posts."""
    return sum(map(len, path.read_bytes().splitlines(keepends=True)[:posts])) + len('{"user": 10, "text": "')


def assert_refused(imports: Imports, printed: str, name: str) -> None:
    line = f"flsim: {imports.folder / name}: the file changed while flsim read it; import it again"
    assert printed.splitlines()[-1] == line
    assert not imports.out.exists()
    assert not imports.scratch.exists()


def keeping_times(change: Callable[[Path], object], path: Path) -> None:
    about = path.stat()
    change(path)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))


CHANGES: dict[str, Callable[[Path], object]] = {
    "at start": lambda path: overwrite(path, first_word(path, 0), b"z"),
    "at end": lambda path: overwrite(path, first_word(path, 599), b"z"),
    "mapped": lambda path: overwrite_mapped(path, first_word(path, 599), b"z"),
    "damaged": lambda path: overwrite(path, first_word(path, 599) - 9, b"{{{"),
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2 + 5),
    "grown": lambda path: path.write_bytes(path.read_bytes() + b'{"user": 1, "text": "one more"}\n'),
}


@pytest.mark.slow
@pytest.mark.parametrize(("pieces", "name"), [(6, "one"), (4, "three")])  # the plan, 3 hashes, and 2 or 0 parts
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_source_that_changes_is_refused(
    imports: Imports, pieces: int, name: str, change: Callable[[Path], object]
) -> None:
    process = imports.started(pieces, further=0)
    keeping_times(change, imports.folder / f"{name}.jsonl")
    imports.go()
    assert_refused(imports, imports.finish(process, code=2), f"{name}.jsonl")


def test_a_source_that_changes_after_an_interruption_is_refused(imports: Imports) -> None:
    source = imports.sources[2]
    kill(imports.started(3, source, further=0))
    keeping_times(CHANGES["at end"], source)
    assert_refused(imports, imports.finish(imports.start(source), code=2), source.name)


def test_a_compressed_source_that_changes_is_refused(imports: Imports) -> None:
    packed = imports.folder / "one.jsonl.bz2"
    packed.write_bytes(bz2.compress(imports.sources[0].read_bytes()))
    process = imports.started(2, packed, further=0)
    keeping_times(lambda path: overwrite(path, 4, b"?"), packed)
    imports.go()
    assert_refused(imports, imports.finish(process, code=2), packed.name)
