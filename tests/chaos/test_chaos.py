"""The chaos run in its short form, with a seed whose incidents are of every kind; ``make chaos`` makes longer ones."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.conftest import ROOT


def chaos(*arguments: str) -> dict[str, Any]:
    run = subprocess.run(
        [sys.executable, "-m", "tests.chaos", "--json", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    report: dict[str, Any] = json.loads(run.stdout)
    return report


@pytest.mark.postgres
def test_relays_that_are_killed_paused_and_cut_off_lose_nothing_and_repeat_only_what_they_had_in_hand() -> None:
    report = chaos("--seconds", "10", "--seed", "7")
    assert report["problems"] == []
    # How much of the deck is dealt in the time depends on the machine.
    assert report["incidents"].keys() & {"restart fast", "restart immediate"}
    assert report["incidents"].keys() >= {"kill", "terminate"}
    assert report["effects"] >= 5 * report["events"] > 100


@pytest.mark.sqlite
def test_on_sqlite_a_relay_that_is_killed_again_and_again_loses_nothing() -> None:
    report = chaos("--seconds", "4", "--seed", "4", "--database", "sqlite")
    assert report["problems"] == []
    assert report["incidents"]["kill"] >= 2
    assert report["relay_starts"] >= 3
