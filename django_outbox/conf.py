"""
``settings.OUTBOX`` → frozen settings, and the one validator behind the checks and the runtime.

Every key is a dataclass field below: its default, kind, bounds, unit and
meaning stand in one line, and the validator, the runtime and the documentation
test all read that line.
"""

from __future__ import annotations

import difflib
import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from functools import lru_cache
from typing import Any, Final, Literal, cast

from django.conf import settings as django_settings
from django.core.signals import setting_changed

from django_outbox.errors import InvalidSettings
from django_outbox.retry import JITTER, Schedule

__all__ = [
    "EmailSettings",
    "OutboxSettings",
    "Problem",
    "QueueSettings",
    "TaskSettings",
    "WebhookSettings",
    "get_settings",
    "problems",
    "queue_classes",
    "setting_fields",
]

Kind = Literal["bool", "count", "seconds", "text", "module", "queue", "texts", "networks", "counts"]

_YEAR: Final = 366 * 86_400.0
_FOR_EVER: Final = 100 * _YEAR

_WANTED: Final[Mapping[Kind, tuple[tuple[type, ...], str]]] = {
    "bool": ((bool,), "True or False"),
    "count": ((int,), "a whole number"),
    "seconds": ((int, float), "a number of seconds"),
    "text": ((str,), "a string"),
    "module": ((str,), "a string"),
    "texts": ((list, tuple), "a list of strings"),
    "networks": ((list, tuple), "a list of networks"),
    "counts": ((list, tuple), "a list of whole numbers"),
}


def _setting(
    kind: Kind,
    *,
    default: Any,
    low: float = 0,
    high: float = _YEAR,
    unit: str = "",
    optional: bool = False,
    choices: tuple[str, ...] = (),
    doc: str,
) -> Any:
    return field(
        default=default,
        metadata={
            "kind": kind,
            "low": low,
            "high": high,
            "unit": unit or ("seconds" if kind == "seconds" else ""),
            "optional": optional or default is None,
            "choices": choices,
            "doc": doc,
        },
    )


