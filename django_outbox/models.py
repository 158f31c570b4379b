"""
The tables. Constraints and indexes stand here, the statements that use them in ``lease``.

No queue refers to another by foreign key: ids are copied, so purging one table
never touches another.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar
from zoneinfo import ZoneInfo

from django.conf import settings
from django.core.serializers.json import DjangoJSONEncoder
from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import F, Func, Q, TextField, Value
from django.db.models.lookups import Exact
from django.utils import timezone

__all__ = [
    "AuditEntry",
    "AuditHead",
    "EmailPriority",
    "JSONTypeOf",
    "Leasable",
    "Notification",
    "OperatorAlert",
    "OutboxEmail",
    "OutboxEmailAttachment",
    "OutboxEmailBlob",
    "OutboxEmailContent",
    "OutboxEvent",
    "OutboxTask",
    "Status",
    "UTCDateTimeField",
    "WebhookAttempt",
    "WebhookDelivery",
    "WebhookEndpoint",
]


class Status(models.TextChoices):
    """Where a row stands. The values stand literally in the index predicates and in ``lease``."""

    PENDING = "pending", "pending"
    WAITING = "waiting", "waiting"
    DONE = "done", "done"
    DEAD = "dead", "dead"
    FAILED = "failed", "failed"


if TYPE_CHECKING:
    _DateTimeField = models.DateTimeField[Any, Any]
else:
    _DateTimeField = models.DateTimeField


class UTCDateTimeField(_DateTimeField):
    """
    A moment, read as an aware UTC datetime whatever USE_TZ and TIME_ZONE say.

    The engine writes these columns with the database's clock, in UTC. Django's own
    field would read them in the connection's zone, or as naive local time.
    """

    def from_db_value(
        self,
        value: datetime | None,
        expression: object,  # noqa: ARG002  Django's signature
        connection: BaseDatabaseWrapper,
    ) -> datetime | None:
        """Return the moment in UTC."""
        if value is None:
            return None
        if connection.vendor == "sqlite":
            return value.replace(tzinfo=UTC)
        if timezone.is_naive(value):
            value = value.replace(tzinfo=ZoneInfo(connection.timezone_name))
        return value.astimezone(UTC)

    def get_prep_value(self, value: Any) -> Any:
        """Return the moment in UTC; a naive one is taken in the project's time zone."""
        value = self.to_python(value)
        if isinstance(value, datetime):
            if timezone.is_naive(value):
                value = value.replace(tzinfo=ZoneInfo(settings.TIME_ZONE or "UTC"))
            return value.astimezone(UTC)
        return value

    def get_db_prep_value(
        self,
        value: Any,
        connection: BaseDatabaseWrapper,
        prepared: bool = False,  # noqa: FBT001, FBT002  Django's signature
    ) -> Any:
        """Return what the driver stores: text without an offset on SQLite, an aware datetime elsewhere."""
        if not prepared:
            value = self.get_prep_value(value)
        if isinstance(value, datetime) and connection.vendor == "sqlite":
            return str(value.replace(tzinfo=None))
        return value


class JSONTypeOf(Func):
    """The JSON type of a column's value, by the database's own word for it."""

    function = "JSONB_TYPEOF"
    output_field = TextField()

    def as_sqlite(self, compiler: Any, connection: BaseDatabaseWrapper, **context: Any) -> tuple[str, Any]:
        """Use SQLite's name of the function."""
        return self.as_sql(compiler, connection, function="JSON_TYPE", **context)


def is_json_object(field: str) -> Exact:
    """Return the condition that a JSON column holds an object."""
    return Exact(JSONTypeOf(F(field)), Value("object"))


