"""The tables of ``cases.json``: what is judged, and how."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

CASES: Final[dict[str, Any]] = json.loads(Path(__file__).with_name("cases.json").read_text(encoding="utf-8"))


def rows(table: list[dict[str, Any]]) -> list[Any]:
    """Return the rows of a table as parameters of a test, each under its number and first value."""
    names = [str(next(iter(row.values())))[:40].encode("ascii", "backslashreplace").decode() for row in table]
    return [
        pytest.param(row, id=f"{number}-{name}") for number, (row, name) in enumerate(zip(table, names, strict=True))
    ]
