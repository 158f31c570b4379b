"""
Both ends of the wake-up: a hint after commit, and the relay that waits for one.

A wake-up is never trusted for correctness: a relay that hears nothing finds the
same rows at its next poll.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import random
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from django.db import DatabaseError, Error, connections, transaction

from django_outbox.errors import clean_error

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

__all__ = ["CHANNELS", "FileWatcher", "Listener", "Signal", "Watcher", "notify_on_commit", "watch"]

logger = logging.getLogger("django_outbox.wake")

QUEUES: Final = ("events", "email", "webhooks", "tasks")
CHANNELS: Final = {f"django_outbox_{queue}": queue for queue in QUEUES}
"""A channel says whose rows to look for; a notification itself carries nothing."""
NOTIFY_WINDOW_SECONDS: Final = 0.01
"""Within so long after a process has notified a queue's relays it does not do so again."""
PING_SECONDS: Final = 15.0
PING_DEADLINE_SECONDS: Final = 10.0
RECONNECT_MIN_SECONDS: Final = 0.25
RECONNECT_MAX_SECONDS: Final = 15.0
QUEUE_USAGE_TOLD: Final = 0.5
HEARING_SECONDS: Final = 2.0
"""How long a notification may take behind a session pooler, where it does arrive."""
DATA_VERSION_SECONDS: Final = 0.05


# --- the sending end -------------------------------------------------------------------------------------------------


class Signal:
    """
    A wake flag that a signal handler may set.

    ``threading.Event`` may not be set from a signal handler: it deadlocks when the
    handler interrupts the thread that waits on it. ``SimpleQueue.put`` may.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._set = False

    def set(self) -> None:
        """Wake whoever waits, now or at its next wait."""
        if not self._set:
            self._set = True
            self._queue.put(None)

    def clear(self) -> None:
        """Forget earlier wake-ups; call before looking for what they spoke of, never after."""
        # In this order: a set() in between leaves a token or finds the flag still up,
        # and either way the look that follows sees what it spoke of.
        while not self._queue.empty():
            try:
                self._queue.get_nowait()
            except queue.Empty:
                break
        self._set = False

    def wait(self, timeout: float) -> bool:
        """Return whether the flag was set within ``timeout`` seconds."""
        try:
            self._queue.get(timeout=max(0.0, timeout))
        except queue.Empty:
            return False
        # The token stands for the flag: put it back, so that only clear() forgets.
        self._queue.put(None)
        return True


_notified_at: dict[tuple[str, str], float] = {}
"""When this process last notified, by alias and queue; taken before, so that a window never ends too late."""

_local_relays: weakref.WeakSet[_LocalRelay] = weakref.WeakSet()
_local_lock = threading.Lock()


OnWake = Callable[[str | None], None]
"""Called with the queue in which something may be due; ``None`` for any of them."""


class _LocalRelay:
    """A relay in this process, for the alias it serves."""

    def __init__(self, alias: str, on_wake: OnWake) -> None:
        self.alias = alias
        self.on_wake = on_wake


class _NotifyHook:
    """The commit hook of one transaction and queue; runs once however often it is registered."""

    def __init__(self, alias: str, queue: str) -> None:
        self.alias = alias
        self.queue = queue
        self.fired = False
        # Django logs the error of a robust hook under this name, and an object without it
        # would make the logging itself raise into the caller, after the commit.
        self.__qualname__ = type(self).__qualname__
        self.among: list[Any] | None = None
        """Django's list of hooks in which it stands."""
        self.savepoints: frozenset[str | None] = frozenset()
        """Those around its latest registration."""

    def __call__(self) -> None:
        if self.fired:
            return
        self.fired = True
        notify(self.alias, queue=self.queue)


_latest_hooks: weakref.WeakKeyDictionary[BaseDatabaseWrapper, dict[str, _NotifyHook]] = weakref.WeakKeyDictionary()


