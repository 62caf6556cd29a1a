"""What the chart makes of the metrics: who scrapes them, what is alarming, what is drawn."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from support.documented_metrics import documented_metrics
from support.helm_chart import (
    CHART,
    Manifest,
    lets_through,
    module_or_skip,
    named,
    of_kind,
    pod_template,
    render,
    selects,
)

promql_parser = module_or_skip("promql_parser")
_LABELS = {"release": "prometheus"}
_ALL_ON = {
    "metrics": {
        "serviceMonitor": {"enabled": True, "labels": _LABELS},
        "rules": {"enabled": True, "labels": _LABELS, "firstTokenSeconds": 2.5},
        "dashboard": {"enabled": True},
    }
}


def _documented_names() -> frozenset[str]:
    """As Prometheus spells them: the table of docs/OPERATIONS.md."""
    return frozenset[str]().union(*(metric.prometheus_names for metric in documented_metrics()))


def _rules() -> list[Manifest]:
    (manifest,) = of_kind(render(_ALL_ON), "PrometheusRule")
    return [rule for group in manifest["spec"]["groups"] for rule in group["rules"]]


def _dashboard() -> Manifest:
    return json.loads(named(render(_ALL_ON), "ConfigMap", "mesh-pdmesh-dashboard")["data"]["pdmesh.json"])


def _queries() -> Iterator[str]:
    """Every expression, with the variables of Grafana filled in."""
    for rule in _rules():
        yield rule["expr"]
    for panel in _dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"].replace("$__rate_interval", "5m").replace("$namespace", "n").replace("$mesh", "m")


def _metric_names(query: str) -> set[str]:
    return set(re.findall(r"\b(?:pdmesh|gen_ai)_[a-z_]+(?=[{\[])", query))


def test_every_query_is_well_formed_and_asks_for_metrics_that_exist() -> None:
    documented = _documented_names()
    assert {"pdmesh_requests_waiting", "gen_ai_server_time_to_first_token_seconds_bucket"} < documented
    assert {"pdmesh_transfer_bytes_total", "pdmesh_handoffs_damaged_total"} < documented
    queries = list(_queries())
    assert len(queries) > 25
    for query in queries:
        promql_parser.parse(query)
        assert _metric_names(query)
        assert _metric_names(query) <= documented, query


def test_pools_scale_by_a_metric_that_exists() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    metrics = values["poolDefaults"]["autoscaling"]["metrics"]
    assert {metric["pods"]["metric"]["name"] for metric in metrics} <= _documented_names()
    scaled = render({"prefillPools": {"default": {"autoscaling": {"enabled": True, "maxReplicas": 7}}}})
    (scaler,) = of_kind(scaled, "HorizontalPodAutoscaler")
    assert (scaler["spec"]["minReplicas"], scaler["spec"]["maxReplicas"]) == (1, 7)
    assert scaler["spec"]["metrics"] == metrics


def test_every_node_is_scraped_where_it_answers() -> None:
    manifests = render(_ALL_ON)
    (monitor,) = of_kind(manifests, "ServiceMonitor")
    assert monitor["metadata"]["labels"].items() >= _LABELS.items()
    services = [
        service
        for service in of_kind(manifests, "Service")
        if selects(monitor["spec"]["selector"], service["metadata"]["labels"])
    ]
    (service,) = services
    assert [port["name"] for port in service["spec"]["ports"]] == [monitor["spec"]["endpoints"][0]["port"]]
    assert monitor["spec"]["namespaceSelector"] == {"matchNames": ["serving"]}
    target = service["spec"]["ports"][0]["targetPort"]
    for workload in of_kind(manifests, "Deployment", "StatefulSet"):
        template = pod_template(workload)
        assert selects({"matchLabels": service["spec"]["selector"]}, template["metadata"]["labels"])
        (container,) = template["spec"]["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        config = yaml.safe_load(named(manifests, "ConfigMap", workload["metadata"]["name"])["data"]["node.yaml"])
        assert ports[target] == config["metrics_port"] == 7720
        labels = template["metadata"]["labels"]
        assert lets_through(manifests, source={"app": "prometheus"}, target=labels, port=7720)


def test_without_metrics_nothing_listens_and_nothing_is_scraped() -> None:
    manifests = render({"metrics": {"enabled": False, "serviceMonitor": {"enabled": True}}})
    assert not of_kind(manifests, "ServiceMonitor")
    for manifest in of_kind(manifests, "ConfigMap"):
        assert "metrics_port" not in manifest["data"]["node.yaml"]
    assert "metrics" not in json.dumps(
        [manifest["spec"] for manifest in of_kind(manifests, "Deployment", "StatefulSet")]
    )


def test_the_dashboard_is_one_that_grafana_can_lay_out() -> None:
    panels = _dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)
    for one, other in itertools.combinations([panel["gridPos"] for panel in panels], 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or above


def _series(name: str, values: str, **labels: str) -> dict[str, str]:
    own = {"mesh": "mesh", "namespace": "serving", "pod": "p-0", **labels}
    return {
        "series": f"{name}{{{','.join(f'{key}={json.dumps(value)}' for key, value in own.items())}}}",
        "values": values,
    }


def _requests(values: str, **labels: str) -> dict[str, str]:
    return _series("gen_ai_server_request_duration_seconds_count", values, **labels)


_SERVING = _series("pdmesh_serving", "1x60", role="router")
_ALARMS = (
    ("PdmeshNoRouter", [_series("pdmesh_serving", "0x60", role="router")], [_SERVING]),
    (
        "PdmeshNodeNotServing",
        [_series("pdmesh_serving", "0x60", role="decode"), _series("pdmesh_draining", "0x60", role="decode")],
        [_series("pdmesh_serving", "0x60", role="decode"), _series("pdmesh_draining", "1x60", role="decode")],
    ),
    (
        "PdmeshDamagedCache",
        [_series("pdmesh_handoffs_damaged_total", "0x25 1x34")],
        [_series("pdmesh_handoffs_damaged_total", "3x60")],
    ),
    (
        "PdmeshManyRetries",
        [_series("pdmesh_retries_total", "0+2x60"), _requests("0+10x60")],
        [_series("pdmesh_retries_total", "0+0.5x60"), _requests("0+10x60")],
    ),
    (
        "PdmeshManyFailures",
        [_requests("0+10x60"), _requests("0+1x60", error_type="Internal")],
        [_requests("0+10x60"), _requests("0+5x60", error_type="cancelled")],
    ),
    (
        "PdmeshSlowFirstToken",
        [
            _series("gen_ai_server_time_to_first_token_seconds_bucket", "0+10x60", le="2.5"),
            _series("gen_ai_server_time_to_first_token_seconds_bucket", "0+11x60", le="5"),
            _series("gen_ai_server_time_to_first_token_seconds_bucket", "0+11x60", le="+Inf"),
        ],
        [
            _series("gen_ai_server_time_to_first_token_seconds_bucket", "0+11x60", le="1"),
            _series("gen_ai_server_time_to_first_token_seconds_bucket", "0+11x60", le="+Inf"),
        ],
    ),
    (
        "PdmeshQueueGrows",
        [_series("pdmesh_requests_waiting", "0+1x60")],
        [_series("pdmesh_requests_waiting", "40-0.5x60")],
    ),
    (
        "PdmeshBlocksQuarantined",
        [_series("pdmesh_arena_blocks", "4x60", state="quarantined")],
        [_series("pdmesh_arena_blocks", "4 0x59", state="quarantined")],
    ),
)


def test_every_rule_has_a_history_in_which_it_wakes_somebody() -> None:
    assert [alert for alert, _, _ in _ALARMS] == [rule["alert"] for rule in _rules()]


def test_rules_wake_somebody_when_they_should_and_only_then(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed; it comes with the Debian package prometheus")
    (manifest,) = of_kind(render(_ALL_ON), "PrometheusRule")
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(manifest["spec"]), encoding="utf-8")
    tests = [
        {
            "name": f"{alert} {'fires' if fires else 'is quiet'}",
            "interval": "1m",
            "input_series": series,
            # How many alerts are firing; none at all is no sample.
            "promql_expr_test": [
                {
                    "expr": f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})',
                    "eval_time": "35m",
                    "exp_samples": [{"labels": "{}", "value": 1}] if fires else [],
                }
            ],
        }
        for alert, alarming, calm in _ALARMS
        for series, fires in ((alarming, True), (calm, False))
    ]
    history = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "history.yaml").write_text(yaml.safe_dump(history), encoding="utf-8")
    result = subprocess.run(
        [promtool, "test", "rules", "history.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
