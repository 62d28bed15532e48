"""The bytes of a batch, and the JSON that says where they go."""

from __future__ import annotations

import pytest

from ostinato.errors import ConfigError
from ostinato.events.config import ENDPOINT, parse_events_config
from ostinato.observe.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, decode, encode

RECORDED = bytes.fromhex(
    "93cb3ff80000000000009481a474797065b0416c6c426c6f636b73436c65617265648ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392c40461616161c40462626262b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f6964739401020304aa626c6f636b5f73697a6502a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae736c6964696e675f77696e646f77bc6b765f63616368655f737065635f736c6964696e675f77696e646f77cd02008ca474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391c40463636363b1706172656e745f626c6f636b5f68617368c40462626262a9746f6b656e5f696473920506aa626c6f636b5f73697a6502a76c6f72615f6964c0a66d656469756da3435055a96c6f72615f6e616d65c0aa65787472615f6b6579739191a178a967726f75705f69647801b26b765f63616368655f737065635f6b696e64a56d616d6261a96f776e657273686970a4686f737485a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391c40461616161a66d656469756da3435055a967726f75705f69647801a96f776e657273686970a4686f737400"
)
"""Recorded from vLLM 0.32's own classes, for the same events."""
EVENTS = [
    AllBlocksCleared(),
    BlockStored([b"aaaa", b"bbbb"], None, [1, 2, 3, 4], 2, None, "GPU", None, None, 0, "sliding_window", 512),
    BlockStored([b"cccc"], b"bbbb", [5, 6], 2, None, "CPU", None, [("x",)], 1, "mamba", None, None, "host"),
    BlockRemoved([b"aaaa"], "CPU", 1, None, "host"),
]


def test_the_bytes_are_those_of_vllm() -> None:
    assert encode(1.5, EVENTS) == RECORDED


def test_what_is_encoded_is_decoded() -> None:
    batch = decode(RECORDED)
    assert (batch.ts, batch.events, batch.data_parallel_rank) == (1.5, EVENTS, 0)


def test_vllms_json_is_read() -> None:
    config = parse_events_config(
        '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://127.0.0.1:5557",'
        ' "replay_endpoint": "tcp://localhost:5558", "buffer_steps": 7, "hwm": 8, "max_queue_size": 9, "topic": "kv"}'
    )
    assert config.enabled
    assert (config.endpoint, config.replay_endpoint) == (ENDPOINT, "tcp://localhost:5558")
    assert (config.buffer_steps, config.hwm, config.max_queue_size, config.topic) == (7, 8, 9, "kv")


@pytest.mark.parametrize("text", ["{}", '{"enable_kv_cache_events": true, "publisher": "null"}'])
def test_off_unless_asked_for(text: str) -> None:
    assert not parse_events_config(text).enabled


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no json", "give JSON such as"),
        ('{"endpiont": "tcp://127.0.0.1:1"}', "endpiont"),
        ('{"publisher": "kafka"}', "publisher"),
        ('{"buffer_steps": 0}', "at least 1"),
        ('{"endpoint": "5557"}', "no address"),
        ('{"endpoint": "tcp://127.0.0.1:port"}', "no address"),
        ('{"endpoint": "tcp://*:5557"}', "allow_public"),
        ('{"endpoint": "tcp://0.0.0.0:5557"}', "allow_public"),
        ('{"endpoint": "tcp://router.example:5557"}', "allow_public"),
        ('{"replay_endpoint": "tcp://[::]:5558"}', "allow_public"),
    ],
)
def test_what_cannot_be_meant_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_events_config(text)


@pytest.mark.parametrize(
    "text",
    [
        '{"endpoint": "tcp://*:5557", "allow_public": true}',
        '{"endpoint": "ipc:///run/ostinato.sock"}',
        '{"endpoint": "tcp://[::1]:5557"}',
        '{"endpoint": "tcp://127.0.0.1:*"}',
    ],
)
def test_other_addresses(text: str) -> None:
    parse_events_config(text)