def notify_on_commit(using: str, *, queue: str = "events") -> None:
    """
    Wake the relays after the caller's transaction commits: once a queue, however many rows it holds.

    A savepoint that is rolled back takes its hooks with it, so the hook is registered
    again in every savepoint that no earlier registration outlives; all of them share
    one object that fires once.
    """
    connection = connections[using]
    here = frozenset(connection.savepoint_ids)
    hooks = _latest_hooks.setdefault(connection, {})
    hook = hooks.get(queue)
    # Remembered, because looking through the list at every emit would cost a long import
    # the square of its savepoints. Django replaces the list when a transaction ends and
    # when a savepoint is rolled back; only then is it looked through.
    if hook is None or hook.fired or hook.among is not connection.run_on_commit:
        hook = hooks[queue] = _standing_hook(connection, queue) or _NotifyHook(using, queue)
    if hook.among is connection.run_on_commit and hook.savepoints <= here:
        return
    transaction.on_commit(hook, using=using, robust=True)
    hook.among, hook.savepoints = connection.run_on_commit, here


def _standing_hook(connection: BaseDatabaseWrapper, queue: str) -> _NotifyHook | None:
    """Return the hook of this transaction by its latest registration: an earlier one is outlived by it."""
    for savepoints, registered, *_ in reversed(connection.run_on_commit):
        if isinstance(registered, _NotifyHook) and registered.queue == queue and not registered.fired:
            registered.among, registered.savepoints = connection.run_on_commit, frozenset(savepoints)
            return registered
    return None


def notify(using: str, *, queue: str = "events") -> None:
    """
    Wake every relay of a database for a queue now; never raises for the database's sake.

    On PostgreSQL a payload-free NOTIFY as a statement of its own, in effect with asynchronous
    commit: a notifying transaction takes a lock of the whole server while it commits,
    so the business transaction must not be the one that notifies. And one for all that
    this process commits within `NOTIFY_WINDOW_SECONDS`: a relay looks again when a
    window has passed since it was woken.
    """
    with _local_lock:
        relays = list(_local_relays)
    for relay in relays:
        if relay.alias == using:
            relay.on_wake(queue)
    connection = connections[using]
    if connection.vendor != "postgresql":
        return
    now = time.monotonic()
    if now - _notified_at.get((using, queue), -math.inf) < NOTIFY_WINDOW_SECONDS:
        return
    try:
        with connection.cursor() as cursor:
            # A transaction that writes nothing else waits for no disk, whatever synchronous_commit says.
            cursor.execute(f"NOTIFY django_outbox_{queue}")
        _notified_at[using, queue] = now
    except Error as error:  # the base of InterfaceError too: a connection that is closed already
        logger.warning(
            "wake-up not sent, the next poll finds the event database=%s error=%s", using, clean_error(error)
        )


# --- the receiving end -----------------------------------------------------------------------------------------------


class Watcher:
    """Calls ``on_wake`` when there may be something to claim; the base hears of this process's writes only."""

    def __init__(self, alias: str, on_wake: OnWake) -> None:
        self._local = _LocalRelay(alias, on_wake)
        self._on_wake = on_wake

    def start(self) -> None:
        """Begin to watch; returns at once."""
        with _local_lock:
            _local_relays.add(self._local)

    def stop(self) -> None:
        """Stop watching; idempotent."""
        with _local_lock:
            _local_relays.discard(self._local)


class FileWatcher(Watcher):
    """
    Watches a SQLite file by its ``data_version``, which changes when another connection commits.

    Uses a connection of its own: the number does not change for one's own writes.
    """

    def __init__(self, alias: str, on_wake: OnWake) -> None:
        super().__init__(alias, on_wake)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outbox-watch", daemon=True)

    def start(self) -> None:
        """Begin to watch in a thread of its own."""
        super().start()
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        super().stop()
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def _run(self) -> None:
        connection = connections.create_connection(self._local.alias)
        seen: int | None = None
        try:
            while not self._stopped.wait(DATA_VERSION_SECONDS):
                try:
                    with connection.cursor() as cursor:
                        cursor.execute("PRAGMA data_version")
                        version = int(cursor.fetchone()[0])
                except DatabaseError as error:
                    logger.warning("cannot watch the database file error=%s", clean_error(error))
                    connection.close()
                    seen = None
                    self._stopped.wait(RECONNECT_MAX_SECONDS)
                    continue
                # The first look wakes too: what was committed before it, and after the relay's
                # own first look, is in the number already and will not change it.
                if version != seen:
                    self._on_wake(None)
                seen = version
        finally:
            connection.close()


