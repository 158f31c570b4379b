"""A mail server that wants nobody."""

from __future__ import annotations

import smtplib
from collections.abc import Sequence

from django.core.mail import EmailMessage
from django.core.mail.backends.base import BaseEmailBackend


class EmailBackend(BaseEmailBackend):
    """Refuses every recipient for good."""

    def send_messages(self, email_messages: Sequence[EmailMessage]) -> int:
        address = email_messages[0].to[0]
        raise smtplib.SMTPRecipientsRefused({address: (550, b"5.1.1 no such user")})
