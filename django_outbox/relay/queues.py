"""The queues that a relay serves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from django_outbox import events, mail, webhooks
from django_outbox.delivery import Work

_owed_to: Final = events.registry.deliveries

WORK: Final[Mapping[str, Work]] = {
    work.queue.name: work
    for work in (
        events.EventWork(),
        mail.EmailWork(owed_to=_owed_to),
        webhooks.WebhookWork(owed_to=_owed_to),
    )
}
"""Every queue by name, in the order in which a relay looks at them."""
