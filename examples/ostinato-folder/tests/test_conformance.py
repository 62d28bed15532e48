"""The whole conformance kit over this connector: each check is one test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ostinato.conformance.bench import Subject
from ostinato.conformance.kit import subject_of
from ostinato.conformance.suite import ConnectorConformance


class TestFolder(ConnectorConformance):
    @pytest.fixture
    def subject(self, tmp_path: Path) -> Iterator[Subject]:
        """The tier, and how to harm what it stored."""

        def spoil() -> None:
            for number, file in enumerate(sorted(tmp_path.glob("*/*"))):
                content = bytearray(file.read_bytes())
                content[number * 31 % len(content)] ^= 1
                file.write_bytes(content)

        def lose() -> None:
            for file in sorted(tmp_path.glob("*/*"))[::4]:
                file.unlink()

        with subject_of([f"folder:{tmp_path}"]) as made:
            yield Subject(made.name, made.make, spoil, lose)
