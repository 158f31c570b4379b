"""
Payloads and headers: what is stored, and what is refused before any SQL runs.

The suite runs on both databases, so every expectation here is the same on both.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import json
import math
import uuid
from collections.abc import Mapping
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
from django.core.serializers.json import DjangoJSONEncoder
from django.db import connection, transaction
from django.test import override_settings
from django.test.utils import CaptureQueriesContext
from django.utils.functional import SimpleLazyObject, lazy
from django.utils.safestring import mark_safe
from django.utils.translation import gettext_lazy, override

from django_outbox import Event, InvalidPayload, NewEvent, OutboxError, emit_event, emit_events, on_event
from django_outbox.models import OutboxEvent
from django_outbox.testing import drain
from tests.testapp.models import Note

pytestmark = pytest.mark.django_db

LIMIT = 262_144


def round_trip(payload: Any) -> Any:
    """Emit a payload, deliver it, and return what the handler received."""
    received: list[Event] = []
    on_event("thing.done", name="listener")(received.append)
    with transaction.atomic():
        emit_event("thing.done", payload)
    assert drain() == {"done": 1}
    (event,) = received
    assert OutboxEvent.objects.get().payload == event.payload
    return event.payload


def refusal(payload: Any = None, **arguments: Any) -> str:
    """Emit in a transaction with work of its own, and return the refusal; no SQL may run, the work must commit."""
    Note.objects.all().delete()
    with transaction.atomic():
        Note.objects.create(text="before")
        with CaptureQueriesContext(connection) as queries, pytest.raises(InvalidPayload) as caught:
            emit_event("thing.done", payload, **arguments)
        assert len(queries) == 0
        Note.objects.create(text="after")
    assert list(Note.objects.order_by("id").values_list("text", flat=True)) == ["before", "after"]
    assert not OutboxEvent.objects.exists()
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, OutboxError)
    assert len(str(caught.value)) < 1_000
    return str(caught.value)


# --- what is refused -------------------------------------------------------------------------------------------------


def test_a_nul_is_refused_with_its_path_and_the_rows_beside_it_commit() -> None:
    """Scenario 22."""
    assert "$.name holds a NUL" in refusal({"name": "a\x00b"})


class Weird:
    def __repr__(self) -> str:
        return "w" * 10_000


@dataclasses.dataclass
class Point:
    x: int = 1


@pytest.mark.parametrize(
    ("payload", "path", "problem"),
    [
        ({"items": [{}, {}, {}, {"price": math.nan}]}, "$.items[3].price", "nan"),
        ({"a": math.inf}, "$.a", "inf"),
        ([-math.inf], "$[0]", "-inf"),
        (math.nan, "$", "nan"),
        ("a\x00", "$", "NUL"),
        ({"a": ["\ud800"]}, "$.a[0]", "lone surrogate"),
        ({"a": "\udfff\ud800"}, "$.a", "lone surrogate"),
        # A pair of surrogates is no character in Python.
        ({"a": "x\ud83d\ude00"}, "$.a", "lone surrogate"),
        ({"a": {"k\x00": 1}}, "$.a", "key that holds a NUL"),
        ({"a": {"\ud800": 1}}, "$.a", "key that holds a lone surrogate"),
        ({"a": b"bytes"}, "$.a", "bytes"),
        ({"a": bytearray(b"x")}, "$.a", "bytearray"),
        ({"a": memoryview(b"x")}, "$.a", "memoryview"),
        ({"a": {1: "x"}}, "$.a", "the key 1, a int"),
        ({None: 1}, "$", "the key None"),
        ({True: 1}, "$", "the key True"),
        ({1.5: 1}, "$", "the key 1.5"),
        ({("a", "b"): 1}, "$", "a tuple"),
        ({uuid.UUID(int=0): 1}, "$", "a UUID"),
        ({gettext_lazy("Yes"): 1}, "$", "the key"),
        ({"a": {1, 2}}, "$.a", "a set"),
        ({"a": frozenset()}, "$.a", "a frozenset"),
        ({"a": (letter for letter in "")}, "$.a", "a generator"),
        ({"a": {}.keys()}, "$.a", "a dict_keys"),
        ({"a": range(3)}, "$.a", "a range"),
        ({"a": 1j}, "$.a", "a complex"),
        ({"a": object()}, "$.a", "a object"),
        ({"a": Weird()}, "$.a", "a Weird"),
        ({"a": SimpleNamespace()}, "$.a", "a SimpleNamespace"),
        ({"a": Point()}, "$.a", "a Point"),
        ({"a": int}, "$.a", "a type"),
        ({"a": ValueError("x")}, "$.a", "a ValueError"),
        ({"a": MappingProxyType({})}, "$.a", "a mappingproxy"),
        # It passes for a string wherever isinstance() asks, but nothing can store it.
        ({"a": SimpleLazyObject(lambda: "text")}, "$.a", "a SimpleLazyObject"),
        ({"a": SimpleLazyObject(lambda: 7)}, "$.a", "a SimpleLazyObject"),
        ({"a": SimpleLazyObject(dict)}, "$.a", "a SimpleLazyObject"),
        ({SimpleLazyObject(lambda: "key"): 1}, "$", "a SimpleLazyObject"),
        ({"a": collections.UserDict()}, "$.a", "a UserDict"),
        ({"a": enum.Enum("Plain", "A").A}, "$.a", "a Plain"),  # type: ignore[attr-defined]
        ({"a": time(1, 2, tzinfo=UTC)}, "$.a", "timezone-aware times"),
        ({"a b": [{"it's": {"": b""}}]}, """$['a b'][0]["it's"]['']""", "bytes"),
        ({"naïve": b""}, "$['naïve']", "bytes"),
        ({"line\nbreak": b""}, "$['line\\nbreak']", "bytes"),
        ({"k" * 100_000: b""}, "$", "bytes"),
        ({Weird(): 1}, "$", "a Weird"),
    ],
)  # fmt: skip
def test_what_is_not_json_is_refused_with_its_path(payload: Any, path: str, problem: str) -> None:
    text = refusal(payload)
    assert f"payload at {path}" in text
    assert problem in text


def test_a_key_that_cannot_even_be_printed_is_refused_all_the_same() -> None:
    assert "a int" in refusal({"a": {10**5_000: 1}})


def test_integers_keep_every_digit_up_to_4300() -> None:
    largest = 10**4_300 - 1
    assert round_trip([largest, -largest, 2**63, -(2**64), 0]) == [largest, -largest, 2**63, -(2**64), 0]


@pytest.mark.parametrize("value", [10**4_300, -(10**4_300)], ids=["positive", "negative"])
def test_an_integer_of_more_than_4300_digits_is_refused(value: int) -> None:
    assert "payload at $.a[1] is an integer of more than 4,300 digits" in refusal({"a": [1, value]})


def nested(depth: int, inner: Any = None) -> Any:
    """Return lists in lists, this many, around a value."""
    value = inner
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("leaf", [None, "text", 7, Decimal("1.5"), uuid.UUID(int=1), gettext_lazy("Yes")])
def test_a_hundred_levels_are_accepted_whatever_they_hold(leaf: Any) -> None:
    received = round_trip(nested(100, leaf))
    for _ in range(100):
        (received,) = received
    assert received == (leaf if leaf is None or isinstance(leaf, int) else str(leaf))


@pytest.mark.parametrize("leaf", [[], {}, ()])
def test_a_hundred_and_one_levels_are_refused(leaf: Any) -> None:
    assert "deeper than 100 levels" in refusal(nested(100, leaf))


def test_far_deeper_nesting_than_the_interpreters_stack_is_refused_as_well() -> None:
    assert "deeper than 100 levels" in refusal({"a": nested(50_000)})


def test_a_payload_that_contains_itself_is_refused() -> None:
    payload: dict[str, Any] = {"a": []}
    payload["a"].append(payload)
    assert "$.a[0].a[0] is nested deeper than 100 levels, or contains itself" in refusal(payload)
    cycle: list[Any] = []
    cycle.append(cycle)
    assert "contains itself" in refusal(cycle)


def test_the_size_limit_counts_utf8_bytes_to_the_byte() -> None:
    overhead = len('{"a":""}')
    assert len(round_trip({"a": "x" * (LIMIT - overhead)})["a"]) == LIMIT - overhead
    OutboxEvent.objects.all().delete()
    text = refusal({"a": "x" * (LIMIT - overhead + 1)})
    assert f"The payload is {LIMIT + 1} bytes" in text
    assert f'OUTBOX["MAX_PAYLOAD_BYTES"] is {LIMIT}' in text


def test_the_size_limit_is_no_count_of_characters() -> None:
    assert f"{4 * 65_536 + 2} bytes" in refusal("😀" * 65_536)
    assert round_trip("😀" * 65_535) == "😀" * 65_535


def test_control_characters_count_as_their_escapes() -> None:
    assert "bytes as JSON" in refusal("\x01" * (LIMIT // 6 + 1))


@override_settings(OUTBOX={"MAX_PAYLOAD_BYTES": 64})
def test_the_size_limit_follows_the_setting() -> None:
    assert '"MAX_PAYLOAD_BYTES"] is 64' in refusal({"a": "x" * 64})
    assert '"MAX_PAYLOAD_BYTES"] is 64' in refusal({}, headers={"a": "x" * 64})


# --- headers and columns ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("headers", [[], [("a", 1)], "a", b"b", 7, True, object()])
def test_headers_must_be_a_dict(headers: Any) -> None:
    assert "headers must be a dict" in refusal(headers=headers)


@pytest.mark.parametrize(
    ("headers", "problem"),
    [
        ({"a": {"b": "\x00"}}, "headers at $.a.b holds a NUL"),
        ({1: "a"}, "headers at $ has the key 1"),
        ({"a": math.nan}, "headers at $.a is nan"),
        ({"a": b""}, "headers at $.a is a bytes"),
        ({"a": "x" * LIMIT}, "The headers is"),
    ],
)
def test_headers_follow_the_rules_of_the_payload(headers: Any, problem: str) -> None:
    assert problem.replace("The headers is", "headers") in refusal(headers=headers)


@pytest.mark.parametrize("headers", [None, {}, MappingProxyType({})])
def test_no_headers_are_an_empty_object(headers: Mapping[str, Any] | None) -> None:
    with transaction.atomic():
        emit_event("thing.done", headers=headers)
    assert OutboxEvent.objects.get().headers == {}


COLUMNS = {"aggregate_type": 128, "aggregate_id": 255, "organization_id": 255, "request_id": 255}


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize(
    "value",
    [
        "a\x00b",
        "\ud800",
        None,
        7,
        b"x",
        uuid.UUID(int=0),
        gettext_lazy("Yes"),
        SimpleLazyObject(lambda: "a"),
        "toolong",
    ],
)
def test_a_text_that_its_column_cannot_hold_is_refused_by_name(column: str, value: Any) -> None:
    if value == "toolong":
        value = "x" * (COLUMNS[column] + 1)
    text = refusal(**{column: value})
    assert text.startswith(column)


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("letter", ["x", "é", "😀"])
def test_a_text_may_fill_its_column_with_any_characters(column: str, letter: str) -> None:
    value = letter * COLUMNS[column]
    with transaction.atomic():
        emit_event("thing.done", **{column: value})  # type: ignore[arg-type]
    assert getattr(OutboxEvent.objects.get(), column) == value


def test_the_bad_one_of_many_is_named_and_none_is_written() -> None:
    with transaction.atomic(), CaptureQueriesContext(connection) as queries:
        with pytest.raises(InvalidPayload, match=r"payload at \$\.a"):
            emit_events([NewEvent("thing.done", {"a": 1}), NewEvent("thing.done", {"a": b""})])
    assert len(queries) == 0


# --- what is accepted ------------------------------------------------------------------------------------------------


def test_values_of_djangos_encoder_arrive_as_its_texts() -> None:
    """Scenario 24."""
    id_ = uuid.uuid4()
    payload = {
        "id": id_,
        "price": Decimal("1.10"),
        "at": datetime(2026, 1, 2, 3, 4, 5, 678_901, tzinfo=UTC),
        "in_nepal": datetime(2026, 1, 2, tzinfo=timezone(timedelta(hours=5, minutes=45))),
        "on": date(2026, 1, 2),
        "opens": time(9, 30),
        "span": timedelta(days=1, seconds=2),
        "back": timedelta(seconds=-1),
    }
    received = round_trip(payload)
    assert received == {
        "id": str(id_),
        "price": "1.10",
        "at": "2026-01-02T03:04:05.678Z",
        "in_nepal": "2026-01-02T00:00:00+05:45",
        "on": "2026-01-02",
        "opens": "09:30:00",
        "span": "P1DT00H00M02S",
        "back": "-P0DT00H00M01S",
    }
    assert received == json.loads(json.dumps(payload, cls=DjangoJSONEncoder))
    assert Decimal(received["price"]) == payload["price"]


@pytest.mark.parametrize("value", [Decimal("1E+400"), Decimal("-0"), Decimal("0.1000"), Decimal("NaN")])
def test_a_decimal_is_its_exact_text(value: Decimal) -> None:
    assert round_trip([value]) == [str(value)]


class Level(enum.IntEnum):
    HIGH = 3


class Color(str, enum.Enum):  # noqa: UP042  the older form, which prints as Color.RED
    RED = "red"


class Share(float):
    def __str__(self) -> str:
        return "half"

    __repr__ = __str__


class Amount(int):
    def __str__(self) -> str:
        return "many"

    __repr__ = __str__


class Pair(NamedTuple):
    left: int
    right: str


@pytest.mark.parametrize(
    ("payload", "received"),
    [
        (None, {}),
        ({}, {}),
        ([], []),
        ("", ""),
        (0, 0),
        (False, False),
        ([None], [None]),
        ((1, (2,)), [1, [2]]),
        (Pair(1, "b"), [1, "b"]),
        (Level.HIGH, 3),
        (Color.RED, "red"),
        ({Color.RED: Color.RED}, {"red": "red"}),
        (Share(0.5), 0.5),
        (Amount(5), 5),
        ({"flags": [True, False]}, {"flags": [True, False]}),
        (collections.OrderedDict(b=1, a=2), {"a": 2, "b": 1}),
        (collections.defaultdict(list, a=[1]), {"a": [1]}),
        (collections.Counter("aab"), {"a": 2, "b": 1}),
        (mark_safe("<b>"), "<b>"),
        ({"": {"": ""}}, {"": {"": ""}}),
        ({"__proto__": 2, "$.a": 3, "a'b\"c": 4}, {"__proto__": 2, "$.a": 3, "a'b\"c": 4}),
        ("%s %% %(a)s ? $1 \\u0000 \\", "%s %% %(a)s ? $1 \\u0000 \\"),
        ("\u2028\u2029\t\x7f\x1f\ufeff\uffff 😀 \U0010ffff", "\u2028\u2029\t\x7f\x1f\ufeff\uffff 😀 \U0010ffff"),
        ([0.1, 1.0, -2.5e-10, 1e15], [0.1, 1.0, -2.5e-10, 1e15]),
    ],
)  # fmt: skip
def test_what_is_json_arrives_as_it_was(payload: Any, received: Any) -> None:
    assert round_trip(payload) == received


@pytest.mark.parametrize("value", [1e22, -1e22, 1.7976931348623157e308, 5e-324, -0.0, 123456789.123456789])
def test_a_float_keeps_its_value_though_not_its_spelling(value: float) -> None:
    """PostgreSQL gives a whole float back as an integer."""
    assert float(round_trip([value])[0]) == value


def test_what_is_shared_but_no_cycle_is_written_out_in_each_place() -> None:
    shared = {"a": [1]}
    assert round_trip([shared, shared, {"again": shared}]) == [shared, shared, {"again": shared}]


def test_a_lazy_text_is_resolved_in_the_language_of_the_emit() -> None:
    payload = {"answer": gettext_lazy("Yes"), "nested": [gettext_lazy("No")]}
    with override("de"):
        received = round_trip(payload)
    assert received == {"answer": "Ja", "nested": ["Nein"]}


def test_a_lazy_text_is_held_to_the_same_rules() -> None:
    assert "payload at $.a holds a NUL" in refusal({"a": lazy(lambda: "a\x00b", str)()})


def test_what_the_caller_changes_later_does_not_reach_the_event() -> None:
    payload = {"items": [1]}
    received: list[Event] = []
    on_event("thing.done", name="listener")(received.append)
    with transaction.atomic():
        emit_event("thing.done", payload)
        payload["items"].append(2)
    drain()
    assert received[0].payload == {"items": [1]}


def test_nothing_in_a_payload_can_leave_its_place_in_the_statement() -> None:
    nasty = "'); DROP TABLE django_outbox_event; -- %s \" \\ {} $$ \x1a"
    with transaction.atomic():
        emit_events(
            [
                NewEvent("thing.done", {nasty: nasty}, aggregate_id=nasty, request_id=nasty, headers={nasty: nasty}),
                NewEvent("thing.done", [nasty], aggregate_type=nasty, organization_id="{a,b}"),
                NewEvent("thing.done", "NULL", aggregate_type="NULL", organization_id="\\"),
            ]
        )
    first, second, third = OutboxEvent.objects.order_by("id")
    assert (first.payload, first.headers) == ({nasty: nasty}, {nasty: nasty})
    assert (first.aggregate_id, first.request_id) == (nasty, nasty)
    assert (second.payload, second.aggregate_type, second.organization_id) == ([nasty], nasty, "{a,b}")
    assert (third.payload, third.aggregate_type, third.organization_id) == ("NULL", "NULL", "\\")
