"""``make bench``: run the workloads and print their table."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import django
import psycopg

from tests.benchmarks.server import server

WORKLOADS = (
    "emit",
    "bulk",
    "drain",
    "processes",
    "sqlite",
    "latency",
    "growth",
    "io",
    "fanout",
    "audit",
    "idle",
    "memory",
    "mail_enqueue",
    "mail_send",
    "mail_far",
    "mail_memory",
    "webhooks",
    "hook_fanout",
    "hook_fairness",
    "tasks",
    "task_enqueue",
    "task_deferred",
)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog='make bench ARGS="..."',
        description="Measure the outbox beside plain psycopg, in the same run, by turns.",
        epilog="On PostgreSQL with default durability, started for the run unless BENCH_DATABASE_URL or"
        " TEST_DATABASE_URL names one (databases bench_outbox and bench_outbox_grown are made anew on it).",
    )
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"Default: all. {', '.join(WORKLOADS)}")
    parser.add_argument("--rounds", type=int, default=3, help="Rounds of each workload; the table shows medians.")
    parser.add_argument("--scale", type=float, default=1.0, help="Share of the full sizes: 0.1 for a quick look.")
    parser.add_argument(
        "--limit", type=float, default=180.0, metavar="SECONDS", help="Begin no further round of a workload after this."
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="Also write the lines to a file.")
    options = parser.parse_args()
    if unknown := set(options.workloads) - set(WORKLOADS):
        parser.error(f"no workload {', '.join(sorted(unknown))}; there are {', '.join(WORKLOADS)}")
    if options.rounds < 1 or not 0 < options.scale <= 10:
        parser.error("--rounds is at least 1, --scale above 0 and at most 10")
    return options


def _machine() -> dict[str, Any]:
    with psycopg.connect(os.environ["BENCH_DATABASE_URL"], autocommit=True) as session:
        names = ("server_version", "fsync", "synchronous_commit", "full_page_writes", "shared_buffers")
        values = {name: str((session.execute(f"SHOW {name}").fetchone() or ("?",))[0]) for name in names}
    return {
        "python": platform.python_version(),
        "django": django.get_version(),
        "psycopg": f"{psycopg.__version__} ({psycopg.pq.__impl__})",
        "postgres": values,
        "cores": os.cpu_count(),
        "load": _load(),
    }


def _header(machine: dict[str, Any], options: argparse.Namespace) -> str:
    settings = ", ".join(f"{name} {value}" for name, value in machine["postgres"].items() if name != "server_version")
    return (
        f"Python {machine['python']}, Django {machine['django']}, psycopg {machine['psycopg']}\n"
        f"PostgreSQL {machine['postgres']['server_version']}: {settings}\n"
        f"{machine['cores']} cores, load average {machine['load']}\n"
        f"{options.rounds} rounds, scale {options.scale:g}; figures are medians, ratios medians of the rounds' ratios"
    )


def _load() -> str:
    return " ".join(f"{each:.2f}" for each in os.getloadavg())


def _print_table(lines: list[Any]) -> None:
    words = {True: "yes", False: "NO", None: ""}
    rows = [("workload", "ours", "reference", "ratio", "target", "reached")]
    for line in lines:
        ratio = "-" if line.ratio is None else f"{line.ratio:.2f}"
        rows.append((line.workload, line.ours, line.reference, ratio, line.target, words[line.reached]))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for number, row in enumerate(rows):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        print("  ".join(cells).rstrip())
        if number == 0:
            print("  ".join("-" * width for width in widths))


def main() -> int:
    """Run what the command line asks for; return 0 whether the targets are reached or not."""
    options = _options()
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.benchmarks.settings"
    with server():
        django.setup()
        # These use models, and the settings the server's URL.
        from tests.benchmarks import draining, hooks, mailing, tasking, waiting, writing
        from tests.benchmarks.harness import Bench, databases, progress

        functions = {
            name: function
            for module in (writing, draining, waiting, mailing, hooks, tasking)
            for name, function in vars(module).items()
            if name in WORKLOADS
        }
        bench = Bench(rounds=options.rounds, scale=options.scale, limit_seconds=options.limit)
        machine = _machine()
        print(_header(machine, options), flush=True)
        began = time.monotonic()
        lines = []
        with databases():
            for name in options.workloads or WORKLOADS:
                lines += list(functions[name](bench))
                progress("")
    machine["load_after"] = _load()
    print()
    _print_table(lines)
    for note in bench.notes:
        print(f"Cut short: {note}")
    print(f"\n{time.monotonic() - began:.0f} s; load average now {machine['load_after']}")
    if options.json is not None:
        report = {"machine": machine, "rounds": bench.rounds, "scale": bench.scale, "notes": bench.notes}
        options.json.write_text(json.dumps(report | {"lines": [asdict(line) for line in lines]}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