class Leasable(models.Model):
    """
    What every queue's row shares: a status, a schedule and a lease.

    ``lease_until`` and ``leased_by`` are in no index and in no index predicate: a
    claim changes them and the counters alone, which PostgreSQL can then do as a
    HOT update, without touching an index.
    """

    id = models.UUIDField(primary_key=True, editable=False)
    status = models.CharField(max_length=16, choices=Status.choices, db_default=Status.PENDING.value)
    attempts = models.IntegerField(db_default=0, help_text="+1 at claim; given back at release.")
    fence = models.BigIntegerField(db_default=0, help_text="+1 at every claim, never reset.")
    due_at = UTCDateTimeField(null=True, blank=True)
    lease_until = UTCDateTimeField(null=True, blank=True)
    leased_by = models.CharField(max_length=128, blank=True, db_default="")
    lost_leases = models.IntegerField(
        db_default=0, help_text="Starts that ended with the death of their process, in a row."
    )
    not_before = UTCDateTimeField(null=True, blank=True)
    quiet = models.BooleanField(db_default=False, help_text="Its death is not announced.")
    last_error = models.TextField(blank=True, db_default="")
    created_at = UTCDateTimeField()
    finished_at = UTCDateTimeField(null=True, blank=True)
    dead_at = UTCDateTimeField(null=True, blank=True)

    class Meta:
        abstract = True
        constraints: ClassVar[tuple[models.BaseConstraint, ...]] = (
            models.CheckConstraint(
                condition=Q(status__in=["pending", "waiting", "done", "dead", "failed"]),
                name="%(app_label)s_%(class)s_status",
            ),
            models.CheckConstraint(
                condition=Q(status="dead")
                | Q(status="waiting", due_at__isnull=False)
                | Q(status__in=["pending", "done", "failed"], due_at__isnull=True),
                name="%(app_label)s_%(class)s_due",
            ),
            models.CheckConstraint(
                condition=~Q(status__in=["done", "failed"]) | Q(leased_by="", lease_until__isnull=True),
                name="%(app_label)s_%(class)s_finished",
            ),
            models.CheckConstraint(
                condition=Q(attempts__gte=0, fence__gte=0, lost_leases__gte=0),
                name="%(app_label)s_%(class)s_counters",
            ),
        )

    def __str__(self) -> str:
        return str(self.pk)


class OutboxEvent(Leasable):
    """One event, and which of its handlers it is still owed to."""

    type = models.CharField(max_length=128)
    payload = models.JSONField(encoder=DjangoJSONEncoder)
    occurred_at = UTCDateTimeField()
    aggregate_type = models.CharField(max_length=128, blank=True, db_default="")
    aggregate_id = models.CharField(max_length=255, blank=True, db_default="")
    organization_id = models.CharField(max_length=255, blank=True, db_default="")
    request_id = models.CharField(max_length=255, blank=True, db_default="")
    causation_id = models.UUIDField(null=True, blank=True)
    headers = models.JSONField(default=dict, encoder=DjangoJSONEncoder)
    deliveries = models.JSONField(default=dict, help_text="Handler name → delivery time, null while owed.")
    failures = models.JSONField(default=dict, help_text="Handler name → its last error and how it ended.")

    class Meta(Leasable.Meta):
        db_table = "django_outbox_event"
        verbose_name = "event"
        verbose_name_plural = "events"
        default_permissions = ("view",)
        permissions = (
            ("retry_outboxevent", "Can retry events"),
            ("discard_outboxevent", "Can discard events"),
        )
        constraints = (
            *Leasable.Meta.constraints,
            models.CheckConstraint(condition=is_json_object("headers"), name="django_outbox_event_headers_object"),
            models.CheckConstraint(
                condition=is_json_object("deliveries"), name="django_outbox_event_deliveries_object"
            ),
            models.CheckConstraint(condition=is_json_object("failures"), name="django_outbox_event_failures_object"),
        )
        indexes = (
            # The three scans of a claim. Each predicate is a literal status, so that
            # neither finished rows nor those of another scan are ever walked.
            models.Index(fields=["created_at", "id"], name="outbox_event_pending", condition=Q(status="pending")),
            models.Index(fields=["due_at", "id"], name="outbox_event_waiting", condition=Q(status="waiting")),
            models.Index(
                fields=["due_at", "id"], name="outbox_event_replay", condition=Q(status="dead", due_at__isnull=False)
            ),
            # What operators look at, newest first.
            models.Index(fields=["dead_at", "id"], name="outbox_event_dead", condition=Q(status="dead")),
            models.Index(fields=["finished_at", "id"], name="outbox_event_failed", condition=Q(status="failed")),
            # Retention.
            models.Index(fields=["finished_at", "id"], name="outbox_event_done", condition=Q(status="done")),
            # "What happened to order 123?" Events without an aggregate pay nothing for it.
            models.Index(
                fields=["aggregate_type", "aggregate_id", "id"],
                name="outbox_event_aggregate",
                condition=~Q(aggregate_id=""),
            ),
        )

    def __str__(self) -> str:
        return f"{self.type} {self.pk}"


