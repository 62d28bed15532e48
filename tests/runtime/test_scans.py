"""The scans over recurrent state: C++ kernels and the torch reference against transformers, and bitwise invariance."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ostinato.errors import AuditError, ConfigError
from ostinato.runtime import native
from ostinato.runtime.scans import CpuScans, ScanBackend, StateIndex, TorchScans, select_scans
from scan_cases import (
    CASES,
    HOLE,
    KINDS,
    ROW_FIELDS,
    Call,
    Case,
    Part,
    changed,
    convolution,
    cut,
    empty_states,
    fresh_states,
    gated_delta,
    index_of,
    parameters,
    rows_of,
    run,
    scan,
    selective,
    state_space,
)

LIBRARY, REASON = native.load()
LEVELS = [level for level in native.Isa if LIBRARY is not None and 0 <= level <= LIBRARY.best_isa]
BACKENDS: list[ScanBackend] = [TorchScans(), *(CpuScans(level) for level in LEVELS)]
NAMES = ["torch", *(level.name.lower() for level in LEVELS)]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}

needs_library = pytest.mark.skipif(LIBRARY is None, reason=REASON)
each_backend = pytest.mark.parametrize("backend", BACKENDS, ids=NAMES)
torch_and_best = pytest.mark.parametrize("backend", [BACKENDS[0], BACKENDS[-1]], ids=("torch", "best"))
each_kernel = pytest.mark.parametrize("backend", BACKENDS[1:], ids=NAMES[1:])
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=("fp32", "bf16"))
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
each_kind = pytest.mark.parametrize("case", KINDS.values(), ids=KINDS)


@pytest.fixture(autouse=True)
def fixed_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # waiting threads spin, which is slow on shared cores; tests that need two ask for them
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    assert actual.shape == expected.shape
    assert actual.float().isfinite().all()
    scale = max(1.0, expected.float().abs().max().item()) if expected.numel() else 1.0
    assert (actual.float() - expected.float()).abs().max().item() <= tolerance * scale


# ------------------------------------------------------------------------------------------------------- transformers


def scan_one(backend: ScanBackend, call: Call, state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and the end state of one sequence that starts from ``state``."""
    states = empty_states(tuple(state.shape), 3, state.dtype)
    states[1] = state
    (out,) = scan(backend, [Part(call, 1, ((rows_of(call), 2),))], states)
    assert torch.equal(states[1], state)
    return out, states[2]


@each_backend
@pytest.mark.parametrize("rows", [1, 70])
def test_gated_delta_is_that_of_transformers(backend: ScanBackend, rows: int) -> None:
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    call, state = gated_delta(rows, torch.float32, (2, 4), (32, 40), False), torch.randn(4, 32, 40)
    out, end = scan_one(backend, call, state)
    values = (call.query[None], call.key[None], call.value[None], call.decay[None], call.beta[None])
    for theirs in (qwen.torch_chunk_gated_delta_rule, qwen.torch_recurrent_gated_delta_rule):
        expected, last = theirs(
            *values, initial_state=state[None], output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        assert_close(out, expected[0])
        assert_close(end, last[0])


@each_backend
def test_kimi_delta_is_that_of_transformers(backend: ScanBackend) -> None:
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention

    call, state = gated_delta(70, torch.float32, (3, 3), (32, 40), True), torch.randn(3, 32, 40)
    out, end = scan_one(backend, call, state)
    expected, last = chunk_kimi_delta_attention(
        call.query[None],
        call.key[None],
        call.value[None],
        call.decay[None],
        call.beta[None],
        initial_state=state[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    assert_close(out, expected[0])
    assert_close(end, last[0])


@each_backend
@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.1, 0.7)])
def test_state_space_is_that_of_transformers(backend: ScanBackend, limit: tuple[float, float]) -> None:
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    call = replace(state_space(70, torch.float32, (2, 4), (24, 32)), dt_limit=limit)
    state = torch.randn(4, 24, 32)
    out, end = scan_one(backend, call, state)
    expected, last = mamba2_chunk_scan(
        *(call.inputs[None], call.dt[None], call.a, call.b[None], call.c[None], 16),
        D=call.d,
        dt_bias=call.dt_bias,
        initial_states=state[None],
        dt_softplus=True,
        dt_limit=limit,
        return_final_states=True,
    )
    assert_close(out, expected[0])
    assert_close(end, last[0])


@each_backend
def test_selective_scan_is_that_of_transformers(backend: ScanBackend) -> None:
    from transformers.models.falcon_mamba import modeling_falcon_mamba as mamba

    call = selective(40, torch.float32, 70, 16)
    assert call.gate is not None
    out, end = scan_one(backend, call, torch.zeros(70, 16))
    rows = (tensor.t()[None] for tensor in (call.inputs, call.dt))
    expected, last = mamba.mamba_selective_scan(
        *(*rows, call.a, call.b.t()[None], call.c.t()[None], call.d),
        z=call.gate.t()[None],
        delta_bias=call.dt_bias,
        delta_softplus=True,
        return_last_state=True,
    )
    assert_close(out, expected[0].t())
    assert_close(end, last[0])


