"""Several tiers below one device: hits that no tier has alone, and blocks on their way up and down.

Every answer is compared with a cold one.  Redis, where it is installed, with ``-m stores``.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from e2e.support import UNIT, Oracle, assert_at_rest, greedy, make_llm, same, settle
from families.configs import build
from ostinato.connectors.api import Connector
from ostinato.connectors.multi import MultiConnector, expand
from ostinato.connectors.registry import make_connector
from ostinato.engine.llm import LLM
from ostinato.engine.outputs import RequestOutput
from ostinato.runtime.load import Runtime, build_runtime
from ostinato.serve.demo.halves import PartConnector
from stores.redis_server import redis_server

LENGTH = 213
WHOLE = 208
"""Tokens of whole units in a prompt of LENGTH, less the last token."""
CUT = 112
HEAD, TAIL = range(CUT + 1), range(CUT + 1, 1 << 30)
PAIRS = ["host-disk", "host-redis", "disk-redis"]


def tokens(count: int, seed: int = 0) -> list[int]:
    """Below the smallest vocabulary of the models here."""
    source = random.Random(seed)
    return [source.randrange(4, 250) for _ in range(count)]


@pytest.fixture(scope="session")
def recurrent(_one_thread: None) -> Runtime:
    """Full attention and recurrent state."""
    return build_runtime(build("qwen3_next"), name="qwen3_next", weights=bytes([9]) * 32, max_model_len=512)


@pytest.fixture(params=["windows", "states"])
def hybrid(request: pytest.FixtureRequest) -> Runtime:
    runtime: Runtime = request.getfixturevalue("tiny_fp32" if request.param == "windows" else "recurrent")
    return runtime


@pytest.fixture(scope="session")
def oracles() -> dict[str, Oracle]:
    return {}


@pytest.fixture
def cold(hybrid: Runtime, oracles: dict[str, Oracle]) -> Oracle:
    return oracles.setdefault(hybrid.name, Oracle(hybrid))


def marked(pairs: Sequence[str]) -> list[Any]:
    return [pytest.param(pair, marks=pytest.mark.stores if "redis" in pair else ()) for pair in pairs]


@pytest.fixture(params=marked(PAIRS))
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """Specifications of two tiers, the faster first; what asked ones hold lasts as long as the test."""
    names = request.param.split("-")
    specs = {"host": "host:64MiB", "disk": f"disk:{tmp_path / 'kv'}:128MiB"}
    if "redis" in names:
        with redis_server(tmp_path) as server:
            specs["redis"] = server.url
            yield specs[names[0]], specs[names[1]]
    else:
        yield specs[names[0]], specs[names[1]]


host_first = pytest.mark.parametrize("pair", marked(PAIRS[:2]), indirect=True)


@contextmanager
def engine(runtime: Runtime, connectors: Sequence[Connector], pages: int = 300, **options: Any) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ostinato.engine.llm.make_tiers", lambda config: expand([MultiConnector(connectors)]))
        llm = make_llm(runtime, pages, max_num_batched_tokens=43, **options)
    with llm:
        yield llm
        settle(llm)
        assert_at_rest(llm)


def ask(llm: LLM, prompt: Sequence[int]) -> RequestOutput:
    output = llm.generate(list(prompt), greedy(4))[0]
    settle(llm)
    return output


def reuse(runtime: Runtime, connectors: Sequence[Connector], prompt: Sequence[int], cold: Oracle) -> dict[str, int]:
    """Tokens by tier, when the device has forgotten a prompt that it computed."""
    with engine(runtime, connectors) as llm:
        assert same(ask(llm, prompt), cold(prompt))
        llm.reset_prefix_cache(device_only=True)
        output = ask(llm, prompt)
        assert same(output, cold(prompt))
        return dict(output.cached_by_tier)


@pytest.mark.parametrize("head_first", [True, False])
def test_a_hit_that_neither_tier_has_alone(
    hybrid: Runtime, cold: Oracle, pair: tuple[str, str], head_first: bool
) -> None:
    parts = (HEAD, TAIL) if head_first else (TAIL, HEAD)
    made = [PartConnector(make_connector(spec), part) for spec, part in zip(pair, parts, strict=True)]
    fast, slow = (connector.tier for connector in made)
    merged = reuse(hybrid, made, tokens(LENGTH), cold)
    assert merged == ({fast: CUT, slow: WHOLE - CUT} if head_first else {slow: CUT, fast: WHOLE - CUT})


@pytest.mark.parametrize("part", [HEAD, TAIL])
def test_one_half_alone_is_a_shorter_hit_or_none(hybrid: Runtime, cold: Oracle, tmp_path: Path, part: range) -> None:
    for spec in ("host:64MiB", f"disk:{tmp_path / 'kv'}:64MiB"):
        alone = reuse(hybrid, [PartConnector(make_connector(spec), part)], tokens(LENGTH), cold)
        assert sum(alone.values()) <= (CUT if part is HEAD else 0)


def test_units_in_turns(hybrid: Runtime, cold: Oracle, pair: tuple[str, str]) -> None:
    """Every other unit is in one tier only: not even two tokens side by side in units come from the same."""
    made = [
        PartConnector(make_connector(spec), range(first * UNIT, 1 << 30, 2 * UNIT))
        for spec, first in zip(pair, (1, 2), strict=True)
    ]
    found = reuse(hybrid, made, tokens(LENGTH), cold)
    assert sum(found.values()) == WHOLE
    assert len(found) == 2


@host_first
def test_what_one_tier_lost_comes_from_the_other(hybrid: Runtime, cold: Oracle, pair: tuple[str, str]) -> None:
    """The faster tier delivers; when the process forgets its memory, the store does, and the device is filled anew."""
    with engine(hybrid, [make_connector(spec) for spec in pair]) as llm:
        prompt = tokens(LENGTH)
        fast, slow = (connector.tier for connector in llm.built.connectors)
        ask(llm, prompt)
        llm.reset_prefix_cache(device_only=True)
        output = ask(llm, prompt)
        assert same(output, cold(prompt))
        assert output.cached_by_tier == {fast: WHOLE}
        llm.reset_prefix_cache()
        output = ask(llm, prompt)
        assert same(output, cold(prompt))
        assert output.cached_by_tier == {slow: WHOLE}
        output = ask(llm, prompt)
        assert output.cached_by_tier == {"device": WHOLE}


@host_first
@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_blocks_go_up_and_down(hybrid: Runtime, cold: Oracle, pair: tuple[str, str], mode: str) -> None:
    """A device of few prompts, host memory of a few more, a store of all: each prompt comes back, whoever has it."""
    need = hybrid.layout.peak_pages(LENGTH + 4, 43)
    host = f"host:{8 * need * hybrid.layout.page_bytes}?store={mode}"
    source: dict[str, int] = {}
    with engine(hybrid, [make_connector(host), make_connector(pair[1])], pages=4 * need) as llm:
        few, many = [0, 1, 2, 3, 4, 5], list(range(14))
        for number in [*many, *many, *few, *few]:
            prompt = tokens(LENGTH, number)
            output = ask(llm, prompt)
            assert same(output, cold(prompt))
            for tier, count in output.cached_by_tier.items():
                source[tier] = source.get(tier, 0) + count
    # A token counts with the slowest tier that any group took it from.
    assert source["host"] > 0, source
    assert source[llm.built.connectors[1].tier] > 0, source
    assert sum(source.values()) > 20 * WHOLE, source


@host_first
def test_a_block_from_the_store_stays_in_host_memory(hybrid: Runtime, cold: Oracle, pair: tuple[str, str]) -> None:
    """Promotion: what the store delivered once and the device has to give up is copied to host memory."""
    prompt, need = tokens(LENGTH), hybrid.layout.peak_pages(LENGTH + 4, 43)
    with engine(hybrid, [make_connector(spec) for spec in pair], pages=4 * need) as llm:
        ask(llm, prompt)
        llm.reset_prefix_cache()
        assert ask(llm, prompt).cached_by_tier == {llm.built.connectors[1].tier: WHOLE}
        for number in range(1, 12):
            ask(llm, tokens(LENGTH, number))
        output = ask(llm, prompt)
        assert same(output, cold(prompt))
        assert output.cached_by_tier.get("host", 0) == WHOLE, output.cached_by_tier


def test_a_store_that_goes_away_leaves_the_other(hybrid: Runtime, cold: Oracle, tmp_path: Path) -> None:
    """Of two tiers one answers nothing any more; no request notices, and half of the prompt is still there."""
    made = [PartConnector(make_connector("host:64MiB"), HEAD), make_connector("redis://127.0.0.1:1?timeout=0.2")]
    with engine(hybrid, made) as llm:
        for _ in range(3):
            start = time.monotonic()
            output = ask(llm, tokens(LENGTH))
            assert same(output, cold(tokens(LENGTH)))
            assert time.monotonic() - start < 20
            llm.reset_prefix_cache(device_only=True)