class EmailPriority(models.IntegerChoices):
    """The lanes of the email queue, in the order in which they are looked at."""

    URGENT = 0, "urgent"
    NORMAL = 1, "normal"
    BULK = 2, "bulk"


class OutboxEmail(Leasable):
    """One email on its way; what it says is in `OutboxEmailContent`."""

    priority = models.SmallIntegerField(choices=EmailPriority.choices, db_default=EmailPriority.NORMAL.value)
    backend_alias = models.CharField(max_length=64, db_default="default", help_text="What it is delivered with.")
    subject = models.CharField(max_length=255, blank=True, db_default="", help_text="A copy; none if sensitive.")
    recipient = models.CharField(max_length=320, blank=True, db_default="", help_text="The first one.")
    message_id = models.CharField(max_length=255, help_text="The same at every attempt.")
    provider_message_id = models.CharField(max_length=255, blank=True, db_default="")
    idempotency_key = models.CharField(max_length=255, null=True, blank=True, unique=True)
    expires_at = UTCDateTimeField(null=True, blank=True)
    sensitive = models.BooleanField(db_default=False, help_text="Its content goes once it is sent or given up.")
    wiped = models.BooleanField(db_default=False, help_text="Its content is gone; it cannot be sent again.")
    maybe_sent = models.BooleanField(db_default=False, help_text="A failed attempt may have reached its recipients.")
    failure_kind = models.CharField(max_length=32, blank=True, db_default="")
    last_code = models.CharField(max_length=16, blank=True, db_default="", help_text="Of the server's last refusal.")
    refused = models.JSONField(default=dict, help_text="Recipient → what the server said of it.")
    organization_id = models.CharField(max_length=255, blank=True, db_default="")
    request_id = models.CharField(max_length=255, blank=True, db_default="")
    causation_id = models.UUIDField(null=True, blank=True)

    class Meta(Leasable.Meta):
        db_table = "django_outbox_email"
        verbose_name = "email"
        verbose_name_plural = "emails"
        default_permissions = ("view",)
        permissions = (
            ("retry_outboxemail", "Can retry emails"),
            ("discard_outboxemail", "Can discard emails"),
            ("read_outboxemail", "Can read what emails say"),
        )
        constraints = (
            *Leasable.Meta.constraints,
            models.CheckConstraint(condition=is_json_object("refused"), name="django_outbox_email_refused_object"),
        )
        indexes = (
            # A claim takes one lane of one backend, so that a paused backend costs the others nothing.
            models.Index(
                fields=["priority", "backend_alias", "created_at", "id"],
                name="outbox_email_lane_pending",
                condition=Q(status="pending"),
            ),
            models.Index(
                fields=["priority", "backend_alias", "due_at", "id"],
                name="outbox_email_lane_waiting",
                condition=Q(status="waiting"),
            ),
            models.Index(
                fields=["priority", "backend_alias", "due_at", "id"],
                name="outbox_email_lane_replay",
                condition=Q(status="dead", due_at__isnull=False),
            ),
            # Across the lanes: when something falls due next, how old the oldest is, what operators look at.
            models.Index(fields=["created_at", "id"], name="outbox_email_pending", condition=Q(status="pending")),
            models.Index(fields=["due_at", "id"], name="outbox_email_waiting", condition=Q(status="waiting")),
            models.Index(
                fields=["due_at", "id"], name="outbox_email_replay", condition=Q(status="dead", due_at__isnull=False)
            ),
            models.Index(fields=["dead_at", "id"], name="outbox_email_dead", condition=Q(status="dead")),
            models.Index(fields=["finished_at", "id"], name="outbox_email_failed", condition=Q(status="failed")),
            models.Index(fields=["finished_at", "id"], name="outbox_email_done", condition=Q(status="done")),
            # "Did it reach her?", and what a bounce is about.
            models.Index(fields=["recipient", "id"], name="outbox_email_recipient"),
            models.Index(fields=["message_id", "id"], name="outbox_email_message_id"),
            models.Index(
                fields=["provider_message_id", "id"], name="outbox_email_provider", condition=~Q(provider_message_id="")
            ),
        )

    def __str__(self) -> str:
        return f"{self.message_id} to {self.recipient}"


