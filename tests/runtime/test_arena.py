"""The arena: views of every group tile its pages without overlap, poison reaches every number, pages can be copied."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import tiny_models as tiny
from families.configs import build
from ostinato import memory
from ostinato.cache.layout import build_layout
from ostinato.errors import CapacityError
from ostinato.ids import SlotId
from ostinato.runtime.arena import Arena
from ostinato.runtime.geometry import ModelSpecs
from ostinato.runtime.specs import probe_specs
from ostinato.scheduler.plan import PageCopy

PAGES = 3
MIXED = (
    *("gemma3", "gemma4", "llama4", "deepseek_v3", "kimi_linear", "qwen3_next"),
    *("bamba", "falcon_h1", "zamba2", "jamba", "mamba", "lfm2"),
)


def views(arena: Arena, specs: ModelSpecs, group: int) -> Iterator[torch.Tensor]:
    """Every buffer of the group, each byte once: a latent's values are the first columns of its keys."""
    for layer, place in arena.layers.items():
        if place.group == group:
            shape = specs.geometry[layer]
            assert shape is not None
            yield place.pages.k
            if shape.latent:
                assert place.pages.v.data_ptr() == place.pages.k.data_ptr()
                assert place.pages.v.shape[3] == shape.key_dim
            else:
                yield place.pages.v
    for states in arena.states.values():
        if states.group == group:
            yield from states.buffers.values()


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_views_do_not_overlap(name: str, dtype: torch.dtype) -> None:
    """Distinct numbers written through every view of a group are all there afterwards, and padding is untouched."""
    specs = probe_specs(build(name, dtype))
    layout = build_layout(specs.layers, hash_unit=16)
    arena = Arena(layout, specs, PAGES)
    assert arena.raw.data_ptr() % 64 == 0
    for index, group in enumerate(layout.groups):
        arena.raw.fill_(0xAB)
        buffers = list(views(arena, specs, index))
        for number, buffer in enumerate(buffers):
            assert buffer.shape[0] == PAGES * group.page_units
            assert buffer[0].is_contiguous()
            count = buffer[0].numel()
            blocks = torch.arange(buffer.shape[0]).view(-1, *[1] * (buffer.ndim - 1))
            buffer.copy_((torch.arange(count) % 16).view(buffer.shape[1:]) + 16 * (blocks % 4) + 64 * (number % 4))
        for number, buffer in enumerate(buffers):
            expected = (torch.arange(buffer[0].numel()) % 16).view(buffer.shape[1:]) + 64 * (number % 4)
            for block in range(buffer.shape[0]):
                assert torch.equal(buffer[block].float(), (expected + 16 * (block % 4)).float()), (index, number)
        untouched = _bytes_left(arena, buffers)
        assert (arena.raw.flatten()[untouched] == 0xAB).all()
        used = sum(buffer.numel() * buffer.dtype.itemsize for buffer in buffers)
        padded = PAGES * group.page_units * group.unit_bytes - used
        assert 0 <= padded < PAGES * 64 * max(1, len(buffers)), "only states are padded, each to a line"


def _bytes_left(arena: Arena, buffers: list[torch.Tensor]) -> torch.Tensor:
    """Positions of the bytes of the pool that lie in none of the ``buffers``."""
    free = torch.ones(arena.raw.numel(), dtype=torch.bool)
    for buffer in buffers:
        item, base = buffer.dtype.itemsize, arena.raw.data_ptr()
        size = buffer[0].numel() * item
        for block in buffer:
            begin = block.data_ptr() - base
            assert free[begin : begin + size].all(), "two views share a byte"
            free[begin : begin + size] = False
    return free.nonzero().flatten()


def test_pages_of_several_units() -> None:
    specs = probe_specs(build("gemma4"))
    layout = build_layout(specs.layers, hash_unit=16)
    arena = Arena(layout, specs, PAGES)
    for place in arena.layers.values():
        group = layout.groups[place.group]
        assert place.pages.k.stride(0) * 4 == group.unit_stride
        assert place.pages.k.stride(0) * 4 * group.page_units == layout.page_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["deepseek_v3", "bamba"])
def test_poison_reaches_every_number(name: str, dtype: torch.dtype) -> None:
    """Whatever a page is read as, the model's dtype or float32, nothing in it is a number."""
    specs = probe_specs(build(name, dtype))
    arena = Arena(build_layout(specs.layers), specs, PAGES, poison=True)
    buffers = [buffer for group in range(len(arena.layout.groups)) for buffer in views(arena, specs, group)]
    assert {buffer.dtype for buffer in buffers} == {dtype} | ({torch.float32} if name == "bamba" else set())
    assert all(bool(buffer.isnan().all()) for buffer in buffers)
    arena.raw.zero_()
    arena.poison_page(SlotId(1))
    for buffer in buffers:
        units = buffer.shape[0] // PAGES
        assert buffer[units : 2 * units].isnan().all()
        assert (buffer[:units] == 0).all()
        assert (buffer[2 * units :] == 0).all()


def test_copy() -> None:
    specs = probe_specs(tiny.llama(torch.bfloat16))
    arena = Arena(build_layout(specs.layers), specs, num_pages=2, poison=True)
    arena.raw[0] = 7
    arena.copy(PageCopy(SlotId(0), SlotId(1), offset=64, length=128))
    assert (arena.raw[1] == 7).sum() == 128
    assert (arena.raw[1, 64:192] == 7).all()


def test_a_pool_larger_than_the_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = probe_specs(tiny.llama())
    layout = build_layout(specs.layers)
    monkeypatch.setattr(memory, "available_memory", lambda: 2**30)
    with pytest.raises(CapacityError, match=r"asks for 2\.00 GiB.*1\.00 GiB"):
        Arena(layout, specs, num_pages=2**31 // layout.page_bytes)