@each_backend
def test_one_token_is_that_of_transformers(backend: ScanBackend) -> None:
    from transformers.models.falcon_mamba.modeling_falcon_mamba import mamba_selective_state_update
    from transformers.models.mamba2.modeling_mamba2 import mamba2_selective_state_update

    heads, state = state_space(1, torch.float32, (2, 4), (24, 32)), torch.randn(4, 24, 32)
    wide = {name: getattr(heads, name)[..., None].expand(-1, 24) for name in ("d", "dt_bias")}
    out, end = scan_one(backend, heads, state)
    expected = mamba2_selective_state_update(
        *(state[None], heads.inputs, heads.dt[..., None].expand(-1, -1, 24)),
        *(heads.a[:, None, None].expand(-1, 24, 32), heads.b, heads.c, wide["d"], wide["dt_bias"], True),
    )
    assert_close(out, expected)
    assert_close(end, state)  # updated in place

    call, state = selective(1, torch.float32, 70, 16), torch.randn(70, 16)
    out, end = scan_one(backend, call, state)
    expected = mamba_selective_state_update(
        *(state[None], call.inputs, call.dt, call.a, call.b, call.c, call.d, call.dt_bias, True, call.gate)
    )
    assert_close(out, expected)
    assert_close(end, state)


@each_backend
@pytest.mark.parametrize("kernel", [2, 3, 4])
def test_convolution_is_that_of_transformers(backend: ScanBackend, kernel: int) -> None:
    from transformers.models.mamba2.modeling_mamba2 import causal_conv1d_fn

    call, state = convolution(40, torch.float32, 70, kernel, "silu"), torch.randn(70, kernel - 1)
    out, end = scan_one(backend, call, state)
    padded = torch.cat((state, call.inputs.t()), dim=1)
    expected = causal_conv1d_fn(padded[None], call.weight, call.bias, activation="silu")[0, :, kernel - 1 :]
    assert_close(out, expected.t())
    assert torch.equal(end, padded[:, -(kernel - 1) :])


# ---------------------------------------------------------------------------------------------------------- invariance


def in_chunks(backend: ScanBackend, case: Case, call: Call, cuts: list[int]) -> tuple[Tensor, Tensor]:
    """Page 0 is a checkpoint; all chunks after the first work in place, on page 1."""
    states = fresh_states(case, call, 2)
    outs = [
        scan(backend, [Part(cut(call, start, end), 0 if start == 0 else 1, ((end - start, 1),))], states)[0]
        for start, end in itertools.pairwise(cuts)
    ]
    return torch.cat(outs), states[1].clone()


@each_backend
@each_case
@each_dtype
def test_bits_do_not_depend_on_how_rows_are_scanned(backend: ScanBackend, case: Case, dtype: torch.dtype) -> None:
    rows = 75
    call, other = case.make(rows, dtype), case.make(rows, dtype)
    seed = torch.random.get_rng_state()

    def chunks(cuts: list[int]) -> tuple[Tensor, Tensor]:
        torch.random.set_rng_state(seed)  # the same state in page 0
        return in_chunks(backend, case, call, cuts)

    out, end = chunks([0, rows])
    assert out.float().isfinite().all()
    assert end.float().isfinite().all()
    for cuts in ([0, 1, 2, 34, 35, 68, rows], [0, 64, rows], list(range(rows + 1))):
        again = chunks(cuts)
        assert torch.equal(again[0], out)
        assert torch.equal(again[1], end)

    torch.random.set_rng_state(seed)
    states = fresh_states(case, call, 9)
    parts = [  # decodes and prefills side by side, of which two start from one checkpoint, and one keeps checkpoints
        Part(cut(other, 0, 1), HOLE, ((1, 3),)),
        Part(call, 0, ((16, 4), (32, 5), (33, 6), (rows, 1))),
        Part(cut(other, 0, 40), 0, ((40, 7),)),
        Part(call, 0, ((rows, 2),)),
    ]
    parts = [replace(part, call=changed(part.call, parameters(call))) for part in parts]
    outs = scan(backend, parts, states)
    assert torch.equal(outs[1], out)
    assert torch.equal(outs[3], out)
    assert torch.equal(states[1], end)
    assert torch.equal(states[2], end)
    assert states[8].isnan().all()
    (rest,) = scan(backend, [Part(cut(call, 33, rows), 6, ((rows - 33, 6),))], states)
    assert torch.equal(rest, out[33:])
    assert torch.equal(states[6], end)


@each_kernel
@each_kind
def test_bits_do_not_depend_on_threads(backend: ScanBackend, case: Case) -> None:
    call = case.make(2000, torch.float32)
    states = fresh_states(case, call, 3)
    index = index_of([Part(call, 0, ((1000, 1), (2000, 2)))])
    one, end = run(backend, call, states, index), states[2].clone()
    torch.set_num_threads(2)
    assert torch.equal(run(backend, call, states, index), one)
    assert torch.equal(states[2], end)


