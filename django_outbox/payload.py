"""What a payload may hold: JSON that PostgreSQL and SQLite store alike, or an error with the path."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from django.core.serializers.json import DjangoJSONEncoder
from django.utils.functional import Promise

from django_outbox.errors import InvalidPayload

_MAX_DEPTH: Final = 100
_MAX_INTEGER: Final = 10**4_300
_IDENTIFIER: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,79}")
_encoder: Final = DjangoJSONEncoder()


def encode_json(value: Any, *, what: str, limit: int) -> str:
    """
    Return a value as JSON text that PostgreSQL and SQLite store alike.

    Dates, decimals, UUIDs and lazy strings become text as Django's encoder writes
    them, lazy strings in the active language.

    :raises InvalidPayload: naming the path of the first part that is not JSON, or the size.
    """
    plain = _Plain(what, limit).of(value, ())
    text = json.dumps(plain, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    size = len(text) if text.isascii() else len(text.encode())
    if size > limit:
        raise _too_large(what, f"{size} bytes", limit)
    return text


def encode_headers(headers: object, limit: int) -> str:
    """Return headers as JSON text; the rules are those of a payload that is an object."""
    if not isinstance(headers, Mapping):
        raise InvalidPayload(f"headers must be a dict, not {type(headers).__name__}.")
    return encode_json(dict(headers), what="headers", limit=limit)


def _too_large(what: str, size: str, limit: int) -> InvalidPayload:
    return InvalidPayload(
        f'The {what} is {size} as JSON; OUTBOX["MAX_PAYLOAD_BYTES"] is {limit}. Store the data in a table or'
        " a file and emit its key."
    )


class _Plain:
    """Turns a value into plain JSON types, or names the path of what is none."""

    def __init__(self, what: str, limit: int) -> None:
        self._what = what
        self._limit = limit
        self._parts = 0

    def of(self, value: Any, path: tuple[str | int, ...]) -> Any:
        """Return the value in plain JSON types; ``path`` leads to it."""
        # Each part takes a byte at least. A small object that refers to itself again and
        # again from side by side would otherwise unfold without end.
        self._parts += 1
        if self._parts > self._limit:
            raise _too_large(self._what, f"more than {self._limit} bytes", self._limit)
        # By the true type: a SimpleLazyObject passes for what it wraps, and is none of it.
        kind = type(value)
        if value is None or kind is bool:
            return value
        if issubclass(kind, (str, int, float)):
            return self._scalar(value, path)
        if len(path) >= _MAX_DEPTH and issubclass(kind, (dict, list, tuple)):
            raise InvalidPayload(
                f"{_at(self._what, path[:4])} is nested deeper than {_MAX_DEPTH} levels, or contains itself."
            )
        if issubclass(kind, dict):
            return {self._key(key, path): self.of(item, (*path, key)) for key, item in value.items()}
        if issubclass(kind, (list, tuple)):
            return [self.of(item, (*path, index)) for index, item in enumerate(value)]
        if isinstance(value, Promise):
            return self.of(str(value), path)
        try:
            encoded = _encoder.default(value)
        except (TypeError, ValueError) as error:
            reason = f": {error}" if isinstance(error, ValueError) else ""
            raise InvalidPayload(
                f"{_at(self._what, path)} is a {kind.__name__}, which is not JSON{reason}. Convert it first."
            ) from None
        return self.of(encoded, path)

    def _scalar(self, value: Any, path: tuple[str | int, ...]) -> str | int | float:
        if isinstance(value, str):
            if problem := unstorable(value):
                raise InvalidPayload(f"{_at(self._what, path)} holds {problem}, which PostgreSQL cannot store.")
            return str.__str__(value)
        if isinstance(value, int):
            if value.bit_length() > 14_000 and abs(value) >= _MAX_INTEGER:
                raise InvalidPayload(f"{_at(self._what, path)} is an integer of more than 4,300 digits.")
            return int(value)
        if not math.isfinite(value):
            raise InvalidPayload(f"{_at(self._what, path)} is {value}, which is not JSON.")
        return float(value)

    def _key(self, key: Any, path: tuple[str | int, ...]) -> str:
        if not issubclass(type(key), str):
            raise InvalidPayload(
                f"{_at(self._what, path)} has the key {shown(key)}, a {type(key).__name__}; JSON keys are strings."
            )
        if problem := unstorable(key):
            raise InvalidPayload(
                f"{_at(self._what, path)} has a key that holds {problem}, which PostgreSQL cannot store."
            )
        return str.__str__(key)


def unstorable(text: str) -> str:
    """Return what in a text PostgreSQL cannot store, or nothing."""
    if "\x00" in text:
        return "a NUL character"
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            return "a lone surrogate"
    return ""


def _at(what: str, path: Sequence[str | int]) -> str:
    steps = "".join(
        f"[{step}]" if isinstance(step, int) else f".{step}" if _IDENTIFIER.fullmatch(step) else f"[{shown(step)}]"
        for step in path
    )
    return f"The {what} at ${steps}"


def shown(value: object) -> str:
    """Return a value as an error text shows it: bounded, whatever its ``repr`` does."""
    try:
        text = repr(value)
    except ValueError:  # an integer of too many digits to print
        text = f"({type(value).__name__})"
    return text if len(text) <= 160 else text[:157] + "..."
