"""What a client shows to those it calls, and whom it trusts."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from node_runtime.errors import BadConfig
from node_runtime.rpc.channel import Channel, connect
from node_runtime.rpc.tls import TlsFiles, TlsTransport
from node_runtime.rpc.transport import Transport
from pdmesh_cli.defaults import TOKEN_VARIABLE

MAX_MESSAGE_BYTES: Final = 16 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """By default nothing is shown, and nothing is encrypted.

    `token` goes with every call; without `tls` it travels in the open. `server_name` is the DNS name that a server must
    have; None: the host that is dialled.
    """

    token: str = field(default="", repr=False)
    tls: TlsFiles | None = None
    server_name: str | None = None

    def connect(self, address: str) -> Channel:
        """A channel to host:port; nothing is dialled yet. Raises InvalidRequest for a malformed address, BadConfig."""
        transport: Transport | None = None
        if self.tls is not None:
            transport = TlsTransport(self.tls, server_name=self.server_name)
        metadata = (("authorization", f"Bearer {self.token}"),) if self.token else ()
        return connect(address, max_message_bytes=MAX_MESSAGE_BYTES, transport=transport, metadata=metadata)


ANONYMOUS: Final = Identity()


def identity_of(
    *,
    token_file: Path | None,
    tls_ca: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_server_name: str | None,
) -> Identity:
    """What the options of a command say. The token is that of the file, else of the environment. Raises BadConfig."""
    if tls_ca is None and (tls_cert or tls_key or tls_server_name):
        raise BadConfig("tls_ca: required with the other options of TLS")
    if (tls_cert is None) != (tls_key is None):
        raise BadConfig("tls_cert, tls_key: go together")
    tls = None
    if tls_ca is not None:
        tls = TlsFiles(authority=tls_ca, certificate=tls_cert, key=tls_key)
        # Whether they can be read, before anything is asked.
        TlsTransport(tls, server_name=tls_server_name)
    return Identity(token=_token(token_file), tls=tls, server_name=tls_server_name or None)


def _token(path: Path | None) -> str:
    if path is None:
        return os.environ.get(TOKEN_VARIABLE, "").strip()
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadConfig(f"token_file: cannot read {path}: {type(error).__name__}") from None
    if not token.isascii() or not token.isprintable():
        raise BadConfig(f"token_file: {path} does not hold one line of printable characters")
    return token
