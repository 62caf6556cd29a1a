"""Which prompts the demo uses."""

from __future__ import annotations

from pathlib import Path

import pytest

from node_runtime.errors import BadConfig
from pdmesh_cli.client_types import ChatMessage
from pdmesh_cli.demo import requests_for
from pdmesh_cli.demo_requests import CHAT_REQUESTS, COMPLETION_REQUESTS


def test_a_model_without_chat_template_is_given_beginnings_only(tmp_path: Path) -> None:
    assert requests_for(tmp_path) == COMPLETION_REQUESTS
    assert all(isinstance(request.prompt, str) for request in COMPLETION_REQUESTS)


def test_a_model_with_a_chat_template_is_asked_questions(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert requests_for(tmp_path) == CHAT_REQUESTS
    assert isinstance(CHAT_REQUESTS[0].prompt[0], ChatMessage)


@pytest.mark.parametrize("requests", [CHAT_REQUESTS, COMPLETION_REQUESTS])
def test_the_third_prompt_shares_a_long_beginning_with_the_second(requests) -> None:
    second, third = (str(request.prompt) for request in requests[1:3])
    shared = next(index for index, (left, right) in enumerate(zip(second, third, strict=False)) if left != right)
    assert shared > 1000


def test_a_file_that_is_no_model_is_bad_configuration(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("a shopping list, long enough for a header")
    with pytest.raises(BadConfig, match="not a GGUF file"):
        requests_for(path)
