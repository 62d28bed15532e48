"""What a scan over recurrent state is: the values that go in, and the protocol.

Owns: the types shared by the implementations.  Does not own: state memory (the arena hands out views), which pages a
sequence reads and writes (the plan says), the modules that call scans (``mixers``).

One call scans a ragged batch, prefill chunks and decodes alike, in one pass per sequence.  A sequence starts from the
state in its ``read`` page (zeros when that is a hole) and leaves its state behind at each of its *stops*; the last stop
is its last row, the others are checkpoints on the way::

    rows      | seq 0: rows 0 .. 4   | seq 1: row 5 | seq 2: rows 6 .. 44                      |
    cu_q        0                      5              6                                          45
    stops       5                      6              22 (checkpoint)   38 (checkpoint)  45
    cu_stops    0                      1              2                                          5
    pages       9                      4              17                18               30
    read        -1: zeros              4: in place    12: a checkpoint, which stays as it is

All implementations are *sequential*: one recurrence step per token, in one code path for every batch, so that decode,
prefill, reload and recomputation give the same bits.

Thread: the engine's; implementations keep no state between calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ostinato.errors import AuditError


@dataclass(frozen=True, slots=True)
class StateIndex:
    """One step's batch as one state group sees it; all int32.

    Attributes:
        cu_q: ``[sequences + 1]``, where each sequence's rows start.
        read: ``[sequences]``, the page a sequence starts from, below 0: zeros.
        cu_stops: ``[sequences + 1]``, where each sequence's stops start.
        stops: ``[stops]``, row (of the whole batch) *after* which the state is kept, ascending.
        pages: ``[stops]``, the page that it is kept in.
    """

    cu_q: Tensor
    read: Tensor
    cu_stops: Tensor
    stops: Tensor
    pages: Tensor


@dataclass(frozen=True, slots=True)
class Convolution:
    """A causal depthwise convolution: ``inputs`` [rows, channels], ``weight`` [channels, kernel], ``bias`` [channels].

    ``activation``: None, ``silu`` or ``swish``.  The result has the dtype of ``inputs``; sums are in float32.
    State: [pages, channels, kernel - 1] in the dtype of ``inputs``.
    """

    inputs: Tensor
    weight: Tensor
    bias: Tensor | None
    activation: str | None


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """Gated delta rule (and KDA): ``query``, ``key`` [rows, key_heads, Dk], ``value`` [rows, heads, Dv].

    ``decay`` [rows, heads] (gated delta) or [rows, heads, Dk] (KDA) is the log of the factor; ``beta`` [rows, heads].
    ``normalize``: L2-normalise query and key (epsilon 1e-6 inside the root).  The query is scaled by Dk ** -0.5.  Each
    key head serves heads / key_heads consecutive value heads.  State: float32 [pages, heads, Dk, Dv].

        S = exp(decay) * S;  S += k (x) (beta * (v - k S));  y = q S
    """

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    beta: Tensor
    normalize: bool


@dataclass(frozen=True, slots=True)
class StateSpace:
    """Mamba-2 (SSD): ``inputs`` x [rows, heads, P], ``dt`` [rows, heads] (before bias and softplus), ``a`` [heads],
    ``b``, ``c`` [rows, groups, N], ``d`` [heads] or None, ``dt_bias`` [heads] or None, ``dt_limit`` (min, max).

    State: float32 [pages, heads, P, N].

        dt = clamp(softplus(dt + bias));  S = exp(dt a) S + (dt x) (x) b;  y = S c + d x
    """

    inputs: Tensor
    dt: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    d: Tensor | None
    dt_bias: Tensor | None
    softplus: bool
    dt_limit: tuple[float, float]


@dataclass(frozen=True, slots=True)
class SelectiveScan:
    """Mamba-1: ``inputs`` u [rows, channels], ``dt`` [rows, channels] (before bias and softplus), ``a`` [channels, N],
    ``b``, ``c`` [rows, N], ``d`` and ``dt_bias`` [channels] or None, ``gate`` z [rows, channels] or None.

    State: float32 [pages, channels, N] (any stride between pages).

        dt = softplus(dt + bias);  h = exp(dt a) h + dt b u;  y = (h c + d u) * silu(z)
    """

    inputs: Tensor
    dt: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    d: Tensor | None
    gate: Tensor | None
    dt_bias: Tensor | None
    softplus: bool


class ScanBackend(Protocol):
    """Runs scans over state pages.  ``states`` are strided views, dense but for the stride between pages."""

    @property
    def name(self) -> str:
        """Short name, for the start-up table and a tier's fingerprint."""

    @property
    def invariant(self) -> bool:
        """Whether results are bitwise independent of chunking, batch, threads and number of stops."""

    def convolve(self, call: Convolution, states: Tensor, index: StateIndex) -> Tensor:
        """[rows, channels], contiguous."""

    def gated_delta(self, call: GatedDelta, states: Tensor, index: StateIndex) -> Tensor:
        """[rows, heads, Dv] in the dtype of ``call.value``, contiguous."""

    def state_space(self, call: StateSpace, states: Tensor, index: StateIndex) -> Tensor:
        """[rows, heads, P] float32, contiguous."""

    def selective(self, call: SelectiveScan, states: Tensor, index: StateIndex) -> Tensor:
        """[rows, channels] in the dtype of ``call.inputs``, contiguous."""


def has_silu(activation: str | None) -> bool:
    """Whether a convolution ends in SiLU, which is also called swish.

    Raises:
        AuditError: it ends in anything else.
    """
    if activation not in (None, "silu", "swish"):
        raise AuditError(f"a convolution with activation {activation} has no scan; add it to the backends in scans/")
    return activation is not None
