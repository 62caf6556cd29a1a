"""Holds the code to the naming rules, and the rules to their own examples."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load_rules() -> object:
    spec = importlib.util.spec_from_file_location("vocabulary_rules", Path(__file__).with_name("vocabulary_rules.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


RULES = load_rules().RULES


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_the_code_keeps_the_rule(rule) -> None:
    findings = list(rule.findings(ROOT))
    assert not findings, f"write {rule.instead}:\n" + "\n".join(findings)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_each_rule_covers_files_that_exist(rule) -> None:
    assert any(path.is_file() for glob in rule.scope for path in ROOT.glob(glob))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_each_rule_finds_its_own_violation_and_nothing_else(rule, tmp_path: Path) -> None:
    scope = rule.scope[0].replace("**/", "").replace(".*", ".h")
    if scope.endswith("/*"):
        scope += ".h"
    target = tmp_path / scope.replace("*", "sample")
    target.parent.mkdir(parents=True)
    target.write_text(f"{rule.allowed}\n{rule.violation}\n", encoding="utf-8")
    findings = list(rule.findings(tmp_path))
    assert len(findings) == 1
    assert findings[0].endswith(f":2: {rule.violation}")


def test_the_product_names_no_machine_path_and_no_package_index() -> None:
    needles = ("/" + "work/", "pypi" + ".org", "registry" + ".npmjs", "files.python" + "hosted")
    suffixes = {".py", ".md", ".toml", ".sh", ".cpp", ".h", ".proto", ".yaml", ".txt", ".pyi"}
    skipped = {".venv", "build", ".git"}
    found = []
    for path in ROOT.rglob("*"):
        if path.suffix not in suffixes or skipped & set(path.relative_to(ROOT).parts):
            continue
        text = path.read_text(encoding="utf-8")
        found += [f"{path.relative_to(ROOT)}: {needle}" for needle in needles if needle in text]
    assert not found
