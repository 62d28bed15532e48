"""The long check: prompts beyond windows, chunks and budgets, in random chunks beside each other, over poisoned pages.

Owns: its schedules and the comparison with the model's own forward pass.  Does not own: tables and pages, which are the
cache's own.  Thread: one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from transformers import PreTrainedModel

from ostinato.cache.directory import Directory
from ostinato.cache.pool import SlotPool
from ostinato.cache.retention import Retention
from ostinato.cache.table import BlockTable
from ostinato.ids import DEVICE, RequestId, Step
from ostinato.runtime.arena import Arena
from ostinato.runtime.load import HASH_UNIT, Runtime
from ostinato.runtime.runner import ModelRunner
from ostinato.runtime.sampler import Sampler
from ostinato.runtime.selfcheck import distance
from ostinato.scheduler.plan import SequencePlan, StepPlan

LENGTHS: Final = (1, 9, 40, 77, 130)
DECODES: Final = 4
"""Tokens at the end of each prompt that come one at a time."""
TOLERANCE: Final = 1e-4
_STEP_TOKENS: Final = 48
_SEED: Final = 11
_FIRST_TOKEN: Final = 3


class MismatchError(Exception):
    """The paged runtime computed something else than the model; says where."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A prompt and the logits [tokens, vocabulary] of the model's own forward pass over it."""

    tokens: tuple[int, ...]
    logits: torch.Tensor


@dataclass(slots=True)
class _Run:
    """One prompt on its way through the runtime."""

    request_id: RequestId
    trial: Trial
    table: BlockTable
    computed: int = 0
    sent: list[int] = field(default_factory=list)


def expect(model: PreTrainedModel) -> list[Trial]:
    """Run ``model`` as transformers made it.  To be called before it is made ready for pages."""
    model.set_attn_implementation("eager")
    vocabulary = int(model.config.get_text_config(decoder=True).vocab_size)
    source = random.Random(_SEED)
    trials = []
    for length in LENGTHS:
        tokens = tuple(source.randrange(_FIRST_TOKEN, vocabulary) for _ in range(length + DECODES))
        with torch.inference_mode():
            logits: torch.Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits
        trials.append(Trial(tokens, logits[0].float()))
    return trials


def run(runtime: Runtime, trials: Sequence[Trial]) -> None:
    """Compute all ``trials`` over pages, once alone and once together.  Raises :class:`MismatchError`."""
    for trial in trials:
        _Schedule(runtime, [trial], _SEED).run()
    _Schedule(runtime, trials, _SEED + 1).run()


class _Schedule:
    """Random shares of random sequences per step; whatever a table lets go of is poisoned at once."""

    def __init__(self, runtime: Runtime, trials: Sequence[Trial], seed: int) -> None:
        self._random = random.Random(seed)
        layout = runtime.layout
        # Any number of checkpoints may be kept on the way, so there is a page for every unit of every group.
        pages = sum(-(-len(trial.tokens) // HASH_UNIT) + 2 for trial in trials) * len(layout.groups)
        self._pool = SlotPool(DEVICE, pages, Retention(DEVICE, Directory()))
        self._random.shuffle(self._pool.free_slots)
        self._arena = Arena(layout, runtime.prepared.specs, pages, poison=True)
        self._runner = ModelRunner(runtime.prepared, self._arena, Sampler())
        self._waiting = [self._open(number, trial, runtime) for number, trial in enumerate(trials)]
        self._step = 0

    def _open(self, number: int, trial: Trial, runtime: Runtime) -> _Run:
        request_id, groups = RequestId(str(number)), runtime.layout.groups
        lease = self._pool.take(0, request_id)
        assert lease is not None
        return _Run(request_id, trial, BlockTable(request_id, groups, lease), sent=[0] * len(groups))

    def run(self) -> None:
        running: list[_Run] = []
        while self._waiting or running:
            if self._waiting and (not running or self._random.random() < 0.5):
                running.append(self._waiting.pop())
            shares = self._shares(running)
            logits = self._runner.logits(self._plan(shares))
            assert logits is not None
            for (sequence, stop), row in zip(shares, logits, strict=True):
                _compare(sequence.trial, stop, row)
                sequence.computed = stop
                self._let_go(sequence)
            running = [sequence for sequence in running if sequence.computed < len(sequence.trial.tokens)]

    def _shares(self, running: Sequence[_Run]) -> list[tuple[_Run, int]]:
        """Some of ``running``, and how far each of them goes."""
        shares, budget = [], _STEP_TOKENS
        for sequence in self._random.sample(running, len(running)):
            decodes = len(sequence.trial.tokens) - DECODES
            rest = 1 if sequence.computed >= decodes else decodes - sequence.computed
            count = min(self._random.randint(1, rest), budget)
            if count:
                budget -= count
                shares.append((sequence, sequence.computed + count))
        return shares

    def _plan(self, shares: Sequence[tuple[_Run, int]]) -> StepPlan:
        self._step += 1
        return StepPlan(Step(self._step), tuple(self._sequence(sequence, stop) for sequence, stop in shares))

    def _sequence(self, sequence: _Run, stop: int) -> SequencePlan:
        start, table = sequence.computed, sequence.table
        first = -(-(start + 1) // HASH_UNIT) * HASH_UNIT
        checkpoints = [cut for cut in range(first, stop, HASH_UNIT) if self._random.random() < 0.5]
        stops = (*checkpoints, stop)
        taken = self._pool.take(table.missing_pages(start, stops), sequence.request_id)
        assert taken is not None
        state = table.grow(start, stops, taken)
        return SequencePlan(
            sequence.request_id,
            start,
            sequence.trial.tokens[start:stop],
            table.new_pages(sequence.sent),
            fresh=start == 0,
            sample=True,
            state=state,
        )

    def _let_go(self, sequence: _Run) -> None:
        held = set(sequence.table.lease.slots)
        sequence.table.trim(sequence.computed, None)
        for page in sorted(held - set(sequence.table.lease.slots)):
            self._arena.poison_page(page)


def _compare(trial: Trial, stop: int, row: torch.Tensor) -> None:
    expected = trial.logits[stop - 1]
    off = distance(row, expected)
    where = f"at token {stop} of a prompt of {len(trial.tokens)}"
    if not off <= TOLERANCE:
        raise MismatchError(f"{where} the logits are off by {off:.0e} of their spread")
    if int(row.argmax()) != int(expected.argmax()) and float(expected.max() - expected[row.argmax()]) > TOLERANCE:
        raise MismatchError(f"{where} the most probable token is another one")