class OutboxEmailContent(models.Model):
    """What an email says, apart from the row that claims and settles rewrite: JSON as `mail.codec` writes it."""

    email_id = models.UUIDField(primary_key=True, editable=False)
    document = models.TextField()

    class Meta:
        db_table = "django_outbox_email_content"
        default_permissions = ()

    def __str__(self) -> str:
        return str(self.pk)


class OutboxEmailBlob(models.Model):
    """The bytes of an attachment, which several emails may share. Never changed."""

    id = models.UUIDField(primary_key=True, editable=False)
    # Not unique: two transactions that store the same bytes must not wait for one another.
    sha256 = models.CharField(max_length=64)
    content = models.BinaryField()

    class Meta:
        db_table = "django_outbox_email_blob"
        default_permissions = ()
        indexes = (models.Index(fields=["sha256"], name="outbox_email_blob_sha256"),)

    def __str__(self) -> str:
        return self.sha256


class OutboxEmailAttachment(models.Model):
    """That an email needs a blob."""

    email_id = models.UUIDField()
    blob_id = models.UUIDField()

    class Meta:
        db_table = "django_outbox_email_attachment"
        default_permissions = ()
        constraints = (
            models.UniqueConstraint(fields=["email_id", "blob_id"], name="django_outbox_email_attachment_once"),
        )
        indexes = (models.Index(fields=["blob_id"], name="outbox_email_attachment_blob"),)

    def __str__(self) -> str:
        return f"{self.email_id} {self.blob_id}"


