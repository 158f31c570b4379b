"""Deliver: take one leased delivery to its endpoint, take turns between endpoints, and keep their health."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Final
from urllib.parse import urlsplit
from uuid import UUID

from django_outbox import lease as engine
from django_outbox import wake
from django_outbox.conf import WebhookSettings, get_settings
from django_outbox.delivery import LeaseLost, Result, SingleRun, Work
from django_outbox.errors import InvalidSettings, UnsafeURL, clean_error, clean_text
from django_outbox.webhooks import store
from django_outbox.webhooks.box import custom_headers, secrets_in_force
from django_outbox.webhooks.guard import LOOKUP_SECONDS, LookupFailed, judged_url, look_up, shown_url
from django_outbox.webhooks.health import End, Notice, after, retry_after_seconds
from django_outbox.webhooks.signing import sign
from django_outbox.webhooks.transport import Answer, send
from django_outbox.webhooks.turns import Turns, endpoint_of

logger = logging.getLogger("django_outbox.webhooks")

USER_AGENT: Final = "django-outbox/0.1.0"
STEP_MARGIN_SECONDS: Final = 10.0
"""What a step may take beside them; the transport's own deadline comes first."""

LOOKUP_FOR_SECONDS: Final = 6 * 3_600.0
"""Age up to which a name that cannot be looked up costs its deliveries nothing."""


READS_LIMIT: Final = 3
"""How often a delivery reads an endpoint that is changed under its hands; then its lease must be gone."""


@lru_cache(maxsize=1_024)
def _destination(url: str, settings: WebhookSettings) -> tuple[str, str, int]:
    """Return the URL rebuilt, its host and its port; what is refused is judged anew each time."""
    rebuilt = judged_url(url, settings)
    parts = urlsplit(rebuilt)
    return rebuilt, str(parts.hostname), parts.port or {"http": 80, "https": 443}[parts.scheme]


@dataclass(frozen=True, slots=True)
class WebhookResult(Result):
    """How a delivery ended, with what that says of its endpoint and its attempt."""

    end: End | None = None
    attempt: store.AttemptEnd | None = None


def _over(reason: str, error: str) -> WebhookResult:
    """Return the result of a delivery that waits for an operator."""
    return WebhookResult(error, outcome=engine.Dead(), columns={"reason": reason})


