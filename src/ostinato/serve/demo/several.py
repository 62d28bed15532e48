"""The demo with several tiers in one engine.

Owns: the rows ``multi`` (all tiers keep everything; the fastest that has it delivers) and ``merged`` (the prompt's head
is in one tier only, what follows in another only: either alone would be a shorter hit, or none).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ostinato.config import EngineConfig
from ostinato.connectors.api import Connector
from ostinato.connectors.hooks import close_all
from ostinato.connectors.multi import MultiConnector
from ostinato.connectors.registry import make_connector
from ostinato.engine.build import BuiltEngine, build_engine
from ostinato.engine.live import Prompt
from ostinato.engine.outputs import RequestOutput
from ostinato.serve.demo.halves import PartConnector
from ostinato.serve.demo.prompts import Scenario
from ostinato.serve.demo.stage import SAMPLING, STEP_TOKENS, Stage, new_salt

RUNS: Final = 4
"""Prompts that :func:`run_several` runs."""
FOR_EVER: Final = 1 << 40


def together(tiers: Sequence[str]) -> list[str]:
    """Those of ``tiers`` that one engine can have: the first of each name."""
    by_name: dict[str, str] = {}
    for tier in tiers:
        connector = make_connector(tier)
        by_name.setdefault(connector.tier, tier)
        connector.close()
    return list(by_name.values())


def run_several(stage: Stage, tiers: Sequence[str], scenario: Scenario) -> None:
    """``tiers``, fastest first, two at least, of different names."""
    _run_multi(stage, tiers, scenario)
    _run_merged(stage, tiers, scenario)


def _run_multi(stage: Stage, tiers: Sequence[str], scenario: Scenario) -> None:
    salt = new_salt()
    with stage.llm(kv=list(tiers), pages=_pages(stage)) as llm:
        stage.generate(llm, scenario.stored, salt)
        llm.reset_prefix_cache(device_only=True)
        output = stage.generate(llm, scenario.asked, salt)
        stage.add_row("multi", output, scenario.asked, [scenario.stored])


def _run_merged(stage: Stage, tiers: Sequence[str], scenario: Scenario) -> None:
    """The second tier keeps the first half of what the two prompts have in common, the first tier the rest."""
    cut = len(stage.tokens(scenario.asked)) // 2
    parts = (range(cut + 1, FOR_EVER), range(cut + 1))
    salt = new_salt()
    made = [PartConnector(make_connector(tier), part) for tier, part in zip(tiers, parts, strict=False)]
    built = _build(stage, [MultiConnector(made)])
    try:
        _generate(stage, built, scenario.stored, salt)
        built.hierarchy.core.drop_idle(device_only=True)
        output = _generate(stage, built, scenario.asked, salt)
        fast, slow = (connector.tier for connector in made)
        note = f"tokens up to {cut:,} were kept by {slow} only, those behind by {fast} only"
        stage.add_row("merged", output, scenario.asked, [scenario.stored], note)
    finally:
        built.engine.close()
        close_all(built.connectors)


def _pages(stage: Stage) -> int:
    """More than elsewhere: here the device is emptied by hand, and stores to two tiers pin twice as much of it."""
    return 2 * stage.pages


def _build(stage: Stage, connectors: Sequence[Connector]) -> BuiltEngine:
    config = EngineConfig(
        model=stage.runtime.name, num_gpu_blocks_override=_pages(stage), max_num_batched_tokens=STEP_TOKENS
    )
    return build_engine(stage.runtime, config, connectors)


def _generate(stage: Stage, built: BuiltEngine, prompt: str, salt: str) -> RequestOutput:
    engine = built.engine
    engine.add("merged", Prompt(prompt, tuple(stage.tokens(prompt))), SAMPLING, 0, salt)
    outputs: list[RequestOutput] = []
    while engine.has_work:
        outputs += engine.step()
    engine.drain()
    stage.bars.advance(1)
    return outputs[0]
