"""The compute half of a step: from a plan's sequences to sampled tokens.

Owns: the worker's tables (per sequence and group, the blocks appended so far), packing a ragged batch, the forward
pass, sampling, log-probabilities, logits digests.  Does not own: pages, transfers (``worker``), the model's arithmetic.
Recurrent state has no table: each plan says where a sequence's state lies.

One batch per step: the new tokens of all sequences, prefill chunks and decodes alike, in one row of ``T`` tokens with
explicit positions.  The head runs only over the last rows of sequences that sample, and over rows of prompts whose
log-probabilities are wanted.

Invariant: a row's result depends on its sequence alone, up to the runtime's promise (``selfcheck``); the batch is
padded to the row rule of the linear kernels for that (``linear.RowRule``).  Thread: the worker's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ostinato.ids import RequestId
from ostinato.runtime.arena import Arena
from ostinato.runtime.attention import AttentionBackend
from ostinato.runtime.context import ACTIVE, BlockRow, ForwardContext, Span, build_groups, build_states
from ostinato.runtime.geometry import ModelSpecs
from ostinato.runtime.grammars import GrammarError, Grammars, GrammarState
from ostinato.runtime.latent import LatentWeights
from ostinato.runtime.linear import LinearPlan
from ostinato.runtime.logprobs import token_logprobs
from ostinato.runtime.paged_cache import PagedCache
from ostinato.runtime.penalties import History
from ostinato.runtime.sampler import Sampler, SampleRow, request_seed
from ostinato.runtime.scans.base import ScanBackend
from ostinato.sampling_params import SamplingParams
from ostinato.scheduler.plan import PromptLogprobs, SampledToken, SequencePlan, StepPlan


@dataclass(frozen=True, slots=True, eq=False)
class PreparedModel:
    """A model whose attention, mixers and linears were replaced, and what is known of it.

    ``latents``: absorption weights, by layer.  Shared by runners, never changed.
    """

    model: PreTrainedModel
    specs: ModelSpecs
    backend: AttentionBackend
    scans: ScanBackend
    linears: LinearPlan
    latents: Mapping[int, LatentWeights]


@dataclass(slots=True)
class _Sequence:
    """What the worker remembers of a request between steps."""

    rows: tuple[BlockRow, ...]
    params: SamplingParams | None
    seed: int
    history: History
    grammar: GrammarState | None = None
    broken: str = ""
    """Why no token can come any more."""

    def mask(self, size: int) -> torch.Tensor | None:
        """The tokens that a grammar allows next; all (None), and ``broken`` says why, where it can allow none."""
        try:
            return self.grammar.mask(size) if self.grammar is not None else None
        except GrammarError as error:
            self.broken = str(error)
            return None

    def push(self, token: int) -> None:
        self.history.push(token)
        if self.grammar is not None:
            self.grammar.push(token)


@dataclass(frozen=True, slots=True)
class Computed:
    """What a step's sequences gave: sampled tokens in the order of the plan, and scored parts of prompts."""

    sampled: tuple[SampledToken, ...] = ()
    prompts: tuple[PromptLogprobs, ...] = ()


