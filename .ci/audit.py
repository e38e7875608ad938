"""Known vulnerabilities of what the constraints pin, as osv.dev lists them.

Exit code 0: none; 1: some, which are printed; 3: it could not be asked, so nothing is known. Options go to pip-audit.
"""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PINNED = ("constraints.txt", "constraints-peers.txt")
ACCEPTED: dict[str, str] = {}  # vulnerability -> why it does not reach us
NOT_ASKED = 3


def main() -> int:
    """Ask, and say what came of it: a line for each vulnerability and for each file of pins."""
    return max(map(audit, PINNED), key=(0, NOT_ASKED, 1).index)


def audit(pinned: str) -> int:
    """Of one file; the exit code."""
    command = [sys.executable, "-m", "pip_audit", "--requirement", str(ROOT / pinned), "--no-deps", "--disable-pip"]
    command += ["--vulnerability-service", "osv", "--format", "json", "--progress-spinner", "off", "--timeout", "20"]
    done = subprocess.run([*command, *sys.argv[1:]], capture_output=True, text=True)
    try:
        found = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        why = (done.stderr.strip().splitlines() or [f"pip-audit ended with {done.returncode}"])[-1]
        print(f"audit: NOT DONE of {pinned}, osv.dev could not be asked: {why:.300}")
        return NOT_ASKED
    skipped = [each["name"] for each in found if "skip_reason" in each]
    known = [(each, vulnerability) for each in found for vulnerability in each.get("vulns", [])]
    left = [(each, of) for each, of in known if of["id"] not in ACCEPTED]
    for each, of in left:
        fixed = ", ".join(of["fix_versions"]) or "no version"
        print(f"audit: {each['name']} {each['version']}: {of['id']} {' '.join(of['aliases'])}: fixed in {fixed}")
    accepted, rest = len(known) - len(left), f"; NOT ASKED of {', '.join(skipped)}" if skipped else ""
    print(f"audit: {pinned}: {len(found)} packages, {len(left)} vulnerabilities, {accepted} accepted{rest}")
    return 1 if left else NOT_ASKED if skipped else 0


if __name__ == "__main__":
    sys.exit(main())
