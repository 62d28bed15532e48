"""The attention backends: C++ kernels against the torch reference, bitwise invariance, and the small operators.

Pages are laid out as the engine lays them out: strided views into one arena, with other layers between two blocks.
Everything that no query can see is NaN, so a read outside of the live range shows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ostinato.errors import AuditError, ConfigError
from ostinato.runtime import native
from ostinato.runtime.attention import (
    HOLE,
    AttentionParams,
    BatchMetadata,
    CpuNative,
    KVPages,
    TorchRef,
    select_backend,
)
from ostinato.runtime.attention.base import first_visible

LIBRARY, REASON = native.load()
LEVELS = [level for level in native.Isa if LIBRARY is not None and 0 <= level <= LIBRARY.best_isa]
DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}

needs_library = pytest.mark.skipif(LIBRARY is None, reason=REASON)
each_isa = pytest.mark.parametrize("isa", LEVELS or [native.Isa.AUTO], ids=lambda level: level.name.lower())
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=("fp32", "bf16"))


@pytest.fixture(autouse=True)
def fixed_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # waiting threads spin, which is slow on shared cores; tests that need two ask for them
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True, slots=True)
class Heads:
    query: int
    kv: int
    dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class Content:
    """One sequence, independent of how it is paged: q ``[s, Hq, D]``, k ``[s, Hkv, D]``, v ``[s, Hkv, Dv]``."""

    q: Tensor
    k: Tensor
    v: Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """Positions ``start`` to before ``end`` of a sequence, as one step of a batch."""

    content: Content
    start: int
    end: int


def make_content(length: int, heads: Heads, dtype: torch.dtype) -> Content:
    return Content(
        torch.randn(length, heads.query, heads.dim).to(dtype),
        torch.randn(length, heads.kv, heads.dim).to(dtype),
        torch.randn(length, heads.kv, heads.value_dim).to(dtype),
    )


def empty_pages(num_blocks: int, heads: Heads, block_size: int, dtype: torch.dtype) -> KVPages:
    """NaN-filled views into an arena whose blocks hold padding of other layers before, between and after K and V."""
    k_size, v_size = heads.kv * block_size * heads.dim, heads.kv * block_size * heads.value_dim
    arena = torch.full((num_blocks, 7 + k_size + 13 + v_size + 29), float("nan"), dtype=dtype)
    k = arena[:, 7 : 7 + k_size].view(num_blocks, heads.kv, block_size, heads.dim)
    v = arena[:, 20 + k_size : 20 + k_size + v_size].view(num_blocks, heads.kv, block_size, -1)
    return KVPages(k, v)


def make_batch(
    parts: list[Part], heads: Heads, params: AttentionParams, block_size: int, dtype: torch.dtype
) -> tuple[Tensor, KVPages, BatchMetadata]:
    """Page the batch: blocks in random order, holes wherever nothing is visible, NaN in every other position."""
    width = max(-(-part.end // block_size) for part in parts) + 1
    pages = empty_pages(width * len(parts) + 1, heads, block_size, dtype)
    free = torch.randperm(pages.k.shape[0]).tolist()
    table = torch.full((len(parts), width), HOLE, dtype=torch.int32)
    for row, part in enumerate(parts):
        first = first_visible(params, part.start)
        for index in range(first // block_size, -(-part.end // block_size)):
            table[row, index] = block = free.pop()
            low, high = max(first, index * block_size), min(part.end, (index + 1) * block_size)
            inside = slice(low - index * block_size, high - index * block_size)
            pages.k[block, :, inside] = part.content.k[low:high].transpose(0, 1)
            pages.v[block, :, inside] = part.content.v[low:high].transpose(0, 1)
    lengths = [part.end - part.start for part in parts]
    metadata = BatchMetadata(
        cu_q=torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
        seq_lens=torch.tensor([part.end for part in parts], dtype=torch.int32),
        query_lens=lengths,
        context_lens=[part.start for part in parts],
        block_table=table,
        slots=torch.empty(0, dtype=torch.int32),
    )
    return torch.cat([part.content.q[part.start : part.end] for part in parts]), pages, metadata


SHAPES = [
    Heads(4, 1, 256, 256),
    Heads(8, 2, 64, 64),
    Heads(4, 4, 192, 128),
    Heads(6, 2, 96, 96),
    Heads(5, 1, 80, 80),
    Heads(4, 2, 72, 40),
    Heads(3, 3, 40, 72),
    Heads(14, 2, 16, 24),
    Heads(2, 1, 37, 19),
    Heads(16, 1, 576, 512),
    Heads(2, 1, 640, 640),
]
VARIANTS = [
    AttentionParams(1.0, window=window, chunk=chunk, softcap=softcap)
    for window, chunk, softcap in (
        *((0, 0, 0.0), (0, 0, 0.0), (100, 0, 0.0), (512, 0, 0.0), (0, 128, 0.0), (40, 96, 0.0)),
        *((0, 0, 5.0), (20, 0, 5.0)),  # every second one has sinks as well
    )
]


def test_oracle_on_a_case_done_by_hand() -> None:
    heads = Heads(1, 1, 2, 1)
    content = Content(
        torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]], [[1.0, 0.0]]]),
        torch.tensor([[[0.0, 0.0]], [[1.0, 0.0]], [[2.0, 0.0]]]),
        torch.tensor([[[1.0]], [[2.0]], [[4.0]]]),
    )
    sink = torch.tensor([0.5])
    weights = torch.tensor([1.0, 2.0, 0.5]).exp()
    for params, expected in (
        (AttentionParams(1.0, window=2), (2 * weights[0] + 4 * weights[1]) / weights[:2].sum()),
        (AttentionParams(1.0, window=2, sinks=sink), (2 * weights[0] + 4 * weights[1]) / weights.sum()),
        (AttentionParams(1.0, chunk=2), torch.tensor(4.0)),
    ):
        query, pages, metadata = make_batch([Part(content, 2, 3)], heads, params, 2, torch.float32)
        torch.testing.assert_close(TorchRef().attend(query, pages, params, metadata).flatten(), expected.view(1))


@needs_library
@each_isa
@each_dtype
@pytest.mark.parametrize("heads", SHAPES, ids=lambda heads: f"{heads.query}-{heads.kv}-{heads.dim}-{heads.value_dim}")
def test_kernel_agrees_with_reference(isa: native.Isa, dtype: torch.dtype, heads: Heads) -> None:
    lengths = [(699, 700), (0, 37), (0, 1), (536, 600), (512, 513), (1024, 1029), (63, 64), (0, 70)]
    parts = [Part(make_content(end, heads, dtype), start, end) for start, end in lengths]
    sinks = torch.randn(heads.query)
    for index, variant in enumerate(VARIANTS):
        params = replace(variant, scale=heads.dim**-0.5, sinks=sinks if index % 2 else None)
        query, pages, metadata = make_batch(parts, heads, params, 16, dtype)
        out = CpuNative(isa).attend(query, pages, params, metadata)
        wide = KVPages(pages.k.float(), pages.v.float())
        expected = TorchRef().attend(query.float(), wide, params, metadata)
        assert out.dtype == dtype
        torch.testing.assert_close(out.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def run(
    parts: list[Part], heads: Heads, params: AttentionParams, isa: native.Isa, block_size: int = 16
) -> list[Tensor]:
    """Output of each part."""
    query, pages, metadata = make_batch(parts, heads, params, block_size, parts[0].content.q.dtype)
    out = CpuNative(isa).attend(query, pages, params, metadata)
    return list(torch.split(out, metadata.query_lens))


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


@needs_library
@each_isa
@each_dtype
@pytest.mark.parametrize("heads", [Heads(4, 1, 64, 64), Heads(6, 2, 72, 40)], ids=("even", "ragged"))
def test_bitwise_invariance(isa: native.Isa, dtype: torch.dtype, heads: Heads) -> None:
    length = 700
    content, other = make_content(length, heads, dtype), make_content(length, heads, dtype)
    sinks = torch.randn(heads.query)
    for params in (
        AttentionParams(0.125),
        AttentionParams(0.125, window=100, sinks=sinks),
        AttentionParams(0.125, chunk=160, softcap=20.0),
    ):
        whole = run([Part(content, 0, length)], heads, params, isa)[0]
        assert not whole.isnan().any()
        torch.set_num_threads(2)
        assert torch.equal(bits(run([Part(content, 0, length)], heads, params, isa)[0]), bits(whole)), "threads"
        torch.set_num_threads(1)
        for block_size in (32, 64, 7):
            paged = run([Part(content, 0, length)], heads, params, isa, block_size)[0]
            assert torch.equal(bits(paged), bits(whole)), f"block size {block_size}"
        for cuts in ((0, 1, 37, 64, 200, 513, 699, 700), (0, 512, 700), (0, 650, 651, 652, 653, 700)):
            pieces = [run([Part(content, a, b)], heads, params, isa)[0] for a, b in itertools.pairwise(cuts)]
            assert torch.equal(bits(torch.cat(pieces)), bits(whole)), f"chunks {cuts}"
        mixed = [Part(other, 0, 300), Part(content, 699, 700), Part(other, 511, 513), Part(content, 100, 333)]
        outs = run(mixed, heads, params, isa)
        assert torch.equal(bits(outs[1]), bits(whole[699:])), "decode in a batch"
        assert torch.equal(bits(outs[3]), bits(whole[100:333])), "chunk in a batch"


@needs_library
@each_isa
@each_dtype
def test_decode_one_by_one_is_bitwise_prefill(isa: native.Isa, dtype: torch.dtype) -> None:
    heads, params, length = Heads(4, 2, 40, 40), AttentionParams(0.2), 560
    content = make_content(length, heads, dtype)
    query, pages, metadata = make_batch([Part(content, 0, length)], heads, params, 16, dtype)
    whole = CpuNative(isa).attend(query, pages, params, metadata)
    for position in range(length):
        ends = torch.tensor([position + 1], dtype=torch.int32)
        starts = torch.tensor([0, 1], dtype=torch.int32)
        step = replace(metadata, cu_q=starts, seq_lens=ends, query_lens=[1], context_lens=[position])
        out = CpuNative(isa).attend(query[position : position + 1], pages, params, step)
        assert torch.equal(bits(out), bits(whole[position : position + 1])), f"position {position}"


@needs_library
def test_long_context_split_over_threads_is_bitwise() -> None:
    heads, params, length = Heads(4, 1, 128, 128), AttentionParams(0.09), 5000
    part = [Part(make_content(length, heads, torch.bfloat16), length - 1, length)]
    outs = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        outs.append(run(part, heads, params, native.Isa.AUTO)[0])
    assert torch.equal(bits(outs[0]), bits(outs[1]))
    assert torch.equal(bits(outs[0]), bits(outs[2]))


@needs_library
def test_strided_query_and_extreme_logits() -> None:
    heads, params = Heads(4, 2, 32, 32), AttentionParams(1.0)
    content = make_content(90, heads, torch.float32)
    content.q.mul_(100.0)
    query, pages, metadata = make_batch([Part(content, 0, 90)], heads, params, 16, torch.float32)
    strided = query.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    heads_first = query.transpose(0, 1).contiguous().transpose(0, 1)
    out = CpuNative().attend(query, pages, params, metadata)
    torch.testing.assert_close(out, TorchRef().attend(query, pages, params, metadata), atol=1e-3, rtol=1e-3)
    assert torch.equal(out, CpuNative().attend(strided, pages, params, metadata))
    assert torch.equal(out, CpuNative().attend(heads_first, pages, params, metadata))


@pytest.mark.parametrize("backend", [TorchRef(), pytest.param(CpuNative(), marks=needs_library)], ids=lambda b: b.name)
def test_hole_in_the_live_range_raises(backend: TorchRef | CpuNative) -> None:
    heads, params = Heads(2, 1, 32, 32), AttentionParams(1.0, window=40)
    query, pages, metadata = make_batch(
        [Part(make_content(100, heads, torch.float32), 99, 100)], heads, params, 16, torch.float32
    )
    assert metadata.block_table[0, :3].tolist() == [HOLE] * 3  # positions below 60 are out of sight
    assert not backend.attend(query, pages, params, metadata).isnan().any()
    for entry in (HOLE, pages.k.shape[0]):
        metadata.block_table[0, 4] = entry
        with pytest.raises(AuditError, match="block table"):
            backend.attend(query, pages, params, metadata)


@needs_library
def test_bad_batches_are_refused() -> None:
    heads, params = Heads(2, 1, 32, 32), AttentionParams(1.0)
    query, pages, good = make_batch(
        [Part(make_content(20, heads, torch.float32), 10, 20)], heads, params, 16, torch.float32
    )
    backend = CpuNative()
    for metadata in (
        replace(good, cu_q=torch.tensor([0, 9], dtype=torch.int32)),
        replace(good, seq_lens=torch.tensor([5], dtype=torch.int32)),
        replace(good, seq_lens=torch.tensor([999], dtype=torch.int32)),
        replace(good, block_table=good.block_table.long()),
    ):
        with pytest.raises(AuditError):
            backend.attend(query, pages, params, metadata)
    with pytest.raises(AuditError):
        backend.attend(query.bfloat16(), pages, params, good)
    assert backend.supports(64, 64, torch.float16) is not None
    assert backend.supports(37, 19, torch.bfloat16) is None


@each_dtype
@pytest.mark.parametrize("backend", [TorchRef(), pytest.param(CpuNative(), marks=needs_library)], ids=lambda b: b.name)
def test_write_puts_tokens_into_their_slots(backend: TorchRef | CpuNative, dtype: torch.dtype) -> None:
    heads, block_size = Heads(4, 3, 20, 12), 8
    pages = empty_pages(5, heads, block_size, dtype)
    key = torch.randn(heads.kv, 4, heads.dim).to(dtype).transpose(0, 1)  # heads first in memory, as models leave it
    value = torch.randn(4, heads.kv, 2 * heads.value_dim).to(dtype)[..., : heads.value_dim]
    slots = torch.tensor([3, -1, 39, 16], dtype=torch.int32)
    backend.write(key, value, pages, slots)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert torch.equal(pages.k[slot // block_size, :, slot % block_size], key[token])
            assert torch.equal(pages.v[slot // block_size, :, slot % block_size], value[token])
    assert int((~pages.k.isnan()).sum()) == 3 * heads.kv * heads.dim, "nothing else was written"
    with pytest.raises(AuditError):
        backend.write(key, value, pages, torch.tensor([0, 0, 40, 0], dtype=torch.int32))


@needs_library
def test_copy_pages_copies_and_checks_bounds() -> None:
    copy = torch.ops.ostinato.copy_pages
    source = torch.randint(0, 256, (6, 100), dtype=torch.uint8)
    target = torch.zeros(4, 128, dtype=torch.uint8)[:, :100]
    copy(source, target, torch.tensor([5, 0]), torch.tensor([1, 3]))
    assert torch.equal(target[[1, 3]], source[[5, 0]])
    assert not target[[0, 2]].any()
    before = target.clone()
    for bad_source, bad_target in (([0, 6], [0, 1]), ([0, -1], [0, 1]), ([0, 1], [0, 4]), ([0, 1], [0])):
        with pytest.raises(RuntimeError):
            copy(source, target, torch.tensor(bad_source), torch.tensor(bad_target))
    with pytest.raises(RuntimeError):
        copy(source[:, :99], target, torch.tensor([0]), torch.tensor([0]))
    assert torch.equal(target, before), "a refused copy writes nothing"


@needs_library
@each_isa
@each_dtype
def test_argmax_takes_the_first_of_equals_and_ignores_nan(isa: native.Isa, dtype: torch.dtype) -> None:
    def argmax(logits: Tensor) -> list[int]:
        result: list[int] = torch.ops.ostinato.argmax_rows(logits, int(isa)).tolist()
        return result

    for columns in (1, 3, 63, 4096, 4097, 20011):
        logits = torch.randn(5, columns).to(dtype)
        first = [int((row == row.max()).nonzero()[0]) for row in logits]
        assert argmax(logits) == first
        poisoned = logits.repeat(1, 2)  # every maximum twice
        assert argmax(poisoned) == first
        poisoned[:, columns:] = float("nan")
        assert argmax(poisoned) == first
    flat = torch.zeros(2, 9000, dtype=dtype)
    assert argmax(flat) == [0, 0]
    assert argmax(flat.fill_(float("nan"))) == [0, 0]
    assert argmax(flat.fill_(float("-inf"))) == [0, 0]
    flat[:, 0] = float("nan")
    flat[:, 8999] = -3.0
    assert argmax(flat) == [8999, 8999]


def test_selection_explains_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSTINATO_NATIVE", "0")
    native.load.cache_clear()
    backend, line = select_backend([(64, 64)], torch.float32)
    assert (backend.name, backend.invariant) == ("torch_ref", False)
    assert line == "torch_ref, within tolerance: switched off by OSTINATO_NATIVE=0"
    monkeypatch.setenv("OSTINATO_NATIVE", "1")
    monkeypatch.setenv("CXX", "no-such-compiler")
    native.load.cache_clear()
    assert "no C++ compiler" in select_backend([(64, 64)], torch.float32)[1]
    native.load.cache_clear()
    with pytest.raises(ConfigError):
        select_backend([(64, 64)], torch.int8)


@needs_library
def test_instruction_set_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSTINATO_ISA", "portable")
    backend, line = select_backend([(64, 64)], torch.float32)
    assert (backend.invariant, line) == (True, "cpu_native (portable), bitwise")
    assert select_backend([(64, 64)], torch.float16)[0].name == "torch_ref"
    monkeypatch.setenv("OSTINATO_ISA", "mmx")
    with pytest.raises(ConfigError, match="choose one of"):
        select_backend([(64, 64)], torch.float32)


@needs_library
def test_a_failed_build_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "broken.cpp").write_text("int broken( {\n")
    monkeypatch.setattr(native, "SOURCES", sources)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    native.load.cache_clear()
    library, reason = native.load()
    native.load.cache_clear()
    assert library is None
    assert reason.startswith("compilation failed: ")
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
