"""The disk tier under a real engine loop: what it stored is a hit for the next process, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from e2e.support import Oracle, greedy, make_llm, same, settle, tiny_gemma3, tokens
from field.rig import expected_tokens, fake_rig, layout_of
from ostinato.cache.kinds import Full, State, Window
from ostinato.connectors.api import Site
from ostinato.connectors.disk.connector import DiskConnector
from ostinato.connectors.record import RecordIdentity
from ostinato.connectors.registry import make_connector

LAYOUT = layout_of(Full(), Window(32), State())


def rig(path: Path, options: str = "", layout: Any = LAYOUT, budget: str = "16MiB", **more: Any) -> Any:
    tier = make_connector(f"disk:{path}:{budget}{options}")
    assert isinstance(tier, DiskConnector)
    tier.open(Site(layout, RecordIdentity(layout.fingerprint(), b"n" * 32)))
    return fake_rig(layout, 200, [tier], **more), tier  # type: ignore[list-item]


def serve(engine: Any, prompt: list[int], count: int = 3) -> Any:
    """One request; transfers run on threads, so steps wait a little."""
    import time

    name = engine.add(prompt, count)
    deadline = time.monotonic() + 20
    while engine.engine.has_work or len(engine.cache.core.book):
        engine.step()
        time.sleep(0.001)
        assert time.monotonic() < deadline, engine.dump()
    return engine.outputs[name]


def finish(engine: Any, tier: DiskConnector) -> None:
    engine.engine.executor.close()
    tier.close()


@pytest.mark.parametrize("options", ["", "?mode=direct", "?mode=buffered"])
def test_the_next_process_finds_what_was_stored(tmp_path: Path, options: str) -> None:
    prompt = list(range(100, 300))
    engine, tier = rig(tmp_path / "kv", options)
    serve(engine, prompt)
    finish(engine, tier)
    engine, tier = rig(tmp_path / "kv", options)
    output = serve(engine, prompt)
    assert output.cached_tokens == 192
    assert tuple(output.outputs[0].token_ids) == expected_tokens(prompt, 3)
    other = serve(engine, prompt[:192] + list(range(50)))
    assert other.cached_tokens == 192
    assert not tier.store.stats.faults
    finish(engine, tier)


def test_an_evicted_device_loads_from_disk(tmp_path: Path) -> None:
    engine, tier = rig(tmp_path / "kv")
    prompt = list(range(160))
    serve(engine, prompt)
    engine.cache.core.drop_idle(device_only=True)
    assert serve(engine, prompt).cached_tokens == 144
    assert tier.store.stats.loaded
    finish(engine, tier)


def test_a_growing_chat_is_written_once(tmp_path: Path) -> None:
    engine, tier = rig(tmp_path / "kv")
    chat = list(range(64))
    for turn in range(20):
        output = serve(engine, chat, 8)
        chat += [*output.outputs[0].token_ids, *range(1000 * turn, 1000 * turn + 40)]
        if turn % 5 == 4:
            engine.cache.core.drop_idle(device_only=True)
    stats = tier.store.stats
    full = len(chat) // 16
    assert stats.stored <= 3 * full
    slots = [entry.slab.slot_bytes for entry in tier.store.catalog.index]
    assert stats.bytes_written == sum(slots), "a unit was written twice"
    finish(engine, tier)


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_model_answers_as_if_cold(tmp_path: Path, encrypted: bool) -> None:
    options = ""
    if encrypted:
        secret = tmp_path / "key"
        secret.write_bytes(bytes(range(32)))
        secret.chmod(0o600)
        options = f"?key_file={secret}"
    runtime = tiny_gemma3(torch.bfloat16)
    cold = Oracle(runtime)(tokens(200))
    spec = f"disk:{tmp_path / 'kv'}:64MiB{options}"
    with make_llm(runtime, kv=(spec,)) as llm:
        assert same(llm.generate(tokens(200), greedy())[0], cold)
        settle(llm)
    for _ in range(2):
        with make_llm(runtime, kv=(spec,)) as llm:
            output = llm.generate(tokens(200), greedy())[0]
            assert output.cached_tokens == 192
            assert same(output, cold)
    other = tiny_gemma3(torch.bfloat16, seed=8)
    with make_llm(other, kv=(spec,)) as llm:
        output = llm.generate(tokens(200), greedy())[0]
        assert not output.cached_tokens
        assert same(output, Oracle(other)(tokens(200)))
