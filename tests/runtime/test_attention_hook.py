"""The attention function that models call: every sort of layer against a dense mask, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

import tiny_models as tiny
from ostinato.cache.kinds import Chunked, Full
from ostinato.errors import AuditError
from ostinato.runtime import native
from ostinato.runtime.attention import AttentionBackend, CpuNative, TorchRef
from ostinato.runtime.attention_hook import install, paged_attention
from ostinato.runtime.context import ACTIVE
from ostinato.runtime.geometry import LayerGeometry
from ostinato.runtime.probe_cache import LAYER_KEY
from paged_forward import PagedForward, Pool

LIBRARY, REASON = native.load()
HEADS = 4
FULL = LayerGeometry(0, Full(), 2, 24, 16, window=0, source=0)

each_backend = pytest.mark.parametrize(
    "backend",
    [pytest.param(CpuNative(), marks=pytest.mark.skipif(LIBRARY is None, reason=REASON)), TorchRef()],
    ids=("cpu_native", "torch_ref"),
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Content:
    """One sequence's rows as a model hands them over: [1, heads, tokens, dim]."""

    query: Tensor
    key: Tensor
    value: Tensor

    def rows(self, begin: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.query[:, :, begin:end], self.key[:, :, begin:end], self.value[:, :, begin:end]


def content(shape: LayerGeometry, tokens: int = 90) -> Content:
    return Content(
        torch.randn(1, HEADS, tokens, shape.key_dim),
        torch.randn(1, shape.kv_heads, tokens, shape.key_dim),
        torch.randn(1, shape.kv_heads, tokens, shape.value_dim),
    )


def call(pool: Pool, backend: AttentionBackend, layer: int, rows: Sequence[Tensor], **kwargs: Any) -> Tensor:
    """One layer's call for the next rows of one sequence; ``kwargs`` reach the attention function."""
    span = pool.extend("mine", kwargs.pop("tokens", rows[0].shape[2]))
    active = ACTIVE.set(pool.context([span], backend))
    try:
        module: Any = SimpleNamespace(layer_idx=layer)
        return paged_attention(module, *rows, None, **kwargs)[0]
    finally:
        ACTIVE.reset(active)


def dense(
    part: Content, shape: LayerGeometry, scale: float, softcap: float = 0.0, sinks: Tensor | None = None
) -> Tensor:
    """[1, tokens, heads, value dim] by one dense mask."""
    tokens = part.query.shape[2]
    query, key = torch.arange(tokens)[:, None], torch.arange(tokens)[None]
    mask = key <= query
    if shape.window:
        mask &= key > query - shape.window
    if shape.chunk:
        mask &= key // shape.chunk == query // shape.chunk
    group = HEADS // shape.kv_heads
    logits = part.query @ part.key.repeat_interleave(group, 1).transpose(2, 3) * scale
    if softcap:
        logits = torch.tanh(logits / softcap) * softcap
    logits = logits.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        logits = torch.cat([logits, sinks[None, :, None, None].expand(1, HEADS, tokens, 1)], -1)
    weights = torch.softmax(logits, -1)[..., :tokens]
    return (weights @ part.value.repeat_interleave(group, 1)).transpose(1, 2)


@each_backend
@pytest.mark.parametrize(
    ("shape", "kwargs"),
    [
        (FULL, {}),
        (FULL, {"scaling": 0.4}),
        (replace(FULL, chunk=20), {"scaling": 0.4}),
        (replace(FULL, chunk=20, window=9), {}),
        (replace(FULL, window=9), {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0])}),
        (replace(FULL, window=9), {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.bfloat16)}),
        (FULL, {"softcap": 2.0, "scaling": 0.4}),
        (replace(FULL, key_dim=10, value_dim=33, kv_heads=1), {"softcap": None}),
    ],
)
def test_layers_attend_as_their_geometry_says(
    backend: AttentionBackend, shape: LayerGeometry, kwargs: dict[str, Any]
) -> None:
    part = content(shape)
    pool = Pool([shape], torch.float32)
    cuts = pairwise((0, 1, 18, 50, 51, 90))
    out = torch.cat([call(pool, backend, 0, part.rows(*cut), **kwargs) for cut in cuts], 1)
    sinks = kwargs.get("s_aux")
    expected = dense(
        part,
        shape,
        kwargs.get("scaling") or shape.key_dim**-0.5,
        kwargs.get("softcap") or 0.0,
        None if sinks is None else sinks.float(),
    )
    assert torch.allclose(out, expected, atol=2e-5)


