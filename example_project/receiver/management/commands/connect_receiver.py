"""Introduce sender and receiver to one another."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from django_outbox.webhooks import create_endpoint, send_test
from example_project.receiver.models import SenderSecret


class Command(BaseCommand):
    """Make an endpoint that leads to this project's own receiver, and give the receiver its secret."""

    help = "Make a webhook endpoint for the receiver page, and give the page the secret."

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the address of the receiver."""
        parser.add_argument("--url", default="http://127.0.0.1:8000/hooks/in/")

    def handle(self, *_args: Any, **options: Any) -> None:
        """Create it and send a test."""
        endpoint, secret = create_endpoint(options["url"], event_types=["user.*"], description="the receiver page")
        SenderSecret.objects.create(value=secret)
        send_test(endpoint)
        self.stdout.write(f"Endpoint {endpoint.pk} sends user.* to {options['url']}. A test is on its way.")
