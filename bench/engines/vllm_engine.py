"""vLLM on the CPU, float32 and compiled, through its offline interface. Arguments: MODEL NUM_THREADS.

It reads no GGUF file on a CPU: the weights of one are expanded into a folder of their own first.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # what is timed runs in this process

from protocol import prompt, serve

MAX_REQUEST_TOKENS = 1024
MAX_BATCH_SIZE = 32


class VllmEngine:
    def __init__(self, model: Path, num_threads: int, _: list[str]) -> None:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{num_threads - 1}")
        import vllm  # here, so that its absence is an answer

        self.facts: Mapping[str, float] = {}
        self._sampling_of = vllm.SamplingParams
        self._scratch = tempfile.TemporaryDirectory()
        self._llm = vllm.LLM(
            model=str(expanded(model, Path(self._scratch.name))),
            dtype="float32",
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=MAX_REQUEST_TOKENS,
            max_num_seqs=MAX_BATCH_SIZE,
        )

    def prefill(self, num_tokens: int) -> float:
        return self._generate(1, num_tokens, 1)

    def decode(self, batch_size: int, context_tokens: int, num_steps: int) -> float:
        # The same prompts twice: what the second run takes longer are the steps alone.
        without_steps = self._generate(batch_size, context_tokens, 1)
        return (self._generate(batch_size, context_tokens, num_steps + 1) - without_steps) / num_steps

    def _generate(self, batch_size: int, num_tokens: int, num_new_tokens: int) -> float:
        prompts = [{"prompt_token_ids": prompt(number, num_tokens)} for number in range(batch_size)]
        sampling = self._sampling_of(temperature=0.0, max_tokens=num_new_tokens, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        self._llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - began


def expanded(model: Path, folder: Path) -> Path:
    """A folder with float32 safetensors: the model's own, or one made in `folder`."""
    if model.is_dir():
        return model
    from transformers import AutoConfig, AutoModelForCausalLM

    source = AutoModelForCausalLM.from_pretrained(model.parent, gguf_file=model.name)
    config = AutoConfig.from_pretrained(model.parent, gguf_file=model.name).to_dict()
    # A model that says it was read from GGUF refuses to be saved, although its weights are plain by now.
    config.pop("quantization_config", None)
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    plain.load_state_dict(source.state_dict())
    plain.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    serve(VllmEngine)
