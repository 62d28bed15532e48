"""What every run of the demo needs: one loaded model, engines over it, prompts put to them, rows.

Owns: how a prompt is run and what its row expects.  Does not own: which runs there are (``run``, ``several``).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ostinato.engine.llm import LLM
from ostinato.engine.outputs import RequestOutput
from ostinato.runtime.load import Runtime
from ostinato.sampling_params import SamplingParams
from ostinato.serve.demo.report import Row
from ostinato.serve.tables import Bars

STEP_TOKENS: Final = 512
OUTPUT_TOKENS: Final = 16
SAMPLING: Final = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, logits_digest=True)


@dataclass(slots=True)
class Stage:
    """One demo: the loaded model, the device pages of its engines, cold results by prompt, the rows so far."""

    runtime: Runtime
    bars: Bars
    pages: int = 0
    cold: dict[str, RequestOutput] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    def llm(self, pages: int | None = None, **options: Any) -> LLM:
        options |= {"num_gpu_blocks_override": pages or self.pages, "max_num_batched_tokens": STEP_TOKENS}
        return LLM(self.runtime, **options)

    def generate(self, llm: LLM, prompt: str, salt: str = "") -> RequestOutput:
        output = llm.generate(prompt, SAMPLING, cache_salt=salt)[0]
        # Stores run behind the answers; a prompt counts as stored when they are done.
        llm.built.engine.drain()
        self.bars.advance(1)
        return output

    def add_row(self, name: str, output: RequestOutput, prompt: str, seen: Sequence[str], note: str = "") -> None:
        """``output`` answers ``prompt``; ``seen``: what was run before it, by which it is known what can be reused."""
        common = max(common_prefix(output.prompt_token_ids, self.tokens(text)) for text in seen)
        unit = self.runtime.layout.granularity
        expected = min(common, len(output.prompt_token_ids) - 1) // unit * unit
        self.rows.append(Row.of(name, output, self.cold[prompt], expected, note))

    def tokens(self, text: str) -> list[int]:
        tokenizer: Callable[[str], Any] | None = self.runtime.tokenizer
        assert tokenizer is not None, "the demo's prompts are text"
        ids: list[int] = tokenizer(text).input_ids
        return ids


def warm_up(llm: LLM) -> None:
    """The first pass of a process pays for memory and kernels; no row should."""
    llm.generate("Warm up: " + "one two three four " * 150, SamplingParams(temperature=0.0, max_tokens=4))
    llm.reset_prefix_cache()


def new_salt() -> str:
    """For tiers that outlive the demo: what an earlier run left there must not make a row better."""
    return f"demo {secrets.token_hex(8)}"


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))
