"""`pdmesh fetch`: a model file from a web server of this test, checked by its hash."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from pdmesh_cli.main import app

_CONTENT = b"weights" * 100_000
_SHA256 = hashlib.sha256(_CONTENT).hexdigest()


class _Files(BaseHTTPRequestHandler):
    """Serves one file, and the same file cut off."""

    requests: list[str]

    def do_GET(self) -> None:
        self.requests.append(self.path)
        if self.path not in ("/whole", "/cut"):
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(_CONTENT)))
        self.end_headers()
        self.wfile.write(_CONTENT if self.path == "/whole" else _CONTENT[:1000])

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[str, list[str]]]:
    requests: list[str] = []
    handler = type("Files", (_Files,), {"requests": requests})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_address[1]}", requests
        httpd.shutdown()
        thread.join()


def _fetch(url: str, sha256: str, target: Path) -> Result:
    return CliRunner().invoke(app, ["fetch", url, "--sha256", sha256, "--to", str(target)])


def test_a_file_is_put_where_it_was_wanted_and_not_fetched_again(server: tuple[str, list[str]], tmp_path: Path) -> None:
    base, requests = server
    target = tmp_path / "models" / "m.gguf"
    first = _fetch(f"{base}/whole", _SHA256, target)
    assert (first.exit_code, target.read_bytes()) == (0, _CONTENT), first.output
    second = _fetch(f"{base}/whole", _SHA256.upper(), target)
    assert (second.exit_code, requests) == (0, ["/whole"])
    assert "was there already" in second.stdout
    assert [path.name for path in target.parent.iterdir()] == ["m.gguf"]


@pytest.mark.parametrize(
    ("path", "sha256", "complaint"),
    [
        ("/whole", "0" * 64, f"has sha256 {_SHA256}, expected {'0' * 64}; nothing was kept"),
        ("/cut", _SHA256, "the connection ended after 1000 of 700000 bytes"),
        ("/none", _SHA256, "404"),
        ("/whole", "abc", "sha256: expected 64 hexadecimal digits, got 'abc'"),
    ],
)
def test_a_file_that_is_not_the_one_wanted_is_not_kept(
    server: tuple[str, list[str]], tmp_path: Path, path: str, sha256: str, complaint: str
) -> None:
    target = tmp_path / "m.gguf"
    target.write_bytes(b"old")
    result = _fetch(server[0] + path, sha256, target)
    assert result.exit_code == 1
    assert complaint in result.stderr
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_server_that_is_not_there_is_told_in_plain_words(tmp_path: Path) -> None:
    result = _fetch("http://127.0.0.1:1/m", _SHA256, tmp_path / "m")
    assert (result.exit_code, result.stderr) == (1, "pdmesh: http://127.0.0.1:1/m: Connection refused\n")


def test_other_places_than_web_servers_are_refused_without_showing_a_password(tmp_path: Path) -> None:
    result = _fetch("ftp://user:hunter2@host/m", _SHA256, tmp_path / "m")
    assert result.exit_code == 1
    assert "url: expected http:// or https://, got 'ftp://***@host/m'" in result.stderr
