"""The two databases: what PostgreSQL and SQLite write differently, and their clock."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast
from uuid import UUID

from django.db import connections, transaction

from django_outbox.lease.rows import Queue

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

_offset_seconds = 0.0


@contextmanager
def shift_clock(seconds: float) -> Iterator[None]:
    """Add to the database's time, as every statement of the engine in this process sees it. For tests."""
    global _offset_seconds  # noqa: PLW0603
    before = _offset_seconds
    _offset_seconds = before + seconds
    try:
        yield
    finally:
        _offset_seconds = before


Build = TypeVar("Build", bound=Callable[..., str])


def statement(build: Build) -> Build:
    """
    Keep what a function that builds SQL returned, by its arguments and the clock's shift.

    Few texts occur, and building one costs more than sending it.
    """
    kept = lru_cache(maxsize=256)(lambda _offset, *arguments: build(*arguments))

    @wraps(build)
    def text(*arguments: Any) -> str:
        return kept(_offset_seconds, *arguments)

    return cast("Build", text)


class Dialect(ABC):
    """The parts of a statement that the two databases write differently."""

    lock: str
    """Locks the rows that a SELECT finds."""
    lock_skipping: str
    """Locks them too, and leaves out those that somebody else has locked."""

    @property
    @abstractmethod
    def now(self) -> str:
        """The statement's time: stable, so an index condition can use it."""

    @property
    @abstractmethod
    def clock(self) -> str:
        """The time at which the expression is evaluated, for assignments."""

    @abstractmethod
    def after(self, seconds: str) -> str:
        """Return the expression for so many seconds from now; NULL for NULL."""

    @abstractmethod
    def epoch(self, moment: str) -> str:
        """Return a moment as seconds since 1970."""

    @abstractmethod
    def records(self, columns: Mapping[str, str]) -> str:
        """Return a FROM item named ``o`` with the columns (name → PostgreSQL type) of one JSON array parameter."""

    @abstractmethod
    def merged(self, left: str, right: str) -> str:
        """Return one JSON object with the keys of another, which may be NULL, put into it."""

    @abstractmethod
    def given(self, document: str, name: str, kind: str, *, otherwise: str) -> str:
        """Return the value of a name in a JSON object, as a PostgreSQL type; the other where it is absent."""

    @abstractmethod
    def json_value(self, value: Any) -> Any:
        """Return a value as it stands in a JSON parameter, for a column to take it from there."""

    @abstractmethod
    def param(self, value: Any) -> Any:
        """Return a value as a parameter that is compared with a column."""

    @abstractmethod
    def id_list(self) -> str:
        """Return a subselect of the ids in one JSON array parameter."""

    @abstractmethod
    def json_text(self, column: str) -> str:
        """Return a JSON column as text."""

    @abstractmethod
    def id_param(self, value: UUID) -> str:
        """Return an id as it stands in parameters."""

    def id_value(self, value: Any) -> UUID:
        """Return an id as it comes from the driver."""
        return value if isinstance(value, UUID) else UUID(value)


class Postgres(Dialect):
    """PostgreSQL 14 and later."""

    lock = "FOR NO KEY UPDATE"
    lock_skipping = "FOR NO KEY UPDATE SKIP LOCKED"

    @property
    def now(self) -> str:
        return self._shifted("statement_timestamp()")

    @property
    def clock(self) -> str:
        return self._shifted("clock_timestamp()")

    def _shifted(self, clock: str) -> str:
        return f"({clock} + interval '{_offset_seconds!r} seconds')" if _offset_seconds else clock

    def after(self, seconds: str) -> str:
        return f"({self.clock} + ({seconds}) * interval '1 second')"

    def epoch(self, moment: str) -> str:
        return f"extract(epoch from {moment})::float8"

    def records(self, columns: Mapping[str, str]) -> str:
        return f"jsonb_to_recordset(%s::jsonb) AS o({', '.join(f'{name} {kind}' for name, kind in columns.items())})"

    def merged(self, left: str, right: str) -> str:
        return f"CASE WHEN {right} IS NULL THEN {left} ELSE {left} || {right} END"

    def given(self, document: str, name: str, kind: str, *, otherwise: str) -> str:
        value = f"nullif({document} -> '{name}', 'null')" if kind == "jsonb" else f"({document} ->> '{name}')::{kind}"
        return f"CASE WHEN jsonb_exists({document}, '{name}') THEN {value} ELSE {otherwise} END"

    def json_value(self, value: Any) -> Any:
        if isinstance(value, datetime):
            return value.isoformat()
        return str(value) if isinstance(value, UUID) else value

    def param(self, value: Any) -> Any:
        return value

    def id_list(self) -> str:
        return "(SELECT value::uuid FROM jsonb_array_elements_text(%s::jsonb))"

    def json_text(self, column: str) -> str:
        return f"{column}::text"

    def id_param(self, value: UUID) -> str:
        return str(value)


