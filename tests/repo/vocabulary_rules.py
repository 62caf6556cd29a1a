"""The naming rules of the code base, as data: where a word must not appear, and what to say instead.

The words divide two worlds. Logical quantities are tokens; physical ones are blocks and bytes. A word of one world in
code of the other is a layering mistake before it is a naming mistake, so the rules are tests (test_vocabulary.py), not
advice. docs/GLOSSARY.md defines the words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One forbidden pattern.

    scope: glob patterns, relative to the repository root, of the files it holds for.
    pattern: regular expression searched in each line.
    instead: what to write.
    violation: a line that breaks the rule; proves in its own test that the pattern works.
    allowed: a similar line that does not.
    exempt: globs inside the scope where the word is at home.
    """

    name: str
    scope: tuple[str, ...]
    pattern: str
    instead: str
    violation: str
    allowed: str
    exempt: tuple[str, ...] = ()

    def findings(self, root: Path) -> Iterator[str]:
        """Yields `path:line: text` for every line that breaks the rule."""
        expression = re.compile(self.pattern)
        exempt = {path for glob in self.exempt for path in root.glob(glob)}
        for path in sorted({path for glob in self.scope for path in root.glob(glob) if path.is_file()} - exempt):
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
                if expression.search(line):
                    yield f"{path.relative_to(root)}:{number}: {line.strip()}"


CORE = ("scheduler_core/**/*.cpp", "scheduler_core/**/*.h", "scheduler_core/**/*.py", "scheduler_core/**/*.pyi")
PYTHON = tuple(
    f"{package}/**/*.py"
    for package in (
        "cache_runtime",
        "model_runtime",
        "node_runtime",
        "prefill_node",
        "decode_node",
        "router_node",
        "simulation",
        "pdmesh_cli",
    )
)
PRODUCT = (*CORE, *PYTHON, "protos/**/*.proto")

RULES = (
    Rule(
        name="the core has no page",
        scope=CORE,
        pattern=r"(?i)page",
        instead="block, block_granularity or prefix_granularity: the core has no kernel pages",
        violation="int page_size = 16;",
        allowed="int block_granularity = 16;",
    ),
    Rule(
        name="declaration shapes stop at the bridge",
        scope=CORE,
        pattern=r"rows_per_|entry_stride|checkpoint_granularity",
        instead="block_granularity: the only span that crosses the bridge",
        violation="int checkpoint_granularity;",
        allowed="int block_granularity;",
    ),
    Rule(
        name="the core is pure",
        scope=("scheduler_core/csrc/**/*.cpp", "scheduler_core/csrc/**/*.h"),
        pattern=r"#include <(chrono|thread|mutex|iostream|fstream|random|cstdio|ctime|atomic)>",
        instead="an argument: time, ids and seeds come in from outside, and nothing is logged",
        violation="#include <chrono>",
        allowed="#include <cstdint>",
    ),
    Rule(
        name="the allocator counts blocks, not tokens",
        scope=("scheduler_core/csrc/cache/allocator/*", "scheduler_core/csrc/cache/core/block_pool.*"),
        pattern=r"(?i)token|prefix_granularity|block_granularity|window",
        instead="block counts, converted by GroupGeometry in the coordinator",
        violation="int num_tokens;",
        allowed="int num_blocks;",
    ),
    Rule(
        name="kernel geometry does not come from the identity grain",
        scope=PYTHON,
        pattern=r"kernel_page_size\s*=\s*(self\.|config\.|plan\.|contract\.)*prefix_granularity",
        instead="kernel_page_sizes.resolve(...) or an explicit configuration value",
        violation="kernel_page_size = config.prefix_granularity",
        allowed="kernel_page_size = resolve(backend, config.kernel_page_size)",
    ),
    Rule(
        name="page tables exist for paged attention only",
        scope=(
            "node_runtime/**/*.py",
            "prefill_node/**/*.py",
            "decode_node/**/*.py",
            "router_node/**/*.py",
            "protos/**/*.proto",
        ),
        pattern=r"page_table|(?<!kernel_)page_size",
        instead="block_table; only mapping and attention kernels know pages (kernel_page_size may be passed on)",
        violation="page_table = plan.tables[0]",
        allowed="kernel_page_sizes = registry()",
        exempt=("node_runtime/config.py", "node_runtime/engine/assembly.py"),
    ),
    Rule(
        name="roles are spelled out",
        scope=PRODUCT,
        pattern=r"\b(p_node|d_node|pnode|dnode|[pd]_(engine|blocks|address|side))\b",
        instead="prefill and decode",
        violation="p_node = peers[0]",
        allowed="prefill_node = peers[0]",
    ),
    Rule(
        name="a request is named by request_id",
        scope=PRODUCT,
        pattern=r"\brids?\b|\breq_id\b",
        instead="request_id",
        violation="rid = make_id()",
        allowed="request_id = make_id()",
    ),
    Rule(
        name="one word for the granularity of identity",
        scope=PRODUCT,
        pattern=r"\b(block_size|chunk_size|prefix_block_size)\b",
        instead="prefix_granularity (identity), block_granularity (slot span) or a quantity that ends in its unit",
        violation="block_size = 64",
        allowed="block_granularity = 64",
        # A field of another project's protocol.
        exempt=("decode_node/engine_protocol/kv_messages.py",),
    ),
    Rule(
        name="no dumping grounds",
        scope=PRODUCT,
        pattern=r"^\s*(from|import) (?!opentelemetry\.)[\w.]*\b(utils|helpers|common)\b",
        instead="a module named for what it is",
        violation="from node_runtime.utils import retry",
        allowed="from node_runtime.clock import Clock",
    ),
)
