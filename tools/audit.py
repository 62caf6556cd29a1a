"""Looks for known vulnerabilities in what is installed, and for requirements that do not fit together.

Exits with 1 for a vulnerability or a conflict. Where no database of vulnerabilities can be reached it says so and that
nothing was checked: a machine without the network must not fail for that.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from typing import TypeAlias

# Asked one after the other until one answers.
SERVICES = ("osv", "pypi")
# Installed wherever this runs.
_PROBE = "protobuf"
_TIMEOUT_S = 300
_REQUEST_TIMEOUT_S = 10
# Vulnerabilities that do not concern us, each with the reason; their ids as pip-audit shows them.
ACCEPTED: dict[str, str] = {}

Finding: TypeAlias = tuple[str, str, str, str]


@dataclass(frozen=True, slots=True)
class Report:
    """What a database said: (package, version, id, versions with a fix) each, and of how many packages it knew any."""

    findings: tuple[Finding, ...]
    num_checked: int


def conflicts() -> str:
    """What pip says of requirements that are not met; empty when all are."""
    result = subprocess.run(
        [sys.executable, "-m", "pip", "check"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    return "" if result.returncode == 0 else result.stdout + result.stderr


def read_report(text: str) -> Report | None:
    """pip-audit's JSON; None where it is none, or where nothing was checked: a mirror knows packages and no faults."""
    try:
        checked = [item for item in json.loads(text)["dependencies"] if "skip_reason" not in item]
    except (ValueError, KeyError, TypeError):
        return None
    if not checked:
        return None
    findings = tuple(
        (item["name"], item["version"], known["id"], ", ".join(known["fix_versions"]) or "none")
        for item in checked
        for known in item["vulns"]
        if not {known["id"], *known.get("aliases", ())} & ACCEPTED.keys()
    )
    return Report(findings, len(checked))


def ask(service: str, *what: str) -> tuple[Report | None, str]:
    """What a database knows of `what` pip-audit is to look at; None and the reason where it cannot be asked."""
    command = [
        *(sys.executable, "-m", "pip_audit", *what, "--progress-spinner", "off", "--format", "json"),
        *("--vulnerability-service", service, "--timeout", str(_REQUEST_TIMEOUT_S)),
    ]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return None, f"no answer within {_TIMEOUT_S} s"
    report = read_report(result.stdout)
    if report is not None:
        return report, ""
    lines = result.stderr.strip().splitlines()
    return None, lines[-1][:120] if lines and not result.stdout else "it knows nothing of what is installed"


def ask_for_one(service: str) -> tuple[Report | None, str]:
    """The same of one package alone, so that a registry that cannot answer is not asked for all."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(f"{_PROBE}=={version(_PROBE)}\n")
        file.flush()
        return ask(service, "-r", file.name, "--no-deps", "--disable-pip")


def main() -> int:
    """The exit status."""
    complaint = conflicts()
    if complaint:
        print(f"audit: requirements do not fit together:\n{complaint}", file=sys.stderr)
        return 1
    for service in SERVICES:
        report, reason = ask_for_one(service)
        if report is not None:
            report, reason = ask(service, "--local", "--skip-editable")
        if report is None:
            print(f"audit: {service} cannot be asked: {reason}")
            continue
        for name, found_version, vulnerability, fixed in report.findings:
            print(f"audit: {name} {found_version}: {vulnerability}, fixed in {fixed}", file=sys.stderr)
        print(f"audit: {service} knows {len(report.findings)} vulnerabilities of {report.num_checked} packages")
        return 1 if report.findings else 0
    print("audit: NOT CHECKED for vulnerabilities, no database of them can be reached; requirements fit together")
    return 0


if __name__ == "__main__":
    sys.exit(main())