class WebhookRun(SingleRun):
    """One leased delivery on its way."""

    def __init__(self, lease: engine.Lease, *, using: str, work: WebhookWork, probe: bool) -> None:
        super().__init__(lease, using=using, name="webhook")
        self._work = work
        self._probe = probe
        self._settings = work.settings()
        self._target: store.Target | None = None
        self._endpoint_id = endpoint_of(lease)
        # One time limit for the step, beyond those of its parts, so that theirs are what is met.
        self.timeout = LOOKUP_SECONDS + self._settings.timeout_seconds + STEP_MARGIN_SECONDS

    def refused(self) -> Result | None:
        """Return how the delivery ends if nothing is to be sent; a pause spends no attempt."""
        # As the claim saw it a moment ago; before the request, the attempt's row is only
        # written if that still holds.
        self._target = self._work.turns.seen(self._endpoint_id) or store.target(self._endpoint_id, using=self.using)
        return self._refusal(self._target)

    def _refusal(self, target: store.Target | None) -> Result | None:
        if target is None:
            return _over(store.ENDPOINT_MISSING, "the endpoint does not exist any more")
        if not target.enabled:
            return _over(store.ENDPOINT_DISABLED, "the endpoint is disabled")
        paused = target.wait_seconds > 0 or target.half_open or self._work.turns.on_hold(self._endpoint_id)
        left = self.lease.deadline - time.monotonic()
        if (paused and not self._probe) or left < LOOKUP_SECONDS + self._settings.timeout_seconds:
            return Result(outcome=engine.Released())
        return None

    def perform(self, *, timeout: float) -> Result:  # noqa: ARG002  the parts have limits of their own
        """Look up, judge, sign and send; the attempt is written and committed before anything is sent."""
        for _ in range(READS_LIMIT):
            # In the child process of a marked row, nobody read it before.
            target = self._target or store.target(self._endpoint_id, using=self.using)
            self._target = None
            result = self._refusal(target) or (self._try(target) if target is not None else None)
            if result is not None:
                return result
        raise LeaseLost

    def _try(self, target: store.Target) -> Result | None:
        """Send to the endpoint as it was read; ``None``, nothing sent: it, or the lease, is not that any more."""
        settings = self._settings
        try:
            # Judged again: the settings, or the rule, may be others than when it was saved.
            url, host, port = _destination(target.url, settings)
            addresses = look_up(host, port, settings)
        except UnsafeURL as error:
            return _over(error.code, clean_error(str(error)))
        except LookupFailed as error:
            return self._not_found(error)
        self._work.turns.found(self._endpoint_id)
        try:
            # Until when a secret is in force was written by the database's clock.
            secrets = secrets_in_force(target.sealed_secrets, now=self.lease.clock.now())
            custom = custom_headers(target.sealed_headers)
        except InvalidSettings as error:
            logger.error("webhook cannot be signed endpoint=%s error=%s", self._endpoint_id, clean_error(error))
            return WebhookResult(clean_error(error), columns={"reason": "misconfigured"})
        attempt_id = store.open_attempt(self.lease, target, probe=self._probe, using=self.using)
        if attempt_id is None:
            return None
        body = str(self.lease.content["body"]).encode()
        answer = send(
            url,
            addresses=addresses,
            headers={**custom, **self._headers(secrets, body)},
            body=body,
            timeout_seconds=settings.timeout_seconds,
            ca_bundle=settings.ca_bundle,
        )
        return self._verdict(attempt_id, answer, [*secrets, *custom.values(), *_private_parts(url)])

    def _headers(self, secrets: Sequence[str], body: bytes) -> dict[str, str]:
        webhook_id = str(_as_uuid(self.lease.content["event_id"]))
        # A receiver compares it with its own clock, so it is this computer's and not the database's.
        timestamp = int(time.time())
        return {
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",
            "Connection": "close",
            "User-Agent": USER_AGENT,
            "webhook-id": webhook_id,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": " ".join(sign(secret, webhook_id, timestamp, body) for secret in secrets),
            "X-Outbox-Delivery": self.lease.text,
            "X-Outbox-Attempt": str(self.lease.attempts),
        }

    def _not_found(self, error: LookupFailed) -> Result:
        """Park the delivery, since no request was made and no attempt is spent; up to a bound, then it has failed."""
        self._work.turns.not_found(self._endpoint_id)
        outcome = engine.Park(spent=False) if self.lease.age_now < LOOKUP_FOR_SECONDS else None
        return WebhookResult(clean_error(str(error)), outcome=outcome, columns={"reason": "lookup_failed"})

    def _verdict(self, attempt_id: UUID, answer: Answer, confidential: Sequence[str]) -> Result:
        """Return what an answer, or the want of one, means for delivery, attempt and endpoint."""
        status = answer.status
        ok = status is not None and 200 <= status < 300
        reason = "" if ok else answer.code or f"http_{status}"
        error = "" if ok else clean_error(_hidden(_words(answer), confidential))
        pause = None if ok else retry_after_seconds(answer.retry_after, now=time.time())
        gone = status == 410
        end = End(
            ok=ok,
            broken=not ok and (bool(answer.code) or status == 429 or (status or 0) >= 500),
            gone=gone,
            probe=self._probe,
            seconds=answer.seconds,
            pause_seconds=pause,
            error=error,
        )
        attempt = store.AttemptEnd(
            id=attempt_id,
            reason=reason or "delivered",
            http_status=status,
            duration_ms=round(answer.seconds * 1_000),
            error=error,
            # Patterns would find more, but take a quarter of a second for a body made to hurt them.
            response=clean_text(_hidden(answer.body.decode("utf-8", "replace"), confidential)),
            address=answer.address,
        )
        outcome: engine.Outcome | None = None
        if gone:
            outcome, reason = engine.Dead(), store.ENDPOINT_GONE
        return WebhookResult(
            error,
            rejected=status in self._settings.permanent_statuses,
            delay=pause,
            outcome=outcome,
            columns={"reason": reason, "last_status": status},
            end=end,
            attempt=attempt,
        )

    def settled(self) -> engine.Settled:
        """Return how it ended, and have the settle write what that means for endpoint and attempt."""
        if isinstance(self._result, WebhookResult) and self._result.attempt is not None:
            self._work.note(self.lease, self._result)
        return super().settled()


def _words(answer: Answer) -> str:
    if answer.error:
        return answer.error
    words = f"HTTP {answer.status}"
    if answer.location:
        words += f", a redirect to {shown_url(answer.location)}, which is not followed"
    return words


def _hidden(text: str, confidential: Sequence[str]) -> str:
    """Return a text without our secrets, should a server send them back."""
    for value in confidential:
        for part in (value, *value.split(None, 1)):
            if len(part) >= 4:
                text = text.replace(part, "[hidden]")
    return text


def _private_parts(url: str) -> list[str]:
    """Return what a URL holds beside its host, which for many receivers is the password."""
    parts = urlsplit(url)
    # A plain word is none, and stands in many an answer.
    words = [each for each in parts.path.split("/") if len(each) > 4 and not (each.isalpha() and each.islower())]
    return [url, parts.query, *words]


def _as_uuid(value: Any) -> UUID:
    return value if isinstance(value, UUID) else UUID(value)


