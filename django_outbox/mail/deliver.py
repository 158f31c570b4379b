"""Deliver: send one leased email, and decide what becomes of it."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final
from uuid import UUID

from django.core.mail import EmailMessage
from django.db import DatabaseError, InterfaceError, OperationalError

from django_outbox import lease as engine
from django_outbox.conf import EMAIL_LEASE_MARGIN_SECONDS, EmailSettings, get_settings
from django_outbox.delivery import Cause, Result, SingleRun, Work
from django_outbox.errors import clean_error, clean_text
from django_outbox.mail import compat, store
from django_outbox.mail.backend import delivering
from django_outbox.mail.codec import decode
from django_outbox.mail.store import EMAILS
from django_outbox.mail.transport import SendFailed, Sent, Transport, sends_mime
from django_outbox.mail.verdicts import Blame, Stage, Verdict, judge, refusal_text

__all__ = ["EmailRun", "EmailWork"]

logger = logging.getLogger("django_outbox.mail")

CHUNK: Final = 100
PAUSE_MIN_SECONDS: Final = 5.0
PAUSE_MAX_SECONDS: Final = 300.0
REFUSALS_TO_BREAK: Final = 5
"""Refusals for good in a row, of one code and to different recipients, that make a backend's fault of them."""
LANE: Final = ("priority", "backend_alias")
"""The columns by which emails are claimed apart; the lower the priority's number, the sooner."""


# --- what the process knows of a backend -----------------------------------------------------------------------------


@dataclass(slots=True)
class _Health:
    """One backend, as this process has met it."""

    faults: int = 0
    until: float = 0.0
    """The end of its pause; a reading of the monotonic clock."""
    code: str = ""
    refused: set[str] = field(default_factory=set)