def _queue(doc: str) -> dict[str, Any]:
    """
    Return the metadata of a queue's settings.

    The field's ``default_factory`` is their class: a queue with defaults or keys of its own has one of its own.
    """
    return {"kind": "queue", "doc": doc, "unit": "", "optional": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    """The settings of one queue."""

    max_attempts: int = _setting(
        "count", default=8, low=1, high=10_000, unit="attempts", doc="Failed attempts after which a row is dead."
    )
    retry_base_seconds: float = _setting(
        "seconds", default=5.0, doc="Wait after the first failure; doubles from there."
    )
    retry_cap_seconds: float = _setting(
        "seconds", default=3_600.0, doc="Longest wait between two attempts, before jitter."
    )
    replay_every_seconds: float | None = _setting(
        "seconds", default=21_600.0, low=1, optional=True, doc="How often a dead row is tried again; `None` = never."
    )
    replay_for_seconds: float | None = _setting(
        "seconds",
        default=None,
        low=1,
        high=_FOR_EVER,
        doc="Age after which a dead row is not replayed; `None` = for ever.",
    )
    lease_seconds: float = _setting(
        "seconds", default=60.0, low=1, high=86_400, doc="How long a claim holds a row; renewed at a third of it."
    )
    timeout_seconds: float = _setting(
        "seconds", default=30.0, low=0.01, high=86_400, doc="Time limit of a handler that sets none of its own."
    )
    concurrency: int = _setting(
        "count", default=8, low=1, high=1_000, unit="threads", doc="Handler threads per relay process."
    )
    retention_seconds: float | None = _setting(
        "seconds",
        default=604_800.0,
        high=_FOR_EVER,
        optional=True,
        doc="How long done rows are kept; an idle relay removes older ones. `None` = for ever. "
        "Dead and failed rows are kept.",
    )

    @property
    def schedule(self) -> Schedule:
        """The failure schedule these settings describe."""
        return Schedule(
            max_attempts=self.max_attempts,
            base=self.retry_base_seconds,
            cap=self.retry_cap_seconds,
            replay_every=self.replay_every_seconds,
            replay_for=self.replay_for_seconds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EmailSettings(QueueSettings):
    """The settings of the email queue."""

    max_attempts: int = _setting(
        "count", default=4, low=1, high=10_000, unit="attempts", doc="Failed attempts after which an email is dead."
    )
    retry_base_seconds: float = _setting(
        "seconds", default=60.0, doc="Wait after the first failure; doubles from there."
    )
    replay_for_seconds: float | None = _setting(
        "seconds",
        default=86_400.0,
        low=1,
        high=_FOR_EVER,
        optional=True,
        doc="Age after which a dead email is not replayed; `None` = for ever.",
    )
    lease_seconds: float = _setting(
        "seconds", default=120.0, low=1, high=86_400, doc="How long a claim holds a row; renewed at a third of it."
    )
    timeout_seconds: float = _setting(
        "seconds", default=30.0, low=0.1, high=3_600, doc="Time limit of one email, over all replies of the server."
    )
    concurrency: int = _setting(
        "count",
        default=8,
        low=1,
        high=1_000,
        unit="threads",
        doc="Sending threads, and connections, per relay process.",
    )
    backend: str | None = _setting(
        "text",
        default=None,
        doc="Dotted path of the backend that delivers. `None` = `EMAIL_BACKEND`, if that is not the queue's own; with"
        " `MAILERS` it must stay `None`.",
    )
    reply_timeout_seconds: float = _setting(
        "seconds",
        default=10.0,
        low=0.1,
        high=3_600,
        doc="Longest wait for one reply of the server, where the backend sets no time-out of its own.",
    )
    message_id_domain: str | None = _setting(
        "text", default=None, doc="Domain of the Message-ID of a message that has none; `None` = that of its sender."
    )
    max_message_bytes: int = _setting(
        "count",
        default=10 * 2**20,
        low=1_024,
        high=256 * 2**20,
        unit="bytes",
        doc="Largest message, texts and attachments together, before any encoding.",
    )
    max_recipients: int = _setting(
        "count", default=50, low=1, high=10_000, unit="addresses", doc="Most recipients of one message."
    )
    extra_attributes: tuple[str, ...] = _setting(
        "texts", default=(), doc="Attributes of a message, beyond Django's and Anymail's, that are stored with it."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookSettings(QueueSettings):
    """The settings of the webhook queue."""

    max_attempts: int = _setting(
        "count", default=4, low=1, high=10_000, unit="attempts", doc="Failed attempts after which a delivery is dead."
    )
    retry_base_seconds: float = _setting(
        "seconds", default=30.0, doc="Wait after the first failure; doubles from there."
    )
    replay_for_seconds: float | None = _setting(
        "seconds",
        default=604_800.0,
        low=1,
        high=_FOR_EVER,
        optional=True,
        doc="Age after which a dead delivery is not replayed; `None` = for ever.",
    )
    lease_seconds: float = _setting(
        "seconds", default=330.0, low=1, high=86_400, doc="How long a claim holds a row; renewed at a third of it."
    )
    timeout_seconds: float = _setting(
        "seconds", default=30.0, low=0.1, high=3_600, doc="Time limit of one request, from connecting to its answer."
    )
    concurrency: int = _setting(
        "count", default=16, low=1, high=1_000, unit="threads", doc="Sending threads per relay process."
    )
    endpoint_concurrency: int = _setting(
        "count",
        default=4,
        low=1,
        high=1_000,
        unit="requests",
        doc="Requests to one endpoint at a time, per relay process; a slow or failing endpoint gets one.",
    )
    secret_keys: tuple[str, ...] | None = _setting(
        "texts",
        default=None,
        doc="Texts from which the keys are derived that encrypt endpoints' secrets; the first encrypts, all decrypt. "
        "`None` = `SECRET_KEY` and `SECRET_KEY_FALLBACKS`.",
    )
    allow_http: bool = _setting("bool", default=False, doc="Accept endpoints without TLS.")
    allow_ports: tuple[int, ...] = _setting(
        "counts", default=(80, 443, 8080, 8443), low=1, high=65_535, doc="Ports that an endpoint may use."
    )
    allow_networks: tuple[str, ...] = _setting(
        "networks", default=(), doc="Networks, such as `10.1.0.0/16`, that may be reached although they are not public."
    )
    deny_networks: tuple[str, ...] = _setting(
        "networks", default=(), doc="Networks that may not be reached although they are public."
    )
    permanent_statuses: tuple[int, ...] = _setting(
        "counts", default=(), low=400, high=499, doc="HTTP statuses after which a delivery is not tried again."
    )
    disable_after_seconds: float | None = _setting(
        "seconds",
        default=259_200.0,
        low=60,
        doc="An endpoint that had no success for so long, and failed often, is disabled; `None` = never.",
    )
    ca_bundle: str | None = _setting(
        "text", default=None, doc="File of the certificate authorities to trust; `None` = those of `certifi`."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSettings(QueueSettings):
    """The settings of the task queue."""

    max_attempts: int = _setting(
        "count",
        default=8,
        low=1,
        high=10_000,
        unit="attempts",
        doc="Failed attempts after which a task is dead, where it says nothing itself.",
    )
    retry_base_seconds: float = _setting(
        "seconds", default=30.0, doc="Wait after the first failure; doubles from there."
    )
    replay_every_seconds: float | None = _setting(
        "seconds",
        default=None,
        low=1,
        doc="How often a dead task is tried again; `None` = never: it waits for a person.",
    )
    lease_seconds: float = _setting(
        "seconds", default=300.0, low=1, high=86_400, doc="How long a claim holds a row; renewed at a third of it."
    )
    timeout_seconds: float = _setting(
        "seconds", default=300.0, low=0.01, high=86_400, doc="Time limit of a task that sets none of its own."
    )
    concurrency: int = _setting(
        "count", default=8, low=1, high=1_000, unit="threads", doc="Threads that run tasks, per relay process."
    )
    retention_seconds: float | None = _setting(
        "seconds",
        default=604_800.0,
        high=_FOR_EVER,
        optional=True,
        doc="How long done tasks are kept, with their return values; an idle relay removes older ones. `None` = for"
        " ever. Dead and failed ones are kept.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxSettings:
    """All of ``settings.OUTBOX``, validated, with defaults filled in."""

    database: str = _setting("text", default="default", doc="Alias of the database that holds the outbox tables.")
    require_transaction: bool = _setting(
        "bool", default=True, doc="Refuse `emit_event` outside `atomic()`. `False`: it opens a transaction of its own."
    )
    max_payload_bytes: int = _setting(
        "count",
        default=262_144,
        low=64,
        high=64 * 2**20,
        unit="bytes",
        doc="Largest payload, and largest headers, as UTF-8 JSON.",
    )
    poll_seconds: float = _setting("seconds", default=30.0, low=0.05, high=3_600, doc="Longest sleep of an idle relay.")
    shutdown_grace_seconds: float = _setting(
        "seconds", default=25.0, low=0, high=3_600, doc="How long a stopping relay waits for handlers at work."
    )
    stuck_seconds: float = _setting(
        "seconds",
        default=300.0,
        low=0,
        high=86_400,
        doc="How long a handler past its time limit keeps its row before it counts as failed.",
    )
    park_for_seconds: float = _setting(
        "seconds",
        default=86_400.0,
        low=0,
        doc="How long a delivery waits for a relay that knows its handler; 0 = dead at once.",
    )
    listen_dsn: str | None = _setting(
        "text", default=None, doc="PostgreSQL DSN for LISTEN, when `DATABASE` points at a transaction pooler."
    )
    handlers_module: str = _setting(
        "module", default="outbox_handlers", doc="Module looked for in every installed app."
    )
    builtin_handlers: tuple[str, ...] = _setting(
        "texts",
        default=(),
        choices=("audit-log", "webhook-fanout", "notification-fanout", "operator-alert"),
        doc="Built-in handlers to switch on: `audit-log` enters every event in the audit log, `webhook-fanout` writes"
        " webhook deliveries, `notification-fanout` notifications, `operator-alert` tells operators what died.",
    )
    audit_protect: bool = _setting(
        "bool", default=True, doc="Triggers refuse to update or delete audit entries; put in place by `migrate`."
    )
    alert_emails: tuple[str, ...] | None = _setting(
        "texts", default=None, doc="Addresses that `operator-alert` writes to. `None` = those in `ADMINS`."
    )
    alert_webhook_url: str | None = _setting(
        "text", default=None, doc="URL that `operator-alert` sends webhooks to, such as a chat's incoming webhook."
    )
    alert_window_seconds: float = _setting(
        "seconds",
        default=600.0,
        low=1,
        high=86_400,
        doc="After an alert, what else dies is told at most this often, in one summary.",
    )
    events: QueueSettings = field(default_factory=QueueSettings, metadata=_queue("The events queue."))
    email: EmailSettings = field(default_factory=EmailSettings, metadata=_queue("The email queue."))
    webhooks: WebhookSettings = field(default_factory=WebhookSettings, metadata=_queue("The webhook queue."))
    tasks: TaskSettings = field(default_factory=TaskSettings, metadata=_queue("The task queue."))


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with ``OUTBOX``: a stable check id, a sentence, a hint."""

    id: str
    message: str
    hint: str


def setting_fields(cls: type[OutboxSettings | QueueSettings] = OutboxSettings) -> dict[str, Field[Any]]:
    """Return the setting keys as users write them, with the field behind each."""
    return {entry.name.upper(): entry for entry in fields(cls)}


def queue_classes() -> dict[str, type[QueueSettings]]:
    """Return the class of each queue's settings by the key that holds them, such as ``EVENTS``."""
    return {
        key: cast("type[QueueSettings]", entry.default_factory)
        for key, entry in setting_fields().items()
        if entry.metadata["kind"] == "queue"
    }


def problems(raw: object) -> list[Problem]:
    """Return everything that is wrong with a value of ``settings.OUTBOX``; empty when it is right."""
    if not isinstance(raw, Mapping):
        return [_not_a_dict(raw, "OUTBOX")]
    return list(_problems(raw, OutboxSettings, "OUTBOX")) or list(_contradictions(_build(raw)))


def get_settings() -> OutboxSettings:
    """
    Return the settings in force; raise `InvalidSettings` naming the first wrong key.

    The value is cached and follows Django's ``setting_changed`` signal.
    """
    return _cached()


@lru_cache(maxsize=1)
def _cached() -> OutboxSettings:
    raw = getattr(django_settings, "OUTBOX", {})
    for problem in problems(raw):
        raise InvalidSettings(f"{problem.message} {problem.hint}")
    return _build(raw)


def _forget(*, setting: str, **_: object) -> None:
    if setting in {"OUTBOX", "DATABASES"}:
        _cached.cache_clear()


setting_changed.connect(_forget, dispatch_uid="django_outbox.conf")


def _build(raw: Mapping[str, Any]) -> OutboxSettings:
    values = _frozen(raw)
    for key, cls in queue_classes().items():
        if key in raw:
            values[key.lower()] = cls(**_frozen(raw[key]))
    return OutboxSettings(**values)


def _frozen(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by the names of their fields, frozen to the last item."""
    return {key.lower(): tuple(value) if isinstance(value, list) else value for key, value in raw.items()}


def _problems(raw: Mapping[Any, Any], cls: type[OutboxSettings | QueueSettings], where: str) -> Iterator[Problem]:
    known = setting_fields(cls)
    for key, value in raw.items():
        path = f'{where}["{key}"]'
        if key not in known:
            yield Problem("E001", f"{path} is not a setting.", _hint_for_unknown(str(key).upper(), known))
        elif known[key].metadata["kind"] != "queue":
            yield from _value_problems(path, value, known[key].metadata)
        elif isinstance(value, Mapping):
            yield from _problems(value, queue_classes()[key], path)
        else:
            yield _not_a_dict(value, path)


def _not_a_dict(value: object, where: str) -> Problem:
    return Problem("E002", f"{where} must be a dict, not {type(value).__name__}.", f"Write {where} = {{}}.")


def _hint_for_unknown(key: str, known: Mapping[str, Field[Any]]) -> str:
    for queue, cls in queue_classes().items():
        if key in setting_fields(cls) and key not in known:
            return f'It belongs to a queue: OUTBOX["{queue}"]["{key}"].'
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f'Did you mean "{close[0]}"?' if close else f"Known keys: {', '.join(known)}."


def _value_problems(path: str, value: object, meta: Mapping[str, Any]) -> Iterator[Problem]:
    if value is None and meta["optional"]:
        return
    types, words = _WANTED[meta["kind"]]
    # bool is a subclass of int, but True attempts are a mistake.
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        or_none = " or None" if meta["optional"] else ""
        yield Problem("E002", f"{path} must be {words}{or_none}, not {type(value).__name__}.", meta["doc"])
    elif isinstance(value, list | tuple):
        yield from _item_problems(path, value, meta)
    elif value == "":
        yield Problem("E003", f"{path} is empty.", meta["doc"] + " Leave it out for the default.")
    elif meta["kind"] == "module" and not all(part.isidentifier() for part in str(value).split(".")):
        yield Problem("E003", f"{path} is {value!r}, which is not the name of a module.", meta["doc"])
    # In this form a NaN is out of range too.
    elif isinstance(value, int | float) and not meta["low"] <= value <= meta["high"]:
        low, high, unit = meta["low"], meta["high"], meta["unit"]
        yield Problem("E003", f"{path} is {value}; it must lie between {low:,} and {high:,} {unit}.", meta["doc"])


def _item_problems(path: str, values: Sequence[object], meta: Mapping[str, Any]) -> Iterator[Problem]:
    for index, value in enumerate(values):
        where = f"{path}[{index}]"
        if meta["kind"] == "counts":
            item = {**meta, "kind": "count", "optional": False}
        else:
            item = {**meta, "kind": "text", "optional": False}
        wrong = list(_value_problems(where, value, item))
        yield from wrong
        if meta["choices"] and not wrong and value not in meta["choices"]:
            yield Problem("E003", f"{where} is {value!r}; choose among {', '.join(meta['choices'])}.", meta["doc"])
        if meta["kind"] == "networks" and not wrong:
            try:
                ipaddress.ip_network(str(value))
            except ValueError as error:
                yield Problem("E003", f"{where} is not a network: {error}.", meta["doc"])


EMAIL_LEASE_MARGIN_SECONDS: Final = 15.0
"""What an email's lease must leave beyond its time limit, so that a failed renewal doubles no send."""
WEBHOOK_LOOKUP_SECONDS: Final = 5.0
"""How long the look-up of an endpoint's name may take."""
WEBHOOK_LEASE_MARGIN_SECONDS: Final = 30.0
"""What a lease must leave beside look-up and request, so that a renewal that fails can be tried again."""


def _contradictions(built: OutboxSettings) -> Iterator[Problem]:
    if built.database not in django_settings.DATABASES:
        yield Problem(
            "E004",
            f'OUTBOX["DATABASE"] is {built.database!r}, which is not in DATABASES.',
            f"Use one of: {', '.join(sorted(django_settings.DATABASES))}.",
        )
    for name in queue_classes():
        queue: QueueSettings = getattr(built, name.lower())
        where = f'OUTBOX["{name}"]'
        if queue.retry_cap_seconds < queue.retry_base_seconds:
            yield Problem(
                "E005",
                f"{where}: RETRY_CAP_SECONDS ({queue.retry_cap_seconds:g}) is less than "
                f"RETRY_BASE_SECONDS ({queue.retry_base_seconds:g}).",
                "The cap is the longest wait; make it at least the base.",
            )
        if (
            queue.replay_every_seconds is not None
            and queue.replay_for_seconds is not None
            and queue.replay_for_seconds <= queue.replay_every_seconds * (1 + JITTER)
        ):
            yield Problem(
                "E006",
                f"{where}: the replay window closes ({queue.replay_for_seconds:g} s) before the first replay "
                f"({queue.replay_every_seconds:g} s, up to a quarter later).",
                "Raise REPLAY_FOR_SECONDS, lower REPLAY_EVERY_SECONDS, or set the latter to None for no replay.",
            )
    email = built.email
    needed = email.timeout_seconds + EMAIL_LEASE_MARGIN_SECONDS
    if email.lease_seconds < needed:
        yield Problem(
            "E021",
            f'OUTBOX["EMAIL"]: LEASE_SECONDS ({email.lease_seconds:g}) does not cover one email, that is its time limit'
            f" ({email.timeout_seconds:g} s) and {EMAIL_LEASE_MARGIN_SECONDS:g} s of margin: another relay could send"
            " it again.",
            f"Raise LEASE_SECONDS to {needed:g} or more, or lower TIMEOUT_SECONDS.",
        )
    hooks = built.webhooks
    needed = WEBHOOK_LOOKUP_SECONDS + hooks.timeout_seconds + WEBHOOK_LEASE_MARGIN_SECONDS
    if hooks.lease_seconds < needed:
        yield Problem(
            "E031",
            f'OUTBOX["WEBHOOKS"]: LEASE_SECONDS ({hooks.lease_seconds:g}) does not cover a look-up'
            f" ({WEBHOOK_LOOKUP_SECONDS:g} s), a request ({hooks.timeout_seconds:g} s) and"
            f" {WEBHOOK_LEASE_MARGIN_SECONDS:g} s of margin: another relay could send the same again.",
            f"Raise LEASE_SECONDS to {needed:g} or more, or lower TIMEOUT_SECONDS.",
        )