class OutboxTask(Leasable):
    """One call of a task, and how it ended."""

    task_path = models.CharField(max_length=255, help_text="Where the task is found, such as shop.tasks.send_invoice.")
    backend_alias = models.CharField(max_length=64, db_default="default", help_text="Its name in the setting TASKS.")
    queue_name = models.CharField(max_length=64, db_default="default")
    priority = models.SmallIntegerField(db_default=0, help_text="-100 to 100, larger first.")
    payload = models.JSONField(encoder=DjangoJSONEncoder, help_text="Its arguments: args and kwargs.")
    max_attempts = models.IntegerField(null=True, blank=True, help_text="Null: the queue's.")
    timeout_seconds = models.FloatField(null=True, blank=True, help_text="Null: the queue's.")
    waits = models.JSONField(null=True, blank=True, help_text="Seconds between attempts. Null: the queue's.")
    dedupe_key = models.CharField(max_length=255, blank=True, db_default="")
    return_value = models.JSONField(null=True, blank=True)
    errors = models.JSONField(default=list, help_text="What its latest failed attempts raised.")
    worker_ids = models.JSONField(default=list, help_text="The holder of every attempt that ended.")
    started_at = UTCDateTimeField(null=True, blank=True, help_text="Of its first attempt that ended.")
    last_attempted_at = UTCDateTimeField(null=True, blank=True)
    parked_at = UTCDateTimeField(null=True, blank=True, help_text="Since when no relay that had it knows the task.")
    organization_id = models.CharField(max_length=255, blank=True, db_default="")
    request_id = models.CharField(max_length=255, blank=True, db_default="")
    causation_id = models.UUIDField(null=True, blank=True)

    class Meta(Leasable.Meta):
        db_table = "django_outbox_task"
        verbose_name = "task"
        verbose_name_plural = "tasks"
        default_permissions = ("view",)
        permissions = (
            ("retry_outboxtask", "Can retry tasks"),
            ("discard_outboxtask", "Can discard tasks"),
            ("read_outboxtask", "Can read tasks' arguments and results"),
        )
        constraints = (
            *Leasable.Meta.constraints,
            models.CheckConstraint(condition=is_json_object("payload"), name="django_outbox_task_payload_object"),
            # A key is held by the row that may still run. A dead one holds nothing, and no claim touches this.
            models.UniqueConstraint(
                fields=["task_path", "dedupe_key"],
                name="django_outbox_task_dedupe",
                condition=Q(status__in=["pending", "waiting"]) & ~Q(dedupe_key=""),
            ),
        )
        indexes = (
            # A claim takes one priority of one queue name, so that a flood of another costs it nothing.
            models.Index(
                fields=["queue_name", "priority", "created_at", "id"],
                name="outbox_task_lane_pending",
                condition=Q(status="pending"),
            ),
            models.Index(
                fields=["queue_name", "priority", "due_at", "id"],
                name="outbox_task_lane_waiting",
                condition=Q(status="waiting"),
            ),
            models.Index(
                fields=["queue_name", "priority", "due_at", "id"],
                name="outbox_task_lane_replay",
                condition=Q(status="dead", due_at__isnull=False),
            ),
            # Across the lanes: how old the oldest is, what operators look at, retention.
            models.Index(fields=["created_at", "id"], name="outbox_task_pending", condition=Q(status="pending")),
            models.Index(fields=["due_at", "id"], name="outbox_task_waiting", condition=Q(status="waiting")),
            models.Index(fields=["dead_at", "id"], name="outbox_task_dead", condition=Q(status="dead")),
            models.Index(fields=["finished_at", "id"], name="outbox_task_failed", condition=Q(status="failed")),
            models.Index(fields=["finished_at", "id"], name="outbox_task_done", condition=Q(status="done")),
        )

    def __str__(self) -> str:
        return f"{self.task_path} {self.pk}"


