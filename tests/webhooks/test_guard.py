"""The guard: addresses, URLs, look-ups and headers, judged one by one."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest
from django.test import override_settings

from django_outbox.conf import WebhookSettings
from django_outbox.errors import UnsafeURL
from django_outbox.webhooks import guard
from django_outbox.webhooks.guard import (
    LookupFailed,
    check_headers,
    check_url,
    is_public,
    look_up,
    may_reach,
    shown_url,
)
from tests.webhooks.cases import CASES, rows

DEFAULTS = WebhookSettings()


def answering(*addresses: str, error: Exception | None = None) -> guard.GetAddrInfo:
    """Return a stand-in for the system's resolver."""

    def resolver(host: str, port: int, **_: Any) -> list[tuple[Any, ...]]:
        if error is not None:
            raise error
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    return resolver


def hanging(until: threading.Event) -> guard.GetAddrInfo:
    """Return a resolver that does not answer before the event."""

    def resolver(*_: Any, **__: Any) -> list[tuple[Any, ...]]:
        until.wait(30)
        return []

    return resolver


# --- addresses


@pytest.mark.parametrize("case", rows(CASES["ips"]))
def test_an_address_is_judged(case: dict[str, Any]) -> None:
    assert is_public(case["ip"]) is (case["verdict"] == "allow")
    assert may_reach(case["ip"], DEFAULTS) is (case["verdict"] == "allow")


def test_the_rule_is_the_table() -> None:
    rule = CASES["ip_rule"]
    assert {str(network) for network in guard._IPV4_DENIED} == set(rule["ipv4_deny"])
    assert {str(network) for network in guard._IPV6_DENIED} == set(rule["ipv6_deny_inside"])
    assert str(guard._IPV6_ALLOWED) == rule["ipv6_allow"]
    assert str(guard._NAT64) == rule["nat64_unwrap"]


@pytest.mark.parametrize("text", ["", "localhost", "127.1", "0x7f000001", "2130706433", "1.1.1.1 ", "1.1.1.1/32"])
def test_what_is_no_address_is_not_public(text: str) -> None:
    assert not is_public(text)
    assert not may_reach(text, DEFAULTS)


def test_nat64_is_judged_by_the_address_behind_it() -> None:
    assert is_public("64:ff9b::808:808")
    assert not is_public("64:ff9b::a9fe:a9fe")
    inside = WebhookSettings(allow_networks=("10.0.0.0/8",))
    assert may_reach("64:ff9b::a00:1", inside)
    assert not may_reach("64:ff9b::808:808", WebhookSettings(deny_networks=("8.8.8.0/24",)))


def test_an_allowed_network_opens_itself_and_nothing_else() -> None:
    settings = WebhookSettings(allow_networks=("10.1.0.0/16", "fd12::/32", "127.0.0.1"))
    for address in ("10.1.2.3", "fd12::1", "127.0.0.1"):
        assert may_reach(address, settings)
    for address in ("10.2.0.1", "fd13::1", "127.0.0.2", "::ffff:10.1.2.3", "::1", "fd12::1%eth0"):
        assert not may_reach(address, settings)


@pytest.mark.parametrize(
    "address", ["169.254.169.254", "169.254.1.1", "fd00:ec2::254", "100.100.100.200", "168.63.129.16", "fd20:ce::254"]
)
def test_a_metadata_address_is_opened_only_by_its_own_name(address: str) -> None:
    everything = WebhookSettings(allow_networks=("0.0.0.0/0", "::/0", "169.254.0.0/16"))
    assert not may_reach(address, everything)
    assert may_reach(address, WebhookSettings(allow_networks=(address,)))


def test_a_denied_network_is_closed_even_if_it_is_public_or_allowed() -> None:
    settings = WebhookSettings(deny_networks=("8.8.8.0/24", "10.0.0.0/24"), allow_networks=("10.0.0.0/8",))
    assert not may_reach("8.8.8.8", settings)
    assert not may_reach("10.0.0.5", settings)
    assert may_reach("10.0.1.5", settings)


# --- URLs