class WebhookWork(Work):
    """
    The webhook queue, as the relay sees it. Its endpoints take turns; see `turns`.

    ``owed_to`` says to which handlers an event of a type is owed, as `OutboxEvent`
    stores it.
    """

    queue: ClassVar[engine.Queue] = store.DELIVERIES
    # Enough for the threads to be busy while the next are claimed; what waits, waits under a lease.
    prefetch_seconds: ClassVar[float] = 0.2
    look_when_landed: ClassVar[bool] = True
    asks_database: ClassVar[bool] = False

    def __init__(self, *, owed_to: Callable[[str], str]) -> None:
        self.turns = Turns()
        self._owed_to = owed_to
        self._lock = threading.Lock()
        self._results: dict[engine.Lease, WebhookResult] = {}

    def settings(self) -> WebhookSettings:
        """Return the settings in force."""
        return get_settings().webhooks

    def start(self, lease: engine.Lease, *, using: str) -> WebhookRun:
        """Return the run of a delivery."""
        return WebhookRun(lease, using=using, work=self, probe=self.turns.is_probe(lease))

    def scopes(self, room: int, *, using: str) -> Iterable[tuple[Mapping[str, Any], int]]:
        """Return the endpoints whose turn it is."""
        settings = self.settings()
        return self.turns.scopes(room, settings, threads=self.threads or settings.concurrency, using=using)

    def next_due_seconds(self, *, using: str) -> float | None:  # noqa: ARG002
        """Return the seconds until an endpoint that was passed over may be served."""
        return self.turns.next_seconds()

    def claimed(self, leases: Sequence[engine.Lease]) -> None:
        """Count rows under way at their endpoints."""
        self.turns.claimed(leases)

    def landed(self, leases: Sequence[engine.Lease]) -> None:
        """Count them no longer."""
        self.turns.landed(leases)
        with self._lock:
            for lease in leases:
                self._results.pop(lease, None)

    # --- what a settle writes along

    def note(self, lease: engine.Lease, result: WebhookResult) -> None:
        """Keep what a delivery's end means until its settle writes it."""
        with self._lock:
            self._results[lease] = result

    def along(self, written: Sequence[tuple[engine.Settled, str]], *, using: str) -> None:
        """
        Finish the attempts, and write what became of the endpoints, in the transaction of a settle that wrote.

        Whoever dies before it commits leaves the deliveries leased and the attempts with
        an unknown end; whoever lost the lease changes neither counters nor breaker.
        """
        with self._lock:
            results = [(settled, status, self._results.get(settled.lease)) for settled, status in written]
        store.close_attempts([result.attempt for *_, result in results if result and result.attempt], using=using)
        ends: dict[UUID, list[End]] = {}
        for settled, status, result in results:
            if result is not None and result.end is not None:
                exhausted = (
                    status == "dead" and not settled.lease.was_dead and isinstance(settled.outcome, engine.Retry)
                )
                endpoint_id = endpoint_of(settled.lease)
                ends.setdefault(endpoint_id, []).append(replace(result.end, exhausted=exhausted))
        if ends:
            self._keep_health(ends, using)

    def _keep_health(self, ends: Mapping[UUID, Iterable[End]], using: str) -> None:
        patients, now = store.lock_health(sorted(ends), using=using)
        limit = self.settings().disable_after_seconds
        rows: list[engine.NewRow] = []
        healths = {}
        for id_, patient in patients.items():
            healths[id_], notices = after(patient.health, ends[id_], now=now, disable_after_seconds=limit)
            rows += [self._notice(kind, id_, patient, healths[id_].disabled_reason) for kind in notices]
        store.write_health(healths, using=using)
        if rows:
            engine.insert_events(rows, using=using)
            wake.notify_on_commit(using)

    def _notice(self, kind: Notice, endpoint_id: UUID, patient: store.Patient, reason: str) -> engine.NewRow:
        logger.warning("webhook endpoint is %s endpoint=%s reason=%s", kind, endpoint_id, reason)
        health = patient.health
        return self._event(
            f"webhook.endpoint.{kind}",
            {
                "endpoint_id": str(endpoint_id),
                "url": shown_url(patient.url),
                "organization_id": patient.organization_id,
                "reason": reason,
                "failures": health.failures + 1,
                "error": health.last_error,
            },
            organization_id=patient.organization_id,
        )

    def announce(self, settled: engine.Settled, status: str) -> engine.NewRow | None:
        """Return the event that says that a delivery is dead or refused; its endpoint's end speaks for itself."""
        reason = settled.columns.get("reason", "")
        if reason in store.UNWANTED:
            return None
        lease = settled.lease
        event_id = str(_as_uuid(lease.content["event_id"]))
        return self._event(
            self.queue.announcement,
            {
                "queue": self.queue.name,
                "id": lease.text,
                "event_id": event_id,
                "event_type": lease.content["event_type"],
                "endpoint_id": str(endpoint_of(lease)),
                "status": status,
                "reason": reason,
                "attempts": lease.attempts,
                "error": settled.error,
            },
            organization_id=lease.content["organization_id"],
            causation_id=UUID(event_id),
        )

    def _event(
        self, type_: str, payload: Mapping[str, Any], *, organization_id: str, causation_id: UUID | None = None
    ) -> engine.NewRow:
        return engine.NewRow(
            id=engine.new_id(),
            type=type_,
            payload=json.dumps(payload, ensure_ascii=False),
            deliveries=self._owed_to(type_),
            organization_id=organization_id,
            causation_id=causation_id,
            quiet=True,
        )

    def purge(self, *, using: str, limit: int) -> int:
        """Delete done deliveries past their retention, and those of missing and disabled endpoints after 30 days."""
        return super().purge(using=using, limit=limit) + store.purge_unwanted(using=using, limit=limit)