class WebhookEndpoint(models.Model):
    """
    Where a customer wants events sent, and how it has been going.

    What comes after ``created_at`` is written by deliveries, in the transaction that
    settles them; and by the verbs in ``webhooks``.
    """

    id = models.UUIDField(primary_key=True, editable=False)
    url = models.CharField("URL", max_length=2048)
    description = models.CharField(max_length=255, blank=True, db_default="")
    organization_id = models.CharField(
        max_length=255,
        blank=True,
        db_default="",
        help_text="It gets the events of this organization; without one, all.",
    )
    event_types = models.JSONField(default=list, help_text='Types, prefixes such as "order.*", or "*".')
    enabled = models.BooleanField(db_default=True)
    sealed_secrets = models.TextField(editable=False, help_text="Signing secrets, encrypted.")
    sealed_headers = models.TextField(editable=False, blank=True, db_default="", help_text="Custom headers, encrypted.")
    created_at = UTCDateTimeField(editable=False)
    rotated_at = UTCDateTimeField(null=True, blank=True, editable=False)
    disabled_at = UTCDateTimeField(null=True, blank=True, editable=False)
    disabled_reason = models.CharField(max_length=32, blank=True, db_default="", editable=False)
    paused_until = UTCDateTimeField(null=True, blank=True, help_text="Nothing is sent before.")
    open_until = UTCDateTimeField(null=True, blank=True, editable=False, help_text="The breaker lets nothing through.")
    open_seconds = models.IntegerField(db_default=0, editable=False, help_text="0 while the breaker is closed.")
    streak = models.IntegerField(db_default=0, editable=False, help_text="Failures of the server in a row.")
    failures = models.IntegerField(db_default=0, editable=False, help_text="Failed attempts since the last success.")
    exhausted = models.IntegerField(db_default=0, editable=False, help_text="Dead deliveries since the last success.")
    failing_since = UTCDateTimeField(null=True, blank=True, editable=False)
    warned_at = UTCDateTimeField(null=True, blank=True, editable=False)
    mean_seconds = models.FloatField(db_default=0.0, editable=False, help_text="Moving mean of a request's duration.")
    delivered_total = models.BigIntegerField(db_default=0, editable=False)
    failed_total = models.BigIntegerField(db_default=0, editable=False)
    last_success_at = UTCDateTimeField(null=True, blank=True, editable=False)
    last_failure_at = UTCDateTimeField(null=True, blank=True, editable=False)
    last_error = models.TextField(blank=True, db_default="", editable=False)

    class Meta:
        db_table = "django_outbox_webhook_endpoint"
        verbose_name = "webhook endpoint"
        verbose_name_plural = "webhook endpoints"
        permissions = (("rotate_webhookendpoint", "Can make new secrets for webhook endpoints"),)
        constraints = (
            models.CheckConstraint(
                condition=Exact(JSONTypeOf(F("event_types")), Value("array")),
                name="django_outbox_endpoint_event_types_array",
            ),
            models.CheckConstraint(
                condition=Q(enabled=True, disabled_at__isnull=True) | Q(enabled=False, disabled_at__isnull=False),
                name="django_outbox_endpoint_disabled_since",
            ),
        )
        # The fan-out: an event's organization, and the endpoints that get all.
        indexes = (models.Index(fields=["organization_id", "id"], name="outbox_endpoint_org"),)

    def __str__(self) -> str:
        return self.description or str(self.pk)


class WebhookDelivery(Leasable):
    """One event on its way to one endpoint. ``body`` is what is signed and sent, as UTF-8, at every attempt."""

    event_id = models.UUIDField()
    endpoint_id = models.UUIDField()
    event_type = models.CharField(max_length=128)
    organization_id = models.CharField(max_length=255, blank=True, db_default="")
    body = models.TextField()
    reason = models.CharField(max_length=32, blank=True, db_default="", help_text="How the last attempt ended.")
    last_status = models.IntegerField(null=True, blank=True, help_text="Of the last answer.")

    class Meta(Leasable.Meta):
        db_table = "django_outbox_webhook_delivery"
        verbose_name = "webhook delivery"
        verbose_name_plural = "webhook deliveries"
        default_permissions = ("view",)
        permissions = (
            ("retry_webhookdelivery", "Can retry webhook deliveries"),
            ("discard_webhookdelivery", "Can discard webhook deliveries"),
        )
        constraints = (
            *Leasable.Meta.constraints,
            # What makes a redelivered event write nothing twice.
            models.UniqueConstraint(fields=["event_id", "endpoint_id"], name="django_outbox_delivery_once"),
        )
        indexes = (
            # A claim takes rows of one endpoint; which endpoints have some is found by jumping from one to the next.
            models.Index(
                fields=["endpoint_id", "created_at", "id"],
                name="outbox_delivery_ep_pending",
                condition=Q(status="pending"),
            ),
            models.Index(
                fields=["endpoint_id", "due_at", "id"], name="outbox_delivery_ep_waiting", condition=Q(status="waiting")
            ),
            models.Index(
                fields=["endpoint_id", "due_at", "id"],
                name="outbox_delivery_ep_replay",
                condition=Q(status="dead", due_at__isnull=False),
            ),
            # Across endpoints: when something falls due next, and what operators look at.
            models.Index(fields=["created_at", "id"], name="outbox_delivery_pending", condition=Q(status="pending")),
            models.Index(fields=["due_at", "id"], name="outbox_delivery_waiting", condition=Q(status="waiting")),
            models.Index(
                fields=["due_at", "id"], name="outbox_delivery_replay", condition=Q(status="dead", due_at__isnull=False)
            ),
            models.Index(fields=["dead_at", "id"], name="outbox_delivery_dead", condition=Q(status="dead")),
            models.Index(
                fields=["endpoint_id", "created_at", "id"], name="outbox_delivery_ep_dead", condition=Q(status="dead")
            ),
            models.Index(fields=["finished_at", "id"], name="outbox_delivery_failed", condition=Q(status="failed")),
            # Retention.
            models.Index(fields=["finished_at", "id"], name="outbox_delivery_done", condition=Q(status="done")),
            models.Index(
                fields=["dead_at", "id"],
                name="outbox_delivery_unwanted",
                condition=Q(status="dead", reason__in=["endpoint_disabled", "endpoint_gone", "endpoint_missing"]),
            ),
        )

    def __str__(self) -> str:
        return f"{self.event_type} {self.event_id}"


