"""The admin: what it shows and to whom, what its buttons change, and that its lists stay fast on a large table."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from django.contrib.auth.models import Permission, User
from django.contrib.messages import get_messages
from django.db import connection, transaction
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from django_outbox import admin as outbox_admin
from django_outbox import lease as engine
from django_outbox import on_event
from django_outbox.models import OutboxEvent

pytestmark = pytest.mark.django_db

LIST = "/admin/django_outbox/outboxevent/"
LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)
FAR_AHEAD = datetime(2100, 1, 1, tzinfo=UTC)
TIME = "2026-01-01T12:34:56.000Z"

Visit = Callable[..., Client]


@pytest.fixture
def visit(client: Client) -> Visit:
    """Log a member of staff in with these permissions; ``"*"`` is a superuser."""

    def log_in(*permissions: str) -> Client:
        user = User.objects.create_user("olga", is_staff=True, is_superuser="*" in permissions)
        user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
        client.force_login(user)
        return client

    return log_in


_TIMES: dict[str, dict[str, Any]] = {
    "pending": {},
    "waiting": {"due_at": FAR_AHEAD},
    "dead": {"dead_at": LONG_AGO, "attempts": 8},
    "failed": {"finished_at": LONG_AGO},
    "done": {"finished_at": LONG_AGO},
}


def insert(status: str, count: int = 1, *, handlers: tuple[str, ...] = ("one",), **values: Any) -> list[UUID]:
    rows = [
        engine.NewRow(
            id=engine.new_id(), type="thing.done", payload="{}", deliveries=json.dumps(dict.fromkeys(handlers))
        )
        for _ in range(count)
    ]
    with transaction.atomic():
        ids = engine.insert_events(rows, using="default")
    OutboxEvent.objects.filter(pk__in=ids).update(status=status, **(_TIMES[status] | values))
    return ids


def status_of(id_: UUID) -> str:
    return OutboxEvent.objects.get(pk=id_).status


def detail(id_: UUID) -> str:
    return reverse("admin:django_outbox_outboxevent_change", args=[id_])


def listed(response: Any) -> list[UUID]:
    """Return the ids that a list shows, in its order."""
    return [event.pk for event in response.context["cl"].result_list]


def said(response: Any) -> str:
    return " ".join(str(message) for message in get_messages(response.wsgi_request))


def press(client: Client, verb: str, ids: list[UUID], *, url: str = LIST, across: bool = False) -> str:
    """Run an action on rows as the list shows them now, and return what it says."""
    return said(client.post(url, form(client, verb, ids, url=url, across=across)))


def form(client: Client, verb: str, ids: list[UUID], *, url: str = LIST, across: bool = False) -> dict[str, Any]:
    """Return what the browser would post."""
    page = client.get(url).content.decode()
    return {
        "action": verb,
        "select_across": int(across),
        "index": 0,
        "_selected_action": [str(id_) for id_ in ids],
        "shown": re.findall(r'name="shown" value="([^"]+)"', page),
    }


# --- who may what ----------------------------------------------------------------------------------------------------


def test_without_the_view_permission_there_is_nothing_to_see(visit: Visit) -> None:
    (id_,) = insert("dead")
    client = visit("retry_outboxevent", "discard_outboxevent")
    assert client.get(LIST).status_code == 403
    assert client.get(detail(id_)).status_code == 403
    assert client.post(detail(id_), {"verb": "retry"}).status_code == 403
    assert status_of(id_) == "dead"


def test_who_may_only_look_sees_the_payload_and_no_buttons(visit: Visit) -> None:
    (id_,) = insert("dead", payload={"name": "Ada"})
    client = visit("view_outboxevent")
    page = client.get(detail(id_)).content.decode()
    assert "Ada" in page
    assert "<button" not in page.split('id="content-main"')[1]
    assert 'name="action"' not in client.get(LIST).content.decode()
    for verb in ("retry", "discard", "delete", ""):
        assert client.post(detail(id_), {"verb": verb}).status_code == 403
        client.post(LIST, {"action": verb, "_selected_action": [str(id_)]})
    assert status_of(id_) == "dead"


@pytest.mark.parametrize(
    ("verb", "other", "becomes"), [("retry", "discard", "waiting"), ("discard", "retry", "failed")]
)
def test_each_verb_has_a_permission_of_its_own(visit: Visit, verb: str, other: str, becomes: str) -> None:
    first, second = insert("dead", 2)
    client = visit("view_outboxevent", f"{verb}_outboxevent")
    assert client.post(detail(first), {"verb": other}).status_code == 403
    assert client.post(detail(first), {"verb": verb, "shown": "dead"}).status_code == 302
    press(client, other, [second])
    assert (status_of(first), status_of(second)) == (becomes, "dead")


def test_nobody_adds_changes_or_deletes_events_not_even_a_superuser(visit: Visit) -> None:
    (id_,) = insert("dead", payload={"name": "Ada"})
    client = visit("*")
    assert client.get(f"{LIST}add/").status_code == 403
    assert client.post(f"{LIST}{id_}/delete/", {"post": "yes"}).status_code == 403
    assert client.post(detail(id_), {"type": "other.done", "status": "done"}).status_code == 403
    assert "delete_selected" not in client.get(LIST).content.decode()
    event = OutboxEvent.objects.get(pk=id_)
    assert (event.type, event.status) == ("thing.done", "dead")


# --- lists -----------------------------------------------------------------------------------------------------------


def test_dead_rows_are_one_click_away_with_their_number(visit: Visit) -> None:
    dead = insert("dead", 2)
    insert("done", 3)
    client = visit("*")
    links = {link["label"]: link for link in client.get(LIST).context["status_links"]}
    assert links["dead"]["count"] == "2"
    assert set(listed(client.get(LIST + links["dead"]["query"]))) == set(dead)


def test_counts_stop_at_their_bound(visit: Visit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_admin.queue, "COUNTED", 3)
    monkeypatch.setattr(outbox_admin.queue, "LISTED", 4)
    insert("dead", 6)
    response = visit("*").get(f"{LIST}?status=dead")
    assert response.context["status_links"][0]["count"] == "3+"
    assert response.context["cl"].result_count == 4
    assert "The list ends after 4 events" in response.content.decode()


def test_the_list_shows_the_error_and_never_the_payload(visit: Visit) -> None:
    insert("dead", last_error="one: <b>boom</b>", payload={"secret": "xyzzy"}, headers={"h": "plugh"})
    page = visit("*").get(LIST).content.decode()
    assert "one: &lt;b&gt;boom&lt;/b&gt;" in page
    assert "xyzzy" not in page
    assert "plugh" not in page


@pytest.mark.parametrize(
    ("status", "column", "newest_first"),
    [
        ("dead", "dead_at", True),
        ("failed", "finished_at", True),
        ("done", "finished_at", True),
        ("waiting", "due_at", False),
        ("pending", "created_at", False),
    ],
)
def test_a_list_is_in_the_order_in_which_one_looks_at_it(
    visit: Visit, status: str, column: str, newest_first: bool
) -> None:
    middle, late, early = insert(status, 3)
    for id_, days in ((middle, 2), (late, 3), (early, 1)):
        OutboxEvent.objects.filter(pk=id_).update(**{column: LONG_AGO + timedelta(days=days)})
    expected = [late, middle, early] if newest_first else [early, middle, late]
    assert listed(visit("*").get(f"{LIST}?status={status}")) == expected


def test_filters_by_type_and_handler_find_what_code_and_rows_know(visit: Visit) -> None:
    on_event("user.created", name="registered")(print)
    (kept,) = insert("dead", handlers=("gone",), type="order.paid")
    insert("dead")
    client = visit("*")
    page = client.get(LIST).content.decode()
    for name in ("user.created", "order.paid", "registered", "gone"):
        assert f">{name}</a>" in page
    assert listed(client.get(f"{LIST}?type=order.paid")) == [kept]
    assert listed(client.get(f"{LIST}?handler=gone")) == [kept]
    assert listed(client.get(f"{LIST}?status=dead&type=order.paid&handler=gone")) == [kept]
    assert listed(client.get(f"{LIST}?type=unheard.of")) == []


def test_the_handler_filter_of_a_status_shows_what_is_owed_to_it(visit: Visit) -> None:
    (owed,) = insert("dead", handlers=("one", "two"), deliveries={"one": None, "two": TIME})
    (other,) = insert("dead", handlers=("one", "two"), deliveries={"one": TIME, "two": None})
    client = visit("*")
    assert listed(client.get(f"{LIST}?status=dead&handler=one")) == [owed]
    assert set(listed(client.get(f"{LIST}?handler=one"))) == {owed, other}


@pytest.mark.parametrize("status", ["", "dead", "waiting"])
def test_a_filter_without_an_index_looks_at_a_window_and_says_so(
    visit: Visit, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    insert(status or "done", 30, type="order.paid")
    client = visit("*")
    url = f"{LIST}?type=order.paid&status={status}" if status else f"{LIST}?type=order.paid"
    assert "looked for in" not in client.get(url).content.decode()
    monkeypatch.setattr(outbox_admin.queue, "LISTED", 10)
    for number, id_ in enumerate(OutboxEvent.objects.order_by("pk").values_list("pk", flat=True)):
        moment = LONG_AGO + timedelta(days=number)
        OutboxEvent.objects.filter(pk=id_, status="dead").update(dead_at=moment)
        OutboxEvent.objects.filter(pk=id_, status="waiting").update(due_at=moment)
    response = client.get(url)
    assert "looked for in" in response.content.decode()
    assert 10 <= len(listed(response)) <= 11


@pytest.mark.parametrize("address", ["?status=unheard", "?p=9999"])
def test_an_address_that_means_nothing_leads_back_to_the_list(visit: Visit, address: str) -> None:
    insert("done", 60)
    assert visit("*").get(LIST + address).status_code == 302


def test_an_address_cannot_filter_by_what_no_index_serves(visit: Visit) -> None:
    assert visit("*").get(f"{LIST}?last_error__contains=x").status_code == 400


# --- search ----------------------------------------------------------------------------------------------------------


def test_search_finds_an_event_by_its_id(visit: Visit) -> None:
    id_, _ = insert("done", 2)
    assert listed(visit("*").get(LIST, {"q": f" {id_} "})) == [id_]


@pytest.mark.parametrize("term", ["order:1:2", "order/1:2", " order : 1:2 "])
def test_search_finds_what_an_event_is_about(visit: Visit, term: str) -> None:
    (id_,) = insert("done", aggregate_type="order", aggregate_id="1:2")
    insert("done", aggregate_type="order", aggregate_id="2")
    insert("done", aggregate_type="user", aggregate_id="1:2")
    assert listed(visit("*").get(LIST, {"q": term})) == [id_]


@pytest.mark.parametrize("term", ["123", "order:", "a'b\"c%", "☃" * 500])
def test_search_that_no_index_serves_finds_nothing_and_says_what_to_write(visit: Visit, term: str) -> None:
    insert("done", aggregate_type="order", aggregate_id="123")
    response = visit("*").get(LIST, {"q": term})
    assert listed(response) == []
    assert "type:id" in said(response)


def test_a_nul_in_the_address_is_no_server_error(visit: Visit) -> None:
    client = visit("*")
    for address in ("?q=a:%00", "?type=%00", "?handler=%00", "?status=%00", "?q=%00:b"):
        assert client.get(LIST + address).status_code in {200, 302, 400}


# --- one event -------------------------------------------------------------------------------------------------------


def test_the_page_of_an_event_says_how_each_handler_stands(visit: Visit) -> None:
    for name in ("made", "fails", "refuses", "kills", "open"):
        on_event("thing.done", name=name)(print)
    names = ("made", "fails", "refuses", "kills", "closed", "gone", "open")
    (id_,) = insert(
        "dead",
        handlers=names,
        deliveries=dict.fromkeys(names) | {"made": TIME},
        failures={
            "fails": {"error": "<b>boom</b>", "at": TIME},
            "refuses": {"error": "never", "at": TIME, "rejected": True},
            "kills": {"error": "worker lost: 3", "at": TIME, "lost": True},
            "closed": {"discarded": True},
            "gone": {"error": "unknown", "at": TIME, "parked_at": TIME},
        },
        leased_by="host:1:abc",
        lease_until=LONG_AGO,
        organization_id="acme",
        request_id="req-7",
    )
    response = visit("*").get(detail(id_))
    states = {each.handler: each.state for each in response.context["deliveries"]}
    assert states == {
        "made": "delivered",
        "fails": "given up",
        "refuses": "rejected",
        "kills": "worker lost",
        "closed": "discarded",
        "gone": "parked: no such handler",
        "open": "owed",
    }
    page = response.content.decode()
    assert "&lt;b&gt;boom&lt;/b&gt;" in page
    assert "2026-01-01 12:34:56 UTC" in page
    assert "outbox_retry --rename-handler gone=NEW" in page
    for text in ("host:1:abc", "acme", "req-7", str(id_)):
        assert text in page


@pytest.mark.parametrize(
    ("status", "values", "words"),
    [
        ("dead", {"due_at": FAR_AHEAD}, "tried again by itself in"),
        ("dead", {}, "not tried again by itself"),
        ("failed", {"failures": {"one": {"error": "x", "rejected": True}}}, "refused it for good"),
        ("failed", {"failures": {"one": {"discarded": True}}}, "It was discarded"),
        ("waiting", {}, "Retry makes it due now"),
        ("pending", {}, "next free relay"),
        ("done", {}, "Nothing is owed"),
        ("dead", {"leased_by": "host:1", "lease_until": FAR_AHEAD}, "working on it right now"),
    ],
)
def test_the_page_of_an_event_says_what_comes_next(
    visit: Visit, status: str, values: dict[str, Any], words: str
) -> None:
    (id_,) = insert(status, **values)
    assert words in visit("*").get(detail(id_)).content.decode()


def test_a_payload_is_shown_as_text_and_no_further_than_its_bound(visit: Visit) -> None:
    (id_,) = insert("done", payload={"html": "</pre><script>alert(1)</script>", "name": "Zoë", "zzzzzz": "x" * 200_000})
    page = visit("*").get(detail(id_)).content.decode()
    assert "<script>alert" not in page
    assert "Zoë" in page
    assert "more characters" in page
    assert len(page) < 150_000


def test_an_event_that_was_purged_leads_back_to_the_list(visit: Visit) -> None:
    client = visit("*")
    for id_ in (engine.new_id(), "nonsense"):
        response = client.get(f"{LIST}{id_}/change/")
        assert (response.status_code, response.headers["Location"]) == (302, LIST)


def test_a_button_changes_the_event_and_leaves_a_trace(visit: Visit) -> None:
    (id_,) = insert("dead")
    client = visit("*")
    response = client.post(detail(id_), {"verb": "retry", "shown": "dead"}, follow=True)
    assert "Retried 1 event, due now." in response.content.decode()
    assert status_of(id_) == "waiting"
    assert "olga" in client.get(f"{LIST}{id_}/history/").content.decode()


def test_a_button_does_nothing_to_an_event_that_changed_meanwhile(visit: Visit) -> None:
    (id_,) = insert("waiting")
    response = visit("*").post(detail(id_), {"verb": "discard", "shown": "dead"})
    assert "Discarded 0 events. 1 event left alone" in said(response)
    assert status_of(id_) == "waiting"


def test_one_delivery_can_be_discarded(visit: Visit) -> None:
    (id_,) = insert("dead", handlers=("one", "two"))
    response = visit("*").post(detail(id_), {"verb": "discard", "shown": "dead", "handler": "two"})
    assert "Closed the delivery to two of 1 event." in said(response)
    event = OutboxEvent.objects.get(pk=id_)
    assert (event.status, event.failures) == ("dead", {"two": {"discarded": True}})


# --- actions ---------------------------------------------------------------------------------------------------------


def test_an_action_changes_what_was_selected_and_reports_the_number(visit: Visit) -> None:
    first, second, third = insert("dead", 3)
    assert press(visit("*"), "retry", [first, second]) == "Retried 2 events, due now."
    assert [status_of(id_) for id_ in (first, second, third)] == ["waiting", "waiting", "dead"]


def test_an_action_leaves_rows_alone_that_changed_since_they_were_shown(visit: Visit) -> None:
    stays, changes = insert("dead", 2)
    client = visit("*")
    posted = form(client, "discard", [stays, changes])
    OutboxEvent.objects.filter(pk=changes).update(status="waiting", due_at=FAR_AHEAD, dead_at=None)
    text = said(client.post(LIST, posted))
    assert "Discarded 1 event. 1 event left alone: not in the status shown any more" in text
    assert status_of(changes) == "waiting"


def test_an_action_in_a_filtered_list_counts_rows_that_left_the_filter(visit: Visit) -> None:
    stays, changes = insert("dead", 2)
    client = visit("*")
    posted = form(client, "retry", [stays, changes], url=f"{LIST}?status=dead")
    OutboxEvent.objects.filter(pk=changes).update(status="done", finished_at=LONG_AGO)
    assert "Retried 1 event, due now. 1 event left alone" in said(client.post(f"{LIST}?status=dead", posted))


def test_an_action_leaves_rows_alone_that_a_relay_holds(visit: Visit) -> None:
    held, free = insert("dead", 2)
    OutboxEvent.objects.filter(pk=held).update(leased_by="relay-1", lease_until=FAR_AHEAD)
    text = press(visit("*"), "retry", [held, free])
    assert "Retried 1 event, due now. 1 event left alone: a relay is working on them." in text


def test_an_action_survives_a_selection_that_no_page_shows(visit: Visit) -> None:
    (dead,), (done,) = insert("dead"), insert("done")
    chosen = [str(dead), str(done), str(engine.new_id())]
    text = said(visit("*").post(LIST, {"action": "retry", "_selected_action": chosen}))
    assert "Retried 1 event, due now. 2 events left alone" in text


@pytest.mark.parametrize("query", ["", "?status=dead"])
def test_select_all_across_pages_changes_thousands_of_dead_rows_and_no_others(visit: Visit, query: str) -> None:
    """Scenario 66."""
    insert("dead", 5_000)
    insert("pending", 5_000)
    client = visit("*")
    shown = listed(client.get(LIST + query))
    assert "Retried 5,000 events, due now." in press(client, "retry", shown, url=LIST + query, across=True)
    counts = {name: OutboxEvent.objects.filter(status=name).count() for name in ("dead", "waiting", "pending")}
    assert counts == {"dead": 0, "waiting": 5_000, "pending": 5_000}


def test_select_all_without_a_status_discards_dead_rows_only(visit: Visit) -> None:
    ids = {status: insert(status)[0] for status in ("dead", "waiting", "pending", "failed", "done")}
    press(visit("*"), "discard", list(ids.values()), across=True)
    assert {status: status_of(id_) for status, id_ in ids.items()} == {
        "dead": "failed", "waiting": "waiting", "pending": "pending", "failed": "failed", "done": "done",
    }  # fmt: skip


def test_select_all_keeps_to_the_filters_and_the_search(visit: Visit) -> None:
    (wanted,) = insert("dead", aggregate_type="order", aggregate_id="1")
    (other,) = insert("dead", type="order.paid")
    client = visit("*")
    press(client, "retry", [wanted], url=f"{LIST}?q=order:1", across=True)
    assert (status_of(wanted), status_of(other)) == ("waiting", "dead")
    press(client, "discard", [other], url=f"{LIST}?type=order.paid&status=dead", across=True)
    assert status_of(other) == "failed"


def test_one_action_takes_a_bounded_number_and_says_that_there_are_more(
    visit: Visit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_admin.queue, "LISTED", 5)
    ids = insert("dead", 8)
    text = press(visit("*"), "retry", ids[:1], across=True)
    assert "Retried 5 events" in text
    assert "there are more" in text


# --- a large table ---------------------------------------------------------------------------------------------------

# A walk of an index that a LIMIT ends is what is wanted; what is not: the table from end to end, or a sort of it.
WHOLE_TABLE = {
    "postgresql": re.compile(r"Seq Scan on django_outbox_event"),
    "sqlite": re.compile(r"SCAN django_outbox_event$", re.MULTILINE),
}
SORT = {"postgresql": re.compile(r"Sort Key"), "sqlite": re.compile(r"USE TEMP B-TREE FOR ORDER BY")}


def load(count: int) -> None:
    """Insert rows by SQL: of a hundred, ten are dead, five each failed, waiting and pending, the others done."""
    table = OutboxEvent._meta.db_table
    status = (
        "CASE WHEN n %% 100 < 10 THEN 'dead' WHEN n %% 100 < 15 THEN 'failed' WHEN n %% 100 < 20 THEN 'waiting'"
        " WHEN n %% 100 < 25 THEN 'pending' ELSE 'done' END"
    )
    if connection.vendor == "postgresql":
        numbers = (
            "SELECT n, timestamptz '2026-01-01 00:00Z' + n * interval '1 s' AS at FROM generate_series(1, %s) AS n"
        )
        id_ = "('01900000-0000-7000-8000-' || lpad(to_hex(n), 12, '0'))::uuid"
        object_, empty, failures = "'{\"one\": null}'::jsonb", "'{}'::jsonb", "'{}'::jsonb"
        name = "'type' || (n %% 7) || '.done'"
    else:
        numbers = (
            "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c WHERE n < %s)"
            " SELECT n, strftime('%%Y-%%m-%%d %%H:%%M:%%f', '2026-01-01', n || ' seconds') AS at FROM c"
        )
        id_ = "'01900000000070008000' || printf('%%012x', n)"
        object_, empty, failures = "'{\"one\":null}'", "'{}'", "'{}'"
        name = "'type' || (n %% 7) || '.done'"
    with connection.cursor() as cursor:
        cursor.execute(
            f"""INSERT INTO {table} (id, status, type, payload, headers, deliveries, failures, occurred_at, created_at,
                    due_at, dead_at, finished_at, aggregate_type, aggregate_id)
                SELECT {id_}, status, {name}, {object_}, {empty}, {object_}, {failures}, at, at,
                    CASE WHEN status = 'waiting' THEN at END, CASE WHEN status = 'dead' THEN at END,
                    CASE WHEN status IN ('done', 'failed') THEN at END,
                    CASE WHEN n %% 2 = 0 THEN 'order' ELSE '' END, CASE WHEN n %% 2 = 0 THEN n || '' ELSE '' END
                FROM (SELECT n, at, {status} AS status FROM ({numbers}) AS numbered) AS made""",
            [count],
        )
        cursor.execute("ANALYZE")


def plans(queries: list[dict[str, str]]) -> dict[str, str]:
    """Return the plan of each query that reads events."""
    found = {}
    explain = "EXPLAIN" if connection.vendor == "postgresql" else "EXPLAIN QUERY PLAN"
    with connection.cursor() as cursor:
        for query in queries:
            sql = query["sql"]
            if "django_outbox_event" in sql and sql.startswith("SELECT"):
                cursor.execute(f"{explain} {sql}")
                found[sql] = "\n".join(str(line[-1]) for line in cursor.fetchall())
    return found


ADDRESSES = [
    "",
    "?p=50",
    *(f"?status={status}" for status in ("dead", "failed", "waiting", "pending", "done")),
    "?status=done&p=50",
    "?type=type3.done",
    "?handler=one",
    "?status=dead&handler=one",
    "?status=done&type=type3.done&handler=one",
    "?q=01900000-0000-7000-8000-000000000064",
    "?q=order:100",
    "?q=order:100&status=dead",
]


def test_no_list_sorts_or_scans_a_large_table(visit: Visit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scenario 27, with bounds in proportion to the size of this table."""
    monkeypatch.setattr(outbox_admin.queue, "LISTED", 500)
    monkeypatch.setattr(outbox_admin.queue, "COUNTED", 100)
    monkeypatch.setattr(outbox_admin.OutboxEventAdmin, "list_per_page", 10)
    load(20_000)
    client = visit("*")
    client.get(LIST)
    bad = {}
    for address in ADDRESSES:
        with CaptureQueriesContext(connection) as captured:
            response = client.get(LIST + address)
        assert response.status_code == 200
        assert listed(response), address
        # A bounded window, or what one aggregate has, may be sorted.
        small = "type=" in address or "handler=" in address or "q=" in address
        for sql, plan in plans(captured.captured_queries).items():
            whole = WHOLE_TABLE[connection.vendor].search(plan)
            if whole or (not small and SORT[connection.vendor].search(plan)):
                bad[address, sql] = plan
    assert not bad, "\n\n".join(f"{address}\n{sql}\n{plan}" for (address, sql), plan in bad.items())


@pytest.mark.parametrize("address", ["", "?status=dead", "?status=dead&type=thing.done&handler=one"])
def test_the_number_of_queries_does_not_grow_with_the_rows(visit: Visit, address: str) -> None:
    client = visit("*")
    insert("dead", 2)
    client.get(LIST)
    counts = []
    for _ in range(2):
        with CaptureQueriesContext(connection) as captured:
            client.get(LIST + address)
        counts.append(len(captured))
        insert("dead", 45)
    assert counts[0] == counts[1] <= 16
    assert not any('"payload"' in query["sql"] for query in captured.captured_queries)


def test_every_count_has_an_end(visit: Visit) -> None:
    client = visit("*")
    insert("dead", 2)
    with CaptureQueriesContext(connection) as captured:
        for address in ADDRESSES[:12]:
            client.get(LIST + address)
    counts = [query["sql"] for query in captured.captured_queries if "COUNT(" in query["sql"]]
    assert counts
    assert all("LIMIT" in sql for sql in counts)
