"""`pdmesh sim`: looks for seeds under which a simulated mesh breaks a promise, and explains each."""

from __future__ import annotations

import secrets
import sys
from typing import Annotated

import typer

_SEED_BITS = 31


def simulate_mesh(
    seed: Annotated[
        int | None, typer.Option(help="First seed. Default: a random one.", min=0, show_default=False)
    ] = None,
    runs: Annotated[
        int | None, typer.Option(help="How many seeds. Default: 1000, or no limit with --minutes.", min=1)
    ] = None,
    minutes: Annotated[float | None, typer.Option(help="Go on for so long.", min=0.01)] = None,
    jobs: Annotated[int, typer.Option(help="Processes to run on.", min=1, max=256)] = 1,
    max_failures: Annotated[int, typer.Option(help="Stop after so many seeds with findings.", min=1)] = 3,
    transcript: Annotated[bool, typer.Option("--transcript", help="Tell one seed as it happens, and stop.")] = False,
) -> None:
    """Run whole meshes in virtual time, with every kind of fault, each from one seed. Fails on any finding."""
    from simulation.campaign import run_campaign
    from simulation.drawing import draw_scenario
    from simulation.run import simulate

    first_seed = secrets.randbits(_SEED_BITS) if seed is None else seed
    if transcript:
        outcome = simulate(draw_scenario(first_seed), is_verbose=True)
        typer.echo("\n".join((*outcome.scenario.describe(), *outcome.lines)))
        sys.exit(1 if outcome.findings else 0)
    num_runs = 1000 if runs is None and minutes is None else runs
    typer.echo(f"seeds from {first_seed} on")
    tally = run_campaign(
        first_seed,
        num_runs=num_runs,
        duration_s=None if minutes is None else minutes * 60.0,
        num_jobs=jobs,
        max_failures=max_failures,
        say=typer.echo,
    )
    typer.echo(tally.describe_seen())
    typer.echo(str(tally))
    if tally.failed_seeds:
        typer.echo(f"findings with seeds {', '.join(map(str, tally.failed_seeds))}", err=True)
        sys.exit(1)
