"""
The guard: which URLs may be called, which addresses may be reached, which headers may be sent.

A customer's URL makes this server send requests, so it must not lead inside. The URL is
judged when it is saved and again when it is used; its name is looked up once, every
answer is judged, and the request goes to the judged addresses (`transport`), never to a
second look-up.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any, Final
from urllib.parse import SplitResult, quote, urlsplit

import idna

from django_outbox.conf import WEBHOOK_LOOKUP_SECONDS, WebhookSettings, get_settings
from django_outbox.errors import UnsafeURL, clean_text

__all__ = [
    "LookupFailed",
    "check_headers",
    "check_url",
    "is_public",
    "look_up",
    "lookups_left",
    "shown_url",
]

LOOKUP_SECONDS: Final = WEBHOOK_LOOKUP_SECONDS
LOOKUPS_LIMIT: Final = 64
"""Look-ups under way in this process: one that hangs cannot be stopped, only left behind."""

URL_LIMIT: Final = 2_048
HEADERS_LIMIT: Final = 32
HEADER_VALUE_LIMIT: Final = 8_192

_Address = IPv4Address | IPv6Address
_Network = IPv4Network | IPv6Network

# Ours and not ipaddress.is_global, whose answers differ between patch releases of Python
# and call multicast, site-local, NAT64 and 6to4 addresses global.
_IPV4_DENIED: Final = tuple(
    IPv4Network(text)
    for text in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",
        "240.0.0.0/4",
        "168.63.129.16/32",  # the platform's own services on Azure
    )
)
_IPV6_ALLOWED: Final = IPv6Network("2000::/3")
_IPV6_DENIED: Final = tuple(IPv6Network(text) for text in ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20"))
_NAT64: Final = IPv6Network("64:ff9b::/96")

# Where clouds hand out credentials: an allowed network opens these only if it is that one address.
_METADATA: Final = (
    IPv4Network("169.254.0.0/16"),
    IPv4Network("168.63.129.16/32"),
    IPv4Network("100.100.100.200/32"),
    IPv4Network("192.0.0.192/32"),
    IPv6Network("fd00:ec2::254/128"),
    IPv6Network("fd20:ce::254/128"),
)

_REFUSED_NAMES: Final = ("localhost", "local", "internal")
_UNFIT: Final = re.compile(r"[\x00-\x20\x7f-\x9f\\]|\s")
_LABEL: Final = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMERIC: Final = re.compile(r"[0-9]+|0x[0-9a-f]*")
_AUTHORITY: Final = re.compile(r"(?P<host>\[[0-9a-f:.]+\]|[^\[\]:@%]+)(?::(?P<port>[0-9]{1,5}))?", re.IGNORECASE)
_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VISIBLE: Final = re.compile(r"[!-~]([ !-~]*[!-~])?")
_REFUSED_HEADERS: Final = re.compile(
    r"host|content-.*|transfer-encoding|connection|keep-alive|cookie2?|expect|te|trailer|upgrade|proxy-.*|user-agent|"
    r"accept-encoding|webhook-.*|x-outbox-.*",
    re.IGNORECASE,
)


class LookupFailed(Exception):
    """A name could not be looked up now; another time it may be."""


# --- addresses


def is_public(address: str) -> bool:
    """
    Return whether an address, in the form that a look-up returns, is one of the public internet.

    Nothing but an address is public: no name, and no address with a scope.
    """
    try:
        return _is_public(ip_address(address))
    except ValueError:
        return False


def _is_public(address: _Address) -> bool:
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _IPV4_DENIED)
    if address.scope_id is not None:
        return False
    if address in _NAT64:
        return _is_public(_behind_nat64(address))
    return address in _IPV6_ALLOWED and not any(address in network for network in _IPV6_DENIED)


def _behind_nat64(address: IPv6Address) -> IPv4Address:
    return IPv4Address(int(address) & 0xFFFF_FFFF)


@lru_cache(maxsize=4_096)
def may_reach(address: str, settings: WebhookSettings) -> bool:
    """Return whether a request may go to an address: public or allowed by the settings, and not denied by them."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return False
    if isinstance(parsed, IPv6Address):
        if parsed.scope_id is not None:
            return False
        if parsed in _NAT64:
            return may_reach(str(_behind_nat64(parsed)), settings)
    if _in_any(parsed, _networks(settings.deny_networks)):
        return False
    return _is_public(parsed) or _is_allowed(parsed, _networks(settings.allow_networks))