class ModelRunner:
    """Runs the sequences of step plans with one model over one arena."""

    def __init__(
        self, prepared: PreparedModel, arena: Arena, sampler: Sampler, grammars: Grammars | None = None
    ) -> None:
        self._prepared = prepared
        self._arena = arena
        self._sampler = sampler
        self._grammars = grammars
        self._groups = arena.layout.groups
        self._stateful = frozenset(place.group for place in arena.states.values())
        self._sequences: dict[RequestId, _Sequence] = {}
        self._cache = PagedCache(len(prepared.specs.geometry), prepared.specs.row_offsets)

    @property
    def num_sequences(self) -> int:
        """Sequences whose tables are kept."""
        return len(self._sequences)

    def run(self, plan: StepPlan) -> Computed:
        """Compute the plan's sequences."""
        rows = self._rows(plan)
        if rows is None:
            return Computed()
        counts = [len(sequence.targets) + sequence.sample for sequence in plan.sequences]
        pairs = list(zip(plan.sequences, torch.split(rows, counts), strict=True))
        chosen = [(sequence, part[-1]) for sequence, part in pairs if sequence.sample]
        prompts = tuple(self._score(sequence, part) for sequence, part in pairs if sequence.targets)
        return Computed(self._sample(rows, chosen), prompts)

    def logits(self, plan: StepPlan, every: bool = False) -> torch.Tensor | None:
        """Bring tables up to date and run the model: one row [V] per sampling sequence, or None when there is none.

        ``every``: a row for each token of the step instead.
        """
        assert not any(sequence.targets for sequence in plan.sequences), "these rows are for run() alone"
        return self._rows(plan, every)

    def _rows(self, plan: StepPlan, every: bool = False) -> torch.Tensor | None:
        """Logits [R, V]: of each sequence in turn, the rows before its targets, then its last row when it samples."""
        for request_id in plan.finished:
            self._sequences.pop(request_id, None)
        if not plan.sequences:
            return None
        spans = [self._extend(sequence) for sequence in plan.sequences]
        wanted: list[int] = []
        begin = 0
        for sequence, span in zip(plan.sequences, spans, strict=True):
            wanted += range(begin, begin + (span.count if every else len(sequence.targets)))
            begin += span.count
            wanted += [begin - 1] * (sequence.sample and not every)
        token = ACTIVE.set(self._context(spans))
        try:
            with torch.inference_mode():
                return self._forward(plan.sequences, spans, wanted)
        finally:
            ACTIVE.reset(token)

    def _sample(
        self, rows: torch.Tensor, chosen: Sequence[tuple[SequencePlan, torch.Tensor]]
    ) -> tuple[SampledToken, ...]:
        """``rows``: all that were computed; passed on as they are when each of them is sampled."""
        if not chosen:
            return ()
        logits = rows if len(chosen) == len(rows) else torch.stack([row for _, row in chosen])
        tokens = self._sampler.sample(logits, [self._sample_row(sequence, rows.shape[1]) for sequence, _ in chosen])
        return tuple(
            self._sampled(sequence, token, row)
            for (sequence, _), token, row in zip(chosen, tokens, logits, strict=True)
        )

    def _sampled(self, sequence: SequencePlan, token: int, logits: torch.Tensor) -> SampledToken:
        known = self._sequences[sequence.request_id]
        params = known.params
        assert params is not None
        if params.uses_past:
            known.push(token)
        digest = logits_digest(logits) if params.logits_digest else b""
        logprobs = token_logprobs(logits, token, params.logprobs) if params.logprobs is not None else None
        return SampledToken(sequence.request_id, token, digest, logprobs, known.broken)

    def _score(self, sequence: SequencePlan, rows: torch.Tensor) -> PromptLogprobs:
        params = self._sequences[sequence.request_id].params
        count = params.prompt_logprobs if params is not None else None
        assert count is not None, f"request {sequence.request_id} did not ask for its prompt's log-probabilities"
        # The sampled row, if there is one, comes behind.
        scored = zip(sequence.targets, rows, strict=False)
        tokens = tuple(token_logprobs(row, token, count) for token, row in scored)
        return PromptLogprobs(sequence.request_id, sequence.start + 1, tokens)

    def _context(self, spans: Sequence[Span]) -> ForwardContext:
        prepared = self._prepared
        return ForwardContext(
            tokens=sum(span.count for span in spans),
            groups=build_groups(spans, [group.hash_unit for group in self._groups], self._stateful),
            states=build_states(spans, len(self._groups), self._stateful),
            arena=self._arena,
            backend=prepared.backend,
            scans=prepared.scans,
            geometry=prepared.specs.geometry,
            latents=prepared.latents,
        )

    def _extend(self, sequence: SequencePlan) -> Span:
        known = self._sequences.get(sequence.request_id)
        if sequence.fresh or known is None:
            assert sequence.fresh, f"request {sequence.request_id} has no table here"
            known = self._fresh(sequence, known)
        assert len(sequence.new_pages) == len(self._groups), sequence
        for row, pages, group in zip(known.rows, sequence.new_pages, self._groups, strict=True):
            row.append(pages, group.page_units)
        blocks = tuple(row.blocks for row in known.rows)
        return Span(sequence.start, len(sequence.tokens), blocks, sequence.state)

    def _fresh(self, sequence: SequencePlan, known: _Sequence | None) -> _Sequence:
        params = sequence.sampling
        # A request that was preempted keeps its seed, so that its next token is the one it would have been.
        seed = known.seed if known is not None else 0 if params is None else request_seed(params)
        new = _Sequence(tuple(BlockRow() for _ in self._groups), params, seed, History.of(sequence.past))
        if params is not None and params.structured_outputs is not None:
            assert self._grammars is not None, "the engine refuses these where nobody can compile them"
            new.grammar = self._grammars.start(params.structured_outputs, new.history.output)
        self._sequences[sequence.request_id] = new
        return new

    def _forward(
        self, sequences: Sequence[SequencePlan], spans: Sequence[Span], wanted: list[int]
    ) -> torch.Tensor | None:
        plan = self._prepared.linears
        rows = plan.body.pad(sum(span.count for span in spans))
        ids = np.zeros((1, rows), dtype=np.int64)
        positions = np.zeros((1, rows), dtype=np.int64)
        begin = 0
        for sequence, span in zip(sequences, spans, strict=True):
            ids[0, begin : begin + span.count] = sequence.tokens
            positions[0, begin : begin + span.count] = np.arange(span.start, span.end)
            begin += span.count
        model: Any = self._prepared.model
        inputs: dict[str, Any] = {
            "input_ids": torch.from_numpy(ids),
            "use_cache": True,
            self._prepared.specs.cache_argument: self._cache,
        }
        if self._prepared.specs.takes_positions:
            inputs["position_ids"] = torch.from_numpy(positions)
        if not wanted:
            model.base_model(**inputs)
            return None
        padded = wanted + wanted[-1:] * (plan.head.pad(len(wanted)) - len(wanted))
        logits: torch.Tensor = model(logits_to_keep=torch.tensor(padded), **inputs).logits[0]
        return logits[: len(wanted)]

    def _sample_row(self, sequence: SequencePlan, size: int) -> SampleRow:
        known = self._sequences[sequence.request_id]
        assert known.params is not None, f"request {sequence.request_id} came without sampling parameters"
        return SampleRow(known.params, known.seed, sequence.sampled_before, known.history, known.mask(size))


def logits_digest(logits: torch.Tensor) -> bytes:
    """SHA-256 over a row of logits as little-endian fp32."""
    return hashlib.sha256(logits.to(torch.float32).numpy().astype("<f4", copy=False).tobytes()).digest()
