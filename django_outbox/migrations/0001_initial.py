from typing import Any

import django.core.serializers.json
import django.db.models.lookups
from django.db import migrations, models

import django_outbox.models


def reserve_room_for_claims(apps: Any, schema_editor: Any) -> None:
    """
    Leave half of each page free on PostgreSQL, and let vacuum keep up with a busy queue.

    A claim writes a new version of every row it takes. With room on the same page, and
    no indexed column changed, that is a HOT update, which touches no index.
    """
    if schema_editor.connection.vendor == "postgresql":
        table = schema_editor.quote_name(apps.get_model("django_outbox", "OutboxEvent")._meta.db_table)
        schema_editor.execute(
            f"ALTER TABLE {table} SET (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02,"
            " autovacuum_analyze_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0)"
        )


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="OutboxEvent",
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
                ("type", models.CharField(max_length=128)),
                ("payload", models.JSONField(encoder=django.core.serializers.json.DjangoJSONEncoder)),
                ("occurred_at", django_outbox.models.UTCDateTimeField()),
                ("aggregate_type", models.CharField(blank=True, db_default="", max_length=128)),
                ("aggregate_id", models.CharField(blank=True, db_default="", max_length=255)),
                ("organization_id", models.CharField(blank=True, db_default="", max_length=255)),
                ("request_id", models.CharField(blank=True, db_default="", max_length=255)),
                ("causation_id", models.UUIDField(blank=True, null=True)),
                ("headers", models.JSONField(default=dict, encoder=django.core.serializers.json.DjangoJSONEncoder)),
                (
                    "deliveries",
                    models.JSONField(default=dict, help_text="Handler name → delivery time, null while owed."),
                ),
                (
                    "failures",
                    models.JSONField(default=dict, help_text="Handler name → its last error and how it ended."),
                ),
            ],
            options={
                "verbose_name": "event",
                "verbose_name_plural": "events",
                "db_table": "django_outbox_event",
                "permissions": (
                    ("retry_outboxevent", "Can retry events"),
                    ("discard_outboxevent", "Can discard events"),
                ),
                "abstract": False,
                "default_permissions": ("view",),
                "indexes": [
                    models.Index(
                        condition=models.Q(("status", "pending")),
                        fields=["created_at", "id"],
                        name="outbox_event_pending",
                    ),
                    models.Index(
                        condition=models.Q(("status", "waiting")), fields=["due_at", "id"], name="outbox_event_waiting"
                    ),
                    models.Index(
                        condition=models.Q(("due_at__isnull", False), ("status", "dead")),
                        fields=["due_at", "id"],
                        name="outbox_event_replay",
                    ),
                    models.Index(
                        condition=models.Q(("status", "dead")), fields=["dead_at", "id"], name="outbox_event_dead"
                    ),
                    models.Index(
                        condition=models.Q(("status", "failed")),
                        fields=["finished_at", "id"],
                        name="outbox_event_failed",
                    ),
                    models.Index(
                        condition=models.Q(("status", "done")), fields=["finished_at", "id"], name="outbox_event_done"
                    ),
                    models.Index(
                        condition=models.Q(("aggregate_id", ""), _negated=True),
                        fields=["aggregate_type", "aggregate_id", "id"],
                        name="outbox_event_aggregate",
                    ),
                ],
                "constraints": [
                    models.CheckConstraint(
                        condition=models.Q(("status__in", ["pending", "waiting", "done", "dead", "failed"])),
                        name="django_outbox_outboxevent_status",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            ("status", "dead"),
                            models.Q(("due_at__isnull", False), ("status", "waiting")),
                            models.Q(("due_at__isnull", True), ("status__in", ["pending", "done", "failed"])),
                            _connector="OR",
                        ),
                        name="django_outbox_outboxevent_due",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            models.Q(("status__in", ["done", "failed"]), _negated=True),
                            models.Q(("lease_until__isnull", True), ("leased_by", "")),
                            _connector="OR",
                        ),
                        name="django_outbox_outboxevent_finished",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(("attempts__gte", 0), ("fence__gte", 0), ("lost_leases__gte", 0)),
                        name="django_outbox_outboxevent_counters",
                    ),
                    models.CheckConstraint(
                        condition=django.db.models.lookups.Exact(
                            django_outbox.models.JSONTypeOf(models.F("headers")), models.Value("object")
                        ),
                        name="django_outbox_event_headers_object",
                    ),
                    models.CheckConstraint(
                        condition=django.db.models.lookups.Exact(
                            django_outbox.models.JSONTypeOf(models.F("deliveries")), models.Value("object")
                        ),
                        name="django_outbox_event_deliveries_object",
                    ),
                    models.CheckConstraint(
                        condition=django.db.models.lookups.Exact(
                            django_outbox.models.JSONTypeOf(models.F("failures")), models.Value("object")
                        ),
                        name="django_outbox_event_failures_object",
                    ),
                ],
            },
        ),
        migrations.RunPython(reserve_room_for_claims, migrations.RunPython.noop, elidable=False),
    ]
