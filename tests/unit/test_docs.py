"""
The documentation, held to the code.

Convention: every ```python block must compile. One right after ``<!-- run -->``
is run; the blocks of a page share a namespace, in order. A ```text block right
after ``<!-- output -->`` is what the last run must have printed.
"""

from __future__ import annotations

import io
import re
import textwrap
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest
from django.core.management import get_commands, load_command_class

from django_outbox.testing import isolated_handlers

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_FENCE = re.compile(
    r"^(?P<mark><!-- (?:run|output) -->\n)?(?P<indent> *)```(?P<language>\w*)\n(?P<body>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)
_LINK = re.compile(r"\[[^\]]+\]\((?P<target>[^)\s]+)\)")
_HEADING = re.compile(r"^#+ (?P<title>.+)$", re.MULTILINE)
_COMMAND = re.compile(r"manage\.py (?P<name>[a-z_]+)(?P<rest>[^`\n(;]*)")


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: Path
    line: int
    mark: str
    language: str
    body: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        mark = (match["mark"] or "").strip("<!-> \n")
        yield Block(page, line, mark, match["language"], textwrap.dedent(match["body"]))


def anchors(page: Path) -> set[str]:
    titles = (match["title"] for match in _HEADING.finditer(page.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


ALL = [block for page in PAGES for block in blocks(page)]
RUNNABLE = sorted({block.page for block in ALL if block.mark == "run"})


@pytest.mark.parametrize("block", [block for block in ALL if block.language == "python"], ids=str)
def test_a_python_block_compiles(block: Block) -> None:
    if block.body.startswith('"OPTIONS"'):
        compile(f"{{{block.body}}}", str(block), "eval")
    else:
        compile(block.body, str(block), "exec")


@pytest.mark.django_db
@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_marked_blocks_of_a_page_print_what_it_says(page: Path) -> None:
    namespace: dict[str, object] = {"__name__": "docs"}
    printed = ""
    with isolated_handlers():
        for block in blocks(page):
            if block.mark == "run":
                output = io.StringIO()
                with redirect_stdout(output):
                    exec(compile(block.body, str(block), "exec"), namespace)  # noqa: S102  our own pages
                printed = output.getvalue()
            elif block.mark == "output":
                assert printed == block.body, block


def test_an_output_block_follows_a_run() -> None:
    assert RUNNABLE
    for page in PAGES:
        last = ""
        for block in blocks(page):
            assert block.mark != "output" or last == "run", block
            last = block.mark or last


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for match in _LINK.finditer(page.read_text(encoding="utf-8")):
        target, _, anchor = match["target"].partition("#")
        if "://" in target:
            continue
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), match["target"]
        if anchor:
            assert anchor in anchors(path), match["target"]


def test_every_page_is_linked_from_the_index() -> None:
    index = ROOT / "docs" / "index.md"
    linked = {
        (index.parent / match["target"].partition("#")[0]).resolve()
        for match in _LINK.finditer(index.read_text(encoding="utf-8"))
    }
    assert {page for page in PAGES if page.is_relative_to(index.parent)} - linked - {index} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_and_options_that_are_shown_exist(page: Path) -> None:
    known = get_commands()
    for match in _COMMAND.finditer(page.read_text(encoding="utf-8")):
        assert match["name"] in known, match[0]
        if match["name"].startswith(("outbox_", "run_outbox")):
            parser: ArgumentParser = load_command_class(known[match["name"]], match["name"]).create_parser(
                "manage.py", match["name"]
            )
            options = {option for action in parser._actions for option in action.option_strings}
            for option in re.findall(r"(?<=\s)--?[a-z][a-z-]*", match["rest"]):
                assert option in options, match[0]
