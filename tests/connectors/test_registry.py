"""From a tier specification to a connector: syntax, sizes, discovery, and one clear error for each mistake."""

from __future__ import annotations

from typing import Any

import pytest

from field.scripted import ScriptedTier
from ostinato.connectors import registry
from ostinato.connectors.api import Connector, Ownership
from ostinato.connectors.host import HostConnector
from ostinato.connectors.registry import TierSpec, known_names, make_connector, parse_bytes, parse_spec
from ostinato.errors import CapacityError, ConfigError, ConnectorError, UnknownConnectorError


@pytest.mark.parametrize(
    ("text", "name", "argument", "options"),
    [
        ("host", "host", "", {}),
        ("host:8GiB", "host", "8GiB", {}),
        ("host:8GiB?store=lazy", "host", "8GiB", {"store": "lazy"}),
        ("disk:/var/kv?budget=50GiB&sync=no", "disk", "/var/kv", {"budget": "50GiB", "sync": "no"}),
        ("redis:redis://h:6379/0?x=1", "redis", "redis://h:6379/0", {"x": "1"}),
        ("my-tier_2+x:", "my-tier_2+x", "", {}),
        ("a?b=", "a", "", {"b": ""}),
        ("a?path=%2Ftmp%2Fx+y", "a", "", {"path": "/tmp/x y"}),
    ],
)
def test_a_specification_is_taken_apart(text: str, name: str, argument: str, options: dict[str, str]) -> None:
    assert parse_spec(text) == TierSpec(text, name, argument, options)


@pytest.mark.parametrize("tail", ["", "/0", "?ttl", "?a=1&a=2", "?nonsense=1", "?ttl=x", "/x/y", ":port"])
@pytest.mark.parametrize("name", ["redis", "nobody", "Redis"])
def test_a_password_is_never_shown(name: str, tail: str) -> None:
    text = f"{name}://user:s3cr3t@host{tail}"
    shown = []
    try:
        shown += [repr(parse_spec(text)), repr(vars(make_connector(text)))]
    except ConfigError as error:
        shown += [str(error), repr(error)]
    assert shown
    assert not [line for line in shown if "s3cr3t" in line]


@pytest.mark.parametrize("text", ["", ":8GiB", "Host:8GiB", "8host", "ho st:1", "?a=b", "-host", "host\n:1", "/tmp/x"])
def test_a_bad_name_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="for example host:8GiB"):
        parse_spec(text)


@pytest.mark.parametrize("text", ["host:1GiB?store", "host:1GiB?store=lazy&", "host:1GiB?&", "host:1GiB?a=b&c"])
def test_bad_options_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="options must look like"):
        parse_spec(text)


def test_an_option_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="store"):
        parse_spec("host:1GiB?store=lazy&store=eager")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("4096B", 4096),
        ("0", 0),
        ("1KiB", 1024),
        ("1KB", 1000),
        ("512MiB", 512 * 1024**2),
        ("1.5GB", 1_500_000_000),
        ("1.5GiB", 3 * 1024**3 // 2),
        ("8GiB", 8 * 1024**3),
        (" 2 TiB ", 2 * 1024**4),
        ("1TB", 10**12),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "1e9", "8 gib", "8Gi", "8G", "1,5GiB", "1.GiB", ".5GiB", "8GiBs", "٣"]
)
def test_what_is_not_a_size(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        parse_bytes(text)


def test_the_host_tier() -> None:
    tier = make_connector("host:1MiB")
    assert isinstance(tier, HostConnector)
    assert tier.capabilities.ownership is Ownership.OWNED
    assert tier.capabilities.eager
    assert tier.slots(8192) == 128
    assert tier.slots(10_000) == 104
    lazy = make_connector("host:1MiB?store=lazy")
    assert not lazy.capabilities.eager


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("host", ConfigError, "how much memory"),
        ("host:", ConfigError, "how much memory"),
        ("host:lots", ConfigError, "is not a size"),
        ("host:1MiB?store=never", ConfigError, "store=eager or store=lazy"),
        ("host:1MiB?colour=red", ConfigError, "only option"),
        ("host:900TiB", CapacityError, "this machine has"),
    ],
)
def test_a_host_tier_that_cannot_be(text: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_connector(text)


@pytest.mark.parametrize("budget", ["0", "100"])
def test_a_host_tier_smaller_than_a_page(budget: str) -> None:
    with pytest.raises(CapacityError, match="less than one page"):
        make_connector(f"host:{budget}").slots(4096)


class Point:
    """An entry point; ``target`` is what it loads, or the error that loading raises."""

    def __init__(self, name: str, target: Any) -> None:
        self.name = name
        self.value = f"package.{name}:make"
        self.loads = 0
        self._target = target

    def load(self) -> Any:
        self.loads += 1
        if isinstance(self._target, Exception):
            raise self._target
        return self._target


def install(monkeypatch: pytest.MonkeyPatch, *points: Point) -> None:
    def entry_points(*, group: str) -> list[Point]:
        assert group == "ostinato.connectors"
        return list(points)

    monkeypatch.setattr(registry, "entry_points", entry_points)


def test_a_third_party_connector_is_found_and_gets_the_specification(monkeypatch: pytest.MonkeyPatch) -> None:
    specs: list[TierSpec] = []

    def factory(spec: TierSpec) -> Connector:
        specs.append(spec)
        return ScriptedTier("toy")

    toy, other = Point("toy", factory), Point("other", factory)
    install(monkeypatch, toy, other)
    assert make_connector("toy:here?depth=3").tier == "toy"
    assert specs == [TierSpec("toy:here?depth=3", "toy", "here", {"depth": "3"})]
    assert (toy.loads, other.loads) == (1, 0), "nothing is loaded before it is asked for"


def test_an_unknown_name_lists_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Point("toy", None))
    with pytest.raises(UnknownConnectorError, match=r"no connector 'hots'; known: .*host, .*toy"):
        make_connector("hots:8GiB")
    assert known_names() == sorted({*registry.BUILT_IN, "toy"})


def test_nobody_takes_the_name_of_a_built_in(monkeypatch: pytest.MonkeyPatch) -> None:
    impostor = Point("host", lambda spec: ScriptedTier("impostor"))
    install(monkeypatch, impostor)
    assert isinstance(make_connector("host:1MiB"), HostConnector)
    assert impostor.loads == 0
    assert known_names() == sorted(registry.BUILT_IN)


def test_a_connector_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Point("toy", ImportError("no module named redis")))
    with pytest.raises(ConnectorError, match=r"toy.*no module named redis"):
        make_connector("toy")


@pytest.mark.parametrize("made", [None, object(), ScriptedTier])
def test_a_factory_that_makes_something_else(monkeypatch: pytest.MonkeyPatch, made: Any) -> None:
    install(monkeypatch, Point("toy", lambda spec: made))
    with pytest.raises(ConnectorError, match=r"toy.*Connector"):
        make_connector("toy")


def test_an_error_of_the_factory_that_is_ours_passes_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    def factory(spec: TierSpec) -> Connector:
        raise ConfigError("toy needs a path")

    install(monkeypatch, Point("toy", factory))
    with pytest.raises(ConfigError, match="toy needs a path"):
        make_connector("toy")
