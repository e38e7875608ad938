"""Check of the pinned packages for known vulnerabilities, as osv.dev lists them.

Exit code 0: there are none. Exit code 1: there are some, which are printed. Exit code 3: osv.dev could not be reached,
so the result is unknown. Options are passed to pip-audit.
"""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PINNED = ("constraints.txt", "constraints-peers.txt")
ACCEPTED: dict[str, str] = {}  # vulnerability -> why it does not affect flsim
NOT_ASKED = 3


def main() -> int:
    """Check all files of pins, and print a line for each vulnerability and for each file."""
    return max(map(audit, PINNED), key=(0, NOT_ASKED, 1).index)


def audit(pinned: str) -> int:
    """Check one file, and return its exit code."""
    command = [sys.executable, "-m", "pip_audit", "--requirement", str(ROOT / pinned), "--no-deps", "--disable-pip"]
    command += ["--vulnerability-service", "osv", "--format", "json", "--progress-spinner", "off", "--timeout", "20"]
    done = subprocess.run([*command, *sys.argv[1:]], capture_output=True, text=True)
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        why = (done.stderr.strip().splitlines() or [f"pip-audit ended with {done.returncode}"])[-1]
        print(f"audit: NOT DONE of {pinned}, osv.dev could not be reached: {why:.300}")
        return NOT_ASKED
    skipped = [package["name"] for package in packages if "skip_reason" in package]
    known = [(package, flaw) for package in packages for flaw in package.get("vulns", [])]
    left = [(package, flaw) for package, flaw in known if flaw["id"] not in ACCEPTED]
    for package, flaw in left:
        fixed = ", ".join(flaw["fix_versions"]) or "no version"
        name, aliases = f"{package['name']} {package['version']}", " ".join(flaw["aliases"])
        print(f"audit: {name}: {flaw['id']} {aliases}: fixed in {fixed}")
    accepted, rest = len(known) - len(left), f"; NOT ASKED of {', '.join(skipped)}" if skipped else ""
    print(f"audit: {pinned}: {len(packages)} packages, {len(left)} vulnerabilities, {accepted} accepted{rest}")
    return 1 if left else NOT_ASKED if skipped else 0


if __name__ == "__main__":
    sys.exit(main())
