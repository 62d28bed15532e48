"""The replay against what can be worked out by hand, and against an engine's rules."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ostinato.errors import ConfigError
from ostinato.serve.cli import app
from ostinato.simulate.machine import h100, instant
from ostinato.simulate.readers import read_trace
from ostinato.simulate.replay import Outcome, Replay, Setup
from ostinato.simulate.shapes import SHAPES, find_shape
from ostinato.simulate.trace import RawRequest, Trace, build_trace

GB = 10**9
SHAPE = find_shape("qwen3-next-80b")
TRACES = Path(__file__).resolve().parents[2] / "benchmarks" / "traces"


def chats(count: int, turns: int, block: int = 512) -> Trace:
    """Chats that take turns; each turn adds two blocks and half of one."""
    raw = [
        RawRequest(float(turn * count + chat), (2 * turn + 2) * block + block // 2, 100, [(chat, i) for i in range(99)])
        for turn in range(turns)
        for chat in range(count)
    ]
    return build_trace("chats", block, raw)


def replay(trace: Trace, device: int, **options: object) -> Outcome:
    setup = {"machine": instant(), "serial": True, "warm_up": 0.0, **options}
    run = Replay(trace, Setup(SHAPE, tiers=(("device", device),), **setup))  # type: ignore[arg-type]
    outcome = run.run()
    run.cache.audit()
    assert run.core.device.pool.available == run.core.device.pool.capacity
    return outcome


def test_flops_are_those_of_weights_and_of_pairs() -> None:
    shape = SHAPES["gpt-oss-120b"]
    by_token = sum(
        2 * shape.active + 4 * shape.query_width * (18 * (n + 0.5) + 18 * min(n + 0.5, shape.window))
        for n in range(1000)
    )
    assert shape.flops(0, 1000) == pytest.approx(by_token, rel=1e-3)
    assert shape.flops(0, 300) + shape.flops(300, 1000) == pytest.approx(shape.flops(0, 1000))


def test_what_fits_is_hit() -> None:
    outcome = replay(chats(3, 4), 100 * GB)
    # Turn t finds the blocks of turn t - 1: 0, 2, 4, 6 of 2.5, 4.5, 6.5, 8.5.
    assert outcome.requests == 12
    assert outcome.hit_rate == pytest.approx(12 / 22)
    assert outcome.evictions == {"device": 0}


def test_what_does_not_fit_is_not() -> None:
    outcome = replay(chats(40, 3), 2 * GB)
    assert outcome.hit_rate < 0.1
    assert outcome.evictions["device"] > 0


def test_time_passes_with_a_machine_and_lower_tiers_serve() -> None:
    setup = Setup(SHAPE, h100(2), (("device", 2 * GB), ("host", 100 * GB)), warm_up=0.0, answers=True)
    run = Replay(chats(10, 4), setup)
    outcome = run.run()
    run.cache.audit()
    assert outcome.by_tier["host"] > 0
    assert outcome.loaded_bytes["host"] > 0
    assert len(outcome.ttft_s) == outcome.requests == 40
    assert 0 < outcome.busy_s < outcome.end_s
    assert min(outcome.ttft_s) > 0


def test_replays_are_deterministic() -> None:
    trace = read_trace(TRACES / "mooncake_synthetic.jsonl.gz").first(60)
    runs = [Replay(trace, Setup(SHAPE, h100(), (("device", 8 * GB), ("host", 16 * GB)))).run() for _ in range(2)]
    assert runs[0] == runs[1]


def test_a_request_that_never_fits_is_counted_and_skipped() -> None:
    raw = [RawRequest(0.0, 1_000_000, 1, range(2000)), RawRequest(1.0, 600, 1, [5000])]
    outcome = replay(build_trace("big", 512, raw), 2 * GB)
    assert (outcome.refused, outcome.requests) == (1, 2)


def test_sessions_are_read(tmp_path: Path) -> None:
    """Ids mean something within a session; tools and system prompt are shared when they are as long."""
    requests = [{"t": 0.0, "in": 4096 + 30, "out": 5, "hash_ids": list(range(64))}]
    requests.append(
        {"t": 9.0, "type": "subagent", "requests": [{"t": 1.0, "in": 2048, "out": 1, "hash_ids": list(range(32))}]}
    )
    lines = [
        json.dumps({"block_size": 64, "tool_tokens": 1000, "system_tokens": 100, "requests": requests})
        for _ in range(2)
    ]
    path = tmp_path / "sessions.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    trace = read_trace(path)
    assert (trace.block_tokens, len(trace.requests)) == (1024, 4)
    long = [request for request in trace.requests if request.prompt_tokens > 4000]
    assert long[0].blocks[0] == long[1].blocks[0]
    assert long[0].blocks[1] != long[1].blocks[1]
    assert {len(request.blocks) for request in trace.requests} == {4, 2}


def test_coarser_blocks_keep_the_tree() -> None:
    trace = chats(2, 3).regrouped(2)
    assert trace.block_tokens == 1024
    assert [len(request.blocks) for request in trace.requests] == [1, 1, 2, 2, 3, 3]
    assert trace.requests[0].blocks == trace.requests[2].blocks[:1]


@pytest.mark.parametrize(("text", "message"), [("{}", "neither"), ("[1]", "object"), ("{", "JSON"), ("", "no request")])
def test_bad_files_are_told(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_trace(path)


def test_the_command_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    out = tmp_path / "numbers.json"
    command = ["simulate", str(TRACES / "mooncake_synthetic.jsonl.gz"), "--first", "40", "--capacity", "8GB"]
    result = CliRunner().invoke(app, [*command, "--capacity", "16GB", "--json", str(out)])
    assert result.exit_code == 0, result.output
    assert "FLOPs saved" in result.stdout
    rows = json.loads(out.read_text())
    assert [row["name"] for row in rows] == ["8GB", "16GB"]
    assert rows[0]["hit_rate"] <= rows[1]["hit_rate"]
