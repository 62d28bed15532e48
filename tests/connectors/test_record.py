"""A record is what was asked for, or it is refused: every changed byte, every other length, every other identity."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.cache.keys import BlockKey
from ostinato.connectors.record import TRAILER_BYTES, VERSION, Fault, RecordIdentity, check, seal
from ostinato.ids import GroupId

IDENTITY = RecordIdentity(bytes(range(32)), bytes(range(32, 64)))
KEY = BlockKey(GroupId(3), bytes(range(100, 132)))
digests = st.binary(min_size=32, max_size=32)
payloads = st.binary(max_size=300)


def test_a_record_that_nobody_touched_is_accepted() -> None:
    payload = b"abc" * 100
    trailer = seal(IDENTITY, KEY, 7, [payload])
    assert len(trailer) == TRAILER_BYTES == 192
    assert check(IDENTITY, KEY, [payload], trailer) is None


@given(payloads, st.integers(0, 2**40), st.lists(st.integers(0, 300), max_size=4))
def test_how_the_payload_is_cut_into_pieces_does_not_matter(payload: bytes, ordinal: int, cuts: list[int]) -> None:
    edges = sorted({0, len(payload), *(min(cut, len(payload)) for cut in cuts)})
    pieces = [memoryview(payload)[a:b] for a, b in itertools.pairwise(edges)]
    trailer = seal(IDENTITY, KEY, ordinal, pieces)
    assert trailer == seal(IDENTITY, KEY, ordinal, [payload])
    assert check(IDENTITY, KEY, [payload], trailer) is None
    assert check(IDENTITY, KEY, pieces, memoryview(bytearray(trailer))) is None


def test_pieces_of_wider_items_count_in_bytes() -> None:
    payload = bytes(range(64))
    wide = memoryview(payload).cast("I")
    assert seal(IDENTITY, KEY, 0, [wide]) == seal(IDENTITY, KEY, 0, [payload])
    assert check(IDENTITY, KEY, [wide], seal(IDENTITY, KEY, 0, [payload])) is None


@given(st.binary(min_size=1, max_size=300), st.data())
def test_any_other_byte_in_the_payload_is_found(payload: bytes, data: st.DataObject) -> None:
    trailer = seal(IDENTITY, KEY, 7, [payload])
    place = data.draw(st.integers(0, len(payload) - 1))
    changed = bytearray(payload)
    changed[place] ^= data.draw(st.integers(1, 255))
    assert check(IDENTITY, KEY, [changed], trailer) is Fault.CHECKSUM


@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
def test_any_other_byte_in_the_trailer_is_found(flip: int) -> None:
    payload = b"some bytes of a page"
    trailer = seal(IDENTITY, KEY, 7, [payload])
    for place in range(TRAILER_BYTES):
        changed = bytearray(trailer)
        changed[place] ^= flip
        assert check(IDENTITY, KEY, [payload], changed) is not None, place


@given(payloads, payloads)
def test_another_length_is_found(payload: bytes, other: bytes) -> None:
    trailer = seal(IDENTITY, KEY, 7, [payload])
    if len(other) != len(payload):
        assert check(IDENTITY, KEY, [other], trailer) is Fault.TRUNCATED
    assert check(IDENTITY, KEY, [payload, b"\0"], trailer) is Fault.TRUNCATED


@given(st.integers(0, 400))
def test_a_trailer_of_another_length_is_found(length: int) -> None:
    trailer = seal(IDENTITY, KEY, 7, [b"x"])
    cut = trailer[:length].ljust(length, b"\0")
    assert check(IDENTITY, KEY, [b"x"], cut) is (None if length == TRAILER_BYTES else Fault.TRUNCATED)


@given(digests, digests, digests, st.integers(0, 5))
def test_what_was_stored_under_another_identity_is_refused(
    layout: bytes, namespace: bytes, digest: bytes, group: int
) -> None:
    trailer = seal(IDENTITY, KEY, 7, [b"x"])
    asked = RecordIdentity(layout, namespace), BlockKey(GroupId(group), digest)
    expected = None if asked == (IDENTITY, KEY) else Fault.IDENTITY
    assert check(*asked, [b"x"], trailer) is expected
    for identity in (replace(IDENTITY, layout=layout), replace(IDENTITY, namespace=namespace)):
        assert check(identity, KEY, [b"x"], trailer) is (None if identity == IDENTITY else Fault.IDENTITY)
    assert check(IDENTITY, KEY._replace(group=GroupId(group)), [b"x"], trailer) is (
        None if group == KEY.group else Fault.IDENTITY
    )


def test_another_version_is_no_record_of_ours() -> None:
    trailer = bytearray(seal(IDENTITY, KEY, 7, [b"x"]))
    trailer[8] = VERSION + 1
    assert check(IDENTITY, KEY, [b"x"], trailer) is Fault.FORMAT


@given(st.binary(min_size=TRAILER_BYTES, max_size=TRAILER_BYTES))
def test_random_bytes_are_no_record(trailer: bytes) -> None:
    assert check(IDENTITY, KEY, [b"x"], trailer) is not None