class Backends:
    """Which backends are paused, and why."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, _Health] = {}

    def _of(self, alias: str) -> _Health:
        return self._known.setdefault(alias, _Health())

    def paused_seconds(self, alias: str) -> float:
        """Return how long a backend still rests."""
        with self._lock:
            known = self._known.get(alias)
            return 0.0 if known is None else max(0.0, known.until - time.monotonic())

    def paused(self) -> dict[str, float]:
        """Return the backends that rest, with the seconds that are left."""
        now = time.monotonic()
        with self._lock:
            return {alias: known.until - now for alias, known in self._known.items() if known.until > now}

    def pause(self, alias: str, *, least: float | None = None, reason: str) -> None:
        """Let a backend rest: 5 s, doubling to 5 min with every pause that no success came between."""
        with self._lock:
            known = self._of(alias)
            now = time.monotonic()
            if known.until > now and least is None:
                return  # the threads of one outage count as one
            seconds = max(min(PAUSE_MAX_SECONDS, PAUSE_MIN_SECONDS * 2.0 ** min(known.faults, 16)), least or 0.0)
            known.faults += 1
            known.until = max(known.until, now + seconds)
        logger.warning("backend paused alias=%s seconds=%g reason=%s", alias, seconds, reason)

    def sent(self, alias: str) -> None:
        """Note a success: whatever was wrong is over, but for a pause that was asked for meanwhile."""
        with self._lock:
            known = self._known.get(alias)
            if known is None:
                return
            if known.until > time.monotonic():
                # It was under way when the pause began, and says nothing of what the pause is for.
                known.code, known.refused = "", set()
            else:
                del self._known[alias]

    def refuses_all(self, alias: str, *, code: str, recipient: str) -> bool:
        """Note a refusal for good; return whether it looks as if everything were refused with this code."""
        with self._lock:
            known = self._of(alias)
            if known.code != code:
                known.code, known.refused = code, set()
            if len(known.refused) < REFUSALS_TO_BREAK:
                known.refused.add(recipient)
            return len(known.refused) >= REFUSALS_TO_BREAK


# --- one email -------------------------------------------------------------------------------------------------------


class EmailRun(SingleRun):
    """One leased email."""

    def __init__(self, lease: engine.Lease, *, using: str, work: EmailWork) -> None:
        super().__init__(lease, using=using, name="send")
        self._work = work
        self._alias: str = lease.content["backend_alias"]

    def refused(self) -> Result | None:
        """Return why it is not sent, if it is not: too late, its backend rests, too little is left of its lease."""
        if (expired := self._expired()) is not None:
            return expired
        settings = self._work.settings()
        needed = min(settings.timeout_seconds + EMAIL_LEASE_MARGIN_SECONDS, self.lease.seconds / 2)
        if self._work.backends.paused_seconds(self._alias):
            return _RELEASED
        if not self._work.wait_for_the_last(until=self.lease.deadline - needed):
            return _RELEASED
        return _RELEASED if self.lease.deadline - time.monotonic() < needed else None

    def _expired(self) -> Result | None:
        expires_at = self.lease.content["expires_at"]
        if expires_at is None or self.lease.clock.now() < expires_at:
            return None
        return Result(
            "expired: its expires_at passed before it was sent",
            outcome=engine.Fail(),
            columns={"failure_kind": "expired"},
        )

    @property
    def cause(self) -> Cause:
        """What a backend or its signals write meanwhile comes from this email."""
        content = self.lease.content
        return Cause(
            request_id=content["request_id"], organization_id=content["organization_id"], quiet=self.lease.quiet
        )

    def perform(self, *, timeout: float) -> Result:
        """Send it."""
        self._work.note_started(self.lease)
        try:
            loaded = store.load(self.lease.id, using=self.using, document=self.lease.content.pop(_DOCUMENT, None))
        except (OperationalError, InterfaceError) as error:
            # The database's trouble is not the message's.
            logger.warning("content not loaded id=%s error=%s", self.lease.id, clean_error(error))
            return _RELEASED
        if loaded is None:
            return _failed("its content is gone", "wiped")
        transport = self._work.transport(self._alias)
        settings = self._work.settings()
        try:
            message = decode(*loaded, with_message_id=sends_mime(self._alias, settings))
        except (ValueError, KeyError, TypeError, LookupError) as error:
            return _failed(clean_error(error), "unbuildable")
        finally:
            del loaded
        # Not a moment too late: connecting may have been waited for since the row was claimed.
        if (expired := self._expired()) is not None:
            return expired
        with _delivering(self.lease.content["message_id"]):
            return self._send(transport, message, settings, timeout)

    def _send(self, transport: Transport, message: EmailMessage, settings: EmailSettings, timeout: float) -> Result:
        ends = time.monotonic() + timeout
        for last in (False, True):
            try:
                sent = transport.send(message, settings=settings, seconds=max(0.1, ends - time.monotonic()))
            except SendFailed as failure:
                verdict = _verdict(failure, message)
                if verdict.blame is Blame.CONNECTION:
                    transport.drop()
                    if not last:
                        continue
                text = transport.scrub(_text(failure.error))
                return self._judged(verdict, clean_error(text), message)
            return self._sent(sent, message)
        raise AssertionError  # pragma: no cover

    def _sent(self, sent: Sent, message: EmailMessage) -> Result:
        if sent.count <= 0:
            recipients = message.recipients()
            return _failed(
                "the backend sent nothing" if recipients else "it has no recipients",
                "cancelled" if recipients else "no_recipients",
            )
        self._work.backends.sent(self._alias)
        columns: dict[str, Any] = {"failure_kind": "", "last_code": ""}
        if sent.refused:
            columns["refused"] = _cleaned(sent.refused)
            columns["last_code"] = str(next(iter(sent.refused.values()))).partition(" ")[0]
            logger.warning("recipients refused id=%s count=%d", self.lease.id, len(sent.refused))
        if sent.provider_message_id:
            columns["provider_message_id"] = clean_text(sent.provider_message_id)
        return Result(columns=columns)

    def _judged(self, verdict: Verdict, error: str, message: EmailMessage) -> Result:
        """Return what becomes of the row, and let the backend rest where that is called for."""
        backends = self._work.backends
        columns: dict[str, Any] = {"failure_kind": verdict.kind, "last_code": verdict.code}
        if verdict.refused:
            columns["refused"] = _cleaned(verdict.refused)
        if verdict.maybe_sent:
            columns["maybe_sent"] = True
        held = Result(error, outcome=engine.Park(spent=False), columns=columns)
        match verdict.blame:
            case Blame.BACKEND:
                backends.pause(self._alias, least=verdict.delay, reason=error)
                if verdict.kind in {"configuration", "login"}:
                    logger.error("backend cannot send alias=%s error=%s", self._alias, error)
                return _RELEASED
            case Blame.CONNECTION:
                backends.pause(self._alias, reason=error)
                return held if self._patient() else Result(error, columns=columns)
            case Blame.MESSAGE:
                code = f"{verdict.kind} {verdict.code} {_enhanced(error)}"
                distinct = verdict.kind == "rejected" and bool(verdict.code)
                if distinct and backends.refuses_all(self._alias, code=code, recipient=message.recipients()[0]):
                    backends.pause(self._alias, reason=f"it refuses everything: {error}")
                    logger.error("backend refuses everything alias=%s error=%s", self._alias, error)
                    return held if self._patient() else Result(error, columns=columns)
                return Result(error, rejected=True, columns=columns)
            case Blame.ATTEMPT:
                if verdict.pause:
                    backends.pause(self._alias, least=verdict.delay, reason=error)
                return Result(error, delay=verdict.delay, columns=columns)

    def _patient(self) -> bool:
        """
        Return whether the email may wait without being charged.

        It moves behind the others meanwhile, so that one which breaks every connection does
        not stand in their way; and it does not do so for ever.
        """
        return self.lease.age_now < (self._work.settings().replay_for_seconds or 86_400.0)

    def finish(self, step: SingleRun, result: Result) -> None:
        """Record how it ended; a pause that a child process met is this process's, too."""
        if result is not _RELEASED and isinstance(result.outcome, engine.Released):
            self._work.backends.pause(self._alias, reason="a child process could not send")
        super().finish(step, _in_doubt(result))

    def interrupt(self) -> None:
        """Count a send under way as failed; its message may have gone out."""
        super().interrupt()
        with self._lock:
            if self._result is not None:
                self._result = _in_doubt(self._result)


