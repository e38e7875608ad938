"""What we depend on is pinned, and `make audit` tells a vulnerability from silence."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from threading import Thread
from typing import Any

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
    """All that a package needs here, and what that needs, by name; those that are not installed as well."""
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


def test_all_that_we_need_is_pinned_and_that_is_what_is_here() -> None:
    needed = required("flsim-memorization", frozenset({"dev"}), {})
    del needed["flsim-memorization"]
    assert len(needed) > 100
    builds = {name for name in needed if name.startswith(("nvidia-", "cuda-")) or name in {"setuptools", "pip"}}
    assert needed.keys() - PINS.keys() - builds == set()
    here = {name: version(name).partition("+")[0] for name in needed.keys() - builds}
    assert here == {name: PINS[name] for name in here}


@contextmanager
def osv(vulnerable: str = "") -> Iterator[str]:
    """A server that speaks osv.dev's protocol on loopback: one package has a vulnerability. Its URL."""

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


def audit(url: str, cache: Path) -> tuple[int, str]:
    """Exit code and what was said."""
    command = [sys.executable, str(ROOT / ".ci" / "audit.py"), "--osv-url", url, "--cache-dir", str(cache)]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout


def test_a_vulnerability_fails_the_audit_and_none_does_not(tmp_path: Path) -> None:
    with osv() as url:
        code, said = audit(url, tmp_path / "none")
    assert code == 0
    assert said.splitlines()[0] == f"audit: constraints.txt: {len(PINS)} packages, 0 vulnerabilities, 0 accepted"
    with osv("numpy") as url:
        code, said = audit(url, tmp_path / "one")
    assert code == 1
    assert f"numpy {PINS['numpy']}: PYSEC-0000-1 CVE-0000-1: fixed in 999" in said


def test_silence_is_said_to_be_silence(tmp_path: Path) -> None:
    with osv() as url:
        pass
    code, said = audit(url, tmp_path)
    assert code == 3
    assert all(line.startswith("audit: NOT DONE") for line in said.splitlines())
    assert len(said.splitlines()) == 2
