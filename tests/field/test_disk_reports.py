"""Reports about caches in files: restarts, budgets, full disks, wear, damage.  Every row over a disk tier."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from disk import writer
from disk.chats import check, model, start, tokens, whole
from disk.support import close, get, open_path, put
from disk.test_engine import finish, rig, serve
from e2e.conftest import need_real_model, real_prompt
from e2e.support import Oracle, assert_at_rest, greedy, make_llm, same, settle
from families.configs import build
from ostinato.connectors.disk import tools
from ostinato.connectors.disk.files import OsFile
from ostinato.connectors.disk.format import FileName
from ostinato.connectors.disk.store import DiskStore
from ostinato.engine.llm import LLM
from ostinato.engine.outputs import RequestOutput
from ostinato.errors import CapacityError, ConfigError
from ostinato.runtime.load import Runtime, build_runtime, load_runtime

MIB = 1 << 20
HYBRIDS = pytest.mark.parametrize("name", ["gemma3", "bamba"])
LENGTH = 113
"""A hit of this prompt leaves one token, so that all that was cached has a say in its logits."""


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def over(runtime: Runtime, path: Path, budget: str = "32MiB", options: str = "", **more: Any) -> LLM:
    return make_llm(runtime, kv=[f"disk:{path}:{budget}{options}"], max_num_batched_tokens=64, **more)


def right(llm: LLM, prompt: Sequence[int], count: int = 4) -> RequestOutput:
    """An answer from this engine, which must be the cold one; its stores are done."""
    output = llm.generate(list(prompt), greedy(count))[0]
    assert same(output, model(llm.runtime.name)[1](prompt, count)), output.cached_by_tier
    settle(llm)
    return output


def store_of(llm: LLM) -> DiskStore:
    store = llm.built.connectors[0].store  # type: ignore[attr-defined]
    assert isinstance(store, DiskStore)
    return store


def folder_bytes(path: Path) -> int:
    """What the files take on the disk."""
    return sum(file.stat().st_blocks * 512 for file in path.iterdir())


# ------------------------------------------------------------------------------------------------------------- restarts


@HYBRIDS
def test_p01_p03_saved_killed_started_restored(name: str, tmp_path: Path) -> None:
    """P01, llama.cpp#25913: a restore succeeds, and the whole prompt is computed again; P03, LMCache#2136: keys differ.

    Save after 400 tokens, kill, start, same prompt, hash seeds unlike.  Right: at most a block and the last token are
    computed again, and usage tells the truth.
    """
    prompt = tokens(400)
    child = start(tmp_path, "hang", [[name, prompt, 4]], seed=1)
    assert child.stdout is not None
    assert '"cached": 0' in child.stdout.readline()
    assert child.stdout.readline() == "hanging\n"
    time.sleep(1.5)  # a sync is due every half second
    child.kill()
    child.communicate()
    answers, _ = start(tmp_path, "close", [[name, prompt, 4]], seed=2).communicate(timeout=240)
    answer = json.loads(answers)
    check(name, answer)
    assert answer["cached"] == whole(399)


def test_p02_the_index_is_rebuilt_at_once(tmp_path: Path) -> None:
    """P02, LMCache#562: files are there but never reused after a restart.  Right: < 1 s for 1,000 records; hits."""
    store = open_path(tmp_path / "kv", 64 * MIB)
    for first in range(0, 10_000, 1000):
        put(store, range(first, first + 1000))
    close(store)
    begin = time.perf_counter()
    store = open_path(tmp_path / "kv", 64 * MIB)
    assert time.perf_counter() - begin < 10 * 1.0
    assert get(store, list(range(0, 10_000, 7))) == set(range(0, 10_000, 7))
    close(store)


def killed_writers(path: Path, count: int) -> None:
    for number in range(count):
        command = [
            sys.executable,
            str(Path(writer.__file__)),
            str(path),
            str(4 * MIB),
            str(number + 1),
            str(25 + number),
        ]
        child = subprocess.run(command, stdout=subprocess.PIPE, check=False, timeout=60)
        assert child.returncode == -9