def _in_doubt(result: Result) -> Result:
    """Return a failure that somebody else states, such as the watch over the time limits, as one of an email."""
    if result.ok or "failure_kind" in result.columns:
        return result
    return replace(result, columns={"failure_kind": "interrupted", "maybe_sent": True})


_DOCUMENT: Final = "document"
"""Where a lease carries what its email says, until it is sent."""
_RELEASED: Final = Result(outcome=engine.Released())


def _failed(error: str, kind: str) -> Result:
    return Result(error, outcome=engine.Fail(), columns={"failure_kind": kind})


def _verdict(failure: SendFailed, message: EmailMessage) -> Verdict:
    verdict = judge(failure.error, failure.stage)
    if verdict.kind == "unbuildable":
        # A backend's own mistake may look the same; what builds is not the message's fault.
        try:
            compat.build(message)
        except (ValueError, TypeError, LookupError):
            return verdict
        if failure.stage is Stage.BUILD and not isinstance(failure.error, (UnicodeError, ValueError)):
            return Verdict(blame=Blame.ATTEMPT, kind="error")
    return verdict


def _text(error: Exception) -> str:
    """Return an error as a person reads it."""
    recipients = getattr(error, "recipients", None)
    if isinstance(recipients, Mapping) and recipients:
        said = [f"{address}: {refusal_text(reply)}" for address, reply in list(recipients.items())[:10]]
        return f"{type(error).__name__}: {'; '.join(said)}"
    code, said_bytes = getattr(error, "smtp_code", None), getattr(error, "smtp_error", None)
    if code is not None and said_bytes is not None:
        return f"{type(error).__name__}: {refusal_text((code, said_bytes))}"
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  a broken __str__ must not break the settle
        text = "(its text cannot be read)"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _enhanced(error: str) -> str:
    """Return the enhanced status code in an error, such as 5.7.1, so that different refusals differ."""
    return next((word for word in error.split() if word[:2] in {"5.", "4."} and word.count(".") == 2), "")


def _cleaned(refused: Mapping[str, str]) -> dict[str, str]:
    return {clean_text(address)[:320]: clean_error(said, limit=300) for address, said in refused.items()}


@contextmanager
def _delivering(message_id: str) -> Iterator[None]:
    token = delivering.set(message_id)
    try:
        yield
    finally:
        delivering.reset(token)


# --- the queue -------------------------------------------------------------------------------------------------------


class _Kept(threading.local):
    """What a handler thread keeps between messages: its connections, and the last message it started."""

    def __init__(self) -> None:
        self.transports: dict[str, Transport] = {}
        self.last: UUID | None = None


