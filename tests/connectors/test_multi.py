"""Several connectors as one, from code and from vLLM's JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from connectors.observer import session
from field.rig import fake_rig, layout_of
from field.scripted import ScriptedTier, kept
from ostinato.cache.kinds import Full, Window
from ostinato.config import EngineConfig
from ostinato.connectors.api import Hook, Ownership
from ostinato.connectors.host import HostConnector
from ostinato.connectors.multi import MultiConnector, expand
from ostinato.connectors.tiers import make_tiers
from ostinato.connectors.transfer_config import connector_from_json
from ostinato.errors import ConfigError, UnknownConnectorError

LAYOUT = layout_of(Full(), Window(32))


def config(name: str, extra: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    return {"kv_connector": name, "kv_connector_extra_config": extra or {}, **fields}


def test_hits_are_merged_block_by_block() -> None:
    """The head is in one child, what follows in the other: either alone would be a shorter hit."""
    first, second = kept("one"), kept("two")
    rig = fake_rig(LAYOUT, 100, expand([MultiConnector([first, second])]))
    rig.serve(session(1, 128))
    rig.settle()
    for key in list(first.stored):
        (first if len(first.stored) > len(second.stored) // 2 else second).stored.pop(key)
    assert first.stored
    assert first.stored.keys() != second.stored.keys()
    rig.evict_device()
    output = rig.serve([*session(1, 128), 7])
    assert output.cached_tokens == 128
    assert set(output.cached_by_tier) == {"one", "two"}


def test_the_context_is_forwarded_unchanged() -> None:
    children = [ScriptedTier("one", hooks=(Hook.COMMIT,)), ScriptedTier("two", hooks=(Hook.COMMIT,))]
    multi = MultiConnector(children)
    rig = fake_rig(LAYOUT, 100, expand([multi]))
    assert children[0].context is not None
    assert children[0].context is children[1].context
    other = object()
    multi.bind(other)  # type: ignore[arg-type]
    assert children[0].context is children[1].context is other
    assert rig is not None


def test_a_child_that_raises_is_not_the_others_fault() -> None:
    class Broken(ScriptedTier):
        def probe(self, keys: Any) -> Any:
            raise RuntimeError("down")

        def offer(self, keys: Any) -> Any:
            raise RuntimeError("down")

        def on_commit(self, request_id: Any, computed: int) -> None:
            raise RuntimeError("down")

    broken = Broken("bad", Ownership.SHARED, hooks=(Hook.COMMIT,))
    good = kept("good")
    rig = fake_rig(LAYOUT, 100, expand([MultiConnector([broken, good])]))
    rig.serve(session(1, 128))
    rig.settle()
    rig.evict_device()
    assert rig.serve([*session(1, 128), 7]).cached_by_tier == {"good": 128}


def test_write_policy_first_stores_each_block_once() -> None:
    picky, rest = kept("picky"), kept("rest")
    offer = picky.offer
    picky.offer = lambda keys: [wanted and key.group == 0 for key, wanted in zip(keys, offer(keys), strict=True)]  # type: ignore[method-assign]
    rig = fake_rig(LAYOUT, 100, expand([MultiConnector([picky, rest], write="first")]))
    rig.serve(session(1, 128))
    rig.settle()
    assert {key.group for key in picky.stored} == {0}
    assert {key.group for key in rest.stored} == {1}
    rig.evict_device()
    assert rig.serve([*session(1, 128), 7]).cached_tokens == 128


def test_multi_of_multi_is_flat() -> None:
    one, two, three = kept("one"), kept("two"), kept("three")
    assert expand([MultiConnector([one, MultiConnector([two, three])])]) == (one, two, three)


def test_vllm_json() -> None:
    text = json.dumps(
        config(
            "MultiConnector",
            {
                "connectors": [
                    config("SimpleCPUOffloadConnector", {"cpu_bytes_to_use": 1 << 20, "lazy_offload": True}),
                    config("RedisConnector", {"url": "redis://127.0.0.1:1", "ttl": 60}),
                ]
            },
            kv_role="kv_both",
        )
    )
    tiers = make_tiers(EngineConfig(model="m", kv_transfer_config=text))
    assert [tier.tier for tier in tiers] == ["host", "redis"]
    assert isinstance(tiers[0], HostConnector)
    assert not tiers[0].capabilities.eager
    for tier in tiers:
        tier.close()


@pytest.mark.parametrize("name", ["CPUOffloadConnector", "SimpleCPUOffloadConnector", "OffloadingConnector"])
def test_cpu_offload_by_its_names(name: str) -> None:
    connector = connector_from_json(json.dumps(config(name, {"cpu_bytes_to_use": 1 << 20})))
    assert isinstance(connector, HostConnector)
    assert connector.capabilities.eager


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("{", ConfigError, "kv_transfer_config"),
        ('{"kv_role": "kv_both"}', ConfigError, "kv_connector"),
        (json.dumps(config("HostConnector2")), UnknownConnectorError, "known: .*MultiConnector"),
        (json.dumps(config("OffloadingConnector")), ConfigError, "cpu_bytes_to_use"),
        (json.dumps(config("OffloadingConnector", {"cpu_bytes_to_use": 1 << 20, "x": 1})), ConfigError, "x"),
        (json.dumps(config("OffloadingConnector", kv_role="kv_producer")), ConfigError, "kv_both"),
        (json.dumps(config("OffloadingConnector", kv_load_failure_policy="fail")), ConfigError, "recompute"),
        (json.dumps(config("OffloadingConnector", surprise=1)), ConfigError, "surprise"),
        (json.dumps(config("MultiConnector", {"connectors": {}})), ConfigError, "list"),
        (json.dumps(config("MultiConnector", {"connectors": []})), ConfigError, "at least one"),
        (json.dumps(config("MultiConnector", {"connectors": [], "write": "some"})), ConfigError, "at least one"),
        (json.dumps(config("MultiConnector", {"connectors": [{"kv_connector": 3}]})), ConfigError, "connectors"),
    ],
)
def test_mistakes_are_told(text: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        connector_from_json(text)


def test_a_password_is_not_shown() -> None:
    with pytest.raises(ConfigError) as raised:
        EngineConfig(model="m", kv="redis://:secret@h")  # type: ignore[arg-type]
    assert "secret" not in str(raised.value)
    assert "secret" not in repr(EngineConfig(model="m", kv=["redis://:secret@h"]))
