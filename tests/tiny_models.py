"""Tiny random models of several families, and a small scheduler that drives a worker through step plans.

Weights are drawn wide enough for attention to matter: a wrong mask or position changes the greedy tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers as tf

from ostinato.cache.kinds import Window
from ostinato.ids import HOLE, RequestId, SlotId, Step
from ostinato.runtime.arena import Arena
from ostinato.runtime.load import Runtime, make_worker
from ostinato.runtime.runner import ModelRunner
from ostinato.runtime.sampler import Sampler
from ostinato.runtime.worker import Worker
from ostinato.sampling_params import SamplingParams
from ostinato.scheduler.plan import SequencePlan, StepPlan, StepResult

VOCABULARY = 512
WINDOW = 20
SLIDING = "sliding_attention"
FULL = "full_attention"


def shape(**more: Any) -> dict[str, Any]:
    """Config fields that most families share."""
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    return common | more


def draw(kind: type[Any], config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """A model of class ``kind`` with random weights, the same ones every time, in eval mode."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        model = kind(config)
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.08)
            elif name.endswith("sinks"):
                parameter.normal_(0, 1.0)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.to(dtype).eval()


def llama(dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    return draw(tf.LlamaForCausalLM, tf.LlamaConfig(**shape(**more)), dtype)


def mistral(dtype: torch.dtype = torch.float32) -> Any:
    """All layers slide."""
    return draw(tf.MistralForCausalLM, tf.MistralConfig(**shape(head_dim=16, sliding_window=WINDOW)), dtype)


def gemma2(dtype: torch.dtype = torch.float32) -> Any:
    """Soft caps on attention and on the logits; every other layer slides."""
    config = tf.Gemma2Config(
        **shape(num_hidden_layers=4, head_dim=32, sliding_window=WINDOW, query_pre_attn_scalar=32),
        attn_logit_softcapping=5.0,
    )
    return draw(tf.Gemma2ForCausalLM, config, dtype)


def gemma3(dtype: torch.dtype = torch.float32) -> Any:
    """Five sliding layers to one full one, with a rotary base each."""
    config = tf.Gemma3TextConfig(
        **shape(num_hidden_layers=6, head_dim=32, sliding_window=WINDOW, query_pre_attn_scalar=32),
        layer_types=[SLIDING] * 5 + [FULL],
    )
    return draw(tf.Gemma3ForCausalLM, config, dtype)


def gpt_oss(dtype: torch.dtype = torch.float32) -> Any:
    """Attention sinks, and a mixture of experts."""
    config = tf.GptOssConfig(
        **shape(num_hidden_layers=4, head_dim=16, sliding_window=WINDOW), num_local_experts=4, num_experts_per_tok=2
    )
    return draw(tf.GptOssForCausalLM, config, dtype)


FAMILIES = {"llama": llama, "mistral": mistral, "gemma2": gemma2, "gemma3": gemma3, "gpt_oss": gpt_oss}


def prompts(lengths: Sequence[int], seed: int = 7, vocabulary: int = VOCABULARY) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, vocabulary, (length,), generator=generator).tolist() for length in lengths]


@dataclass
class Running:
    """What a scheduler knows of one request."""

    name: RequestId
    tokens: list[int]
    goal: int
    prompt: int
    start: int = 0
    tables: list[list[SlotId]] = field(default_factory=list)


class Driver:
    """Random continuous batching over a poisoned pool: pages behind a window are poisoned and given away at once."""

    def __init__(self, runtime: Runtime, num_pages: int = 400, seed: int = 0) -> None:
        self.runtime = runtime
        self.rng = random.Random(seed)
        self.worker: Worker = make_worker(runtime, num_pages, {}, poison=True)
        self.free = [SlotId(page) for page in range(num_pages)]
        self.rng.shuffle(self.free)
        self.steps = 0

    def generate(self, prompts: Sequence[list[int]], count: int, budget: int = 48) -> list[list[int]]:
        """Greedy tokens of each prompt, computed in random chunks, beside each other."""
        waiting = [
            Running(RequestId(str(i)), list(prompt), len(prompt) + count, len(prompt))
            for i, prompt in enumerate(prompts)
        ]
        everyone, running = list(waiting), list[Running]()
        finished: tuple[RequestId, ...] = ()
        while waiting or running:
            if waiting and (not running or self.rng.random() < 0.5):
                running.append(waiting.pop(0))
            shares = list(self._shares(running, budget))
            result = self._step([self._plan(sequence, n) for sequence, n in shares], finished)
            for token in result.sampled:
                everyone[int(token.request_id)].tokens.append(token.token)
            for sequence, n in shares:
                sequence.start += n
                self._trim(sequence)
            done = [sequence for sequence in running if len(sequence.tokens) >= sequence.goal]
            running = [sequence for sequence in running if sequence not in done]
            finished = tuple(sequence.name for sequence in done)
            for sequence in done:
                self._release(sequence)
        self._step([], finished)
        return [s.tokens[len(prompt) :] for s, prompt in zip(everyone, prompts, strict=True)]

    def _shares(self, running: list[Running], budget: int) -> Iterator[tuple[Running, int]]:
        order = list(running)
        self.rng.shuffle(order)
        for sequence in order:
            rest = len(sequence.tokens) - sequence.start
            n = min(rest if rest == 1 else self.rng.randint(1, rest), budget)
            if n > 0:
                budget -= n
                yield sequence, n

    def _plan(self, sequence: Running, n: int) -> SequencePlan:
        fresh = not sequence.tables
        groups = self.runtime.layout.groups
        if fresh:
            sequence.tables = [[] for _ in groups]
        end, new = sequence.start + n, []
        for table, group in zip(sequence.tables, groups, strict=True):
            missing = group.pages(end) - len(table)
            added = tuple(self.free.pop() for _ in range(missing))
            table.extend(added)
            new.append(added)
        greedy = SamplingParams(temperature=0.0) if fresh else None
        tokens = tuple(sequence.tokens[sequence.start : end])
        sample = end == len(sequence.tokens)
        sampled = len(sequence.tokens) - sequence.prompt
        return SequencePlan(sequence.name, sequence.start, tokens, tuple(new), fresh, sample, sampled, greedy)

    def _step(self, plans: list[SequencePlan], finished: tuple[RequestId, ...]) -> StepResult:
        self.steps += 1
        return self.worker.execute(StepPlan(Step(self.steps), tuple(plans), finished=finished))

    def _trim(self, sequence: Running) -> None:
        for table, group in zip(sequence.tables, self.runtime.layout.groups, strict=True):
            if isinstance(group.kind, Window):
                for i in range(max(0, sequence.start - group.kind.window + 1) // group.page_tokens):
                    self._give_back(table, i)

    def _release(self, sequence: Running) -> None:
        for table in sequence.tables:
            for i in range(len(table)):
                self._give_back(table, i)

    def _give_back(self, table: list[SlotId], i: int) -> None:
        if table[i] != HOLE:
            self.worker.arena.poison_page(table[i])
            self.free.append(table[i])
            table[i] = HOLE


def logits_runner(runtime: Runtime, num_pages: int) -> tuple[ModelRunner, Arena]:
    """A runner whose logits can be looked at, and its poisoned arena."""
    arena = Arena(runtime.layout, runtime.prepared.specs, num_pages, poison=True)
    return ModelRunner(runtime.prepared, arena, Sampler()), arena
