"""
A pretend CRM. It keeps its data in tables of this project and is often down.

It stands for a system elsewhere, so it writes outside of any transaction of
ours: what it did stays done, whatever becomes of the caller.
"""

from __future__ import annotations

from typing import Final

from example_project.accounts.models import CrmContact, CrmRequest

REFUSALS: Final = 2
"""How many attempts are turned away before one is accepted."""


class CrmUnavailableError(Exception):
    """The CRM did not take the request; a later one may succeed."""


def upsert_contact(*, email: str, name: str, idempotency_key: str, attempt: int) -> None:
    """Create or update a contact; raise `CrmUnavailableError` at the first two attempts."""
    accepted = attempt > REFUSALS
    CrmRequest.objects.create(idempotency_key=idempotency_key, attempt=attempt, accepted=accepted)
    if not accepted:
        raise CrmUnavailableError("503 Service Unavailable")
    CrmContact.objects.update_or_create(email=email, defaults={"name": name})
