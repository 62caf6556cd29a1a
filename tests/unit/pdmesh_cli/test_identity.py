"""Who a client says that it is: where the token comes from, what goes together, and that nothing shows the token."""

from __future__ import annotations

from pathlib import Path

import pytest

from node_runtime.errors import BadConfig
from pdmesh_cli.defaults import TOKEN_VARIABLE
from pdmesh_cli.identity import Identity, identity_of

TOKEN = "hunter2-hunter2"


def asked(**options: Path | str | None) -> Identity:
    nothing = {"token_file": None, "tls_ca": None, "tls_cert": None, "tls_key": None, "tls_server_name": None}
    return identity_of(**(nothing | options))  # type: ignore[arg-type]


def test_the_token_of_a_file_goes_before_that_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert asked().token == ""
    monkeypatch.setenv(TOKEN_VARIABLE, f" {TOKEN}\n")
    assert asked().token == TOKEN
    file = tmp_path / "token"
    file.write_text("of-the-file\n")
    assert asked(token_file=file).token == "of-the-file"


@pytest.mark.parametrize(
    "content", [f"{TOKEN}\n{TOKEN}".encode(), f"{TOKEN}\x1b[2J".encode(), f"{TOKEN}ü".encode(), b"\xff"]
)
def test_a_file_that_holds_no_token_is_named_and_not_quoted(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "token"
    file.write_bytes(content)
    with pytest.raises(BadConfig, match=rf"token_file: .*{file}") as refusal:
        asked(token_file=file)
    assert TOKEN not in str(refusal.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=r"token_file: cannot read .*none: FileNotFoundError"):
        asked(token_file=tmp_path / "none")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"tls_cert": Path("c"), "tls_key": Path("k")}, "tls_ca: required"),
        ({"tls_server_name": "mesh"}, "tls_ca: required"),
        ({"tls_ca": Path("a"), "tls_cert": Path("c")}, "tls_cert, tls_key: go together"),
        ({"tls_ca": Path("a"), "tls_key": Path("k")}, "tls_cert, tls_key: go together"),
    ],
)
def test_options_of_tls_go_together(options: dict[str, Path | str], complaint: str) -> None:
    with pytest.raises(BadConfig, match=complaint):
        asked(**options)


def test_whoever_prints_an_identity_sees_no_token() -> None:
    assert TOKEN not in f"{Identity(token=TOKEN)!r} {Identity(token=TOKEN)}"
