"""The email queue's pages."""

from __future__ import annotations

import html
import re
from typing import Any
from uuid import UUID

import pytest
from django.contrib.auth.models import Permission, User
from django.core.mail import EmailMultiAlternatives
from django.test import Client
from django.urls import reverse

from django_outbox import lease as engine
from django_outbox.mail import EMAILS, enqueue_email
from django_outbox.models import OutboxEmail
from django_outbox.testing import drain, travel
from tests.mail.conftest import message
from tests.mail.test_codec import inline_image

pytestmark = pytest.mark.django_db

LIST = "/admin/django_outbox/outboxemail/"
VERBS = ("view_outboxemail", "retry_outboxemail", "discard_outboxemail")


def visit(client: Client, *permissions: str) -> Client:
    user = User.objects.create_user("olga", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client.force_login(user)
    return client


def page(client: Client, id_: UUID) -> str:
    response = client.get(reverse("admin:django_outbox_outboxemail_change", args=[id_]))
    assert response.status_code == 200
    return str(response.content.decode())


def dead(*numbers: int) -> list[UUID]:
    ids = [enqueue_email(message(number))[0] for number in numbers]
    OutboxEmail.objects.filter(pk__in=ids).update(
        status="dead", dead_at="2020-01-01T00:00:00Z", last_error="550 no", failure_kind="temporary"
    )
    return ids


def html_mail() -> EmailMultiAlternatives:
    made = EmailMultiAlternatives("Hello", "Plain text.", "shop@example.com", ["ann@example.com"])
    body = '<p>Bold</p><script>alert(1)</script><img src="https://tracker.example/x.png">"\'</iframe>'
    made.attach_alternative(body, "text/html")
    made.attach("invoice.pdf", b"x" * 2_048, "application/pdf")
    return made


def test_dead_emails_are_one_click_away(client: Client) -> None:
    ids = dead(1, 2)
    enqueue_email(message(3))
    client = visit(client, *VERBS)
    response = client.get(LIST)
    text = response.content.decode()
    assert re.search(r'href="\?status=dead"[^>]*>dead <b>2</b>', text)
    assert "Number 3" in text
    assert {row.pk for row in client.get(LIST, {"status": "dead"}).context["cl"].result_list} == set(ids)


def test_retry_and_discard_act_on_what_was_shown(client: Client) -> None:
    first, second, third = dead(1, 2, 3)
    client = visit(client, *VERBS)
    for verb, id_, status in (("retry", first, "waiting"), ("discard", second, "failed")):
        posted = {"action": verb, "_selected_action": [str(id_)], "shown": [f"{id_}:dead"], "index": 0}
        client.post(LIST, {**posted, "select_across": 0})
        assert OutboxEmail.objects.get(pk=id_).status == status
    url = reverse("admin:django_outbox_outboxemail_change", args=[third])
    client.post(url, {"verb": "retry", "shown": "dead"})
    assert OutboxEmail.objects.get(pk=third).status == "waiting"


@pytest.mark.parametrize("term", ["user2@example.com", "order:2", "MESSAGE_ID", "MESSAGE_ID_BARE", "ID"])
def test_search_finds_an_email_by_what_an_index_serves(client: Client, term: str) -> None:
    enqueue_email(message(1))
    id_, _ = enqueue_email(message(2), idempotency_key="order:2")
    message_id = OutboxEmail.objects.get(pk=id_).message_id
    known = {"ID": str(id_), "MESSAGE_ID": message_id, "MESSAGE_ID_BARE": message_id.strip("<>")}
    client = visit(client, "view_outboxemail")
    found = client.get(LIST, {"q": known.get(term, term)}).context["cl"].result_list
    assert [row.pk for row in found] == [id_]
    assert list(client.get(LIST, {"q": "nobody"}).context["cl"].result_list) == []


def test_what_an_email_says_takes_a_permission_of_its_own(client: Client) -> None:
    id_, _ = enqueue_email(html_mail())
    client = visit(client, *VERBS)
    text = page(client, id_)
    assert "ann@example.com" in text
    assert "You may not read what emails say." in text
    for part in ("Plain text.", "Bold", "invoice.pdf", "<iframe"):
        assert part not in text


def test_a_reader_sees_the_message_in_a_frame_that_can_do_nothing(client: Client) -> None:
    id_, _ = enqueue_email(html_mail())
    text = page(visit(client, *VERBS, "read_outboxemail"), id_)
    assert "Plain text." in text
    assert "invoice.pdf" in text
    assert re.search(r"2\.0\xa0KB", text)
    (frame,) = re.findall(r"<iframe[^>]*>", text)
    assert 'sandbox=""' in frame
    document = html.unescape(re.findall(r'srcdoc="([^"]*)"', frame)[0])
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; form-action 'none'; base-uri 'none'"
    assert document.startswith(
        f'<!doctype html><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
    )
    # The whole of it stays inside the attribute.
    assert document.endswith("\"'</iframe>")
    assert "<script>alert" not in text


def test_images_that_came_with_the_message_are_shown(client: Client) -> None:
    id_, _ = enqueue_email(inline_image())
    text = html.unescape(page(visit(client, *VERBS, "read_outboxemail"), id_))
    assert '<img src="data:image/png;base64,iVBORw0K' in text


def test_a_sensitive_email_is_shown_to_nobody(client: Client) -> None:
    id_, _ = enqueue_email(message(1, subject="Your code is 123", body="123"), sensitive=True)
    client = visit(client, *VERBS, "read_outboxemail")
    for text in (page(client, id_), client.get(LIST).content.decode()):
        assert "123" not in re.sub(r"[0-9a-f-]{36}|<\d+\.[^>]*>|&lt;[^&]*&gt;", "", text).replace("12345", "")
    assert "It is sensitive, and shown to nobody." in page(client, id_)
    drain()
    text = page(client, id_)
    assert "was removed" in text
    engine.discard(EMAILS, using="default", ids=[id_])
    assert 'value="retry"' not in text


def test_a_page_says_what_servers_said_and_what_to_press(client: Client) -> None:
    (id_,) = dead(1)
    OutboxEmail.objects.update(refused={"a@example.com": "550 <b>no</b>"}, maybe_sent=True)
    text = page(visit(client, *VERBS), id_)
    assert "550 &lt;b&gt;no&lt;/b&gt;" in text
    assert "a retry could send it twice" in text


def test_a_broken_document_is_told(client: Client) -> None:
    from django_outbox.models import OutboxEmailContent

    id_, _ = enqueue_email(message())
    client = visit(client, *VERBS, "read_outboxemail")
    OutboxEmailContent.objects.update(document="{}")
    assert "It cannot be read" in page(client, id_)
    OutboxEmailContent.objects.all().delete()
    assert "It is gone." in page(client, id_)


# --- the commands


def test_the_commands_serve_the_email_queue() -> None:
    import io
    import json

    from django.core.management import CommandError, call_command

    def run(*arguments: str) -> Any:
        out = io.StringIO()
        call_command(*arguments, stdout=out)
        return out.getvalue()

    first, second = dead(1, 2)
    assert json.loads(run("outbox_status", "--json"))["queues"]["email"]["dead"] == 2
    assert "outbox_retry --queue email --status dead" in run("outbox_status", "--queue", "email")
    assert "Retried 1 email, due now." in run("outbox_retry", "--queue", "email", str(first))
    assert "Discarded 1 email." in run("outbox_discard", "--queue", "email", str(second), "--no-input")
    with pytest.raises(CommandError, match="has neither"):
        run("outbox_retry", "--queue", "email", "--handler", "crm")
    with pytest.raises(CommandError, match="has no handlers"):
        run("outbox_retry", "--queue", "email", "--rename-handler", "a=b")
    drain()
    with travel(days=8):
        purged = json.loads(run("outbox_purge", "--json"))
    assert purged["queues"]["email"] == {"purged": 1, "older_than_seconds": 604_800.0}