def test_p05_l13_nothing_is_left_behind_by_kill_9(tmp_path: Path) -> None:
    """P05, llm-d-kv-cache#721: orphan temporary files; L13, vllm#57303: ghost files in /dev/shm after SIGKILL, 5 times.

    Right: no partial file is visible after the next start, none is left anywhere else, and the start succeeds.
    """
    path = tmp_path / "kv"
    shared = set(os.listdir("/dev/shm"))
    killed_writers(path, 5)
    (path / "snapshot-000000ff.tmp").write_bytes(b"half a snapsh")
    (path / "request.tmp").write_bytes(b"{")
    store = open_path(path)
    slabs = {str(FileName("slab", slab.number, slab.slot_bytes)) for slab in store.catalog.slabs.values()}
    left = set(os.listdir(path)) - slabs
    assert {name.partition("-")[0] for name in left} <= {"lock", "log", "snapshot"}
    assert sum(name.startswith("log") for name in left) == 1
    assert not any(name.endswith(".tmp") for name in left)
    assert put(store, range(10)) == 10
    close(store)
    assert set(os.listdir("/dev/shm")) - shared == set()


@HYBRIDS
def test_p06_the_same_weights_keep_the_tier(name: str, tmp_path: Path) -> None:
    """P06, vllm#57810: going to sleep throws the tier away, since weights may have changed.

    Right: the fingerprint tells: kept with the same weights, not used with others.
    """
    runtime, _ = model(name)
    with over(runtime, tmp_path / "kv") as llm:
        right(llm, tokens(LENGTH))
    other = build_runtime(build(name, seed=2), name=name, weights=bytes([6]) * 32, max_model_len=512)
    with over(other, tmp_path / "kv") as llm:
        output = llm.generate(tokens(LENGTH), greedy())[0]
        assert output.cached_tokens == 0
        assert same(output, Oracle(other)(tokens(LENGTH)))
    with over(runtime, tmp_path / "kv") as llm:
        assert right(llm, tokens(LENGTH)).cached_tokens == whole(LENGTH - 1)


def test_p07_the_writer_goes_and_the_reader_stays(tmp_path: Path) -> None:
    """P07, Mooncake#607: data is gone when the client that wrote it exits, what is known of it stays.

    Right: it stays a hit for the reader, which becomes the writer; what is removed is a miss, not an error.
    """
    runtime, _ = model("gemma3")
    writer_llm = over(runtime, tmp_path / "kv")
    with over(runtime, tmp_path / "kv") as reader:
        right(writer_llm, tokens(LENGTH))
        store_of(writer_llm).flush()
        time.sleep(1.1)  # a reader looks again once a second
        assert right(reader, tokens(LENGTH)).cached_by_tier.get("disk")
        tools.remove(str(tmp_path / "kv"))
        reader.reset_prefix_cache(device_only=True)
        right(reader, tokens(LENGTH))
        right(writer_llm, tokens(LENGTH, 2))
        writer_llm.close()
        time.sleep(1.1)
        reader.reset_prefix_cache(device_only=True)
        assert right(reader, tokens(LENGTH, 2)).cached_tokens == whole(LENGTH - 1)
        right(reader, tokens(LENGTH, 3))
        assert store_of(reader).stats.stored, "the reader has not become the writer"


@pytest.mark.slow
def test_p08_ten_sessions_after_a_restart(tmp_path: Path) -> None:
    """P08, mlx-lm PR#1405 and others: the wish for an automatic cache that persists.

    Right: a cold start with 10 sessions on the disk: time to the first token at most 25 % of computing.
    """
    need_real_model()
    runtime = load_runtime("gemma3-270m", "bfloat16")
    prompts = [[*real_prompt(runtime, 40, ""), *range(1000 + 50 * n, 1010 + 50 * n)] for n in range(10)]
    prompts = [[2, 100 + n, *prompt[1:]] for n, prompt in enumerate(prompts)]
    seconds: list[list[float]] = []
    for life in range(2):
        with make_llm(runtime, 3000, kv=[f"disk:{tmp_path}/kv:1GiB"]) as llm:
            llm.generate([5] * 20, greedy(1))  # the first pass pays for memory and kernels
            outputs = [llm.generate(prompt, greedy(2))[0] for prompt in prompts]
            assert [output.cached_tokens for output in outputs] == [life * whole(len(p) - 1) for p in prompts]
            seconds.append([output.metrics.ttft_s for output in outputs])
    share = sorted(seconds[1])[5] / sorted(seconds[0])[5]
    print(f"first token after {share:.1%} of the time to compute")
    assert share <= 0.25


