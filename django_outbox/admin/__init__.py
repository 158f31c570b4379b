"""
The admin: what is dead, why, and what to press.

Nothing is edited here; retry and discard go through the verbs of ``lease``. Every
list is an ordered walk of one index with an end: no count over the table, no sort of
it, and a filter that no index serves looks at the newest rows only, and says so.

``queue`` is what every queue's pages share; a module per queue adds the rest.
"""

from __future__ import annotations

from django_outbox.admin.builtins import AuditEntryAdmin, NotificationAdmin, OperatorAlertAdmin
from django_outbox.admin.emails import OutboxEmailAdmin
from django_outbox.admin.events import OutboxEventAdmin
from django_outbox.admin.tasks import OutboxTaskAdmin
from django_outbox.admin.webhooks import WebhookDeliveryAdmin, WebhookEndpointAdmin

__all__ = [
    "AuditEntryAdmin",
    "NotificationAdmin",
    "OperatorAlertAdmin",
    "OutboxEmailAdmin",
    "OutboxEventAdmin",
    "OutboxTaskAdmin",
    "WebhookDeliveryAdmin",
    "WebhookEndpointAdmin",
]
