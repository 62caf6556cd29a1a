"""Chat templates render as their authors expect and can do no harm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path

import pytest

from model_runtime.text.chat_template import ChatMessage, ChatTemplate
from model_runtime.text.errors import ChatTemplateError
from model_runtime.text.tokenizer import has_chat_template

WriteGguf = Callable[[Mapping[str, object]], Path]

_MESSAGES = (ChatMessage(role="system", content="be brief"), ChatMessage(role="user", content="<b> & 'q'"))


def _render(source: str) -> str:
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>", now=lambda: datetime(2024, 7, 26))
    return template.render(_MESSAGES)


def test_messages_tokens_and_the_generation_prompt_are_passed_unescaped() -> None:
    source = (
        "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}]{{ message.content }}{{ eos_token }}"
        "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    assert _render(source) == "<s>[system]be brief</s>[user]<b> & 'q'</s>[assistant]"


def test_block_lines_leave_no_white_space() -> None:
    assert _render("a\n    {% if true %}\nb\n    {% endif %}\nc") == "a\nb\nc"


def test_loop_controls_generation_blocks_json_and_dates_are_available() -> None:
    source = (
        "{% for message in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ message.content }}{% endgeneration %}{% endfor %}"
        "|{{ messages[1].content | tojson }}|{{ strftime_now('%d %b %Y') }}"
    )
    assert _render(source) == "be brief|\"<b> & 'q'\"|26 Jul 2024"


def test_tools_calls_and_names_are_passed_where_there_are_any() -> None:
    source = (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}|{{ message.name }}"
        "{% for call in message.tool_calls %}{{ call.function.arguments.city }}{% endfor %}"
        "{{ message.tool_call_id }}{% endfor %}"
    )
    template = ChatTemplate(source, bos_token="", eos_token="")
    call = {"function": {"name": "weather", "arguments": {"city": "Paris"}}}
    turns = (
        ChatMessage(role="user", content="hi"),
        ChatMessage(role="assistant", content="", tool_calls=(call,)),
        ChatMessage(role="tool", content="sunny", tool_call_id="7", name="weather"),
    )
    assert template.render(turns, [{"type": "function"}]) == '[{"type": "function"}]||Paris|weather7'
    assert template.render(turns[:1]) == "|"


def test_the_templates_own_refusal_reaches_the_caller() -> None:
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        _render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages[0].nothing.deeper }}",
        "{{ 1 / 0 }}",
        "{{ range(1000000000) | list }}",
    ],
)
def test_escapes_mutation_and_faults_are_refusals(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="refused the messages"):
        _render(source)


def test_a_template_that_does_not_compile_is_refused_when_it_is_loaded() -> None:
    with pytest.raises(ChatTemplateError, match="does not compile"):
        ChatTemplate("{% for %}", bos_token="", eos_token="")


def test_an_unknown_role_is_refused() -> None:
    with pytest.raises(ValueError, match="role: 'narrator' is not one of system, user, assistant, tool"):
        ChatMessage(role="narrator", content="")


def test_whether_a_model_takes_chats_is_read_from_the_header_of_its_gguf(
    write_gguf: WriteGguf, byte_level_values: dict[str, object]
) -> None:
    without = {key: value for key, value in byte_level_values.items() if key != "tokenizer.chat_template"}
    assert not has_chat_template(write_gguf(without))
    assert has_chat_template(write_gguf({**without, "tokenizer.chat_template": "{{ messages }}"}))


def test_whether_a_model_takes_chats_is_read_from_the_files_of_its_directory(tmp_path: Path) -> None:
    assert not has_chat_template(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert has_chat_template(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert has_chat_template(tmp_path)