def _is_allowed(address: _Address, allowed: Iterable[_Network]) -> bool:
    if _in_any(address, _METADATA):
        return any(network.num_addresses == 1 and address in network for network in allowed)
    return _in_any(address, allowed)


def _in_any(address: _Address, networks: Iterable[_Network]) -> bool:
    return any(address.version == network.version and address in network for network in networks)


@lru_cache(maxsize=16)
def _networks(texts: tuple[str, ...]) -> tuple[_Network, ...]:
    return tuple(ip_network(text) for text in texts)


# --- URLs


def check_url(url: str) -> str:
    """
    Return the URL rebuilt from its parts, as it is stored and called.

    Scheme and host are in lower case, a name is in its ASCII form, a default port and
    characters that need no escape are normalised. No look-up is made: names are judged by
    what they resolve to when the request is sent.

    :raises UnsafeURL: with a reason that does not quote the URL.
    """
    return judged_url(url, get_settings().webhooks)


def judged_url(url: object, settings: WebhookSettings) -> str:
    """Return the URL rebuilt, as `check_url` does, under given settings."""
    if not isinstance(url, str) or not url or len(url) > URL_LIMIT:
        raise UnsafeURL(f"A webhook URL is a text of 1 to {URL_LIMIT} characters.")
    # Before anything is parsed: urlsplit deletes some of these, and parsers differ about others.
    if _UNFIT.search(url) or url != clean_text(url):
        raise UnsafeURL("The URL holds a space, a control character or a backslash.")
    try:
        parts = urlsplit(url)
    except ValueError:
        raise UnsafeURL("The URL cannot be parsed.") from None
    if parts.scheme not in {"http", "https"} or not url[len(parts.scheme) :].startswith("://"):
        raise UnsafeURL('The URL must begin with "https://".')
    if parts.scheme == "http" and not settings.allow_http:
        raise UnsafeURL('The URL must begin with "https://"; plain http is allowed by WEBHOOKS["ALLOW_HTTP"].')
    if "#" in url:
        raise UnsafeURL("The URL has a fragment.")
    host, port = _host_and_port(parts)
    if port not in settings.allow_ports:
        raise UnsafeURL(f'Port {port} is not among WEBHOOKS["ALLOW_PORTS"].')
    try:
        address = str(ip_address(host.strip("[]")))
    except ValueError:
        host = _checked_name(host)
    else:
        if not may_reach(address, settings):
            raise UnsafeURL("The URL leads to an address that is not public.", code="non_public")
        host = f"[{address}]" if ":" in address else address
    default = {"http": 80, "https": 443}[parts.scheme]
    authority = host if port == default else f"{host}:{port}"
    # "%" stays: what is escaped already must not be escaped again.
    path = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
    query = "?" + quote(parts.query, safe="/?%:@!$&'()*+,;=~-._") if parts.query else ""
    return f"{parts.scheme}://{authority}{path}{query}"


def _host_and_port(parts: SplitResult) -> tuple[str, int]:
    if "@" in parts.netloc:
        raise UnsafeURL("The URL holds a user name or password.")
    match = _AUTHORITY.fullmatch(parts.netloc)
    if match is None:
        raise UnsafeURL("The URL's host or port is malformed.")
    port = int(match["port"]) if match["port"] else {"http": 80, "https": 443}[parts.scheme]
    return match["host"].lower(), port


def _checked_name(host: str) -> str:
    """Return a host name in its ASCII form; an address in any other than its usual form is none."""
    try:
        name = host if host.isascii() else idna.encode(host, uts46=True, std3_rules=True).decode()
    except (idna.IDNAError, UnicodeError):
        raise UnsafeURL("The URL's host is not a valid name.") from None
    labels = name.split(".")
    if len(name) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise UnsafeURL("The URL's host is not a valid name.")
    # The system's resolver takes 127.1, 0x7f000001 and 2130706433 for addresses; so does a name that maps to one.
    if _NUMERIC.fullmatch(labels[-1]):
        raise UnsafeURL("The URL's host is a number that is no address.")
    if len(labels) == 1:
        raise UnsafeURL("The URL's host is a name without a domain.")
    if labels[-1] in _REFUSED_NAMES:
        raise UnsafeURL(f'The URL\'s host ends in ".{labels[-1]}", which is never public.')
    return name


