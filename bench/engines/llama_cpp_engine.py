"""llama.cpp through xllamacpp's server object, as it times itself. Arguments: MODEL NUM_THREADS."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from protocol import prompt, serve

MAX_BATCH_SIZE = 32
MAX_REQUEST_TOKENS = 1024


class LlamaCppEngine:
    def __init__(self, model: Path, num_threads: int, _: list[str]) -> None:
        import xllamacpp  # here, so that its absence is an answer

        self.facts: Mapping[str, float] = {}
        params = xllamacpp.CommonParams()
        params.model.path = str(model)
        params.n_parallel = MAX_BATCH_SIZE
        params.n_ctx = MAX_BATCH_SIZE * MAX_REQUEST_TOKENS
        params.n_batch = MAX_BATCH_SIZE * MAX_REQUEST_TOKENS  # all prompts of a batch at once
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = num_threads
        self._server = xllamacpp.Server(params)

    def prefill(self, num_tokens: int) -> float:
        return float(self._complete(0, num_tokens, 1)["prompt_ms"]) / 1e3

    def decode(self, batch_size: int, context_tokens: int, num_steps: int) -> float:
        # The first token of each comes from its prompt; the request that starts last waits for no other prompt.
        with ThreadPoolExecutor(batch_size) as pool:
            timings = pool.map(lambda slot: self._complete(slot, context_tokens, num_steps + 1), range(batch_size))
        return min(float(each["predicted_ms"]) for each in timings) / num_steps / 1e3

    def _complete(self, slot: int, num_tokens: int, num_new_tokens: int) -> Mapping[str, float]:
        request = {
            "prompt": prompt(slot, num_tokens),
            "id_slot": slot,
            "n_predict": num_new_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": False,
        }
        answer: dict[str, Mapping[str, float]] = self._server.handle_completions(request)
        return answer["timings"]


if __name__ == "__main__":
    serve(LlamaCppEngine)
