"""The type stub is golden: what Python sees of the native module changes only on purpose.

After a wanted change: `python tests/unit/scheduler_core/test_golden_stub.py` writes it anew.
"""

from __future__ import annotations

from pathlib import Path

from nanobind.stubgen import StubGen

import scheduler_core
import scheduler_core._core as core

STUB_PATH = Path(scheduler_core.__file__).parent / "_core.pyi"
HEADER = "# Written by nanobind's stubgen; checked by a test.\n# ruff: noqa\n# fmt: off\n"


def render_stub() -> str:
    generator = StubGen(core, quiet=True)
    generator.put(core)
    return HEADER + str(generator.get())


def test_the_stub_shows_the_module_as_it_is() -> None:
    assert STUB_PATH.read_text() == render_stub()


if __name__ == "__main__":
    STUB_PATH.write_text(render_stub())
