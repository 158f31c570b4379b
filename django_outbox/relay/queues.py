"""The queues that a relay serves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from django_outbox import events, mail, tasks, webhooks
from django_outbox.delivery import Work

_owed_to: Final = events.registry.deliveries

WORK: Final[Mapping[str, Work]] = {
    work.queue.name: work
    for work in (
        events.EventWork(),
        mail.EmailWork(owed_to=_owed_to),
        webhooks.WebhookWork(owed_to=_owed_to),
        tasks.TaskWork(owed_to=_owed_to),
    )
}
"""Every queue by name, in the order in which a relay looks at them."""


def chosen(names: Iterable[str] | None) -> list[Work]:
    """
    Return the queues of these names, by default all; ``tasks:reports`` is only that part of one.

    :raises ValueError: for a queue, or a part of one, that does not exist.
    """
    if names is None:
        return list(WORK.values())
    parts: dict[str, list[str] | None] = {}
    for each in names:
        name, colon, part = each.partition(":")
        if name not in WORK:
            raise ValueError(f"There is no queue {name!r}. Queues: {', '.join(WORK)}.")
        known = parts.setdefault(name, [])
        if not colon:
            parts[name] = None  # the whole of it, whatever else is named
        elif known is not None:
            known.append(part)
    found = ((work, parts.get(name, [])) for name, work in WORK.items() if name in parts)
    return [work if some is None else work.narrowed(some) for work, some in found]
