"""The `pdmesh` command: which commands there are. Each is imported when it is called.

Exit status: 0 done, 1 failed, 2 wrong usage or configuration.
"""

from __future__ import annotations

import errno
import os
import sys

import typer

from pdmesh_cli.lazy_commands import CommandEntry, add_commands
from pdmesh_cli.parent_death import die_with_parent

app = typer.Typer(
    name="pdmesh",
    help="Serve an LLM with prefill and decode as separate services.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_NODES = "Nodes"
_THIS_MACHINE = "A mesh on this machine"
_CLIENTS = "Using a mesh"
_DEVELOPERS = "Testing a mesh"

COMMANDS = (
    CommandEntry(
        name="router",
        panel=_NODES,
        target="pdmesh_cli.node_commands:router",
        summary="Run a router: the endpoint of clients. Text in, text out; needs no torch.",
    ),
    CommandEntry(
        name="prefill",
        panel=_NODES,
        target="pdmesh_cli.node_commands:prefill",
        summary="Run a prefill node: computes prompts and writes their cache into decode nodes.",
    ),
    CommandEntry(
        name="decode",
        panel=_NODES,
        target="pdmesh_cli.node_commands:decode",
        summary="Run a decode node: takes prefilled prompts and generates tokens.",
    ),
    CommandEntry(
        name="fused",
        panel=_NODES,
        target="pdmesh_cli.node_commands:fused",
        summary="Run a fused node: prefill and decode in one process.",
    ),
    CommandEntry(
        name="up",
        panel=_THIS_MACHINE,
        target="pdmesh_cli.mesh_commands:up",
        summary="Run a whole mesh on this machine: router, prefill and decode nodes, trace collector. Ctrl-C stops it.",
    ),
    CommandEntry(
        name="demo",
        panel=_THIS_MACHINE,
        target="pdmesh_cli.mesh_commands:demo",
        summary="Start router, prefill and decode as three processes, answer four prompts and show what happened to "
        "each.",
    ),
    CommandEntry(
        name="plan",
        panel=_THIS_MACHINE,
        target="pdmesh_cli.mesh_commands:plan",
        summary="Show how the cache of a model would be laid out in a given memory, and how much it would hold.",
    ),
    CommandEntry(
        name="fetch",
        panel=_NODES,
        target="pdmesh_cli.node_commands:fetch",
        summary="Download a model file and check it, for nodes that are to find it on a volume.",
    ),
    CommandEntry(
        name="generate",
        panel=_CLIENTS,
        target="pdmesh_cli.generate_command:generate",
        summary="Generate text for one prompt: the answer goes to standard output, what it cost to standard error.",
    ),
    CommandEntry(
        name="status",
        panel=_CLIENTS,
        target="pdmesh_cli.view_commands:status",
        summary="Show role, state, load and cache of the nodes, once or as they change.",
    ),
    CommandEntry(
        name="trace",
        panel=_CLIENTS,
        target="pdmesh_cli.view_commands:trace",
        summary="Show the last requests, or what happened to one of them.",
    ),
    CommandEntry(
        name="drain",
        panel=_NODES,
        target="pdmesh_cli.node_commands:drain",
        summary="Tell a node to take no new work, finish what it has and leave, as SIGTERM does.",
    ),
    CommandEntry(
        name="config",
        panel=_NODES,
        target="pdmesh_cli.config_commands:config_app",
        summary="Check and show configurations without starting a node.",
    ),
    CommandEntry(
        name="chat",
        panel=_CLIENTS,
        target="pdmesh_cli.client_commands:chat",
        summary="Talk with the model. Every turn finds the conversation before it in the cache.",
    ),
    CommandEntry(
        name="bench",
        panel=_CLIENTS,
        target="pdmesh_cli.client_commands:bench",
        summary="Send random prompts and show throughput and latencies. Fails if any request did.",
    ),
    CommandEntry(name="version", panel=_CLIENTS, target="pdmesh_cli.main:print_version", summary="Print the version."),
    CommandEntry(
        name="sim",
        panel=_DEVELOPERS,
        target="pdmesh_cli.sim:simulate_mesh",
        summary="Run whole meshes in virtual time, with every kind of fault, each from one seed. Fails on any finding.",
    ),
)
add_commands(app, COMMANDS)


def print_version() -> None:
    """Print the version."""
    from importlib.metadata import version

    typer.echo(f"pdmesh {version('pdmesh')}")


# What is wrong with the file or the disk that output goes to, and not with this program.
_CANNOT_WRITE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS})


def main() -> None:
    """Entry point of the `pdmesh` command."""
    die_with_parent()
    try:
        app(prog_name="pdmesh")
    except OSError as error:
        if error.errno not in _CANNOT_WRITE:
            raise
        where = "the output" if error.filename is None else error.filename
        print(f"pdmesh: cannot write {where}: {error.strerror}", file=sys.stderr)
        # Without the interpreter's own end, which would try to write the rest once more.
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    main()
