"""Certificates for tests: an authority of their own, made in memory, and what it signed."""

from __future__ import annotations

from pathlib import Path

import trustme

from cache_runtime.transfer.stream_engine import TlsFiles


def make_tls_files(folder: Path, *, name: str = "127.0.0.1") -> TlsFiles:
    """A certificate for `name`, its key and the authority that signed it."""
    authority = trustme.CA()
    signed = authority.issue_cert(name)
    files = TlsFiles(certificate=folder / "node.pem", key=folder / "node.key", authority=folder / "authority.pem")
    files.certificate.write_bytes(b"".join(blob.bytes() for blob in signed.cert_chain_pems))
    files.key.write_bytes(signed.private_key_pem.bytes())
    files.authority.write_bytes(authority.cert_pem.bytes())
    return files
