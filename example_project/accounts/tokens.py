"""
A pretend token service. It keeps its data in tables of this project and can be down.

It stands for a system elsewhere, so it writes outside of any transaction of
ours: what it did stays done, whatever becomes of the caller.
"""

from __future__ import annotations

from django.conf import settings

from example_project.accounts.models import Switch, Token, TokenRequest

SWITCH = "token-service"


class TokenServiceDownError(Exception):
    """The service did not take the request; a later one may succeed."""


def revoke_all(*, user_id: int, idempotency_key: str, attempt: int) -> None:
    """Revoke every token of a user, or raise `TokenServiceDownError`. Asked again it changes nothing."""
    accepted = attempt > settings.TOKEN_SERVICE_REFUSALS and not Switch.fails(SWITCH)
    TokenRequest.objects.create(idempotency_key=idempotency_key, attempt=attempt, accepted=accepted)
    if not accepted:
        raise TokenServiceDownError("503 Service Unavailable")
    Token.objects.filter(user_id=user_id, revoked=False).update(revoked=True)
