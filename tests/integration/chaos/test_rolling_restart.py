"""Every compute node of a serving mesh is drained and replaced."""

from __future__ import annotations

import subprocess
import sys

from integration.chaos.field import COMPUTE_NODES, Field, Load


def test_a_rolling_restart_of_all_compute_nodes_under_load_fails_no_stream(field: Field) -> None:
    old = [field.nodes[name] for name in COMPUTE_NODES]
    with Load(field, think_s=0.1, seed=11) as load:
        # Half of each pool at a time, which is as much as a pool of two can spare.
        for names in (("prefill-0", "decode-0"), ("prefill-1", "decode-1")):
            load.wait_for_tokens(500)
            signalled, told = (field.nodes[name] for name in names)
            signalled.process.terminate()
            drain = subprocess.run(
                [sys.executable, "-m", "pdmesh_cli.main", "drain", told.address],
                capture_output=True,
                text=True,
                check=True,
                timeout=60,
            )
            assert f"{names[1]} at {told.address} drains" in drain.stdout
            for node in (signalled, told):
                assert node.process.wait(timeout=60) == 0, node.log_text()
                assert "outlived the grace period" not in node.log_text()
            field.restart(*names)
            field.wait_until_whole()
        load.wait_for_tokens(500)
    load.assert_flawless()
    # There was something to finish, and it was finished where it ran.
    assert any("calls finished" in node.log_text() for node in old)
