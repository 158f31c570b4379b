from typing import Any

import django.db.models.lookups
from django.db import migrations, models

import django_outbox.models


def reserve_room_for_claims(apps: Any, schema_editor: Any) -> None:
    """Leave room in each page on PostgreSQL, as for events: claims, and an endpoint's counters, are HOT updates."""
    if schema_editor.connection.vendor == "postgresql":
        for model, fill in (("WebhookDelivery", 50), ("WebhookEndpoint", 20), ("WebhookAttempt", 70)):
            table = schema_editor.quote_name(apps.get_model("django_outbox", model)._meta.db_table)
            schema_editor.execute(
                f"ALTER TABLE {table} SET (fillfactor = {fill}, autovacuum_vacuum_scale_factor = 0.02,"
                " autovacuum_analyze_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0)"
            )


class Migration(migrations.Migration):
    dependencies = [
        ("django_outbox", "0002_email"),
    ]

    operations = [
        migrations.CreateModel(
            name="WebhookAttempt",
            fields=[
                ("id", models.UUIDField(editable=False, primary_key=True, serialize=False)),
                ("delivery_id", models.UUIDField()),
                ("number", models.IntegerField(help_text="Of the delivery's attempts in this life.")),
                ("fence", models.BigIntegerField()),
                ("address", models.CharField(blank=True, db_default="", max_length=64)),
                ("started_at", django_outbox.models.UTCDateTimeField()),
                ("finished_at", django_outbox.models.UTCDateTimeField(blank=True, null=True)),
                ("reason", models.CharField(blank=True, db_default="", max_length=32)),
                ("http_status", models.IntegerField(blank=True, null=True, verbose_name="HTTP status")),
                ("duration_ms", models.IntegerField(blank=True, null=True)),
                ("error", models.TextField(blank=True, db_default="")),
                (
                    "response",
                    models.TextField(
                        blank=True, db_default="", help_text="The first of the answer, for operators only."
                    ),
                ),
            ],
            options={
                "verbose_name": "webhook attempt",
                "verbose_name_plural": "webhook attempts",
                "db_table": "django_outbox_webhook_attempt",
                "default_permissions": ("view",),
                "indexes": [models.Index(fields=["delivery_id", "id"], name="outbox_attempt_delivery")],
            },
        ),
        migrations.CreateModel(
            name="WebhookDelivery",
            fields=[
                ("id", models.UUIDField(editable=False, primary_key=True, serialize=False)),
                (
                    "status",
                    models.CharField(
                        choices=[
                            ("pending", "pending"),
                            ("waiting", "waiting"),
                            ("done", "done"),
                            ("dead", "dead"),
                            ("failed", "failed"),
                        ],
                        db_default="pending",
                        max_length=16,
                    ),
                ),
                ("attempts", models.IntegerField(db_default=0, help_text="+1 at claim; given back at release.")),
                ("fence", models.BigIntegerField(db_default=0, help_text="+1 at every claim, never reset.")),
                ("due_at", django_outbox.models.UTCDateTimeField(blank=True, null=True)),
                ("lease_until", django_outbox.models.UTCDateTimeField(blank=True, null=True)),
                ("leased_by", models.CharField(blank=True, db_default="", max_length=128)),
                (
                    "lost_leases",
                    models.IntegerField(
                        db_default=0, help_text="Starts that ended with the death of their process, in a row."
                    ),
                ),
                ("not_before", django_outbox.models.UTCDateTimeField(blank=True, null=True)),
                ("quiet", models.BooleanField(db_default=False, help_text="Its death is not announced.")),
                ("last_error", models.TextField(blank=True, db_default="")),
                ("created_at", django_outbox.models.UTCDateTimeField()),
                ("finished_at", django_outbox.models.UTCDateTimeField(blank=True, null=True)),
                ("dead_at", django_outbox.models.UTCDateTimeField(blank=True, null=True)),
                ("event_id", models.UUIDField()),
                ("endpoint_id", models.UUIDField()),
                ("event_type", models.CharField(max_length=128)),
                ("organization_id", models.CharField(blank=True, db_default="", max_length=255)),
                ("body", models.TextField()),
                (
                    "reason",
                    models.CharField(blank=True, db_default="", help_text="How the last attempt ended.", max_length=32),
                ),
                ("last_status", models.IntegerField(blank=True, help_text="Of the last answer.", null=True)),
            ],
            options={
                "verbose_name": "webhook delivery",
                "verbose_name_plural": "webhook deliveries",
                "db_table": "django_outbox_webhook_delivery",
                "permissions": (
                    ("retry_webhookdelivery", "Can retry webhook deliveries"),
                    ("discard_webhookdelivery", "Can discard webhook deliveries"),
                ),
                "abstract": False,
                "default_permissions": ("view",),
                "indexes": [
                    models.Index(
                        condition=models.Q(("status", "pending")),
                        fields=["endpoint_id", "created_at", "id"],
                        name="outbox_delivery_ep_pending",
                    ),
                    models.Index(
                        condition=models.Q(("status", "waiting")),
                        fields=["endpoint_id", "due_at", "id"],
                        name="outbox_delivery_ep_waiting",
                    ),
                    models.Index(
                        condition=models.Q(("due_at__isnull", False), ("status", "dead")),
                        fields=["endpoint_id", "due_at", "id"],
                        name="outbox_delivery_ep_replay",
                    ),
                    models.Index(
                        condition=models.Q(("status", "pending")),
                        fields=["created_at", "id"],
                        name="outbox_delivery_pending",
                    ),
                    models.Index(
                        condition=models.Q(("status", "waiting")),
                        fields=["due_at", "id"],
                        name="outbox_delivery_waiting",
                    ),
                    models.Index(
                        condition=models.Q(("due_at__isnull", False), ("status", "dead")),
                        fields=["due_at", "id"],
                        name="outbox_delivery_replay",
                    ),
                    models.Index(
                        condition=models.Q(("status", "dead")), fields=["dead_at", "id"], name="outbox_delivery_dead"
                    ),
                    models.Index(
                        condition=models.Q(("status", "dead")),
                        fields=["endpoint_id", "created_at", "id"],
                        name="outbox_delivery_ep_dead",
                    ),
                    models.Index(
                        condition=models.Q(("status", "failed")),
                        fields=["finished_at", "id"],
                        name="outbox_delivery_failed",
                    ),
                    models.Index(
                        condition=models.Q(("status", "done")),
                        fields=["finished_at", "id"],
                        name="outbox_delivery_done",
                    ),
                    models.Index(
                        condition=models.Q(
                            ("reason__in", ["endpoint_disabled", "endpoint_gone", "endpoint_missing"]),
                            ("status", "dead"),
                        ),
                        fields=["dead_at", "id"],
                        name="outbox_delivery_unwanted",
                    ),
                ],
                "constraints": [
                    models.CheckConstraint(
                        condition=models.Q(("status__in", ["pending", "waiting", "done", "dead", "failed"])),
                        name="django_outbox_webhookdelivery_status",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            ("status", "dead"),
                            models.Q(("due_at__isnull", False), ("status", "waiting")),
                            models.Q(("due_at__isnull", True), ("status__in", ["pending", "done", "failed"])),
                            _connector="OR",
                        ),
                        name="django_outbox_webhookdelivery_due",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            models.Q(("status__in", ["done", "failed"]), _negated=True),
                            models.Q(("lease_until__isnull", True), ("leased_by", "")),
                            _connector="OR",
                        ),
                        name="django_outbox_webhookdelivery_finished",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(("attempts__gte", 0), ("fence__gte", 0), ("lost_leases__gte", 0)),
                        name="django_outbox_webhookdelivery_counters",
                    ),
                    models.UniqueConstraint(fields=("event_id", "endpoint_id"), name="django_outbox_delivery_once"),
                ],
            },
        ),
        migrations.CreateModel(
            name="WebhookEndpoint",
            fields=[
                ("id", models.UUIDField(editable=False, primary_key=True, serialize=False)),
                ("url", models.CharField(max_length=2048, verbose_name="URL")),
                ("description", models.CharField(blank=True, db_default="", max_length=255)),
                (
                    "organization_id",
                    models.CharField(
                        blank=True,
                        db_default="",
                        help_text="It gets the events of this organization; without one, all.",
                        max_length=255,
                    ),
                ),
                ("event_types", models.JSONField(default=list, help_text='Types, prefixes such as "order.*", or "*".')),
                ("enabled", models.BooleanField(db_default=True)),
                ("sealed_secrets", models.TextField(editable=False, help_text="Signing secrets, encrypted.")),
                (
                    "sealed_headers",
                    models.TextField(blank=True, db_default="", editable=False, help_text="Custom headers, encrypted."),
                ),
                ("created_at", django_outbox.models.UTCDateTimeField(editable=False)),
                ("rotated_at", django_outbox.models.UTCDateTimeField(blank=True, editable=False, null=True)),
                ("disabled_at", django_outbox.models.UTCDateTimeField(blank=True, editable=False, null=True)),
                ("disabled_reason", models.CharField(blank=True, db_default="", editable=False, max_length=32)),
                (
                    "paused_until",
                    django_outbox.models.UTCDateTimeField(blank=True, help_text="Nothing is sent before.", null=True),
                ),
                (
                    "open_until",
                    django_outbox.models.UTCDateTimeField(
                        blank=True, editable=False, help_text="The breaker lets nothing through.", null=True
                    ),
                ),
                (
                    "open_seconds",
                    models.IntegerField(db_default=0, editable=False, help_text="0 while the breaker is closed."),
                ),
                (
                    "streak",
                    models.IntegerField(db_default=0, editable=False, help_text="Failures of the server in a row."),
                ),
                (
                    "failures",
                    models.IntegerField(
                        db_default=0, editable=False, help_text="Failed attempts since the last success."
                    ),
                ),
                (
                    "exhausted",
                    models.IntegerField(
                        db_default=0, editable=False, help_text="Dead deliveries since the last success."
                    ),
                ),
                ("failing_since", django_outbox.models.UTCDateTimeField(blank=True, editable=False, null=True)),
                ("warned_at", django_outbox.models.UTCDateTimeField(blank=True, editable=False, null=True)),
                (
                    "mean_seconds",
                    models.FloatField(db_default=0.0, editable=False, help_text="Moving mean of a request's duration."),
                ),
                ("delivered_total", models.BigIntegerField(db_default=0, editable=False)),
                ("failed_total", models.BigIntegerField(db_default=0, editable=False)),
                ("last_success_at", django_outbox.models.UTCDateTimeField(blank=True, editable=False, null=True)),
                ("last_failure_at", django_outbox.models.UTCDateTimeField(blank=True, editable=False, null=True)),
                ("last_error", models.TextField(blank=True, db_default="", editable=False)),
            ],
            options={
                "verbose_name": "webhook endpoint",
                "verbose_name_plural": "webhook endpoints",
                "db_table": "django_outbox_webhook_endpoint",
                "permissions": (("rotate_webhookendpoint", "Can make new secrets for webhook endpoints"),),
                "indexes": [models.Index(fields=["organization_id", "id"], name="outbox_endpoint_org")],
                "constraints": [
                    models.CheckConstraint(
                        condition=django.db.models.lookups.Exact(
                            django_outbox.models.JSONTypeOf(models.F("event_types")), models.Value("array")
                        ),
                        name="django_outbox_endpoint_event_types_array",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            models.Q(("disabled_at__isnull", True), ("enabled", True)),
                            models.Q(("disabled_at__isnull", False), ("enabled", False)),
                            _connector="OR",
                        ),
                        name="django_outbox_endpoint_disabled_since",
                    ),
                ],
            },
        ),
        migrations.RunPython(reserve_room_for_claims, migrations.RunPython.noop, elidable=False),
    ]
