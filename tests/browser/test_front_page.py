"""
The example in a real browser: what a visitor presses, and what then appears by itself.

One web server and one relay are started as ``make run`` starts them, and one headless
Chromium; the tests share them. Screenshots go to ``BROWSER_SCREENSHOTS``, by default a
directory of this run. Without Chromium the tests are skipped, unless ``REQUIRE_BROWSER``
is set.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import connection
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from tests.acceptance.test_example_project import ROOT, own_project

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
WITHIN_SECONDS = 30.0
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,1100",
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER) and not os.environ.get("REQUIRE_BROWSER"),
        reason="needs chromium and chromedriver, which are not installed",
    ),
    # A browser shows the same either way, and takes long to start.
    pytest.mark.skipif(
        (connection.vendor == "sqlite") != (sys.version_info < (3, 12)),
        reason="runs on SQLite before Python 3.12, and on PostgreSQL from there on",
    ),
]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory, django_db_setup: None) -> Iterator[str]:
    """Start the example on an empty database, and return its address."""
    directory = tmp_path_factory.mktemp("example")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with own_project(directory) as project, (directory / "run.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "manage.py"), "run", "--port", str(port)],
            cwd=ROOT,
            env=project.env
            | {
                "DJANGO_SETTINGS_MODULE": "example_project.settings",
                "TOKEN_SERVICE_REFUSALS": "0",
                "RECEIVER_PORT": str(port),
            },
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            until = time.monotonic() + 2 * WITHIN_SECONDS
            while "Ctrl-C ends both" not in (said := (directory / "run.log").read_text()):
                assert process.poll() is None, said
                assert time.monotonic() < until, said
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(2 * WITHIN_SECONDS)
        said = (directory / "run.log").read_text()
        assert process.returncode == 0, said
        assert "Relay ended" in said


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    assert CHROMIUM, "REQUIRE_BROWSER is set, and chromium is not installed"
    assert DRIVER, "REQUIRE_BROWSER is set, and chromedriver is not installed"
    options = ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options=options, service=Service(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


class Visitor:
    """Somebody at the front page."""

    def __init__(self, chrome: Chrome, address: str, screenshots: Path) -> None:
        self.chrome = chrome
        self.address = address
        self._screenshots = screenshots

    def open(self, path: str = "/") -> None:
        self.chrome.get(f"{self.address}{path}")

    def press(self, text: str) -> None:
        self.chrome.find_element(By.XPATH, f"//button[normalize-space()='{text}']").click()

    def switch(self, name: str, *, failing: bool) -> None:
        box = self.chrome.find_element(By.CSS_SELECTOR, f"input[value='{name}']")
        if box.is_selected() == failing:
            return
        box.click()
        word = "fails" if failing else "works"
        self.until(lambda: f"The {name} {word} now." in self.chrome.find_element(By.ID, "said").text)

    def item(self, list_: str, *words: str, status: str = "") -> WebElement:
        """Wait for an entry of a list that holds all these words, and return it."""
        chosen = f"#{list_} li[data-status='{status}']" if status else f"#{list_} li"

        def find() -> WebElement | None:
            for each in self.chrome.find_elements(By.CSS_SELECTOR, chosen):
                if all(word in each.text for word in words):
                    return each
            return None

        found: WebElement = self.until(find)
        return found

    def until(self, condition: Callable[[], Any]) -> Any:
        until = time.monotonic() + WITHIN_SECONDS
        while True:
            try:
                if value := condition():
                    return value
            except StaleElementReferenceException:
                pass  # the page has drawn it anew
            if time.monotonic() > until:
                self.picture("timed-out")
                raise AssertionError(self.chrome.find_element(By.TAG_NAME, "body").text)
            time.sleep(0.05)

    def picture(self, name: str) -> None:
        self._screenshots.mkdir(parents=True, exist_ok=True)
        assert self.chrome.save_screenshot(str(self._screenshots / f"{name}.png"))

    def log_in(self) -> None:
        if self.chrome.find_elements(By.ID, "id_username"):
            self.chrome.find_element(By.ID, "id_username").send_keys("admin")
            self.chrome.find_element(By.ID, "id_password").send_keys("admin")
            self.chrome.find_element(By.CSS_SELECTOR, "input[type=submit]").click()

    def complaints(self) -> list[str]:
        """Return what the browser refused to do or could not: a violated policy, an error of a script."""
        log: list[dict[str, Any]] = self.chrome.get_log("browser")  # type: ignore[no-untyped-call]
        return [str(entry["message"]) for entry in log if entry["level"] == "SEVERE"]


@pytest.fixture
def visitor(chrome: Chrome, address: str, tmp_path: Path) -> Iterator[Visitor]:
    visitor = Visitor(chrome, address, Path(os.environ.get("BROWSER_SCREENSHOTS", tmp_path)))
    visitor.open()
    # Until then the page has not asked how the switches stand.
    visitor.item("announced")
    for name in ("token-service", "receiver"):
        visitor.switch(name, failing=False)
    yield visitor
    assert visitor.complaints() == []


def name_said(visitor: Visitor, word: str) -> str:
    """Return the user that the page says something was done for."""
    said = visitor.until(lambda: (text := visitor.chrome.find_element(By.ID, "said").text).startswith(word) and text)
    return str(said).rstrip(".").split()[-1]


def test_what_follows_from_a_registration_appears_by_itself(visitor: Visitor) -> None:
    visitor.press("Register somebody")
    name = name_said(visitor, "Registered")
    began = time.monotonic()
    event = visitor.item("events", "user.created", name, status="done")
    assert all(
        f"✓ {handler}" in event.text
        for handler in ("audit-log", "welcome-email", "notification-fanout", "webhook-fanout")
    )
    visitor.item("mails", "welcome-email", f"{name}@example.com", status="done")
    visitor.item("notifications", "Welcome aboard", name)
    visitor.item("webhooks", "user.created", "received", status="done")
    visitor.item("tasks", "draw_avatar", status="done")
    visitor.item("audit", "user.created")
    visitor.item("users", name, "logged in on 2 devices")
    # A second is what it takes on a machine with nothing else to do.
    assert time.monotonic() - began < 10
    visitor.picture("registered")


def test_a_handler_that_fails_dies_alone_and_is_delivered_once_somebody_presses_retry(visitor: Visitor) -> None:
    visitor.switch("token-service", failing=True)
    visitor.press("Register somebody")
    name = name_said(visitor, "Registered")
    visitor.press("Change the newest password")
    name_said(visitor, "Changed")
    visitor.item("events", "user.password_changed", name, status="waiting")
    visitor.picture("waiting")
    dead = visitor.item("events", "user.password_changed", name, status="dead")
    assert "✗ revoke-tokens" in dead.text
    assert "✓ security-email" in dead.text
    assert "503 Service Unavailable" in dead.text
    visitor.item("announced", "outbox.event.dead", status="done")
    visitor.item("mails", "operators@example.com", status="done")
    visitor.picture("dead")

    visitor.switch("token-service", failing=False)
    link = visitor.item("events", "user.password_changed", name).find_element(By.TAG_NAME, "a")
    visitor.chrome.get(str(link.get_attribute("href")))
    visitor.log_in()
    visitor.picture("admin")
    form = visitor.chrome.find_element(By.XPATH, "//form[.//input[@name='verb' and @value='retry']]")
    form.find_element(By.CSS_SELECTOR, "button, input[type=submit]").click()
    visitor.picture("retried")
    visitor.open()
    event = visitor.item("events", "user.password_changed", name, status="done")
    assert "✓ revoke-tokens" in event.text
    visitor.item("users", name, "logged out everywhere")
    visitor.picture("delivered")


def test_a_receiver_that_fails_costs_its_webhooks_alone(visitor: Visitor) -> None:
    visitor.switch("receiver", failing=True)
    visitor.press("Register somebody")
    name = name_said(visitor, "Registered")
    visitor.item("events", "user.created", name, status="done")
    visitor.item("webhooks", "user.created", "503", status="dead")
    visitor.picture("receiver-down")
    visitor.switch("receiver", failing=False)


def test_the_registration_form_leads_back_to_what_follows(visitor: Visitor) -> None:
    visitor.open("/register/")
    for field, text in (
        ("username", "saffron"),
        ("email", "saffron@example.com"),
        ("password1", "s3a-Breeze"),
        ("password2", "s3a-Breeze"),
    ):
        visitor.chrome.find_element(By.NAME, field).send_keys(text)
    visitor.picture("form")
    visitor.press("Register")
    visitor.item("events", "user.created", "saffron", status="done")