@each_backend
def test_a_layer_that_borrows_reads_and_does_not_write(backend: AttentionBackend) -> None:
    borrower = replace(FULL, layer=1, source=0, window=9)
    part = content(FULL, 40)
    pool = Pool([FULL, borrower], torch.float32)
    lender_out = call(pool, backend, 0, part.rows(0, 40))
    before = [rows.clone() for rows in pool.cached("mine")]
    query = torch.randn_like(part.query)
    nothing = (torch.full_like(part.key, float("nan")), torch.full_like(part.value, float("nan")))
    span = pool.extend("mine", 0)
    active = ACTIVE.set(pool.context([replace(span, start=0, count=40)], backend))
    try:
        module: Any = SimpleNamespace(layer_idx=1)
        out = paged_attention(module, query, *nothing, None)[0]
    finally:
        ACTIVE.reset(active)
    assert torch.allclose(lender_out, dense(part, FULL, 24**-0.5), atol=2e-5)
    assert torch.allclose(out, dense(replace(part, query=query), borrower, 24**-0.5), atol=2e-5)
    assert all(torch.equal(a, b) for a, b in zip(before, pool.cached("mine"), strict=True))


@each_backend
def test_the_call_names_the_layer(backend: AttentionBackend) -> None:
    """One module may serve several layers; its own index is then not to be trusted."""
    wide = replace(FULL, layer=1, source=1, kv_heads=1, key_dim=40, value_dim=8)
    part = content(wide, 20)
    pool = Pool([FULL, wide], torch.float32)
    out = call(pool, backend, 0, part.rows(0, 20), **{LAYER_KEY: 1})
    assert torch.allclose(out, dense(part, wide, 40**-0.5), atol=2e-5)
    assert pool.layers[0].pages.k.isnan().all()


@each_backend
def test_padding_is_neither_written_nor_attended(backend: AttentionBackend) -> None:
    part = content(FULL, 16)
    pool = Pool([FULL], torch.float32)
    out = call(pool, backend, 0, part.rows(0, 16), tokens=11)
    assert out.shape == (1, 16, HEADS, 16)
    assert torch.allclose(out[:, :11], dense(part, FULL, 24**-0.5)[:, :11], atol=2e-5)
    assert not out[:, 11:].any()
    pages = pool.layers[0].pages
    assert int((~pages.k.isnan()).sum()) == 11 * 2 * 24
    assert int((~pages.v.isnan()).sum()) == 11 * 2 * 16


@each_backend
def test_a_layer_without_keys_and_values_must_not_attend(backend: AttentionBackend) -> None:
    pool = Pool([FULL, None], torch.float32)
    with pytest.raises(AuditError, match="layer 1"):
        call(pool, backend, 1, content(FULL, 5).rows(0, 5))


@each_backend
def test_rows_that_do_not_fit_the_pages_are_refused(backend: AttentionBackend) -> None:
    if isinstance(backend, TorchRef):
        pytest.skip("the reference leaves shapes to torch")
    pool = Pool([FULL], torch.float32)
    with pytest.raises(AuditError, match="refused"):
        call(pool, backend, 0, content(replace(FULL, key_dim=23), 5).rows(0, 5))


@each_backend
def test_a_model_with_chunked_attention(backend: AttentionBackend) -> None:
    """Llama 4: three layers attend inside chunks, the fourth everywhere."""
    config = tf.Llama4TextConfig(
        **tiny.shape(num_hidden_layers=4, head_dim=16, intermediate_size_mlp=128, attention_chunk_size=20),
        num_local_experts=2,
        interleave_moe_layer_step=5,
        attn_temperature_tuning=False,
    )
    model = tiny.draw(tf.Llama4ForCausalLM, config)
    tokens = tiny.prompts((75,))[0]
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
    chunks = [20 if kind == "chunked_attention" else 0 for kind in config.layer_types or ()]
    assert chunks == [20, 20, 20, 0]
    geometry = [
        LayerGeometry(layer, Chunked(chunk) if chunk else Full(), 2, 16, 16, window=0, source=layer, chunk=chunk)
        for layer, chunk in enumerate(chunks)
    ]
    install(model)
    forward = PagedForward(model, Pool(geometry, torch.float32), backend, None)
    cuts = pairwise((0, 7, 19, 22, 60, 61, 75))
    logits = torch.cat([forward.step(("mine", tokens[begin:end]))[0] for begin, end in cuts])
    assert (logits - expected).abs().max() < 1e-4
