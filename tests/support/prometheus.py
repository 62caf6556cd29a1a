"""Reads what a node shows to a scraper."""

from __future__ import annotations

import urllib.request
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families


def scrape(address: str) -> dict[str, float]:
    """Every sample at host:port, by its name with sorted labels as Prometheus writes them."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        _written(sample.name, sample.labels): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def samples_of(samples: Mapping[str, float], prefix: str) -> dict[str, float]:
    """Those whose name begins so."""
    return {name: value for name, value in samples.items() if name.startswith(prefix)}


def _written(name: str, labels: Mapping[str, str]) -> str:
    # An empty label is the same as none.
    listed = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()) if value)
    return f"{name}{{{listed}}}" if listed else name