def shown_url(url: str) -> str:
    """Return what may be shown of a URL: scheme, host and port, since paths and queries bear tokens."""
    try:
        parts = urlsplit(url)
        if not parts.hostname:
            return "(no host)"
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        shown = f"{parts.scheme}://{host}" + (f":{parts.port}" if parts.port else "")
    except ValueError:
        return "(not a URL)"
    return shown + ("/…" if parts.path not in {"", "/"} or parts.query else "/")


# --- look-ups

GetAddrInfo = Callable[..., list[tuple[Any, ...]]]

_lookups = threading.BoundedSemaphore(LOOKUPS_LIMIT)


def lookups_left() -> bool:
    """Return whether another look-up may start; when none may, nothing should be claimed that needs one."""
    if _lookups.acquire(blocking=False):
        _lookups.release()
        return True
    return False


def look_up(
    host: str,
    port: int,
    settings: WebhookSettings,
    *,
    seconds: float = LOOKUP_SECONDS,
    resolver: GetAddrInfo | None = None,
) -> tuple[str, ...]:
    """
    Return the addresses of a host, every one of them judged; ``resolver`` stands in for ``socket.getaddrinfo``.

    An address is returned as it is. The look-up runs in a daemon thread and is left
    behind after ``seconds``: it delays neither the delivery nor the end of the process.

    :raises UnsafeURL: when any answer may not be reached, or the name can never be looked up.
    :raises LookupFailed: when there was no answer in time, an error, or an empty answer.
    """
    bare = host.strip("[]")
    addresses = (bare,) if _is_address(bare) else _answers(bare, port, seconds, resolver or socket.getaddrinfo)
    if not addresses:
        raise LookupFailed("the name has no address")
    # One bad answer among good ones is an attempt to get in by the second try.
    if not all(may_reach(address, settings) for address in addresses):
        raise UnsafeURL("the name leads to an address that is not public", code="non_public")
    return addresses


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _answers(host: str, port: int, seconds: float, resolver: GetAddrInfo) -> tuple[str, ...]:
    found: list[tuple[str, ...]] = []
    errors: list[Exception] = []
    finished = threading.Event()
    deadline = time.monotonic() + seconds
    if not _lookups.acquire(timeout=seconds):
        raise LookupFailed("too many look-ups are under way")

    def ask() -> None:
        try:
            entries = resolver(host, port, type=socket.SOCK_STREAM)
            found.append(tuple(dict.fromkeys(str(entry[4][0]) for entry in entries)))
        except Exception as error:  # noqa: BLE001  told to the thread that waits
            errors.append(error)
        finally:
            _lookups.release()
            finished.set()

    try:
        threading.Thread(target=ask, name="outbox-lookup", daemon=True).start()
    except RuntimeError:
        _lookups.release()
        raise LookupFailed("no thread could be started") from None
    if not finished.wait(max(0.0, deadline - time.monotonic())):
        raise LookupFailed(f"the look-up took longer than {seconds:g} s")
    if not errors:
        return found[0]
    if isinstance(errors[0], UnicodeError):
        raise UnsafeURL("the name can never be looked up")
    reason = getattr(errors[0], "strerror", None) or type(errors[0]).__name__
    raise LookupFailed(f"the look-up failed: {reason}")


# --- headers


def check_headers(headers: Any) -> dict[str, str]:
    """
    Return the custom headers of an endpoint, if all of them may be sent.

    A name is a token of RFC 9110, a value visible ASCII of at most 8 KiB. Headers that
    frame the request, identify us or belong to the signature are refused.

    :raises ValueError: naming the header, never its value.
    """
    if not isinstance(headers, Mapping) or len(headers) > HEADERS_LIMIT:
        raise ValueError(f"Custom headers are a mapping of at most {HEADERS_LIMIT} names to values.")
    seen: set[str] = set()
    for name, value in headers.items():
        if not isinstance(name, str) or not _TOKEN.fullmatch(name) or len(name) > 256:
            raise ValueError(f"{str(name)[:50]!r} is not the name of a header.")
        if _REFUSED_HEADERS.fullmatch(name):
            raise ValueError(f"The header {name!r} is set by the sender itself, or must not be sent.")
        if name.lower() in seen:
            raise ValueError(f"The header {name!r} is given twice.")
        seen.add(name.lower())
        if not isinstance(value, str) or not _VISIBLE.fullmatch(value) or len(value) > HEADER_VALUE_LIMIT:
            raise ValueError(f"The value of the header {name!r} must be 1 to 8,192 visible ASCII characters.")
    return dict(headers)