def test_p09_c02_another_identity_is_ignored_counted_and_reclaimable(tmp_path: Path) -> None:
    """P09, Tanguille/cluster#4213: operators put versions into folder names by hand; C02, sglang#33268: dtypes mix.

    The same model, weights and folder: in bf16 and then fp32, and after an upgrade that changes numerics.  Right: no
    load of the other's records, which are ignored, counted and can be given up.
    """
    runtime, cold = model("gemma3")
    bf16 = build_runtime(build("gemma3", torch.bfloat16), name="gemma3", weights=bytes([5]) * 32, max_model_len=512)
    newer = replace(runtime, identity=replace(runtime.identity, numerics="of the next version"))
    for runtime_of, oracle in ((runtime, cold), (bf16, Oracle(bf16)), (newer, cold)):
        with over(runtime_of, tmp_path / "kv") as llm:
            output = llm.generate(tokens(LENGTH), greedy())[0]
            assert output.cached_tokens == 0
            assert store_of(llm).stats.loaded == 0
            assert same(output, oracle(tokens(LENGTH)))
    owners = tools.inspect(str(tmp_path / "kv")).owners
    assert len(owners) == 3
    assert {owner.model for owner in owners} == {"gemma3"}
    for owner in owners[:2]:
        assert tools.remove(str(tmp_path / "kv"), owner.label) == owner.records
    assert len(tools.inspect(str(tmp_path / "kv")).owners) == 1


# ----------------------------------------------------------------------------------------------------- budgets and wear


def test_e05_e09_usage_never_exceeds_the_limit(tmp_path: Path) -> None:
    """E05, vllm#53042: 1.92 times the flag is used; E09, vllm#52784: a disk tier grows until the volume is full.

    Several times the budget is written.  Right: usage is at most the limit at all times, what was used last stays.
    """
    runtime, _ = model("gemma3")
    path, budget = tmp_path / "kv", 2 * MIB
    with over(runtime, path, "2MiB") as llm:
        sizes = []
        llm.built.engine._on_step = lambda: sizes.append(folder_bytes(path))
        for seed in range(12):
            right(llm, tokens(200, seed))
            time.sleep(1.1 if seed == 10 else 0.05)  # uses are told apart by the second
        store = store_of(llm)
        assert store.stats.bytes_written > 3 * budget
        assert store.space.evictions
        assert max(sizes) <= budget
        assert max(sizes) >= 0.8 * budget
        llm.reset_prefix_cache(device_only=True)
        assert right(llm, tokens(200, 11)).cached_tokens == whole(199)
    assert folder_bytes(path) <= budget
    with over(runtime, path, "2MiB") as llm:
        assert right(llm, tokens(200, 11)).cached_tokens == whole(199)
        assert_at_rest(llm)


def test_e06_an_entry_larger_than_the_limit(tmp_path: Path) -> None:
    """E06, llama.cpp PR#23561: one entry larger than the limit is accepted, checkpoints are not counted.

    Right here: a budget that cannot hold one unit of each group, states included, is refused before anything is made.
    """
    runtime, _ = model("bamba")
    with pytest.raises(CapacityError, match="too small for this model: at least"):
        over(runtime, tmp_path / "kv", "100KiB")
    assert not (tmp_path / "kv").exists()


def test_e07_there_is_no_default_size(tmp_path: Path) -> None:
    """E07, llama.cpp#25740: a default of 8 GiB that nobody saw.  Right here: a size must be given; it is printed."""
    for spec in ("disk", f"disk:{tmp_path}/kv"):
        with pytest.raises(ConfigError, match="say where and how much"):
            make_llm(model("gemma3")[0], kv=[spec])
    with over(model("gemma3")[0], tmp_path / "kv") as llm:
        assert any(row.tier == "disk" for row in llm.startup.tiers)


@HYBRIDS
def test_e08_a_disk_does_not_change_the_layout(name: str, tmp_path: Path) -> None:
    """E08, vllm#41830: any connector silently switches hybrid allocation off.  Right: it stays on."""
    runtime, _ = model(name)
    with make_llm(runtime) as plain, over(runtime, tmp_path / "kv") as llm:
        assert plain.startup.groups == llm.startup.groups
        assert len(llm.startup.groups) > 1
        right(plain, tokens(200))
        right(llm, tokens(200))
        assert plain.stats().tiers[0] == llm.stats().tiers[0]


