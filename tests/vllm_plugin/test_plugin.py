"""The plug-in's two halves against a vLLM of blocks and tables: what is loaded, and that its bytes are right."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ostinato.errors import ConfigError, ConnectorError
from ostinato.integrations.vllm.compat import check_version
from ostinato.integrations.vllm.config import DEFAULT_HOST, parse_config
from ostinato.integrations.vllm.identity import weights_digest
from ostinato.integrations.vllm.layout import read_kind, read_layout
from vllm_plugin import fake_vllm as fake
from vllm_plugin.fake_vllm import FakeEngine, disk

MODELS = {
    "full": [fake.FullAttentionSpec()],
    "windows": [fake.SlidingWindowSpec(), fake.FullAttentionSpec()],
    "all-window": [fake.SlidingWindowSpec(), fake.SlidingWindowSpec(sliding_window=90)],
    "latent": [fake.MLAAttentionSpec()],
    "chunked": [fake.ChunkedLocalAttentionSpec(), fake.FullAttentionSpec()],
    "state": [fake.MambaSpec(), fake.FullAttentionSpec()],
    "unequal": [fake.SlidingWindowSpec(page_size_bytes=96), fake.FullAttentionSpec(block_size=32)],
}
Start = Callable[..., FakeEngine]


@pytest.fixture
def start() -> Iterator[Start]:
    made: list[FakeEngine] = []

    def begin(model: str, *kv: str, world: int = 1) -> FakeEngine:
        made.append(FakeEngine(MODELS[model], {"kv": list(kv)}, world))
        return made[-1]

    yield begin
    for engine in made:
        engine.close()


def prompt(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1000) for _ in range(length)]


@pytest.mark.parametrize("model", MODELS)
def test_the_same_prompt_is_loaded_from_host_memory(start: Start, model: str) -> None:
    engine, tokens = start(model, "host:1MiB"), prompt(200)
    assert engine.run(tokens, chunk=64).loaded == 0
    assert engine.run(tokens, chunk=64).loaded == 192


@pytest.mark.parametrize("model", ["full", "windows", "all-window", "latent", "chunked", "unequal"])
def test_a_prompt_that_parts_in_the_middle_is_loaded_up_to_there(start: Start, model: str) -> None:
    engine, tokens = start(model, "host:1MiB"), prompt(200)
    engine.run(tokens, chunk=64)
    assert engine.run(tokens[:101] + prompt(50, seed=1)).loaded == 96


def test_a_recurrent_model_resumes_where_a_chunk_ended(start: Start) -> None:
    engine, tokens = start("state", "host:1MiB"), prompt(200)
    engine.run(tokens, chunk=64)
    assert engine.run(tokens[:150] + prompt(50, seed=1)).loaded == 128


@pytest.mark.parametrize("model", MODELS)
def test_what_vllm_holds_itself_is_not_loaded(start: Start, model: str) -> None:
    engine, tokens = start(model, "host:1MiB"), prompt(200)
    engine.run(tokens, chunk=64)
    assert engine.run(tokens, local=64).loaded == 128
    assert engine.run(tokens, local=192).loaded == 0


@pytest.mark.parametrize("model", MODELS)
def test_a_disk_serves_the_next_process(start: Start, model: str, tmp_path: Path) -> None:
    engine, tokens = start(model, "host:1MiB", disk(tmp_path)), prompt(200)
    engine.run(tokens, chunk=64)
    engine.drain()
    engine.close()
    again = start(model, "host:1MiB", disk(tmp_path))
    assert again.run(tokens).loaded == 192
    assert again.run(tokens).loaded == 192


def test_without_a_host_tier_a_small_one_is_made(start: Start, tmp_path: Path) -> None:
    engine, tokens = start("windows", disk(tmp_path)), prompt(200)
    engine.run(tokens)
    assert engine.run(tokens).loaded == 192


@pytest.mark.parametrize("model", ["windows", "state"])
def test_every_rank_keeps_its_own_part(start: Start, model: str, tmp_path: Path) -> None:
    engine, tokens = start(model, "host:1MiB", disk(tmp_path), world=2), prompt(200)
    engine.run(tokens, chunk=64)
    assert engine.run(tokens).loaded == 192


def test_host_memory_that_is_too_small_for_a_hit_gives_a_shorter_one(start: Start, tmp_path: Path) -> None:
    engine, tokens = start("full", "host:2048", disk(tmp_path)), prompt(300)  # eight pages of 16 tokens
    for end in range(64, 300, 64):
        engine.run(tokens[:end], chunk=16)
        engine.drain()
    assert 64 <= engine.run(tokens).loaded <= 128


def test_many_prompts_through_little_memory(start: Start, tmp_path: Path) -> None:
    engine, draw = start("windows", "host:16KiB", disk(tmp_path)), random.Random(3)
    known: list[list[int]] = [prompt(120, seed) for seed in range(4)]
    total = 0
    for turn in range(40):
        base = draw.choice(known)
        tokens = base[: draw.randrange(20, len(base))] + prompt(draw.randrange(1, 60), seed=100 + turn)
        known.append(tokens)
        total += engine.run(tokens, chunk=draw.choice([16, 48, 100])).loaded
    assert total > 500


@pytest.mark.parametrize("model", ["full", "windows", "state"])
def test_tiers_that_fail_cost_tokens_and_nothing_else(start: Start, model: str, tmp_path: Path) -> None:
    faults = "fail=0.2&lie=0.2&delay=0.001&seed=5"
    engine, draw = start(model, "host:4KiB", f"faulty:{disk(tmp_path)}?{faults}"), random.Random(7)
    known = [prompt(150, seed) for seed in range(3)]
    for turn in range(25):
        tokens = draw.choice(known)[: draw.randrange(40, 150)] + prompt(9, seed=50 + turn)
        engine.run(tokens, chunk=48)
    engine.drain()
    assert not engine.scheduler.host.pool.leases


def test_a_copy_that_fails_in_one_group_is_computed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, tokens = start("windows", "host:1MiB"), prompt(200)
    engine.run(tokens)
    (worker,) = engine.workers
    plain = worker._copy

    def copy(kind: Any, move: Any) -> None:
        if move.key.group == 1 and kind.value == "load":
            raise OSError("injected")
        plain(kind, move)

    monkeypatch.setattr(worker, "_copy", copy)
    ran = engine.run(tokens)
    assert (ran.loaded, ran.failed) == (0, 1)
    monkeypatch.undo()
    assert engine.run(tokens).loaded == 192


def test_nothing_is_held_when_all_requests_are_over(start: Start) -> None:
    engine, tokens = start("windows", "host:1MiB"), prompt(200)
    engine.run(tokens)
    request = fake.Request("aborted", tokens, 16)
    assert engine.scheduler.match(request, 0) == 192
    engine.scheduler.finished(request, 0)
    pool = engine.scheduler.host.pool
    assert pool.available == pool.capacity
    assert not pool.leases
    engine.scheduler.reset()
    assert engine.run(tokens).loaded == 0


def test_hashes_of_another_block_size_are_never_used(start: Start) -> None:
    engine, tokens = start("full", "host:1MiB"), prompt(200)
    engine.run(tokens)
    assert engine.scheduler.match(fake.Request("odd", tokens, 32), 0) == 0


class TestLayout:
    def test_a_page_is_a_block_of_a_group_on_all_ranks(self) -> None:
        layout = read_layout(fake.cache_config(MODELS["unequal"]), world_size=2)
        assert layout.cache.page_bytes == 2 * 2 * fake.LAYER_BYTES
        assert [spec.hash_unit for spec in layout.cache.groups] == [16, 32]
        assert layout.cache.granularity == 32

    @pytest.mark.parametrize(
        "spec", [fake.RSWASpec(), fake.CrossAttentionSpec(), fake.MambaSpec(mamba_cache_mode="none")]
    )
    def test_what_cannot_be_stored_is_refused(self, spec: fake.KVCacheSpec) -> None:
        with pytest.raises(ConfigError):
            read_kind(spec)


class TestConfig:
    def test_tiers(self) -> None:
        config = parse_config({"kv": ["disk:/x:1GiB", "host:1GiB"]})
        assert (config.host, config.below) == ("host:1GiB", ("disk:/x:1GiB",))
        assert parse_config({"kv": "disk:/x:1GiB"}).host == DEFAULT_HOST

    @pytest.mark.parametrize(
        "extra",
        [{}, {"kv": []}, {"kv": [1]}, {"kv": ["host:1GiB", "host:1GiB"]}, {"kv": ["host:1GiB"], "x": 1}]
        + [{"kv": ["host:1GiB"], "load_deadline_s": value} for value in (0, True, "3")],
    )
    def test_mistakes_are_told(self, extra: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match="kv_connector_extra_config"):
            parse_config(extra)

    @pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "0.33.2"])
    def test_known_versions(self, version: str) -> None:
        check_version(version)

    @pytest.mark.parametrize("version", ["0.31.0", "0.34.0", "1.0", "dev"])
    def test_other_versions_are_refused(self, version: str) -> None:
        with pytest.raises(ConnectorError, match=r"0\.32 to 0\.33"):
            check_version(version)

    def test_without_vllm_the_connector_says_so(self) -> None:
        import ostinato.integrations.vllm as plugin

        with pytest.raises(ConnectorError, match="vLLM"):
            plugin.OstinatoConnector  # noqa: B018


class TestWeights:
    def test_content_counts(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        digests = []
        for name, data in (("a", b"1"), ("b", b"1"), ("c", b"2")):
            (tmp_path / name).mkdir()
            (tmp_path / name / "model.safetensors").write_bytes(data)
            digests.append(weights_digest(str(tmp_path / name)))
        assert digests[0] == digests[1] != digests[2]
        assert weights_digest(str(tmp_path / "a")) == digests[0]

    def test_a_model_without_files_must_be_named(self) -> None:
        with pytest.raises(ConfigError, match="model_digest"):
            weights_digest("nobody/nothing")
