"""What a tool asks of the process that writes a folder: forget records, shrink.

Owns: the file ``request``: one small JSON object, written by one tool at a time, removed by the writer when it is done.
Does not own: what tools want (``tools``).  The writer looks twice a second.

::

    {"drop": ["<name in hex>", ...]}     forget these records
    {"remove": "<label>"}                forget all records of one owner; "" = of all
    {"shrink": <bytes>}                  give up the coldest slabs until the folder is at most this large, once
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from typing import Any, Final

from ostinato.connectors.disk.files import Access, Folder
from ostinato.connectors.disk.format import REQUEST_NAME, TOOL_LOCK_NAME
from ostinato.connectors.disk.store import DiskStore
from ostinato.errors import ConnectorError

log: Final = logging.getLogger(__name__)
MAX_BYTES: Final = 32 << 10
PATIENCE_S: Final = 30.0


def ask(folder: Folder, request: Mapping[str, Any], patience: float = PATIENCE_S) -> None:
    """Have the writer carry out ``request``.  Raises ConnectorError when it does not answer."""
    deadline = time.monotonic() + patience
    while not folder.lock(TOOL_LOCK_NAME):
        _wait(deadline)
    temporary = f"{REQUEST_NAME}.tmp"
    raw = json.dumps(request).encode()
    assert len(raw) <= MAX_BYTES
    file = folder.open(temporary, Access.CREATE)
    file.truncate(0)
    file.write([raw], 0)
    file.close()
    folder.replace(temporary, REQUEST_NAME)
    try:
        while REQUEST_NAME in folder.sizes():
            _wait(deadline)
    except ConnectorError:
        folder.remove(REQUEST_NAME)
        raise


def serve(store: DiskStore) -> None:
    """Carry out the request that is waiting, if any."""
    try:
        file = store.folder.open(REQUEST_NAME, Access.READ)
    except FileNotFoundError:
        return
    try:
        raw = bytearray(min(file.size(), MAX_BYTES))
        del raw[file.read([raw], 0) if raw else 0 :]
    finally:
        file.close()
    try:
        carry_out(store, json.loads(raw))
    except (ValueError, TypeError) as error:
        log.warning("disk: a request makes no sense (%s)", error)
    finally:
        store.folder.remove(REQUEST_NAME)


def carry_out(store: DiskStore, request: Mapping[str, Any]) -> None:
    """Raises ValueError or TypeError when the request makes no sense."""
    if not isinstance(request, dict):
        raise TypeError("not an object")
    if "drop" in request:
        names = [bytes.fromhex(name) for name in request["drop"]]
        entries = (store.catalog.index.get(name) for name in names)
        store.drop([entry for entry in entries if entry is not None])
    if "remove" in request:
        label = request["remove"]
        with store.lock:
            numbers = {number for number, owner in store.catalog.owners.items() if label in ("", owner.label)}
            store.drop([entry for entry in store.catalog.index if entry.identity in numbers])
            store.space.give_up_empty()
    if "shrink" in request:
        with store.lock:
            store.space.shrink(int(request["shrink"]))


def _wait(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise ConnectorError("the process that writes this cache does not answer; stop it, then try again")
    time.sleep(0.05)
