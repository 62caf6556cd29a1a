"""Commands that are imported when they are called: help, and a name that is wrong, need none of them.

Knows where commands are, nothing of what they do.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer
from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from typer._click import Context


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandEntry:
    """One command as the list of all shows it. `summary` is the first paragraph of its own help."""

    name: str
    panel: str
    target: str
    """`module:attribute`: a function with typer's annotations, or a Typer with further commands."""
    summary: str

    def load(self) -> TyperCommand | TyperGroup:
        """The command itself. Raises TypeError when `target` is none."""
        module, _, attribute = self.target.partition(":")
        found = getattr(importlib.import_module(module), attribute)
        if not isinstance(found, typer.Typer):
            alone = typer.Typer(add_completion=False, rich_markup_mode="rich")
            alone.command(self.name)(found)
            found = alone
        command = typer.main.get_command(found)
        if not isinstance(command, TyperCommand | TyperGroup):
            raise TypeError(f"{self.target}: expected a command of typer, got {type(command).__name__}")
        return command


class _LazyCommand(TyperCommand):
    """Stands in for a command until it is called. Its callback is `CommandEntry.load`."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: Context | None = None, **extra: object
    ) -> Context:
        if self.callback is None:
            raise RuntimeError(f"command {info_name}: nothing says where it is")
        loaded: TyperCommand | TyperGroup = self.callback()
        return loaded.make_context(info_name, args, parent, **extra)


def add_commands(app: typer.Typer, entries: Iterable[CommandEntry]) -> None:
    """Adds all of them in their order."""
    for entry in entries:
        app.command(entry.name, cls=_LazyCommand, help=entry.summary, rich_help_panel=entry.panel)(entry.load)
