"""``ostinato layout``: from a config alone to groups, padding and what fits."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import transformers as tf
from rich.console import Console
from typer.testing import CliRunner

from ostinato.cache.layout import LayerSpec, build_layout
from ostinato.errors import ConfigError, ModelFileError, ModelRefusedError, OstinatoError, UnknownModelError
from ostinato.runtime.models.blank import find_config
from ostinato.serve.cli import app
from ostinato.serve.layout import describe_layout, make_report, print_report
from tiny_models import shape


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the shapes of Gemma 3 270M and nothing but a config."""
    config = tf.Gemma3TextConfig(
        **shape(num_hidden_layers=18, num_key_value_heads=1),
        head_dim=256,
        sliding_window=512,
        layer_types=["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(18)],
    )
    folder = tmp_path_factory.mktemp("gemma")
    config.save_pretrained(folder)
    return folder


def written(folder: Path, fields: Any) -> str:
    (folder / "config.json").write_text(fields if isinstance(fields, str) else json.dumps(fields))
    return str(folder)


def test_a_config_alone_is_enough(gemma: Path) -> None:
    report = make_report(str(gemma), "bfloat16", max_model_len=40000, memories=["8GiB", "1MiB"])
    assert report.page_bytes == 48 * 1024
    assert sorted((line.kind, line.count, line.layers, line.page_tokens) for line in report.groups) == [
        ("full", 1, 3, 16),
        ("window 512", 5, 3, 16),
    ]
    assert dict(report.waste) == {1: 0, 2048: 0, 32768: 0}
    assert set(report.bytes_per_token) == {2048, 32768}
    assert report.checkpoint_bytes == 5 * 32 * report.page_bytes
    assert report.max_model_len == 40000
    assert [(line.memory, line.longest > 0) for line in report.fits] == [(8 << 30, True), (1 << 20, True)]
    assert report.fits[0].longest == 40000
    assert report.fits[1].requests == 0


def test_the_dtype_decides_the_size_and_the_config_the_length(gemma: Path) -> None:
    report = make_report(str(gemma), "float32")
    assert report.page_bytes == 96 * 1024
    assert report.max_model_len == 4096
    assert set(report.waste) == {1, 2048, 4096}, "no length beyond the longest context"
    assert len(report.fits) == 4


def test_the_command_prints_tables_or_json(gemma: Path) -> None:
    plain = CliRunner().invoke(app, ["layout", str(gemma), "--dtype", "bfloat16", "--memory", "2GiB"])
    assert plain.exit_code == 0
    for text in ("window 512", "48 KiB", "100.0%", "2 GiB", "4,096 tokens (the longest)"):
        assert text in plain.stdout
    numbers = CliRunner().invoke(app, ["layout", str(gemma), "--json", "--max-model-len", "100"])
    found = json.loads(numbers.stdout)
    assert found["max_model_len"] == found["request_tokens"] == 100
    assert len(found["groups"]) == 2


def test_states_are_drawn_as_states() -> None:
    from ostinato.cache.kinds import Full, State

    layers = [LayerSpec(index, State(), (1 << 20,)) for index in range(6)]
    layers += [LayerSpec(index, Full(), (4096, 4096)) for index in range(6, 8)]
    report = describe_layout(build_layout(layers), ("tiny", "bfloat16", 1 << 16), [1 << 30], 512)
    screen = Console(file=io.StringIO(), width=120)
    print_report(report, screen)
    text = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "1 state" in text
    assert "one more cut" in text


def test_what_cannot_be_read_is_told_in_one_line(tmp_path: Path, gemma: Path) -> None:
    cases: list[tuple[type[OstinatoError], str, dict[str, Any]]] = [
        (ModelFileError, str(tmp_path), {}),
        (UnknownModelError, "no-such-model", {}),
        (UnknownModelError, "", {}),
        (ConfigError, str(gemma), {"max_model_len": 0}),
        (ConfigError, str(gemma), {"memories": ["much"]}),
        (ConfigError, str(gemma), {"dtype": "int4"}),
    ]
    for error, model, options in cases:
        with pytest.raises(error) as caught:
            make_report(model, **options)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ("{", ModelFileError, "cannot read"),
        ("[1]", ModelFileError, "no model_type"),
        ({}, ModelFileError, "no model_type"),
        ({"model_type": "nope"}, ModelFileError, "nope"),
        ({"model_type": "t5"}, ModelRefusedError, "no causal language model"),
    ],
)
def test_other_configs_are_refused(tmp_path: Path, fields: Any, error: type[OstinatoError], words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        make_report(written(tmp_path, fields))
    assert "\n" not in str(caught.value)


def test_a_hub_id_fetches_the_config_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, str]] = []

    def download(name: str, file: str) -> str:
        asked.append((name, file))
        if name == "some/gone":
            raise OSError("not\nthere")
        return str(tmp_path / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert find_config("some/model") == tmp_path / "config.json"
    with pytest.raises(UnknownModelError, match=r"could not be fetched.*\(not\)"):
        find_config("some/gone")
    assert asked == [("some/model", "config.json"), ("some/gone", "config.json")]
    (tmp_path / "config.json").write_text("{}")
    assert find_config(str(tmp_path / "config.json")) == tmp_path / "config.json"