@pytest.mark.parametrize("case", rows(CASES["urls"]))
def test_a_url_is_judged_when_it_is_saved(case: dict[str, Any]) -> None:
    verdict, _, rebuilt = case["verdict"].partition(":")
    if verdict == "reject":
        with pytest.raises(UnsafeURL):
            check_url(case["url"])
    else:
        assert check_url(case["url"]) == (rebuilt or case["url"])


@pytest.mark.parametrize(
    "url",
    [
        "https://[::ffff:127.0.0.1]/",
        "https://[::ffff:a9fe:a9fe]/",
        "https://[::]/",
        "https://[64:ff9b::7f00:1]/",
        "https://0x7f000001/",
        "https://0x7f.1/",
        "https://10.0.0.1:8443/",
        "https://exa%6dple.com/",
        "https://ｌｏｃａｌｈｏｓｔ/",
        "https://LOCALHOST/",
        "https://a.INTERNAL/",
        "https://hooks.example.com:/",
        "https://hooks.example.com:80:80/",
        "https://[v1.fe80::1]/",
        "https://",
        "https:///path",
        "https://exa mple.com/",
        "https://example.com/\u3000",
        "https://example.com/\ud800",
        "https://-a.example.com/",
        "https://" + "a." * 130 + "com/",
        "https://example.com/" + "a" * 2_048,
        "",
        None,
    ],
)
def test_other_unsafe_urls_are_refused_without_being_quoted(url: str | None) -> None:
    with pytest.raises(UnsafeURL) as caught:
        check_url(url)  # type: ignore[arg-type]
    assert not url or url not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "rebuilt"),
    [
        ("https://hooks.example.com", "https://hooks.example.com/"),
        ("https://hooks.example.com:443/a?b=c", "https://hooks.example.com/a?b=c"),
        ("https://hooks.example.com:8443", "https://hooks.example.com:8443/"),
        ("https://8.8.8.8/a", "https://8.8.8.8/a"),
        ("https://[2001:4860:4860:0::8888]/", "https://[2001:4860:4860::8888]/"),
        ("https://example.com/a%2Fb/ü?q=ä&x=1", "https://example.com/a%2Fb/%C3%BC?q=%C3%A4&x=1"),
        ("https://BÜCHER.example/", "https://xn--bcher-kva.example/"),
    ],
)
def test_a_url_is_stored_rebuilt_and_rebuilding_it_again_changes_nothing(url: str, rebuilt: str) -> None:
    assert check_url(url) == rebuilt
    assert check_url(rebuilt) == rebuilt


def test_settings_open_plain_http_ports_and_private_targets() -> None:
    with override_settings(OUTBOX={"WEBHOOKS": {"ALLOW_HTTP": True, "ALLOW_PORTS": [80, 9000]}}):
        assert check_url("http://hooks.example.com/") == "http://hooks.example.com/"
        assert check_url("http://hooks.example.com:9000/") == "http://hooks.example.com:9000/"
        with pytest.raises(UnsafeURL, match="Port 443"):
            check_url("https://hooks.example.com/")
    with override_settings(OUTBOX={"WEBHOOKS": {"ALLOW_NETWORKS": ["10.1.0.0/16"]}}):
        assert check_url("https://10.1.2.3/") == "https://10.1.2.3/"
        with pytest.raises(UnsafeURL, match="not public") as caught:
            check_url("https://10.2.0.1/")
    assert caught.value.code == "non_public"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://hooks.example.com/services/T00/B00/xyz?token=abc", "https://hooks.example.com/…"),
        ("https://user:pw@hooks.example.com:8443/", "https://hooks.example.com:8443/"),
        ("https://[2001:db8::1]/x", "https://[2001:db8::1]/…"),
        ("nonsense", "(no host)"),
        ("https://[", "(not a URL)"),
    ],
)
def test_only_the_host_of_a_url_is_shown(url: str, shown: str) -> None:
    assert shown_url(url) == shown


# --- look-ups