class SQLite(Dialect):
    """SQLite 3.38 and later. Its times are text in UTC, ``YYYY-MM-DD HH:MM:SS.mmm``, which sorts as it should."""

    # One writer at a time: the write lock of the transaction stands for every row lock.
    lock = ""
    lock_skipping = ""

    @property
    def now(self) -> str:
        return self.clock

    @property
    def clock(self) -> str:
        shift = f", '{_offset_seconds:+.3f} seconds'" if _offset_seconds else ""
        return f"strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'{shift})"

    def after(self, seconds: str) -> str:
        # A NULL modifier gives NULL, as PostgreSQL's arithmetic does.
        return f"strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', ({_offset_seconds!r} + ({seconds})) || ' seconds')"

    def epoch(self, moment: str) -> str:
        # julianday() is exact to 0.1 ms here; unixepoch() has fractions from SQLite 3.42 on only.
        return f"((julianday({moment}) - 2440587.5) * 86400.0)"

    def records(self, columns: Mapping[str, str]) -> str:
        fields = ", ".join(f"json_extract(value, '$.{name}') AS {name}" for name in columns)
        return f"(SELECT {fields} FROM json_each(%s)) AS o"

    def merged(self, left: str, right: str) -> str:
        return f"CASE WHEN {right} IS NULL THEN {left} ELSE json_patch({left}, {right}) END"

    def given(self, document: str, name: str, kind: str, *, otherwise: str) -> str:
        value = f"json_extract({document}, '$.{name}')"
        if kind == "jsonb":
            # The operator keeps a text a JSON text; json_extract() would take its quotes away.
            value = f"nullif({document} -> '$.{name}', 'null')"
        return f"CASE WHEN json_type({document}, '$.{name}') IS NOT NULL THEN {value} ELSE {otherwise} END"

    def json_value(self, value: Any) -> Any:
        if isinstance(value, datetime):
            return str(value.astimezone(UTC).replace(tzinfo=None))
        return value.hex if isinstance(value, UUID) else value

    def param(self, value: Any) -> Any:
        return self.json_value(value)

    def id_list(self) -> str:
        return "(SELECT value FROM json_each(%s))"

    def json_text(self, column: str) -> str:
        return column

    def id_param(self, value: UUID) -> str:
        return value.hex


POSTGRES: Final = Postgres()
SQLITE: Final = SQLite()


def dialect_of(connection: BaseDatabaseWrapper) -> Dialect:
    """Return the dialect of a connection."""
    return SQLITE if connection.vendor == "sqlite" else POSTGRES


def database_now(using: str) -> datetime:
    """Return the time by the database's clock, as the statements of the engine see it."""
    connection = connections[using]
    dialect = dialect_of(connection)
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {dialect.epoch(dialect.clock)}", [])
        return datetime.fromtimestamp(float(cursor.fetchone()[0]), UTC)


def table_of(queue: Queue, connection: BaseDatabaseWrapper) -> str:
    """Return the quoted name of a queue's table."""
    return connection.ops.quote_name(queue.model._meta.db_table)


@contextmanager
def write_transaction(connection: BaseDatabaseWrapper, table: str) -> Iterator[None]:
    """
    Open a transaction (a savepoint inside the caller's), on SQLite with the write lock from its first moment.

    A SQLite transaction that reads first and writes later fails at once when another
    writer came between; ``transaction_mode: IMMEDIATE`` avoids it, this also without it.
    """
    with transaction.atomic(using=connection.alias):
        if connection.vendor == "sqlite":
            with connection.cursor() as cursor:
                cursor.execute(f"UPDATE {table} SET fence = fence WHERE 0")
        yield
