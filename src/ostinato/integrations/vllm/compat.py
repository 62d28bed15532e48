"""Which vLLM this is, and where it keeps what a connector needs.

Owns: the range of versions, and every name inside of vLLM whose place changes between them.  Does not own: what is done
with it.  vLLM is imported by :func:`check_installed` only.

How a step's blocks are seen: ``SchedulerOutput.kv_connector_block_state``, which reads a request's table when asked and
lives until ``build_connector_meta`` returns (0.32 and 0.33).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from ostinato.errors import ConnectorError

OLDEST: Final = (0, 32)
NEWER_THAN_ALL: Final = (0, 34)
NULL_BLOCK: Final = 0
"""vLLM's block for positions that hold nothing."""


class VllmRequest(Protocol):
    """What is read of vLLM's ``Request``; never written."""

    request_id: str
    num_prompt_tokens: int
    block_hashes: Sequence[bytes]

    @property
    def num_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Scheduled:
    """What one step computes of one request: its KV up to token ``computed``; ``states``: exact recurrent states.

    A state is ``(group, block, tokens)``.
    """

    request_id: str
    computed: int
    states: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class StepView:
    """A step as the scheduler planned it.  ``rows`` is valid while ``build_connector_meta`` runs."""

    scheduled: tuple[Scheduled, ...]
    source: Any = field(repr=False)

    def rows(self, request_id: str) -> Sequence[Sequence[int]] | None:
        """The request's block ids by group and position, ``NULL_BLOCK`` where nothing is held; None = unknown."""
        rows: Sequence[Sequence[int]] | None = self.source.get_block_ids(request_id)
        return rows


def view_step(output: Any) -> StepView:
    """``output``: vLLM's SchedulerOutput."""
    state = getattr(output, "kv_connector_block_state", None)
    if state is None:
        raise ConnectorError(
            "this vLLM does not show its block tables to connectors: see docs/vllm.md for its versions"
        )
    cached = output.scheduled_cached_reqs
    before = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    before.update((new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs)
    drafts: Mapping[str, Sequence[int]] = output.scheduled_spec_decode_tokens
    states = state.boundary_state_offloads
    scheduled = [
        # Drafts may be rejected: what they leave behind is no content.
        Scheduled(
            request_id,
            before[request_id] + tokens - len(drafts.get(request_id, ())),
            tuple(states.get(request_id, ())),
        )
        for request_id, tokens in output.num_scheduled_tokens.items()
    ]
    scheduled += [
        Scheduled(request_id, 0, tuple(handed)) for request_id, handed in states.items() if request_id not in before
    ]
    return StepView(tuple(scheduled), state)


def check_version(text: str) -> None:
    """Raises ConnectorError when this is no vLLM that the plug-in was tested with."""
    match = re.match(r"(\d+)\.(\d+)", text)
    if match is None or not OLDEST <= (int(match[1]), int(match[2])) < NEWER_THAN_ALL:
        oldest, newest = ".".join(map(str, OLDEST)), f"{NEWER_THAN_ALL[0]}.{NEWER_THAN_ALL[1] - 1}"
        raise ConnectorError(
            f"this is vLLM {text}; OstinatoConnector works with {oldest} to {newest}: install one of them, "
            "or another version of Ostinato"
        )


def check_installed() -> None:
    """Raises ConnectorError when vLLM is missing, or of a version that is not known."""
    try:
        import vllm
    except ImportError as error:
        raise ConnectorError(f"OstinatoConnector runs inside vLLM, which cannot be imported here: {error}") from error
    check_version(str(vllm.__version__))
