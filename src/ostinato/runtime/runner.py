"""The compute half of a step: from a plan's sequences to sampled tokens.

Owns: the worker's tables (per sequence and group, the blocks appended so far), packing a ragged batch, the forward
pass, sampling, logits digests.  Does not own: pages, transfers (``worker``), the model's arithmetic.  Recurrent state
has no table: each plan says where a sequence's state lies.

One batch per step: the new tokens of all sequences, prefill chunks and decodes alike, in one row of ``T`` tokens with
explicit positions.  The head runs only over the last rows of sequences that sample.

Invariant: a row's result depends on its sequence alone, up to the runtime's promise (``selfcheck``); the batch is
padded to the row rule of the linear kernels for that (``linear.RowRule``).  Thread: the worker's.
"""

from __future__ import annotations

import hashlib
import itertools
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
from ostinato.runtime.latent import LatentWeights
from ostinato.runtime.linear import LinearPlan
from ostinato.runtime.paged_cache import PagedCache
from ostinato.runtime.sampler import Sampler, SampleRow, request_seed
from ostinato.runtime.scans.base import ScanBackend
from ostinato.sampling_params import SamplingParams
from ostinato.scheduler.plan import SampledToken, SequencePlan, StepPlan


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


class ModelRunner:
    """Runs the sequences of step plans with one model over one arena."""

    def __init__(self, prepared: PreparedModel, arena: Arena, sampler: Sampler) -> None:
        self._prepared = prepared
        self._arena = arena
        self._sampler = sampler
        self._groups = arena.layout.groups
        self._stateful = frozenset(place.group for place in arena.states.values())
        self._sequences: dict[RequestId, _Sequence] = {}
        self._cache = PagedCache(len(prepared.specs.geometry), prepared.specs.row_offsets)

    @property
    def num_sequences(self) -> int:
        """Sequences whose tables are kept."""
        return len(self._sequences)

    def run(self, plan: StepPlan) -> tuple[SampledToken, ...]:
        """Compute the plan's sequences; the sampled tokens, in their order."""
        logits = self.logits(plan)
        if logits is None:
            return ()
        chosen = [sequence for sequence in plan.sequences if sequence.sample]
        tokens = self._sampler.sample(logits, [self._sample_row(sequence) for sequence in chosen])
        return tuple(
            SampledToken(sequence.request_id, token, self._digest(sequence, row))
            for sequence, token, row in zip(chosen, tokens, logits, strict=True)
        )

    def logits(self, plan: StepPlan) -> torch.Tensor | None:
        """Bring tables up to date and run the model: one row [V] per sampling sequence, or None when there is none."""
        for request_id in plan.finished:
            self._sequences.pop(request_id, None)
        if not plan.sequences:
            return None
        spans = [self._extend(sequence) for sequence in plan.sequences]
        ends = itertools.accumulate(span.count for span in spans)
        last = [end - 1 for end, sequence in zip(ends, plan.sequences, strict=True) if sequence.sample]
        token = ACTIVE.set(self._context(spans))
        try:
            with torch.inference_mode():
                return self._forward(plan.sequences, spans, last)
        finally:
            ACTIVE.reset(token)

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
        new = _Sequence(tuple(BlockRow() for _ in self._groups), params, seed)
        self._sequences[sequence.request_id] = new
        return new

    def _forward(
        self, sequences: Sequence[SequencePlan], spans: Sequence[Span], last: list[int]
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
        if not last:
            model.base_model(**inputs)
            return None
        wanted = last + last[-1:] * (plan.head.pad(len(last)) - len(last))
        logits: torch.Tensor = model(logits_to_keep=torch.tensor(wanted), **inputs).logits[0]
        return logits[: len(last)]

    def _sample_row(self, sequence: SequencePlan) -> SampleRow:
        known = self._sequences[sequence.request_id]
        assert known.params is not None, f"request {sequence.request_id} came without sampling parameters"
        return SampleRow(known.params, known.seed, sequence.sampled_before)

    def _digest(self, sequence: SequencePlan, logits: torch.Tensor) -> bytes:
        params = self._sequences[sequence.request_id].params
        return logits_digest(logits) if params is not None and params.logits_digest else b""


def logits_digest(logits: torch.Tensor) -> bytes:
    """SHA-256 over a row of logits as little-endian fp32."""
    return hashlib.sha256(logits.to(torch.float32).numpy().astype("<f4", copy=False).tobytes()).digest()
