"""Reports of wrong text, on tiny models of the families that they are about: what is saved, restored, shared."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pytest
import torch
import transformers

import tiny_models
from e2e.support import UNIT, Oracle, assert_at_rest, greedy, make_llm, same, settle
from families.configs import FAMILIES, VOCABULARY, build
from field.rig import Rig
from field.scripted import ScriptedTier, kept, poison_on_take
from ostinato.cache.keys import BlockKey
from ostinato.config import EngineConfig
from ostinato.engine.build import build_engine
from ostinato.engine.llm import LLM
from ostinato.engine.outputs import RequestOutput
from ostinato.errors import ModelRefusedError
from ostinato.ids import DEVICE
from ostinato.runtime.arena import Arena
from ostinato.runtime.load import Runtime, build_runtime

QUICK: Final = ("gemma3n", "deepseek_v3", "qwen3_next", "bamba", "nemotron_h")
"""A window, shared keys, a latent, a gated delta rule, and a Mamba-2, with and without experts."""
STATEFUL: Final = tuple(name for name, family in FAMILIES.items() if "state" in family.kinds)
SHARING: Final = ("gemma3n", "gemma4")


@dataclass(frozen=True)
class Tiny:
    """A family's tiny model, ready to run, and what it answers alone and cold."""

    name: str
    runtime: Runtime
    cold: Oracle


@pytest.fixture(scope="module")
def tiny() -> Iterator[Callable[[str], Tiny]]:
    """Each family's model is built once."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    made: dict[str, Tiny] = {}

    def make(name: str) -> Tiny:
        if name not in made:
            runtime = build_runtime(build(name), name=name, weights=bytes([5]) * 32, max_model_len=512)
            made[name] = Tiny(name, runtime, Oracle(runtime))
        return made[name]

    yield make
    torch.set_num_threads(before)


def families(names: Sequence[str]) -> Any:
    """A test for each family; those that are not quick run with ``-m families``."""
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=() if name in (*QUICK, "gemma4") else pytest.mark.families) for name in names]
    )


def tokens(count: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(4, VOCABULARY) for _ in range(count)]


def ask(llm: LLM, prompt: Sequence[int], count: int = 4) -> RequestOutput:
    output = llm.generate(list(prompt), greedy(count))[0]
    settle(llm)
    return output


def rig_of(runtime: Runtime, tiers: Sequence[ScriptedTier], pages: int = 300, step_tokens: int = 43) -> Rig:
    """The model under the script of a tier; recycled pages are poisoned with NaN."""
    config = EngineConfig(
        model="tiny", num_gpu_blocks_override=pages, max_num_batched_tokens=step_tokens, check_invariants=True
    )
    built = build_engine(runtime, config, list(tiers))
    poison_on_take(built.hierarchy.core.device.pool, built.worker.arena.poison_page)
    return Rig(built.engine, built.hierarchy, built.scheduler_clock if hasattr(built, "scheduler_clock") else _Still())


class _Still:
    now = 0.0


# --------------------------------------------------------------------------------------------------- every buffer travels


Snapshot = dict[tuple[BlockKey, int, str], bytes]


def buffers(arena: Arena, layer: int, state: bool) -> dict[str, torch.Tensor]:
    """Each buffer of a layer as ``[blocks, ...]``."""
    if state:
        return {f"{use.value} {index}": view for (use, index), view in arena.states[layer].buffers.items()}
    pages = arena.layers[layer].pages
    return {"keys": pages.k, "values": pages.v}


def snapshot(rig: Rig) -> Snapshot:
    """The bytes of each buffer of each layer in each cached block of the device."""
    arena, found = rig.engine.executor.arena, {}  # type: ignore[attr-defined]
    for entry in rig.cache.core.directory:
        place = entry.places.get(DEVICE)
        if place is None:
            continue
        spec = rig.cache.core.layout.groups[entry.key.group]
        block = place.slot * spec.page_units + entry.ordinal % spec.page_units
        size = 0
        for layer in spec.layers:
            for name, view in buffers(arena, layer, spec.kind == State()).items():
                content = view[block].contiguous().view(torch.uint8).numpy().tobytes()
                found[entry.key, layer, name] = content
                size += 0 if name == "values" and arena.layers[layer].pages.v.data_ptr() == arena.layers[layer].pages.k.data_ptr() else len(content)
        assert spec.unit_bytes - 64 * 8 * len(spec.layers) <= size <= spec.unit_bytes, "a buffer is not looked at"
    return found
