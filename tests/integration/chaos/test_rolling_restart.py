"""Every compute node of a serving mesh is drained and replaced, one after the other."""

from __future__ import annotations

import subprocess
import sys

from integration.chaos.field import COMPUTE_NODES, Field, Load


def test_a_rolling_restart_of_all_compute_nodes_under_load_fails_no_stream(field: Field) -> None:
    with Load(field, seed=11) as load:
        for number, name in enumerate(COMPUTE_NODES):
            load.wait_for_tokens(300)
            node = field.nodes[name]
            if number % 2:
                node.process.terminate()
            else:
                told = subprocess.run(
                    [sys.executable, "-m", "pdmesh_cli.main", "drain", node.address],
                    capture_output=True,
                    text=True,
                    check=True,
                    timeout=60,
                )
                assert f"{name} at {node.address} drains" in told.stdout
            assert node.process.wait(timeout=60) == 0, node.log_text()
            assert "outlived the grace period" not in node.log_text()
            field.restart(name)
            field.wait_until_whole()
        load.wait_for_tokens(500)
    load.assert_flawless()