class EmailWork(Work):
    """
    The email queue.

    ``owed_to`` returns the ``deliveries`` of an event of a type, for the announcements;
    the registry of handlers belongs to a sibling of this package.
    """

    queue = EMAILS
    one_at_a_time = True

    def __init__(self, owed_to: Callable[[str], str]) -> None:
        self._owed_to = owed_to
        self.backends = Backends()
        self._kept = _Kept()
        self._unsettled: dict[UUID, threading.Event] = {}
        self._sweep_after: UUID | None = None
        self._using: str | None = None

    def settings(self) -> EmailSettings:
        """Return ``OUTBOX["EMAIL"]``."""
        return get_settings().email

    def start(self, lease: engine.Lease, *, using: str) -> EmailRun:
        """Return the run of an email."""
        return EmailRun(lease, using=using, work=self)

    def note_started(self, lease: engine.Lease) -> None:
        """Note what this thread sends now; see `wait_for_the_last`."""
        if self._kept.last is not None:
            self._unsettled.pop(self._kept.last, None)
        self._kept.last = lease.id
        self._unsettled[lease.id] = threading.Event()

    def wait_for_the_last(self, *, until: float) -> bool:
        """
        Wait until what this thread sent last is recorded; return whether it was by then.

        A relay that dies repeats what it had sent and not recorded: with this, one message
        of each thread, and not all that it sent while the database was slow.
        """
        event = self._unsettled.get(self._kept.last) if self._kept.last is not None else None
        return event is None or event.wait(max(0.0, until - time.monotonic()))

    def landed(self, leases: Sequence[engine.Lease]) -> None:
        """Note what is recorded, or no longer this process's."""
        for lease in leases:
            if (event := self._unsettled.pop(lease.id, None)) is not None:
                event.set()

    def transport(self, alias: str) -> Transport:
        """Return this thread's connection to a backend."""
        kept = self._kept.transports
        if alias not in kept:
            kept[alias] = Transport(alias)
        return kept[alias]

    def rest(self) -> None:
        """Close this thread's connections."""
        for transport in self._kept.transports.values():
            transport.close()
        self._kept.transports.clear()

    def scopes(self, room: int, *, using: str) -> Iterable[tuple[Mapping[str, Any], int]]:
        """Return the lanes of the backends that do not rest, urgent ones first, where something is due."""
        self._using = using
        due = sorted(scope.values for scope in self._lanes(using) if scope.seconds <= 0)
        return [(dict(zip(LANE, values, strict=True)), min(room, CHUNK)) for values in due]

    def next_due_seconds(self, *, using: str) -> float | None:
        """Return when something is due, or when a backend has rested."""
        moments = [*self.backends.paused().values(), *(scope.seconds for scope in self._lanes(using))]
        return min(moments, default=None)

    def _lanes(self, using: str) -> list[engine.Scope]:
        """Return the lanes with something due, now or later, but for those of backends that rest."""
        paused = self.backends.paused()
        # Not prepared: an import of many emails changes what the best plan is.
        scopes = engine.due_scopes(self.queue, LANE, using=using, prepare=False)
        return [scope for scope in scopes if scope.values[1] not in paused]

    def claimed(self, leases: Sequence[engine.Lease]) -> None:
        """Load what the claimed emails say, in one statement for all of them."""
        if not leases or self._using is None:
            return
        try:
            found = store.documents([lease.id for lease in leases], using=self._using)
        except DatabaseError as error:
            # Each is loaded when its turn comes. The connection is the claim loop's to look after.
            logger.warning("contents not loaded ahead error=%s", clean_error(error))
            return
        for lease in leases:
            if lease.id in found:
                lease.content[_DOCUMENT] = found[lease.id]

    def announce(self, settled: engine.Settled, status: str) -> engine.NewRow:
        """Return the event that says that an email is dead or failed. It holds nothing of what the email says."""
        lease = settled.lease
        payload = {
            "queue": lease.queue.name,
            "id": str(lease.id),
            "status": status,
            "kind": settled.columns.get("failure_kind", ""),
            "code": settled.columns.get("last_code", ""),
            "attempts": lease.attempts,
            "error": settled.error,
            "recipient": lease.content["recipient"],
            "message_id": lease.content["message_id"],
            "idempotency_key": lease.content["idempotency_key"] or "",
        }
        return engine.NewRow(
            id=engine.new_id(),
            type=self.queue.announcement,
            payload=json.dumps(payload, ensure_ascii=False),
            deliveries=self._owed_to(self.queue.announcement),
            organization_id=lease.content["organization_id"],
            request_id=lease.content["request_id"],
            causation_id=lease.id,
            quiet=True,
        )

    def goes_along(self, settled: engine.Settled) -> bool:
        """Return whether a follow-up may be queued or a content be removed; for most emails neither."""
        return bool(settled.lease.content["sensitive"] or settled.columns.get("refused"))

    def along(self, written: Sequence[tuple[engine.Settled, str]], *, using: str) -> None:
        """Queue the follow-ups of partly refused emails, and remove what final sensitive ones say."""
        for settled, status in written:
            again = [
                address
                for address, said in (settled.columns.get("refused") or {}).items()
                if status == "done" and said.startswith("4")
            ]
            if again:
                delay = self.settings().retry_base_seconds
                store.insert_follow_up(settled.lease, again, delay=delay, using=using)
        sensitive = [settled.lease.id for settled, _ in written if settled.lease.content["sensitive"]]
        if sensitive:
            store.wipe_final(sensitive, using=using)

    def purge(self, *, using: str, limit: int) -> int:
        """Delete sent emails past their retention, with what they say; and attachments that nothing needs."""
        gone = super().purge(using=using, limit=limit)
        self._sweep_after, _ = store.sweep_blobs(self._sweep_after, using=using)
        return gone