@pytest.mark.parametrize("call", ["allocate", "write"])
@pytest.mark.parametrize("times", [1, 10**9], ids=["once", "always"])
def test_e10_a_full_disk(
    call: str, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """E10, DingoCache PR#83: after ENOSPC every write fails for ever.

    Right: at most one warning, and serving continues; what is on the disk stays a hit.  A disk that is full when a file
    is to be made bigger only stops growth; one that cannot take what it promised is not written to any more.
    """
    runtime, _ = model("gemma3")
    with over(runtime, tmp_path / "kv", "2MiB") as llm:
        for seed in range(3):  # so that two fit when nothing can grow
            right(llm, tokens(LENGTH, seed))
    left = times
    inner: Callable[..., None] = getattr(OsFile, call)

    def full(file: OsFile, *words: Any) -> None:
        nonlocal left
        if left and (call == "allocate" or len(words[0]) > 1):  # of records, not of the index
            left -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        inner(file, *words)

    monkeypatch.setattr(OsFile, call, full)
    with caplog.at_level(logging.WARNING), over(runtime, tmp_path / "kv", "16MiB") as llm:
        for seed in range(8):
            if seed == 7:
                time.sleep(1.1)  # what is used within one second has no order among prompts
            right(llm, tokens(LENGTH, seed))
        time.sleep(1.1)
        llm.reset_prefix_cache(device_only=True)
        hit = right(llm, tokens(LENGTH)).cached_tokens
        assert hit == whole(LENGTH - 1) or call == "allocate"
        llm.reset_prefix_cache(device_only=True)
        last = right(llm, tokens(LENGTH, 7)).cached_tokens
        assert last == (whole(LENGTH - 1) if call == "allocate" else 0)
        assert_at_rest(llm)
    assert left < times
    assert len([record for record in caplog.records if "disk" in record.message]) == 1
    monkeypatch.undo()
    with over(runtime, tmp_path / "kv", "16MiB") as llm:  # all is well again
        right(llm, tokens(LENGTH, 9))
        assert store_of(llm).stats.stored


def test_e14_writes_can_be_limited(tmp_path: Path) -> None:
    """E14, mlx-engine#341: 40 to 137 GB are written in a session, and it cannot be switched off.

    Right: a cap on the rate, and no tier unless it is named; bytes per new byte are measured in ``disk.test_families``.
    """
    runtime, _ = model("gemma3")
    with over(runtime, tmp_path / "kv", options="?write_limit=256KiB/min") as llm:
        for seed in range(6):
            right(llm, tokens(200, seed))
        assert 0 < store_of(llm).stats.bytes_written <= 300 << 10
    with make_llm(runtime) as llm:
        right(llm, tokens(200))
        assert not llm.built.connectors


def test_e15_prompts_that_come_once_are_not_written(tmp_path: Path) -> None:
    """E15, vllm PR#35259: offloading of one-shot prompts costs throughput and evicts useful data.

    90 % unique prompts, 10 % of two hot ones, the device always evicted.  Right, with ``admit=second``: hits of hot
    prompts stay at 95 % or more of what storing everything gives, with at least 80 % fewer bytes.
    """
    hot = [list(range(1000 * n, 1000 * n + 96)) for n in (1, 2)]
    prompts = [hot[n // 10 % 2] if n % 10 == 0 else list(range(9000 + 200 * n, 9096 + 200 * n)) for n in range(500)]
    hits, written = [], []
    for options in ("", "?admit=second"):
        engine, tier = rig(tmp_path / f"kv{options[-3:]}", options, budget="64MiB", audited=False)
        hits.append(0)
        for prompt in prompts:
            output = serve(engine, prompt, 1)
            hits[-1] += output.cached_tokens if prompt in hot else 0
            engine.cache.core.drop_idle(device_only=True)
        written.append(tier.store.stats.bytes_written)
        finish(engine, tier)
    print(f"hits {hits[1] / hits[0]:.1%}, bytes {written[1] / written[0]:.1%}")
    assert hits[1] >= 0.95 * hits[0]
    assert written[1] <= 0.2 * written[0]


# -------------------------------------------------------------------------------------------------- hits after restarts


@HYBRIDS
def test_r01_resume_behind_the_stored_end(name: str, tmp_path: Path) -> None:
    """R01, llama-server: silently wrong at a resume point behind the stored end, whose window is not all there.

    A prompt of more than 4 windows; a new engine resumes at each cut down to two windows behind the end.  Right: equal
    to the cold run to the last bit, or a shorter hit.
    """
    runtime, _ = model(name)
    with over(runtime, tmp_path / "kv") as llm:
        right(llm, tokens(LENGTH))
    for cut in range(LENGTH, LENGTH - 45, -1):
        with over(runtime, tmp_path / "kv", options="?write_limit=1B/s") as llm:  # so that nothing is added
            output = right(llm, tokens(cut) + tokens(3, 77), 2)
            assert output.cached_tokens <= whole(cut + 2)
            assert output.cached_tokens == whole(cut) or name == "bamba"


@HYBRIDS
def test_r02_a_hit_consumes_nothing(name: str, tmp_path: Path) -> None:
    """R02, llama-server: after a request that shares a part, the original prompt is cold.  Right: A hits in full."""
    runtime, _ = model(name)
    first, second = tokens(LENGTH), tokens(56) + tokens(40, 9)
    for number, prompt in enumerate((first, second, first, second, first)):
        with over(runtime, tmp_path / "kv") as llm:
            cached = right(llm, prompt).cached_tokens
            if number >= 2:
                assert cached == whole(len(prompt) - 1), number


# ------------------------------------------------------------------------------------------------------------- failures


def slab_files(path: Path) -> list[Path]:
    return sorted(path.glob("slab-*"))


def to_nothing(file: Path) -> None:
    os.truncate(file, 0)


def to_half(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def to_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def flip(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[::512] = bytes(byte ^ 1 for byte in raw[::512])
    file.write_bytes(raw)


@HYBRIDS
@pytest.mark.parametrize("harm", [to_nothing, to_half, to_folder, Path.unlink, flip])
@pytest.mark.parametrize("live", [False, True])
def test_f04_f07_files_that_are_not_what_they_were(name: str, harm: Any, live: bool, tmp_path: Path) -> None:
    """F04, LMCache#1690: the index says yes, the data is gone; F07, sglang PR#39269: a short file kills a thread.

    Between two runs, or under a running engine.  Right: misses, right answers, and the tier goes on.
    """
    runtime, _ = model(name)
    path = tmp_path / "kv"
    with over(runtime, path) as llm:
        right(llm, tokens(LENGTH))
        if live:
            store_of(llm).flush()
            store_of(llm).files.keep_only((), ())
            llm.reset_prefix_cache(device_only=True)
            for file in slab_files(path):
                harm(file)
            right(llm, tokens(LENGTH))
            right(llm, tokens(LENGTH))
            assert_at_rest(llm)
    if not live:
        for file in slab_files(path):
            harm(file)
    for life in range(2):
        with over(runtime, path) as llm:
            output = right(llm, tokens(LENGTH, 4))
            assert life == 0 or live or output.cached_tokens == whole(LENGTH - 1)
            right(llm, tokens(LENGTH))


def test_f03_a_read_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F03, vllm-ascend#10561: a failed get, and the request goes on with stale data.  Right: computed again."""
    runtime, _ = model("gemma3")
    with over(runtime, tmp_path / "kv") as llm:
        right(llm, tokens(LENGTH))
    inner, calls = OsFile.read, 0

    def read(file: OsFile, buffers: Any, offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls % 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return inner(file, buffers, offset)

    with over(runtime, tmp_path / "kv") as llm:
        monkeypatch.setattr(OsFile, "read", read)
        right(llm, tokens(LENGTH))
        assert store_of(llm).stats.faults
        monkeypatch.undo()
        llm.reset_prefix_cache(device_only=True)
        assert right(llm, tokens(LENGTH)).cached_tokens == whole(LENGTH - 1)
        assert_at_rest(llm)


def test_f05_a_read_that_takes_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F05, vllm#49545: a slow get parks a request.  Right: computed again after the limit, late data ignored."""
    runtime, _ = model("gemma3")
    with over(runtime, tmp_path / "kv") as llm:
        right(llm, tokens(LENGTH))
    inner = OsFile.read

    def read(file: OsFile, buffers: Any, offset: int) -> int:
        time.sleep(3)
        return inner(file, buffers, offset)

    with over(runtime, tmp_path / "kv", load_deadline_s=0.3) as llm:
        monkeypatch.setattr(OsFile, "read", read)
        begin = time.monotonic()
        output = llm.generate(tokens(LENGTH), greedy())[0]
        assert time.monotonic() - begin < 2.5
        assert output.cached_tokens == 0
        assert same(output, model("gemma3")[1](tokens(LENGTH)))
        monkeypatch.undo()
        time.sleep(3.5)
        settle(llm)
        right(llm, tokens(LENGTH))
        assert_at_rest(llm)


def test_f12_a_tier_that_cannot_be_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """F12, vllm PR#52290: one tier's error at shutdown leaves others unclosed.  Right: reported once, others closed."""
    runtime, _ = model("gemma3")

    def broken(store: DiskStore) -> None:
        raise RuntimeError("cannot end")

    closed: list[str] = []
    llm = make_llm(runtime, kv=[f"disk:{tmp_path}/a:32MiB", "host:8MiB"])
    right(llm, tokens(LENGTH))
    monkeypatch.setattr(DiskStore, "close", broken)
    host = llm.built.connectors[1]
    monkeypatch.setattr(host, "close", lambda: closed.append("host"))
    with caplog.at_level(logging.ERROR):
        llm.close()
    assert closed == ["host"]
    assert ["disk failed in close()" in record.message for record in caplog.records] == [True]
    monkeypatch.undo()
    llm.built.connectors[0].close()
