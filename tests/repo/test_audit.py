"""The audit fails for what it finds and for nothing else."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

# As a mirror of packages makes pip-audit say it.
UNKNOWN = json.dumps({"dependencies": [{"name": "a", "skip_reason": "Dependency not found on PyPI"}], "fixes": []})
CLEAN = json.dumps({"dependencies": [{"name": "a", "version": "1", "vulns": []}, {"name": "b", "skip_reason": "own"}]})
FOUND = json.dumps(
    {
        "dependencies": [
            {
                "name": "a",
                "version": "1.0",
                "vulns": [{"id": "GHSA-1", "aliases": ["CVE-1"], "fix_versions": ["1.1"]}],
            }
        ]
    }
)


@pytest.fixture
def audit(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "tools" / "audit.py"
    spec = importlib.util.spec_from_file_location("audit", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "audit", module)
    spec.loader.exec_module(module)
    return module


def answering(monkeypatch: pytest.MonkeyPatch, audit: ModuleType, *, conflict: str = "", **reports: str) -> None:
    """Has pip tell of a conflict, and pip-audit of what each service says; no report: it cannot be reached."""

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        if "check" in command:
            return subprocess.CompletedProcess(command, int(bool(conflict)), conflict, "")
        report = reports.get(command[command.index("--vulnerability-service") + 1], "")
        return subprocess.CompletedProcess(command, int(report != CLEAN), report, "" if report else "ERROR: no route")

    monkeypatch.setattr(audit.subprocess, "run", run)


def test_a_vulnerability_fails_it_by_name(
    audit: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answering(monkeypatch, audit, osv=FOUND)
    assert audit.main() == 1
    assert "a 1.0: GHSA-1, fixed in 1.1" in capsys.readouterr().err


def test_one_that_was_accepted_does_not(audit: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, audit, osv=FOUND)
    monkeypatch.setitem(audit.ACCEPTED, "CVE-1", "we do not use that part")
    assert audit.main() == 0


def test_where_one_database_cannot_be_reached_another_is_asked(
    audit: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answering(monkeypatch, audit, pypi=FOUND)
    assert audit.main() == 1
    assert "osv cannot be asked: ERROR: no route" in capsys.readouterr().out


def test_without_any_it_says_that_nothing_was_checked_and_passes(
    audit: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answering(monkeypatch, audit)
    assert audit.main() == 0
    assert "NOT CHECKED" in capsys.readouterr().out


def test_a_registry_that_knows_of_no_vulnerabilities_has_checked_nothing(
    audit: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answering(monkeypatch, audit, pypi=UNKNOWN)
    assert audit.main() == 0
    said = capsys.readouterr().out
    assert "pypi cannot be asked: it knows nothing of what is installed" in said
    assert "NOT CHECKED" in said


def test_what_is_clean_is_said_to_be_checked(
    audit: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answering(monkeypatch, audit, osv=CLEAN)
    assert audit.main() == 0
    assert "osv knows 0 vulnerabilities of 1 packages" in capsys.readouterr().out


def test_requirements_that_do_not_fit_together_fail_it(
    audit: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answering(monkeypatch, audit, conflict="a requires b", osv=CLEAN)
    assert audit.main() == 1
    assert "a requires b" in capsys.readouterr().err
