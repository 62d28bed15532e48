"""The check that each model must pass at load: the paged runtime computes what the model's own forward pass computes.

Owns: the trial, its tolerance, and the promise that the runtime may make.  Does not own: exactness on long contexts and
window crossings of a given family (the tests' part).

A short prompt is run once as transformers would, then over poisoned and scattered pages: at once, in odd chunks, beside
another sequence, and resumed behind holes, from a checkpoint of its recurrent state that was taken in the middle of a
chunk.  Logits that differ by more than rounding refuse the model.  What rounding does to it is measured in 16 bits:
the model's own forward pass is run once more with noise in the last place.  Where all schedules give the same bits and
all kernels are made to, the runtime promises ``bitwise``; else ``within tolerance``, which the namespace of cached keys
then says as well.  Runs once per model, at load.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ostinato.cache.kinds import ceil_div, contains, keeps_checkpoints
from ostinato.cache.layout import CacheLayout, GroupSpec
from ostinato.errors import ModelRefusedError, OstinatoError
from ostinato.ids import HOLE, RequestId, SlotId, Step
from ostinato.runtime.arena import Arena
from ostinato.runtime.runner import ModelRunner, PreparedModel
from ostinato.runtime.sampler import Sampler
from ostinato.scheduler.plan import SequencePlan, StatePlan, StepPlan

_TOLERANCE: Final = MappingProxyType({torch.float32: 1e-3, torch.bfloat16: 0.2})
"""Greatest distance (see :func:`distance`) that is still rounding, of any row at the end of a chunk."""
_CHOICE_TOLERANCE: Final = 1.0
"""The same for single rows of a model that chooses experts, in 16 bits: a near tie may fall the other way."""
_NOISE: Final = MappingProxyType({torch.bfloat16: 2.0**-8})
"""Relative noise of one unit in the last place, where that is large enough to hide a wrong model."""
_NOISE_SHARE: Final = 1.75
"""What most rows may be off by, in multiples of what noise does to three of four; correct models need 0.5 to 1.5."""
_SINGLE_SHARE: Final = 4.0
"""The same for a single row, where that is more than the tolerance."""
_LEAST_LIMIT: Final = 0.05
"""What most rows may be off by in any case."""
_LEAST_APART: Final = 0.02
"""What schedules may be apart in any case, over kernels that are made to give the same bits."""
_ENDS: Final = (1, 20, 27, 28, 44, 45)
"""Chunk ends: a single token, chunks inside, across and at the end of hash units, and a decode."""
_UNSAMPLED: Final = 20
"""After this one ``chunked`` asks for no logits, so that the model runs without its head."""
_RESUME_UNITS: Final = 2
_NEIGHBOUR_TOKENS: Final = 23
_SEED: Final = 20
_PROSE: Final = (
    "An ostinato is a phrase that keeps coming back while the music around it changes. A passacaglia is built on one, "
    "and so is many a dance: the bass repeats its few notes, and the upper voices find something new to say each time. "
    "The listener soon knows the phrase by heart, and hears everything else against it."
)


@dataclass(frozen=True, slots=True)
class Promise:
    """What may be said of equal prompts: equal bits whatever was cached, chunked or batched, or equal up to rounding.

    ``difference`` is the distance from transformers' own forward pass that was seen.
    """

    bitwise: bool
    difference: float

    def describe(self) -> str:
        return "bitwise" if self.bitwise else "within tolerance"


@dataclass(frozen=True, slots=True)
class Reference:
    """A trial prompt and the logits [tokens, vocabulary] of the model's own forward pass over it.

    ``noise``: how far three of four rows stay from these when the last bits of the model's products are changed (0:
    not tried).  ``chooses``: the model makes choices, such as a router's of experts.
    """

    tokens: tuple[int, ...]
    neighbour: tuple[int, ...]
    logits: torch.Tensor
    noise: float = 0.0
    chooses: bool = False


def reference(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, noisy: bool = True
) -> Reference:
    """Run ``model`` as transformers loaded it.  To be called before attention and linears are replaced.

    The prompt is prose where there is a tokenizer: on random tokens a trained model is so unstable that two correct
    bf16 kernels differ by half of the logits' spread; on prose, by a twentieth.  Attention is the eager one: the plain
    formula, where faster ones may leave out soft caps.  Not ``noisy``: what noise does is not tried.
    """
    model.set_attn_implementation("eager")
    count = _ENDS[-1] + _NEIGHBOUR_TOKENS
    # Of a folder without tokenizer files transformers makes one that knows no token.
    prose = [] if tokenizer is None else _prose_tokens(tokenizer, count)
    ids = prose or _random_tokens(model, count)
    prompt, neighbour = ids[: _ENDS[-1]], ids[_ENDS[-1] :]
    logits = _own_logits(model, prompt)
    noise = 0.0
    if noisy and model.dtype in _NOISE:
        with _noisy_products(model):
            noise = _third_quartile(map(distance, _own_logits(model, prompt), logits))
    return Reference(tuple(prompt), tuple(neighbour), logits, noise)


def _own_logits(model: PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0]
    return logits.float()


@contextmanager
def _noisy_products(model: PreTrainedModel) -> Iterator[None]:
    """Within it, what linear layers give is off by a unit in the last place, up or down: another correct program."""
    generator = torch.Generator().manual_seed(_SEED)

    def disturb(_: nn.Module, __: object, product: object) -> object:
        if not isinstance(product, torch.Tensor):  # a router that is a linear layer and gives its choice as well
            return product
        signs = torch.randint(0, 2, product.shape, generator=generator) * 2 - 1
        return (product.float() * (1 + _NOISE.get(product.dtype, 0.0) * signs)).to(product.dtype)

    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    linears = [module for module in model.modules() if isinstance(module, nn.Linear) and module is not head]
    handles = [linear.register_forward_hook(disturb) for linear in linears]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _third_quartile(distances: Iterable[float]) -> float:
    return statistics.quantiles(distances, n=4)[2]


def _prose_tokens(tokenizer: PreTrainedTokenizerBase, count: int) -> list[int]:
    ids: list[int] = tokenizer(_PROSE).input_ids
    return (ids * -(-count // max(1, len(ids))))[:count]


def _random_tokens(model: PreTrainedModel, count: int) -> list[int]:
    vocabulary = int(model.config.get_text_config(decoder=True).vocab_size)
    generator = torch.Generator().manual_seed(_SEED)
    ids: list[int] = torch.randint(0, vocabulary, (count,), generator=generator).tolist()
    return ids


def settle(prepared: PreparedModel, layout: CacheLayout, expected: Reference) -> tuple[PreparedModel, Promise]:
    """:func:`check`, and once more with the strictest row rule when the plain one does not give equal bits.

    Products other than linear layers (experts, convolutions written as linears) may need more rows at a time.
    """
    promise = check(prepared, layout, expected)
    strict = replace(prepared, linears=prepared.linears.stricter())
    if promise.bitwise or not _made_for_it(prepared) or strict.linears == prepared.linears:
        return prepared, promise
    second = check(strict, layout, expected)
    return (strict, second) if second.bitwise else (prepared, promise)


def check(prepared: PreparedModel, layout: CacheLayout, expected: Reference) -> Promise:
    """Compare the paged runtime with ``expected``.  Raises :class:`ModelRefusedError` when they differ for real."""
    trial = _Trial(prepared, layout, expected)
    try:
        results = [trial.whole(), trial.chunked(), trial.batched(), trial.resumed()]
    except OstinatoError:
        raise
    except Exception as error:
        # Whatever the model's own code does not like (a replaced module, a packed batch): it cannot run here.
        raise ModelRefusedError(
            f"{type(prepared.model).__name__} cannot be served: its forward pass failed over paged memory "
            f"({type(error).__name__}: {error})"
        ) from error
    _check_rows(prepared, results, expected)
    whole = dict(results[0])
    difference = max(distance(row, expected.logits[end - 1]) for end, row in whole.items())
    alike = all(torch.equal(row, whole[end]) for result in results[1:] for end, row in result)
    return Promise(alike and _made_for_it(prepared), difference)


def _check_rows(prepared: PreparedModel, results: Sequence[Rows], expected: Reference) -> None:
    """Refuse the model when it is further from ``expected``, or from itself, than rounding explains.

    In 16 bits rounding may be as large as a slight mistake, so most rows have to keep a limit that follows the model's
    own sensitivity: three of four, or half of them where a model chooses.  There single rows may be far off, and what
    comes behind them: two correct programs may differ, but one program does the same in every schedule.
    """
    dtype = prepared.specs.dtype
    tolerance = _TOLERANCE[dtype]
    whole = dict(results[0])
    differences = {end: distance(row, expected.logits[end - 1]) for end, row in whole.items()}
    apart = max(distance(row, whole[end].float()) for result in results[1:] for end, row in result)
    rough = dtype in _NOISE
    most = min(tolerance, max(_LEAST_LIMIT, _NOISE_SHARE * expected.noise)) if rough else tolerance
    single = _CHOICE_TOLERANCE if rough and expected.chooses else max(tolerance, _SINGLE_SHARE * expected.noise)
    between = max(_LEAST_APART, expected.noise) if rough and _made_for_it(prepared) else tolerance
    typical = statistics.median if expected.chooses else _third_quartile
    own = "transformers' own forward pass"
    for off, allowed, other in (
        (max(differences[end] for end in _ENDS), single, own),
        (typical(differences.values()), most, own),
        (apart, between, "those of the same prompt in one piece"),
    ):
        if not off <= allowed:
            raise ModelRefusedError(
                f"{type(prepared.model).__name__} cannot be served: over paged memory its logits differ from {other} "
                f"by {off:.2g} of their spread, where {allowed:.2g} is allowed"
            )


def _made_for_it(prepared: PreparedModel) -> bool:
    """Whether all kernels that take part are invariant, so that equal bits in the trial are no accident."""
    attends = any(shape is not None for shape in prepared.specs.geometry)
    keeps_states = any(state is not None for state in prepared.specs.states)
    return (
        (prepared.backend.invariant or not attends)
        and (prepared.scans.invariant or not keeps_states)
        and prepared.linears.invariant
    )


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """L2 norm of the difference of two logits rows, relative to the spread of ``theirs`` about its mean."""
    spread = (theirs - theirs.mean()).norm()
    return float((ours.float() - theirs).norm() / spread.clamp(min=1e-12))


Rows = list[tuple[int, torch.Tensor]]
"""(tokens so far, logits row) for each step that sampled."""
Tables = tuple[tuple[SlotId, ...], ...]
"""Per group the pages of one sequence; none for a group that keeps recurrent state."""
States = tuple[SlotId, ...]
"""Per group the page of one state, HOLE for the other groups."""


@dataclass(slots=True)
class _Held:
    """What one run of the prompt holds; ``read`` is where its recurrent state lies so far."""

    tables: Tables
    working: States
    read: States


class _Trial:
    """Runs the prompt under several schedules, each in pages of its own."""

    def __init__(self, prepared: PreparedModel, layout: CacheLayout, expected: Reference) -> None:
        self._layout = layout
        self._tokens = expected.tokens
        self._neighbour = expected.neighbour
        per_run = sum(group.pages(len(expected.tokens)) + group.pages(_NEIGHBOUR_TOKENS) for group in layout.groups)
        arena = Arena(layout, prepared.specs, 4 * per_run, poison=True)
        self._runner = ModelRunner(prepared, arena, Sampler())
        # Scattered: consecutive blocks of a sequence lie anywhere.
        order = torch.randperm(arena.num_pages, generator=torch.Generator().manual_seed(_SEED)).tolist()
        self._pages: Iterator[SlotId] = map(SlotId, order)
        self._steps = itertools.count(1)
        unit = layout.granularity
        self._resume = min(_RESUME_UNITS * unit, (len(self._tokens) - 1) // unit * unit)
        self._checkpoint = self._take_state()

    def whole(self) -> Rows:
        """All tokens at once: a row for each of them."""
        sequence = self._sequence("whole", self._take(len(self._tokens)), self._tokens, 0)
        return list(enumerate(self._step(sequence, every=True), 1))

    def chunked(self) -> Rows:
        """Leaves the pages and the checkpoint that ``resumed`` starts from."""
        self._kept = self._take(len(self._tokens))
        rows: Rows = []
        for begin, end in itertools.pairwise((0, *_ENDS)):
            sequence = self._sequence("chunked", self._kept, self._tokens[begin:end], begin, self._resume)
            if end == _UNSAMPLED:
                self._runner.logits(StepPlan(Step(next(self._steps)), (replace(sequence, sample=False),)))
            else:
                rows.append((end, self._step(sequence)[0]))
        return rows

    def batched(self) -> Rows:
        """The same chunks, with a neighbour's prefill and decodes before and behind them in the batch."""
        mine, other = self._take(len(self._tokens)), self._take(_NEIGHBOUR_TOKENS)
        rows: Rows = []
        cuts = (*range(_NEIGHBOUR_TOKENS - len(_ENDS) + 1, _NEIGHBOUR_TOKENS + 1),)
        for index, end in enumerate(_ENDS):
            begin, cut = _ENDS[index - 1] if index else 0, cuts[index - 1] if index else 0
            ours = self._sequence("mine", mine, self._tokens[begin:end], begin)
            theirs = self._sequence("other", other, self._neighbour[cut : cuts[index]], cut)
            pair = (ours, theirs) if index % 2 else (theirs, ours)
            rows.append((end, self._step(*pair)[pair.index(ours)]))
        return rows

    def resumed(self) -> Rows:
        """A new request over the pages of ``chunked``: only what the kinds require is there, the rest are holes."""
        start, groups = self._resume, self._layout.groups
        tables = tuple(_required(g, pages, start) for g, pages in zip(groups, self._kept.tables, strict=True))
        held = _Held(tables, self._take_state(), self._checkpoint)
        return [(len(self._tokens), self._step(self._sequence("resumed", held, self._tokens[start:], start))[0])]

    def _take(self, tokens: int) -> _Held:
        tables = tuple(
            () if keeps_checkpoints(group.kind) else tuple(itertools.islice(self._pages, group.pages(tokens)))
            for group in self._layout.groups
        )
        return _Held(tables, self._take_state(), (HOLE,) * len(tables))

    def _take_state(self) -> States:
        return tuple(next(self._pages) if keeps_checkpoints(group.kind) else HOLE for group in self._layout.groups)

    def _sequence(self, name: str, held: _Held, tokens: Sequence[int], start: int, checkpoint: int = 0) -> SequencePlan:
        """The next share of a sequence; the first one brings the whole table.

        Recurrent state is kept at the end, and at ``checkpoint`` where that lies inside of the share.
        """
        fresh = start == 0 or name == "resumed"
        pages = held.tables if fresh else tuple(() for _ in held.tables)
        end = start + len(tokens)
        middle = [(checkpoint, self._checkpoint)] if start < checkpoint < end else []
        state = StatePlan(held.read, (*middle, (end, held.working)))
        held.read = held.working
        return SequencePlan(RequestId(name), start, tuple(tokens), pages, fresh, sample=True, state=state)

    def _step(self, *sequences: SequencePlan, every: bool = False) -> torch.Tensor:
        logits = self._runner.logits(StepPlan(Step(next(self._steps)), sequences), every)
        assert logits is not None
        return logits


def _required(group: GroupSpec, pages: Sequence[SlotId], start: int) -> tuple[SlotId, ...]:
    """``pages`` with holes where nothing is needed by a request that resumes at ``start``."""
    needed = group.kind.required(start, group.hash_unit)
    first_new = start // group.hash_unit
    units = range(ceil_div(len(pages) * group.page_tokens, group.hash_unit))
    kept = {unit // group.page_units for unit in units if unit >= first_new or contains(needed, unit)}
    return tuple(page if index in kept else HOLE for index, page in enumerate(pages))
