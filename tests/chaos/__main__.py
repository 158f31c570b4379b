"""``make chaos``: hit relays for a while, then count what is lost and what is doubled."""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.chaos.judge import Verdict

DATABASE = "chaos_outbox"

EPILOG = """
what happens:
  Two emitters commit orders with their events, some rolled back. Five handlers write a
  side effect each: plain, slow, a coroutine, one that fails at first, one atomic. Four
  relays deliver (two by themselves, two under --processes 2) on leases of two seconds,
  while a random stream of incidents, about one a second, kills them (SIGKILL), pauses them for longer
  than a lease (SIGSTOP, SIGCONT), ends their sessions (pg_terminate_backend) and restarts
  the server, in immediate mode too. Then all of it stops, the relays drain, and the
  ledger is judged:

    lost 0, every event done, atomic effects exactly once, and duplicates only of what a
    killed or paused process had in hand, or whose session or lease was lost.

examples:
  make chaos
  make chaos ARGS="--seconds 300 --seed 7"      the same stream of incidents as another run with this seed
  make chaos ARGS="--database sqlite"           one relay, killed and started again
  python -m tests.chaos --json | jq .duplicates

A seed fixes what is done and in which order, not what the machine makes of it.

exit codes:
  0  nothing lost, nothing doubled without a reason
  1  something was; the relays' logs are kept, and the last line says where
"""


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog='make chaos ARGS="..."',
        description="Run relays under a stream of faults, and count what is lost and what is doubled.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=float, default=60.0, metavar="N", help="How long the faults go on (60).")
    parser.add_argument("--seed", type=int, metavar="N", help="Seed of the faults (a new one, which is printed).")
    parser.add_argument("--database", choices=("postgres", "sqlite"), default="postgres", help="(postgres)")
    parser.add_argument("--json", action="store_true", help="Print the numbers as one JSON object instead.")
    options = parser.parse_args()
    if not 1 <= options.seconds <= 86_400:
        parser.error("--seconds is at least 1 and at most 86400")
    if options.seed is None:
        options.seed = random.randrange(1_000_000)
    return options


def _tell(word: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{word:<78}", end="", file=sys.stderr, flush=True)


def main() -> int:
    """Do what the command line asks for; return the exit code."""
    options = _options()
    directory = Path(tempfile.mkdtemp(prefix="outbox-chaos-"))
    began = time.monotonic()
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.chaos.settings"
    os.environ["PGAPPNAME"] = "chaos"
    server = None
    try:
        if options.database == "sqlite":
            os.environ["CHAOS_DATABASE"] = str(directory / "chaos.sqlite3")
        else:
            from tests.server import Server

            _tell("the server starts")
            server = Server()
            os.environ["CHAOS_DATABASE"] = server.url
        verdict = _play(options, server, directory)
    finally:
        if server is not None:
            server.remove()
        _tell("")
    verdict.facts["took_seconds"] = round(time.monotonic() - began, 1)
    if not verdict.problems:
        shutil.rmtree(directory)
    if options.json:
        print(json.dumps(verdict.facts | {"problems": verdict.problems}, indent=2))
    else:
        _print(verdict)
    if verdict.problems:
        print(f"\nThe relays' logs are in {directory}", file=sys.stderr)
        return 1
    return 0


def _play(options: argparse.Namespace, server: object, directory: Path) -> Verdict:
    import django
    import psycopg

    from tests.server import Server

    if isinstance(server, Server):
        with psycopg.connect(server.url, autocommit=True) as session:
            session.execute(f"CREATE DATABASE {DATABASE}")
    django.setup()
    # These use models.
    from django.core.management import call_command
    from django.db import connections

    from tests.chaos.judge import judge
    from tests.chaos.run import Run

    call_command("migrate", run_syncdb=True, verbosity=0)
    run = Run(
        seed=options.seed,
        seconds=options.seconds,
        server=server if isinstance(server, Server) else None,
        directory=directory,
    )
    try:
        run.play(_tell)
        return judge(run)
    finally:
        connections.close_all()


def _print(verdict: Verdict) -> None:
    facts = verdict.facts
    incidents = ", ".join(f"{count} {kind}" for kind, count in facts["incidents"].items()) or "none"
    print(f"Chaos with seed {facts['seed']}, {facts['seconds']:g} s of it, {facts['took_seconds']:g} s in all")
    print(f"  incidents   {incidents}; relays were started {facts['relay_starts']} times")
    print(f"  in hand     {facts['in_hand_when_killed_or_paused']} rows of relays that were killed or paused")
    reasons = ", ".join(f"{count} by {kind}" for kind, count in sorted(facts["duplicates"].items())) or "none"
    print(f"  duplicates  {reasons}; {facts['leases_lost']} leases lost\n")
    for what, problems in verdict.checks:
        print(f"  {'NO' if problems else 'ok'}  {what}")
        for problem in problems:
            print(f"        {problem}")


if __name__ == "__main__":
    sys.exit(main())
