"""Certificates for tests: an authority of their own, made in memory, and what it signed."""

from __future__ import annotations

from pathlib import Path

import trustme

from cache_runtime.transfer.stream_tls import TlsFiles


def make_tls_files(folder: Path, *, name: str = "127.0.0.1") -> TlsFiles:
    """A certificate for `name`, its key and the authority that signed it."""
    authority = trustme.CA()
    signed = authority.issue_cert(name)
    files = TlsFiles(certificate=folder / "node.pem", key=folder / "node.key", authority=folder / "authority.pem")
    files.certificate.write_bytes(b"".join(blob.bytes() for blob in signed.cert_chain_pems))
    files.key.write_bytes(signed.private_key_pem.bytes())
    files.authority.write_bytes(authority.cert_pem.bytes())
    return files


DOMAIN = "pdmesh.internal"


class MeshAuthority:
    """Signs what the roles of a mesh show."""

    def __init__(self, folder: Path, authority: trustme.CA | None = None) -> None:
        self._folder = folder
        self._authority = authority or trustme.CA()
        self.path = folder / "authority.pem"
        self.path.write_bytes(self._authority.cert_pem.bytes())

    def copied_to(self, folder: Path) -> MeshAuthority:
        """The same authority with files of its own."""
        return MeshAuthority(folder, self._authority)

    def issue(self, role: str) -> tuple[Path, Path]:
        """Certificate and key of a node of `role`, also good for those who dial this machine by name or address."""
        signed = self._authority.issue_cert(DOMAIN, f"{role}.{DOMAIN}", "localhost", "127.0.0.1")
        certificate, key = self._folder / f"{role}.pem", self._folder / f"{role}.key"
        certificate.write_bytes(b"".join(blob.bytes() for blob in signed.cert_chain_pems))
        key.write_bytes(signed.private_key_pem.bytes())
        return certificate, key

    def settings(self, role: str) -> dict[str, str]:
        """Configuration values of a node of `role`."""
        certificate, key = self.issue(role)
        return {"tls_cert": str(certificate), "tls_key": str(key), "tls_ca": str(self.path)}
