"""Names for the integers and strings that travel: so that a slot is never passed for an ordinal."""

from __future__ import annotations

from typing import Final, NewType

RequestId = NewType("RequestId", str)
GroupId = NewType("GroupId", int)
"""Index of a KV cache group in its layout."""
SlotId = NewType("SlotId", int)
"""Index of a page in one tier's arena."""
Ordinal = NewType("Ordinal", int)
"""Position of a hash unit (or page) in a prompt: unit ``m`` of a group covers tokens ``[m * unit, (m + 1) * unit)``."""
TierId = NewType("TierId", str)
JobId = NewType("JobId", int)
TicketId = NewType("TicketId", int)
Step = NewType("Step", int)
"""Number of a scheduler step; steps are counted from 1."""

DEVICE: Final = TierId("device")
HOLE: Final = SlotId(-1)
"""A table position whose block is not held (vLLM: the null block)."""
