from typing import Any

import django.db.models.lookups
from django.db import migrations, models

import django_outbox.models


def reserve_room_for_claims(apps: Any, schema_editor: Any) -> None:
    """Leave half of each page of emails free on PostgreSQL, as for events: a claim is then a HOT update."""
    if schema_editor.connection.vendor == "postgresql":
        table = schema_editor.quote_name(apps.get_model("django_outbox", "OutboxEmail")._meta.db_table)
        schema_editor.execute(
            f"ALTER TABLE {table} SET (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02,"
            " autovacuum_analyze_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0)"
        )


class Migration(migrations.Migration):
    dependencies = [
        ("django_outbox", "0001_initial"),
    ]

    operations = [
        migrations.CreateModel(
            name="OutboxEmailContent",
            fields=[
                ("email_id", models.UUIDField(editable=False, primary_key=True, serialize=False)),
                ("document", models.TextField()),
            ],
            options={
                "db_table": "django_outbox_email_content",
                "default_permissions": (),
            },
        ),
        migrations.CreateModel(
            name="OutboxEmail",
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
                    "priority",
                    models.SmallIntegerField(choices=[(0, "urgent"), (1, "normal"), (2, "bulk")], db_default=1),
                ),
                (
                    "backend_alias",
                    models.CharField(db_default="default", help_text="What it is delivered with.", max_length=64),
                ),
                (
                    "subject",
                    models.CharField(blank=True, db_default="", help_text="A copy; none if sensitive.", max_length=255),
                ),
                ("recipient", models.CharField(blank=True, db_default="", help_text="The first one.", max_length=320)),
                ("message_id", models.CharField(help_text="The same at every attempt.", max_length=255)),
                ("provider_message_id", models.CharField(blank=True, db_default="", max_length=255)),
                ("idempotency_key", models.CharField(blank=True, max_length=255, null=True, unique=True)),
                ("expires_at", django_outbox.models.UTCDateTimeField(blank=True, null=True)),
                (
                    "sensitive",
                    models.BooleanField(db_default=False, help_text="Its content goes once it is sent or given up."),
                ),
                (
                    "wiped",
                    models.BooleanField(db_default=False, help_text="Its content is gone; it cannot be sent again."),
                ),
                (
                    "maybe_sent",
                    models.BooleanField(
                        db_default=False, help_text="A failed attempt may have reached its recipients."
                    ),
                ),
                ("failure_kind", models.CharField(blank=True, db_default="", max_length=32)),
                (
                    "last_code",
                    models.CharField(
                        blank=True, db_default="", help_text="Of the server's last refusal.", max_length=16
                    ),
                ),
                ("refused", models.JSONField(default=dict, help_text="Recipient → what the server said of it.")),
                ("organization_id", models.CharField(blank=True, db_default="", max_length=255)),
                ("request_id", models.CharField(blank=True, db_default="", max_length=255)),
                ("causation_id", models.UUIDField(blank=True, null=True)),
            ],
            options={
                "verbose_name": "email",
                "verbose_name_plural": "emails",
                "db_table": "django_outbox_email",
                "permissions": (
                    ("retry_outboxemail", "Can retry emails"),
                    ("discard_outboxemail", "Can discard emails"),
                    ("read_outboxemail", "Can read what emails say"),
                ),
                "abstract": False,
                "default_permissions": ("view",),
                "indexes": [
                    models.Index(
                        condition=models.Q(("status", "pending")),
                        fields=["priority", "backend_alias", "created_at", "id"],
                        name="outbox_email_lane_pending",
                    ),
                    models.Index(
                        condition=models.Q(("status", "waiting")),
                        fields=["priority", "backend_alias", "due_at", "id"],
                        name="outbox_email_lane_waiting",
                    ),
                    models.Index(
                        condition=models.Q(("due_at__isnull", False), ("status", "dead")),
                        fields=["priority", "backend_alias", "due_at", "id"],
                        name="outbox_email_lane_replay",
                    ),
                    models.Index(
                        condition=models.Q(("status", "pending")),
                        fields=["created_at", "id"],
                        name="outbox_email_pending",
                    ),
                    models.Index(
                        condition=models.Q(("status", "waiting")), fields=["due_at", "id"], name="outbox_email_waiting"
                    ),
                    models.Index(
                        condition=models.Q(("due_at__isnull", False), ("status", "dead")),
                        fields=["due_at", "id"],
                        name="outbox_email_replay",
                    ),
                    models.Index(
                        condition=models.Q(("status", "dead")), fields=["dead_at", "id"], name="outbox_email_dead"
                    ),
                    models.Index(
                        condition=models.Q(("status", "failed")),
                        fields=["finished_at", "id"],
                        name="outbox_email_failed",
                    ),
                    models.Index(
                        condition=models.Q(("status", "done")), fields=["finished_at", "id"], name="outbox_email_done"
                    ),
                    models.Index(fields=["recipient", "id"], name="outbox_email_recipient"),
                    models.Index(fields=["message_id", "id"], name="outbox_email_message_id"),
                    models.Index(
                        condition=models.Q(("provider_message_id", ""), _negated=True),
                        fields=["provider_message_id", "id"],
                        name="outbox_email_provider",
                    ),
                ],
                "constraints": [
                    models.CheckConstraint(
                        condition=models.Q(("status__in", ["pending", "waiting", "done", "dead", "failed"])),
                        name="django_outbox_outboxemail_status",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            ("status", "dead"),
                            models.Q(("due_at__isnull", False), ("status", "waiting")),
                            models.Q(("due_at__isnull", True), ("status__in", ["pending", "done", "failed"])),
                            _connector="OR",
                        ),
                        name="django_outbox_outboxemail_due",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            models.Q(("status__in", ["done", "failed"]), _negated=True),
                            models.Q(("lease_until__isnull", True), ("leased_by", "")),
                            _connector="OR",
                        ),
                        name="django_outbox_outboxemail_finished",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(("attempts__gte", 0), ("fence__gte", 0), ("lost_leases__gte", 0)),
                        name="django_outbox_outboxemail_counters",
                    ),
                    models.CheckConstraint(
                        condition=django.db.models.lookups.Exact(
                            django_outbox.models.JSONTypeOf(models.F("refused")), models.Value("object")
                        ),
                        name="django_outbox_email_refused_object",
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name="OutboxEmailAttachment",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("email_id", models.UUIDField()),
                ("blob_id", models.UUIDField()),
            ],
            options={
                "db_table": "django_outbox_email_attachment",
                "default_permissions": (),
                "indexes": [models.Index(fields=["blob_id"], name="outbox_email_attachment_blob")],
                "constraints": [
                    models.UniqueConstraint(fields=("email_id", "blob_id"), name="django_outbox_email_attachment_once")
                ],
            },
        ),
        migrations.CreateModel(
            name="OutboxEmailBlob",
            fields=[
                ("id", models.UUIDField(editable=False, primary_key=True, serialize=False)),
                ("sha256", models.CharField(max_length=64)),
                ("content", models.BinaryField()),
            ],
            options={
                "db_table": "django_outbox_email_blob",
                "default_permissions": (),
                "indexes": [models.Index(fields=["sha256"], name="outbox_email_blob_sha256")],
            },
        ),
        migrations.RunPython(reserve_room_for_claims, migrations.RunPython.noop, elidable=False),
    ]
