"""Asks an advisory service whether what is installed here has known faults: ``python -m tests.support.audit``.

pip-audit takes a package that the service does not know, as behind a mirror, for one without faults. Here it is told
not to, and an audit that could not be done is said to be none.
"""

import subprocess
import sys
import tempfile
from importlib import metadata
from typing import NamedTuple

OURS = "asyncdata"


class Verdict(NamedTuple):
    """What to exit with, and what to say."""

    status: int
    text: str


def installed() -> list[str]:
    """All that is installed in this environment but the package itself, with exact versions."""
    found = {(each.metadata["Name"], each.version) for each in metadata.distributions()}
    return sorted(f"{name}=={version.partition('+')[0]}" for name, version in found if name != OURS)


def verdict(status: int, said: str, num_packages: int) -> Verdict:
    """What a run of pip-audit has found out: nothing bad, something bad, or nothing at all."""
    if status == 0:
        return Verdict(0, f"audit: {num_packages} packages, no known fault")

    if "known vulnerabilit" in said and "No known" not in said:
        return Verdict(1, f"{said}\naudit: faults are known of what is installed; raise the lower bounds that allow it")

    last = said.strip().splitlines()[-1] if said.strip() else "pip-audit said nothing"
    return Verdict(
        2,
        "audit: NOT DONE. The advisory service cannot be reached from here, or does not know a package, so nothing was "
        f"found out about {num_packages} packages. Run it where the package index, or another advisory service, can be "
        f"reached.\n  {last}",
    )


def main(arguments: list[str]) -> int:
    """Audit this environment; more arguments are pip-audit's, as ``--vulnerability-service osv``."""
    packages = installed()
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.write("\n".join(packages) + "\n")
        file.flush()
        command = ["pip_audit", "--strict", "--no-deps", "--disable-pip", "--progress-spinner", "off", "-r", file.name]
        done = subprocess.run([sys.executable, "-m", *command, *arguments], capture_output=True, text=True, check=False)
    found = verdict(done.returncode, done.stdout + done.stderr, len(packages))
    sys.stdout.write(f"{found.text}\n")
    return found.status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