@each_kernel
@each_case
@each_dtype
def test_kernels_agree_with_the_reference(backend: ScanBackend, case: Case, dtype: torch.dtype) -> None:
    call = case.make(50, dtype)
    states = fresh_states(case, call, 4)
    copy = empty_states(case.state, 4, states.dtype)
    copy.copy_(states)
    parts = [Part(cut(call, 0, 10), HOLE, ((10, 1),)), Part(cut(call, 10, 50), 0, ((17, 3), (40, 2)))]
    for out, expected in zip(scan(backend, parts, states), scan(TorchScans(), parts, copy), strict=True):
        assert out.dtype == expected.dtype
        assert out.is_contiguous()
        assert_close(out, expected, TOLERANCE[out.dtype])
    assert_close(states, copy)


# ----------------------------------------------------------------------------------------------------------- arguments


@torch_and_best
@each_kind
def test_strided_inputs_give_the_same_bits(backend: ScanBackend, case: Case) -> None:
    call = case.make(20, torch.float32)
    states = fresh_states(case, call, 2)
    index = index_of([Part(call, 0, ((20, 1),))])
    out, end = run(backend, call, states, index), states[1].clone()
    names = [name for name in ROW_FIELDS[type(call)] if getattr(call, name) is not None]
    spread = {
        name: torch.stack((getattr(call, name), torch.zeros_like(getattr(call, name))), 1)[:, 0] for name in names
    }
    turned = {name: getattr(call, name).transpose(0, -1).contiguous().transpose(0, -1) for name in names}
    for tensors in (spread, turned):
        assert torch.equal(run(backend, changed(call, tensors), states, index), out)
        assert torch.equal(states[1], end)


@torch_and_best
@each_kind
def test_nothing_to_scan(backend: ScanBackend, case: Case) -> None:
    call = case.make(4, torch.float32)
    states = fresh_states(case, call, 2)
    assert scan(backend, [Part(cut(call, 0, 0), 0, ())], states)[0].shape[0] == 0
    empty = StateIndex(*(torch.tensor(values, dtype=torch.int32) for values in ([0], [], [0], [], [])))
    assert run(backend, cut(call, 0, 0), states, empty).shape[0] == 0
    assert states[1].isnan().all()


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


BAD_INDICES = {
    "rows left out": {"cu_q": int32(0, 4, 9)},
    "rows fall": {"cu_q": int32(0, 12, 10)},
    "read beyond the pool": {"read": int32(4, 0)},
    "page beyond the pool": {"pages": int32(1, 2, 4)},
    "page below 0": {"pages": int32(1, -1, 3)},
    "no state at the end": {"stops": int32(4, 7, 9)},
    "stops fall": {"stops": int32(4, 10, 10)},
    "stop of another sequence": {"stops": int32(4, 3, 10)},
    "stops left out": {"cu_stops": int32(0, 1, 2)},
    "written twice": {"pages": int32(1, 2, 1)},
    "read and written by two": {"read": int32(3, 0)},
    "lengths differ": {"read": int32(0)},
}


@torch_and_best
@each_kind
@pytest.mark.parametrize("change", BAD_INDICES.values(), ids=BAD_INDICES)
def test_bad_index_is_refused(backend: ScanBackend, case: Case, change: dict[str, Tensor]) -> None:
    call = case.make(10, torch.float32)
    states = fresh_states(case, call, 4)
    good = StateIndex(int32(0, 4, 10), int32(0, 0), int32(0, 1, 3), int32(4, 7, 10), int32(1, 2, 3))
    with pytest.raises(AuditError):
        run(backend, call, states, replace(good, **change))
    assert states[1:].isnan().all()


@torch_and_best
@each_kind
def test_tensors_that_do_not_fit_are_refused(backend: ScanBackend, case: Case) -> None:
    call = case.make(10, torch.float32)
    states = fresh_states(case, call, 2)
    index = index_of([Part(call, 0, ((10, 1),))])
    name = ROW_FIELDS[type(call)][-1]
    bad_call = changed(call, {name: getattr(call, name)[:, :-1]}) if getattr(call, name).shape[1] > 1 else None
    with pytest.raises(AuditError):
        run(backend, call, states[..., :-1], index)
    with pytest.raises(AuditError):
        run(backend, call, states.double(), index)
    if bad_call is not None:
        with pytest.raises(AuditError):
            run(backend, bad_call, states, index)
    assert states[1].isnan().all()


@each_backend
def test_unknown_activation_is_refused(backend: ScanBackend) -> None:
    call = convolution(4, torch.float32, 5, 2, "gelu")
    with pytest.raises(AuditError, match="gelu"):
        backend.convolve(call, torch.zeros(1, 5, 1), index_of([Part(call, HOLE, ((4, 0),))]))


def test_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "load", lambda: (None, "no compiler"))
    backend, line = select_scans()
    assert backend.name == "torch_scans"
    assert "no compiler" in line


@needs_library
def test_selection_of_an_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSTINATO_ISA", "portable")
    assert select_scans()[1] == "cpu_scans (portable), bitwise"
    monkeypatch.setenv("OSTINATO_ISA", "mmx")
    with pytest.raises(ConfigError, match="mmx"):
        select_scans()
