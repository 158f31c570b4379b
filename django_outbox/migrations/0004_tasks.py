from typing import Any

import django.core.serializers.json
import django.db.models.lookups
from django.db import migrations, models

import django_outbox.models


def reserve_room_for_claims(apps: Any, schema_editor: Any) -> None:
    """Leave half of each page of tasks free on PostgreSQL, as for events: a claim is then a HOT update."""
    if schema_editor.connection.vendor == "postgresql":
        table = schema_editor.quote_name(apps.get_model("django_outbox", "OutboxTask")._meta.db_table)
        schema_editor.execute(
            f"ALTER TABLE {table} SET (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02,"
            " autovacuum_analyze_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0)"
        )


class Migration(migrations.Migration):
    dependencies = [
        ("django_outbox", "0003_webhooks"),
    ]

    operations = [
        migrations.CreateModel(
            name="OutboxTask",
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
                (
                    "task_path",
                    models.CharField(
                        help_text="Where the task is found, such as shop.tasks.send_invoice.", max_length=255
                    ),
                ),
                (
                    "backend_alias",
                    models.CharField(db_default="default", help_text="Its name in the setting TASKS.", max_length=64),
                ),
                ("queue_name", models.CharField(db_default="default", max_length=64)),
                ("priority", models.SmallIntegerField(db_default=0, help_text="-100 to 100, larger first.")),
                (
                    "payload",
                    models.JSONField(
                        encoder=django.core.serializers.json.DjangoJSONEncoder,
                        help_text="Its arguments: args and kwargs.",
                    ),
                ),
                ("max_attempts", models.IntegerField(blank=True, help_text="Null: the queue's.", null=True)),
                ("timeout_seconds", models.FloatField(blank=True, help_text="Null: the queue's.", null=True)),
                (
                    "waits",
                    models.JSONField(blank=True, help_text="Seconds between attempts. Null: the queue's.", null=True),
                ),
                ("dedupe_key", models.CharField(blank=True, db_default="", max_length=255)),
                ("return_value", models.JSONField(blank=True, null=True)),
                ("errors", models.JSONField(default=list, help_text="What its latest failed attempts raised.")),
                ("worker_ids", models.JSONField(default=list, help_text="The holder of every attempt that ended.")),
                (
                    "started_at",
                    django_outbox.models.UTCDateTimeField(
                        blank=True, help_text="Of its first attempt that ended.", null=True
                    ),
                ),
                ("last_attempted_at", django_outbox.models.UTCDateTimeField(blank=True, null=True)),
                (
                    "parked_at",
                    django_outbox.models.UTCDateTimeField(
                        blank=True, help_text="Since when no relay that had it knows the task.", null=True
                    ),
                ),
                ("organization_id", models.CharField(blank=True, db_default="", max_length=255)),
                ("request_id", models.CharField(blank=True, db_default="", max_length=255)),
                ("causation_id", models.UUIDField(blank=True, null=True)),
            ],
            options={
                "verbose_name": "task",
                "verbose_name_plural": "tasks",
                "db_table": "django_outbox_task",
                "permissions": (
                    ("retry_outboxtask", "Can retry tasks"),
                    ("discard_outboxtask", "Can discard tasks"),
                    ("read_outboxtask", "Can read tasks' arguments and results"),
                ),
                "abstract": False,
                "default_permissions": ("view",),
                "indexes": [
                    models.Index(
                        condition=models.Q(("status", "pending")),
                        fields=["queue_name", "priority", "created_at", "id"],
                        name="outbox_task_lane_pending",
                    ),
                    models.Index(
                        condition=models.Q(("status", "waiting")),
                        fields=["queue_name", "priority", "due_at", "id"],
                        name="outbox_task_lane_waiting",
                    ),
                    models.Index(
                        condition=models.Q(("due_at__isnull", False), ("status", "dead")),
                        fields=["queue_name", "priority", "due_at", "id"],
                        name="outbox_task_lane_replay",
                    ),
                    models.Index(
                        condition=models.Q(("status", "pending")),
                        fields=["created_at", "id"],
                        name="outbox_task_pending",
                    ),
                    models.Index(
                        condition=models.Q(("status", "waiting")), fields=["due_at", "id"], name="outbox_task_waiting"
                    ),
                    models.Index(
                        condition=models.Q(("status", "dead")), fields=["dead_at", "id"], name="outbox_task_dead"
                    ),
                    models.Index(
                        condition=models.Q(("status", "failed")),
                        fields=["finished_at", "id"],
                        name="outbox_task_failed",
                    ),
                    models.Index(
                        condition=models.Q(("status", "done")), fields=["finished_at", "id"], name="outbox_task_done"
                    ),
                ],
                "constraints": [
                    models.CheckConstraint(
                        condition=models.Q(("status__in", ["pending", "waiting", "done", "dead", "failed"])),
                        name="django_outbox_outboxtask_status",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            ("status", "dead"),
                            models.Q(("due_at__isnull", False), ("status", "waiting")),
                            models.Q(("due_at__isnull", True), ("status__in", ["pending", "done", "failed"])),
                            _connector="OR",
                        ),
                        name="django_outbox_outboxtask_due",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            models.Q(("status__in", ["done", "failed"]), _negated=True),
                            models.Q(("lease_until__isnull", True), ("leased_by", "")),
                            _connector="OR",
                        ),
                        name="django_outbox_outboxtask_finished",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(("attempts__gte", 0), ("fence__gte", 0), ("lost_leases__gte", 0)),
                        name="django_outbox_outboxtask_counters",
                    ),
                    models.CheckConstraint(
                        condition=django.db.models.lookups.Exact(
                            django_outbox.models.JSONTypeOf(models.F("payload")), models.Value("object")
                        ),
                        name="django_outbox_task_payload_object",
                    ),
                    models.UniqueConstraint(
                        condition=models.Q(
                            ("status__in", ["pending", "waiting"]), models.Q(("dedupe_key", ""), _negated=True)
                        ),
                        fields=("task_path", "dedupe_key"),
                        name="django_outbox_task_dedupe",
                    ),
                ],
            },
        ),
        migrations.RunPython(reserve_room_for_claims, migrations.RunPython.noop, elidable=False),
    ]
