"""Containers of an image that somebody has built, for tests that run what the chart renders."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

IMAGE = os.environ.get("PDMESH_TEST_IMAGE", "")
OF_AN_IMAGE = (
    pytest.mark.skipif(
        not IMAGE or shutil.which("podman") is None, reason="PDMESH_TEST_IMAGE names no image, or there is no podman"
    ),
    pytest.mark.timeout(600),
)
"""Marks of a module: building an image takes minutes, so nothing runs where none is named."""


def podman(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What podman says to these arguments, whether or not it succeeds."""
    return subprocess.run(["podman", *arguments], capture_output=True, text=True, timeout=300, check=False)