class WebhookAttempt(models.Model):
    """
    One request that was made: written before it, finished with the delivery's settle.

    One that was never finished has an unknown end: its process died, or lost its lease.
    """

    id = models.UUIDField(primary_key=True, editable=False)
    delivery_id = models.UUIDField()
    number = models.IntegerField(help_text="Of the delivery's attempts in this life.")
    fence = models.BigIntegerField()
    address = models.CharField(max_length=64, blank=True, db_default="")
    started_at = UTCDateTimeField()
    finished_at = UTCDateTimeField(null=True, blank=True)
    reason = models.CharField(max_length=32, blank=True, db_default="")
    http_status = models.IntegerField("HTTP status", null=True, blank=True)
    duration_ms = models.IntegerField(null=True, blank=True)
    error = models.TextField(blank=True, db_default="")
    response = models.TextField(blank=True, db_default="", help_text="The first of the answer, for operators only.")

    class Meta:
        db_table = "django_outbox_webhook_attempt"
        verbose_name = "webhook attempt"
        verbose_name_plural = "webhook attempts"
        default_permissions = ("view",)
        indexes = (models.Index(fields=["delivery_id", "id"], name="outbox_attempt_delivery"),)

    def __str__(self) -> str:
        return f"attempt {self.number} of {self.delivery_id}"


# --- what the built-in handlers write --------------------------------------------------------------------------------


class AuditEntry(models.Model):
    """
    One event in the audit log. Appended by ``django_outbox.audit``, never changed.

    ``content`` is the text that is hashed, byte for byte; the columns before it repeat
    parts of it, to search by, and ``outbox_verify_audit`` compares them.
    """

    id = models.UUIDField(primary_key=True, editable=False, help_text="The event's id: it is entered once.")
    position = models.BigIntegerField(unique=True, help_text="Its place in the chain, from 1, without a gap.")
    type = models.CharField(max_length=128)
    aggregate_type = models.CharField(max_length=128, blank=True, db_default="")
    aggregate_id = models.CharField(max_length=255, blank=True, db_default="")
    organization_id = models.CharField(max_length=255, blank=True, db_default="")
    recorded_at = UTCDateTimeField()
    content = models.TextField(help_text="The event as canonical JSON.")
    previous_hash = models.CharField(max_length=64)
    hash = models.CharField(max_length=64, help_text="SHA-256 of the previous hash, a line feed and the content.")

    class Meta:
        db_table = "django_outbox_audit_entry"
        verbose_name = "audit entry"
        verbose_name_plural = "audit entries"
        default_permissions = ("view",)
        indexes = (
            # "What happened to user 7?", in the order of the chain.
            models.Index(
                fields=["aggregate_type", "aggregate_id", "position"],
                name="outbox_audit_aggregate",
                condition=~Q(aggregate_id=""),
            ),
            models.Index(
                fields=["organization_id", "position"],
                name="outbox_audit_organization",
                condition=~Q(organization_id=""),
            ),
        )

    def __str__(self) -> str:
        return f"{self.position}: {self.type}"


