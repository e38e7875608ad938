"""Tests that all dependencies are pinned, and that `make audit` distinguishes vulnerabilities, none, and no answer."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from threading import Thread
from typing import Any

import audit
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PINS: dict[str, str] = {
    str(canonicalize_name(name)): pin
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if not line.startswith("#")
    for name, pin in [line.split("==")]
}


def required(name: str, extras: frozenset[str], seen: dict[str, frozenset[str]]) -> dict[str, frozenset[str]]:
    """Return the direct and indirect dependencies of a package on this machine by name, with those not installed."""
    if name in seen and extras <= seen[name]:
        return seen
    seen[name] = extras | seen.get(name, frozenset())
    try:
        lines = requires(name) or []
    except PackageNotFoundError:
        return seen
    for requirement in map(Requirement, lines):
        if any(requirement.marker is None or requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            required(canonicalize_name(requirement.name), frozenset(requirement.extras), seen)
    return seen


def test_all_dependencies_are_pinned_and_installed_in_the_pinned_version() -> None:
    needed = required("flsim-memorization", frozenset({"dev"}), {})
    del needed["flsim-memorization"]
    assert len(needed) > 100
    builds = {name for name in needed if name.startswith(("nvidia-", "cuda-")) or name in {"setuptools", "pip"}}
    assert needed.keys() - PINS.keys() - builds == set()
    here = {name: version(name).partition("+")[0] for name in needed.keys() - builds}
    assert here == {name: PINS[name] for name in here}


@contextmanager
def osv(vulnerable: str = "") -> Iterator[str]:
    """Serve osv.dev's protocol on loopback, with a vulnerability of one package, and yield the URL."""

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["package"]["name"]
            fixed = {"ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "999"}]}]}
            known: dict[str, Any] = {
                "id": "PYSEC-0000-1",
                "aliases": ["CVE-0000-1"],
                "details": "bad",
                "published": "2026-01-01T00:00:00Z",
            }
            known |= {"affected": [{"package": {"name": asked, "ecosystem": "PyPI"}, **fixed}]}
            body = json.dumps({"vulns": [known]} if asked == vulnerable else {}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1/query"
        finally:
            server.shutdown()
            thread.join()


def test_the_audit_distinguishes_a_vulnerability_from_none_and_from_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(audit, "PINNED", ("constraints-peers.txt",))
    pins = (ROOT / "constraints-peers.txt").read_text()

    def audited(url: str, cache: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["audit", "--osv-url", url, "--cache-dir", str(tmp_path / cache)])
        return audit.main(), capsys.readouterr().out

    with osv() as url:
        code, said = audited(url, "none")
    assert (code, "packages, 0 vulnerabilities, 0 accepted" in said) == (0, True)
    assert audited(url, "silence")[0] == 3
    with osv("numpy") as url:
        code, said = audited(url, "one")
    assert code == 1
    (pin,) = re.findall(r"^numpy==(\S+)", pins, re.MULTILINE)
    assert f"numpy {pin}: PYSEC-0000-1 CVE-0000-1: fixed in 999" in said