class Listener(Watcher):
    """
    LISTENs on a PostgreSQL connection of its own, outside any pool.

    The connection is asked for a sign of life every 15 s with a deadline, so a
    half-open socket is noticed; it reconnects from 250 ms doubling to 15 s, and
    wakes the relay after each reconnect, since what was notified in the gap is lost.
    Behind a pooler that hands its sessions out by the transaction, where LISTEN seems
    to succeed and nothing is ever heard, it says so once and gives up: the relay polls.
    """

    def __init__(self, alias: str, on_wake: OnWake, *, dsn: str | None = None) -> None:
        super().__init__(alias, on_wake)
        self._dsn = dsn
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self._queue_full = False
        self.listening = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outbox-listen", daemon=True)

    def start(self) -> None:
        """Begin to listen in a thread of its own."""
        super().start()
        self._thread.start()

    def stop(self) -> None:
        """End the thread and its connection."""
        super().stop()
        self._stopping = True
        loop, task = self._loop, self._task
        if loop is not None and task is not None and not loop.is_closed():
            try:
                loop.call_soon_threadsafe(task.cancel)
            except RuntimeError:  # the loop closed in between
                return
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except asyncio.CancelledError:
            return

    async def _main(self) -> None:
        import psycopg  # noqa: PLC0415  SQLite projects need no libpq

        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        wait = RECONNECT_MIN_SECONDS
        healthy = True
        while not self._stopping:
            try:
                connection = await self._connect()
                try:
                    for channel in CHANNELS:
                        await self._execute(connection, f"LISTEN {channel}")
                    if not await self._hears(connection):
                        logger.warning(
                            "LISTEN is not heard here, polling instead; a transaction pooler is between, most likely:"
                            ' set OUTBOX["LISTEN_DSN"] to an address of the server itself database=%s',
                            self._local.alias,
                        )
                        return
                    # Registered first, then drained: what was committed before is found by the
                    # drain, what comes after by the notification.
                    self.listening.set()
                    self._on_wake(None)
                    if not healthy:
                        logger.info("listening again database=%s", self._local.alias)
                    wait, healthy = RECONNECT_MIN_SECONDS, True
                    await self._listen(connection)
                finally:
                    self.listening.clear()
                    connection.pgconn.finish()
            except (psycopg.Error, OSError, TimeoutError) as error:
                if healthy:
                    logger.warning(
                        "not listening, polling instead database=%s error=%s", self._local.alias, clean_error(error)
                    )
                healthy = False
            await asyncio.sleep(wait * random.uniform(0.75, 1.25))  # noqa: S311
            wait = min(wait * 2, RECONNECT_MAX_SECONDS)

    async def _listen(self, connection: Any) -> None:
        import psycopg  # noqa: PLC0415  SQLite projects need no libpq

        loop = asyncio.get_running_loop()
        pgconn = connection.pgconn
        # What comes along with the answer to a ping, the driver reads.
        connection.add_notify_handler(lambda notification: self._on_wake(CHANNELS.get(notification.channel)))
        while True:
            ended = asyncio.Event()
            errors: list[psycopg.Error] = []

            def read(ended: asyncio.Event = ended, errors: list[psycopg.Error] = errors) -> None:
                # Below the driver's own loop: every step of it is time between a commit and its handler.
                try:
                    pgconn.consume_input()
                    while (notification := pgconn.notifies()) is not None:
                        self._on_wake(CHANNELS.get(notification.relname.decode()))
                except psycopg.Error as error:
                    errors.append(error)
                    ended.set()

            socket = pgconn.socket
            loop.add_reader(socket, read)
            # What the driver read from the socket with an answer is not heard of there.
            read()
            try:
                with suppress(TimeoutError):
                    async with asyncio.timeout(PING_SECONDS):
                        await ended.wait()
            finally:
                loop.remove_reader(socket)
            if errors:
                raise errors[0]
            # A sign of life that does some good: the server drops what all sessions have read
            # when it is asked how full its queue is. One that was full stays full until then.
            self._note_queue(await self._execute(connection, "SELECT pg_notification_queue_usage()"))

    def _note_queue(self, usage: float) -> None:
        """Say once when the server's notification queue fills: at its end no notification can be sent by anybody."""
        full = usage > QUEUE_USAGE_TOLD
        if full and not self._queue_full:
            logger.warning(
                "the server's notification queue fills up, some session listens inside an open transaction"
                " database=%s full=%d%%",
                self._local.alias,
                round(usage * 100),
            )
        self._queue_full = full

    async def _connect(self) -> Any:
        import psycopg  # noqa: PLC0415  SQLite projects need no libpq

        async with asyncio.timeout(PING_DEADLINE_SECONDS):
            return await psycopg.AsyncConnection.connect(**self._parameters(), autocommit=True)

    async def _execute(self, connection: Any, statement: str) -> Any:
        """Return the first value of a statement's answer, if it has one; a silent server costs the deadline."""
        task = asyncio.ensure_future(connection.execute(statement))
        done, _ = await asyncio.wait([task], timeout=PING_DEADLINE_SECONDS)
        if not done:
            # Closed first: psycopg would spend 10 s more on having the silent server cancel the statement.
            connection.pgconn.finish()
            task.cancel()
            await asyncio.wait([task])
            raise TimeoutError(f"no answer within {PING_DEADLINE_SECONDS:g} s")
        cursor = task.result()
        return (await cursor.fetchone())[0] if cursor.description else None

    async def _hears(self, connection: Any) -> bool:
        """Return whether what another session notifies arrives on this connection."""
        # A pooler greets its clients with a number of its own making. Without one there is no need to ask.
        if await self._execute(connection, "SELECT pg_backend_pid()") == connection.info.backend_pid:
            return True
        channel = f"django_outbox_{secrets.token_hex(8)}"
        await self._execute(connection, f"LISTEN {channel}")
        # Not by this connection: a pooler passes on what comes along with an answer.
        other = await self._connect()
        try:
            await self._execute(other, f"NOTIFY {channel}")
            heard = False
            until = time.monotonic() + HEARING_SECONDS
            while not heard and (left := until - time.monotonic()) > 0:
                async for notification in connection.notifies(timeout=left, stop_after=1):
                    heard = notification.channel == channel
            await self._execute(connection, f"UNLISTEN {channel}")
        finally:
            other.pgconn.finish()
        return heard

    def _parameters(self) -> dict[str, Any]:
        if self._dsn is not None:
            return {"conninfo": self._dsn, "application_name": "django_outbox listen"}
        connection: BaseDatabaseWrapper = connections[self._local.alias]
        parameters = dict(connection.get_connection_params())
        # What Django and its pool add to the libpq parameters.
        for name in ("cursor_factory", "context", "prepare_threshold", "pool", "server_side_binding"):
            parameters.pop(name, None)
        return parameters | {"application_name": "django_outbox listen"}


def watch(alias: str, on_wake: OnWake, *, dsn: str | None = None) -> Watcher:
    """Return the watcher for a database: LISTEN on PostgreSQL, ``data_version`` on a SQLite file."""
    connection = connections[alias]
    if connection.vendor == "postgresql":
        return Listener(alias, on_wake, dsn=dsn)
    if connection.vendor == "sqlite" and not connection.is_in_memory_db():  # type: ignore[attr-defined]
        return FileWatcher(alias, on_wake)
    return Watcher(alias, on_wake)
