"""The prompts of the demo: a short one, a long one, a second one with the same beginning, and a sampled one.

A model that was trained to answer is asked questions; one that continues text is given beginnings.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdmesh_cli.client_types import ChatMessage, GenerateOptions, Prompt

_PAGE = (
    "You work at the front desk of the Old Harbour Museum and answer the questions of visitors. The museum opens "
    "at ten in the morning and closes at six in the evening; on Thursdays it stays open until nine. It is closed "
    "on Mondays, except on public holidays. Adults pay twelve euros, students pay seven euros, and children under"
    " fourteen enter free of charge. On the first Sunday of every month nobody pays. The ground floor shows the "
    "history of the harbour: a model of the docks in 1850, the tools of the rope makers, and the steam crane that"
    " was used until 1962. The first floor shows paintings of ships and storms. On the second floor there is a "
    "planetarium; its shows start at eleven, at two and at four, last forty minutes, and cost three euros more. "
    "Guided tours in English start at noon at the main entrance. The café in the courtyard serves soup, cake and "
    "coffee until half an hour before the museum closes. Large bags must stay in the lockers next to the "
    "entrance; the lockers need a one euro coin, which they give back. Photographs are allowed without flash. "
    "Dogs are not allowed, except guide dogs. The museum can be reached by tram line 7, stop Old Harbour, and "
    "there is a bicycle stand behind the building."
)
_HANDBOOK = f"{_PAGE} Answer briefly and politely, and only with facts from this text."


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRequest:
    """One stop of the tour."""

    title: str
    shown: str
    prompt: Prompt
    options: GenerateOptions


def _museum_question(question: str) -> tuple[ChatMessage, ...]:
    return (ChatMessage(role="system", content=_HANDBOOK), ChatMessage(role="user", content=question))


_SAMPLED = DemoRequest(
    title="sampled, seed 7",
    shown="Once upon a time",
    prompt="Once upon a time",
    options=GenerateOptions(max_tokens=48, temperature=0.8, top_p=0.95, seed=7),
)

CHAT_REQUESTS = (
    DemoRequest(
        title="a chat",
        shown="What is gravity? Answer in one sentence.",
        prompt=(ChatMessage(role="user", content="What is gravity? Answer in one sentence."),),
        options=GenerateOptions(max_tokens=64),
    ),
    DemoRequest(
        title="a long prompt",
        shown="(a page about a museum) When does the museum close on Thursdays?",
        prompt=_museum_question("When does the museum close on Thursdays?"),
        options=GenerateOptions(max_tokens=48),
    ),
    DemoRequest(
        title="the same page again",
        shown="(the same page) Are dogs allowed in the museum?",
        prompt=_museum_question("Are dogs allowed in the museum?"),
        options=GenerateOptions(max_tokens=48),
    ),
    _SAMPLED,
)

COMPLETION_REQUESTS = (
    DemoRequest(
        title="a beginning",
        shown="The capital of France is",
        prompt="The capital of France is",
        options=GenerateOptions(max_tokens=32),
    ),
    DemoRequest(
        title="a long prompt",
        shown="(a page about a museum) The museum opens at",
        prompt=f"{_PAGE}\n\nThe museum opens at",
        options=GenerateOptions(max_tokens=12),
    ),
    DemoRequest(
        title="the same page again",
        shown="(the same page) On Thursdays the museum stays open until",
        prompt=f"{_PAGE} On Thursdays the museum stays open until",
        options=GenerateOptions(max_tokens=12),
    ),
    _SAMPLED,
)
