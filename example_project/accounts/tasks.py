"""Work that nobody waits for, as Django's own tasks; django_outbox is their backend (see TASKS in the settings)."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

import django
from django.contrib.auth.models import User

if TYPE_CHECKING or django.VERSION >= (6, 0):
    from django.tasks import task
else:
    from django_tasks import task


@task
def draw_avatar(user_id: int) -> str:
    """
    Return a round picture with the user's initial, as SVG.

    It may run twice, when its process dies at the wrong moment, and that does no harm:
    the same user gives the same picture.
    """
    user = User.objects.get(pk=user_id)
    hue = sum(map(ord, user.username)) % 360
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 20 20">'
        f'<circle cx="10" cy="10" r="10" fill="hsl({hue} 60% 40%)"/>'
        f'<text x="10" y="14" text-anchor="middle" fill="white">{escape(user.username[:1].upper())}</text></svg>'
    )
