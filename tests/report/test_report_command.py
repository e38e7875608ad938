"""`flsim report` as a command: equal bytes for equal results, bad input, and no file half-written."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from reported import write_run

from flsim import cli
from flsim.base.errors import InputError
from flsim.report.page import write_report


def test_the_same_results_give_the_same_bytes(tmp_path: Path) -> None:
    """In another process, whose sets of texts have another order."""
    paths = [write_run(tmp_path / world, setting=f"{world}, FedAvg, b_u=4") for world in ("IID", "Non-IID")]
    write_report(paths, tmp_path / "here.html")
    code = "import sys; from pathlib import Path; from flsim.report.page import write_report as write; "
    code += "*paths, out = map(Path, sys.argv[1:]); write(paths, out)"
    command = [sys.executable, "-c", code, *map(str, paths), str(tmp_path / "there.html")]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": "7"})
    assert (tmp_path / "here.html").read_bytes() == (tmp_path / "there.html").read_bytes()


def test_a_report_is_written_into_a_pipe(tmp_path: Path) -> None:
    """The bytes of the file, whatever the name of the pipe."""
    run, pipe = write_run(tmp_path / "run"), tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE) as reader:
        write_report([run], pipe)
        read, _ = reader.communicate()
    write_report([run], tmp_path / "here.html")
    assert read == (tmp_path / "here.html").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("nowhere", "--out", "report.html"), "not a run folder"),
        (("run", "--out", "report.pdf"), "reports are written as .html"),
        (("run", "--out", "missing/report.html"), "no such folder as missing"),
        (("run", "broken", "--out", "report.html"), "damaged"),
        (("empty", "--out", "report.html"), "no run has started"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    arguments: tuple[str, ...],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_run(tmp_path / "run")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "sweep.json").write_text("{")
    about = dict.fromkeys(("name", "title", "question", "tier", "about", "command"), "")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "sweep.json").write_text(
        json.dumps({**about, "source": None, "versions": {}, "runs": [], "sessions": []})
    )
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr("sys.argv", ["flsim", "report", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    printed = capsys.readouterr().err
    assert stop.value.code == 2
    assert printed.count("\n") == 1
    assert says in printed
    assert sorted(tmp_path.rglob("*")) == before


def test_a_report_that_is_there_stays_where_another_fails(tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    write_report([write_run(tmp_path / "run")], out)
    before = out.read_bytes()
    (tmp_path / "run" / "planted" / "roster.parquet").write_bytes(b"damaged")
    with pytest.raises(InputError, match="damaged"):
        write_report([tmp_path / "run"], out)
    assert out.read_bytes() == before
    assert not list(tmp_path.glob(".*"))