@pytest.mark.parametrize("case", rows(CASES["dns"]))
def test_the_answers_of_a_look_up_are_judged(case: dict[str, Any]) -> None:
    answers: Any = case["answers"]
    hang = threading.Event()
    resolvers: dict[str, guard.GetAddrInfo] = {
        "SERVFAIL": answering(error=socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")),
        "timeout>5s": hanging(hang),
        "UnicodeError": answering(error=UnicodeEncodeError("idna", "a" * 64, 0, 64, "label too long")),
        "40 public answers": answering(*(f"93.184.215.{number}" for number in range(40))),
    }
    resolver = resolvers[answers] if isinstance(answers, str) else answering(*answers)

    def ask() -> tuple[str, ...]:
        return look_up("hook.test", 443, DEFAULTS, seconds=0.2 if "timeout" in answers else 5, resolver=resolver)

    try:
        if case["verdict"] == "retry":
            with pytest.raises(LookupFailed):
                ask()
        elif case["verdict"] == "dead_letter_terminal":
            with pytest.raises(UnsafeURL) as caught:
                ask()
            assert caught.value.code == ("invalid_target" if answers == "UnicodeError" else "non_public")
        else:
            assert ask() == (tuple(answers) if isinstance(answers, list) else ask())
    finally:
        hang.set()


@pytest.mark.parametrize("answer", ["127.0.0.1", "::ffff:127.0.0.1", "::ffff:a9fe:a9fe", "::", "fe80::1%lo"])
def test_a_name_that_leads_inside_is_refused_when_it_is_used(answer: str) -> None:
    with pytest.raises(UnsafeURL, match="not public"):
        look_up("hook.test", 443, DEFAULTS, resolver=answering("8.8.8.8", answer))


def test_a_look_up_that_hangs_is_left_behind_and_counted() -> None:
    hang = threading.Event()
    started = time.monotonic()
    resolver = hanging(hang)
    try:
        with pytest.raises(LookupFailed, match=r"longer than 0\.05 s"):
            look_up("hook.test", 443, DEFAULTS, seconds=0.05, resolver=resolver)
        assert time.monotonic() - started < 5
        left_behind = [thread for thread in threading.enumerate() if thread.name == "outbox-lookup"]
        assert left_behind
        assert all(thread.daemon for thread in left_behind)
    finally:
        hang.set()
    for thread in left_behind:
        thread.join(5)


def test_no_more_look_ups_start_than_the_limit() -> None:
    hang = threading.Event()
    resolver = hanging(hang)
    try:
        for _ in range(guard.LOOKUPS_LIMIT):
            with pytest.raises(LookupFailed):
                look_up("hook.test", 443, DEFAULTS, seconds=0, resolver=resolver)
        assert not guard.lookups_left()
        with pytest.raises(LookupFailed, match="too many"):
            look_up("hook.test", 443, DEFAULTS, seconds=0.01, resolver=answering("8.8.8.8"))
        assert look_up("8.8.8.8", 443, DEFAULTS) == ("8.8.8.8",)
    finally:
        hang.set()
    for thread in threading.enumerate():
        if thread.name == "outbox-lookup":
            thread.join(5)
    assert guard.lookups_left()


# --- headers


@pytest.mark.parametrize("case", rows(CASES["custom_headers"]))
def test_a_custom_header_is_judged(case: dict[str, Any]) -> None:
    value = case["value"]
    if isinstance(value, dict):
        value = value["repeat"] * value["times"]
    if case["verdict"] == "accept":
        assert check_headers({case["name"]: value}) == {case["name"]: value}
    else:
        with pytest.raises(ValueError, match="header"):
            check_headers({case["name"]: value})


@pytest.mark.parametrize(
    "headers",
    [
        {"Proxy-Authorization": "x"},
        {"TE": "trailers"},
        {"Upgrade": "h2c"},
        {"content-length": "1"},
        {"X-Outbox-Delivery": "1"},
        {"": "x"},
        {"X": ""},
        {"X": " a"},
        {"X-A": "1", "x-a": "2"},
        {f"X-{number}": "1" for number in range(33)},
        [("X", "1")],
    ],
)
def test_other_headers_are_refused(headers: Any) -> None:
    with pytest.raises(ValueError, match=r"header|Custom"):
        check_headers(headers)


def test_a_refused_header_is_named_but_its_value_is_not_quoted() -> None:
    with pytest.raises(ValueError, match="Authorization") as caught:
        check_headers({"Authorization": "Bearer s3cret\n"})
    assert "s3cret" not in str(caught.value)
    assert check_headers({"Authorization": "Bearer s3cret"}) == {"Authorization": "Bearer s3cret"}