class AuditHead(models.Model):
    """The end of the audit chain: one row, whose lock is the right to append."""

    id = models.SmallIntegerField(primary_key=True)
    position = models.BigIntegerField(db_default=0)
    hash = models.CharField(max_length=64)

    class Meta:
        db_table = "django_outbox_audit_head"
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.position}:{self.hash}"


class Notification(models.Model):
    """What one recipient is told about one event. See ``django_outbox.notifications``."""

    id = models.UUIDField(primary_key=True, editable=False)
    recipient = models.CharField(max_length=255, help_text="Whom it is for, such as a user's key. No foreign key.")
    dedup_key = models.CharField(max_length=255, help_text="One per recipient; event:<id> by default.")
    title = models.CharField(max_length=255)
    body = models.TextField(blank=True, db_default="")
    url = models.CharField("URL", max_length=2048, blank=True, db_default="")
    data = models.JSONField(default=dict, encoder=DjangoJSONEncoder)
    event_id = models.UUIDField(null=True, blank=True)
    event_type = models.CharField(max_length=128, blank=True, db_default="")
    organization_id = models.CharField(max_length=255, blank=True, db_default="")
    created_at = UTCDateTimeField()
    read_at = UTCDateTimeField(null=True, blank=True)

    class Meta:
        db_table = "django_outbox_notification"
        default_permissions = ("view", "delete")
        constraints = (
            # What makes a redelivered event tell nobody twice.
            models.UniqueConstraint(fields=["recipient", "dedup_key"], name="django_outbox_notification_once"),
            models.CheckConstraint(condition=is_json_object("data"), name="django_outbox_notification_data_object"),
        )
        indexes = (
            # A recipient's list and its unread ones, newest first; ids sort by time.
            models.Index(fields=["recipient", "id"], name="outbox_notification_list"),
            models.Index(
                fields=["recipient", "id"], name="outbox_notification_unread", condition=Q(read_at__isnull=True)
            ),
            # Retention of what was read.
            models.Index(fields=["read_at", "id"], name="outbox_notification_read", condition=Q(read_at__isnull=False)),
        )

    def __str__(self) -> str:
        return f"{self.recipient}: {self.title}"


class OperatorAlert(models.Model):
    """One announcement that operators are told about, alone or in a summary. See ``django_outbox.alerts``."""

    id = models.UUIDField(primary_key=True, editable=False, help_text="The announcement's id: it is told once.")
    type = models.CharField(max_length=128)
    subject_id = models.CharField(max_length=255, blank=True, db_default="", help_text="The row it speaks of.")
    subject = models.CharField(max_length=255, blank=True, db_default="", help_text="What that row is.")
    error = models.CharField(max_length=500, blank=True, db_default="")
    slot = models.BigIntegerField(help_text="The window of time it came in: seconds since 1970 by the window's length.")
    created_at = UTCDateTimeField()
    told_at = UTCDateTimeField(null=True, blank=True)

    class Meta:
        db_table = "django_outbox_operator_alert"
        verbose_name = "operator alert"
        verbose_name_plural = "operator alerts"
        default_permissions = ("view",)
        indexes = (
            # Whether it has been quiet of late; retention.
            models.Index(fields=["created_at", "id"], name="outbox_alert_created"),
            # What the next summary is about.
            models.Index(fields=["created_at", "id"], name="outbox_alert_untold", condition=Q(told_at__isnull=True)),
        )

    def __str__(self) -> str:
        return f"{self.type} {self.subject_id}"
