"""Start all of the example: a database, an admin, the web server and one relay."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

from django.conf import settings
from django.contrib.auth.models import User
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandParser
from django.urls import reverse

from example_project.receiver.subscription import subscribe

MANAGE: Final = str(Path(settings.BASE_DIR) / "manage.py")
HOST: Final = "127.0.0.1"
LOGIN: Final = "admin"
STOP_WITHIN_SECONDS: Final = 30.0


class Command(BaseCommand):
    """Run the example until it is interrupted."""

    help = "Migrate, create the login admin (password admin), start the web server and a relay, print the address."

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the port."""
        parser.add_argument("--port", type=int, help="default: the first free one from 8000 on")

    def handle(self, *_args: Any, port: int | None, **_options: Any) -> None:
        """Set up and run."""
        port = port or free_port()
        if port != settings.RECEIVER_PORT:
            # The settings say which port webhooks may go to, and they are read when Django starts.
            command = [sys.executable, MANAGE, "run", "--port", str(port)]
            os.execve(command[0], command, os.environ | {"RECEIVER_PORT": str(port)})  # noqa: S606  our own command
        address = f"http://{HOST}:{port}"
        call_command("migrate", verbosity=0)
        if not User.objects.filter(username=LOGIN).exists():
            # For this machine alone: the server listens on the loopback address.
            User.objects.create_superuser(LOGIN, "admin@example.com", LOGIN)
        subscribe(address + reverse("receive"))
        processes = [
            start("run_outbox"),
            start("runserver", f"{HOST}:{port}", "--noreload", "--skip-checks", "--verbosity", "0"),
        ]
        try:
            signal.signal(signal.SIGTERM, interrupt)
            self.wait_for(port, processes)
            self.stdout.write(
                f"\n  {self.style.SUCCESS(address)}\n  Admin: {address}/admin/ (login {LOGIN}, password {LOGIN})\n"
                "  One web server and one relay are running. Ctrl-C ends both.\n\n"
            )
            self.stdout.flush()
            while all(process.poll() is None for process in processes):
                time.sleep(0.2)
            sys.exit(1)  # one of them ended by itself, and said why
        except KeyboardInterrupt:
            self.stdout.write("\n  Stopping.\n")
        finally:
            stop(processes)

    @staticmethod
    def wait_for(port: int, processes: list[subprocess.Popen[bytes]]) -> None:
        """Return when the server answers, or one of the processes has ended."""
        while all(process.poll() is None for process in processes):
            with socket.socket() as probe:
                if probe.connect_ex((HOST, port)) == 0:
                    return
            time.sleep(0.05)


def free_port() -> int:
    """Return the first port from 8000 on that nobody listens on."""
    for port in range(8000, 8100):
        with socket.socket() as probe:
            if probe.connect_ex((HOST, port)) != 0:
                return port
    return 8000


def interrupt(*_: Any) -> None:
    """End as at Ctrl-C."""
    raise KeyboardInterrupt


def start(*arguments: str) -> subprocess.Popen[bytes]:
    """Start a command of this project."""
    return subprocess.Popen([sys.executable, MANAGE, *arguments])  # noqa: S603  our own command


def stop(processes: list[subprocess.Popen[bytes]]) -> None:
    """End the processes: asked first, the relay finishes what it holds."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    for process in processes:
        try:
            process.wait(STOP_WITHIN_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
