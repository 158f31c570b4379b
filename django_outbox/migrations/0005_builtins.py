import django.core.serializers.json
import django.db.models.lookups
from django.db import migrations, models

import django_outbox.models


class Migration(migrations.Migration):
    dependencies = [
        ("django_outbox", "0004_tasks"),
    ]

    operations = [
        migrations.CreateModel(
            name="AuditHead",
            fields=[
                ("id", models.SmallIntegerField(primary_key=True, serialize=False)),
                ("position", models.BigIntegerField(db_default=0)),
                ("hash", models.CharField(max_length=64)),
            ],
            options={
                "db_table": "django_outbox_audit_head",
                "default_permissions": (),
            },
        ),
        migrations.CreateModel(
            name="AuditEntry",
            fields=[
                (
                    "id",
                    models.UUIDField(
                        editable=False,
                        help_text="The event's id: it is entered once.",
                        primary_key=True,
                        serialize=False,
                    ),
                ),
                (
                    "position",
                    models.BigIntegerField(help_text="Its place in the chain, from 1, without a gap.", unique=True),
                ),
                ("type", models.CharField(max_length=128)),
                ("aggregate_type", models.CharField(blank=True, db_default="", max_length=128)),
                ("aggregate_id", models.CharField(blank=True, db_default="", max_length=255)),
                ("organization_id", models.CharField(blank=True, db_default="", max_length=255)),
                ("recorded_at", django_outbox.models.UTCDateTimeField()),
                ("content", models.TextField(help_text="The event as canonical JSON.")),
                ("previous_hash", models.CharField(max_length=64)),
                (
                    "hash",
                    models.CharField(
                        help_text="SHA-256 of the previous hash, a line feed and the content.", max_length=64
                    ),
                ),
            ],
            options={
                "verbose_name": "audit entry",
                "verbose_name_plural": "audit entries",
                "db_table": "django_outbox_audit_entry",
                "default_permissions": ("view",),
                "indexes": [
                    models.Index(
                        condition=models.Q(("aggregate_id", ""), _negated=True),
                        fields=["aggregate_type", "aggregate_id", "position"],
                        name="outbox_audit_aggregate",
                    ),
                    models.Index(
                        condition=models.Q(("organization_id", ""), _negated=True),
                        fields=["organization_id", "position"],
                        name="outbox_audit_organization",
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name="Notification",
            fields=[
                ("id", models.UUIDField(editable=False, primary_key=True, serialize=False)),
                (
                    "recipient",
                    models.CharField(help_text="Whom it is for, such as a user's key. No foreign key.", max_length=255),
                ),
                ("dedup_key", models.CharField(help_text="One per recipient; event:<id> by default.", max_length=255)),
                ("title", models.CharField(max_length=255)),
                ("body", models.TextField(blank=True, db_default="")),
                ("url", models.CharField(blank=True, db_default="", max_length=2048, verbose_name="URL")),
                ("data", models.JSONField(default=dict, encoder=django.core.serializers.json.DjangoJSONEncoder)),
                ("event_id", models.UUIDField(blank=True, null=True)),
                ("event_type", models.CharField(blank=True, db_default="", max_length=128)),
                ("organization_id", models.CharField(blank=True, db_default="", max_length=255)),
                ("created_at", django_outbox.models.UTCDateTimeField()),
                ("read_at", django_outbox.models.UTCDateTimeField(blank=True, null=True)),
            ],
            options={
                "db_table": "django_outbox_notification",
                "default_permissions": ("view", "delete"),
                "indexes": [
                    models.Index(fields=["recipient", "id"], name="outbox_notification_list"),
                    models.Index(
                        condition=models.Q(("read_at__isnull", True)),
                        fields=["recipient", "id"],
                        name="outbox_notification_unread",
                    ),
                    models.Index(
                        condition=models.Q(("read_at__isnull", False)),
                        fields=["read_at", "id"],
                        name="outbox_notification_read",
                    ),
                ],
                "constraints": [
                    models.UniqueConstraint(fields=("recipient", "dedup_key"), name="django_outbox_notification_once"),
                    models.CheckConstraint(
                        condition=django.db.models.lookups.Exact(
                            django_outbox.models.JSONTypeOf(models.F("data")), models.Value("object")
                        ),
                        name="django_outbox_notification_data_object",
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name="OperatorAlert",
            fields=[
                (
                    "id",
                    models.UUIDField(
                        editable=False,
                        help_text="The announcement's id: it is told once.",
                        primary_key=True,
                        serialize=False,
                    ),
                ),
                ("type", models.CharField(max_length=128)),
                (
                    "subject_id",
                    models.CharField(blank=True, db_default="", help_text="The row it speaks of.", max_length=255),
                ),
                ("subject", models.CharField(blank=True, db_default="", help_text="What that row is.", max_length=255)),
                ("error", models.CharField(blank=True, db_default="", max_length=500)),
                (
                    "slot",
                    models.BigIntegerField(
                        help_text="The window of time it came in: seconds since 1970 by the window's length."
                    ),
                ),
                ("created_at", django_outbox.models.UTCDateTimeField()),
                ("told_at", django_outbox.models.UTCDateTimeField(blank=True, null=True)),
            ],
            options={
                "verbose_name": "operator alert",
                "verbose_name_plural": "operator alerts",
                "db_table": "django_outbox_operator_alert",
                "default_permissions": ("view",),
                "indexes": [
                    models.Index(fields=["created_at", "id"], name="outbox_alert_created"),
                    models.Index(
                        condition=models.Q(("told_at__isnull", True)),
                        fields=["created_at", "id"],
                        name="outbox_alert_untold",
                    ),
                ],
            },
        ),
    ]
