"""Registering handlers: types, patterns, names, clashes, and what the refusals say."""

from __future__ import annotations

import enum
import functools
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.test import override_settings

from django_outbox import DuplicateHandler, Event, InvalidEventType, InvalidHandlerName, OutboxError, on_event
from django_outbox.events import check_type, discover_handlers, registry


@pytest.fixture(autouse=True)
def _empty_registry() -> None:
    registry.replace(())


def handler_of(module: str, qualname: str) -> Callable[[Event], None]:
    """Return a function as another module, or the same one after a reload, would define it."""

    def function(event: Event) -> None:
        """Do nothing."""

    function.__module__, function.__qualname__ = module, qualname
    return function


def register(*types: str, name: str = "audit-log", aliases: tuple[str, ...] = (), source: str = "shop.one") -> None:
    on_event(*types, name=name, aliases=aliases)(handler_of(*source.split(".")))


def names_for(type_: str) -> list[str]:
    return [handler.name for handler in registry.for_type(type_)]


class Types(str, enum.Enum):  # noqa: UP042  the older form, which prints as Types.CREATED
    CREATED = "user.created"


class Names(str, enum.Enum):  # noqa: UP042
    AUDIT = "audit-log"
    FORMER = "audit-trail"


# --- types and patterns ----------------------------------------------------------------------------------------------


def test_the_function_is_returned_unchanged() -> None:
    function = handler_of("shop", "one")
    assert on_event("user.created", name="audit-log")(function) is function


@pytest.mark.parametrize(
    ("pattern", "type_", "matches"),
    [
        ("user.created", "user.created", True),
        ("user.created", "user.created.v2", False),
        ("user.*", "user.created", True),
        ("user.*", "user.address.changed", True),
        ("user.*", "users.created", False),
        ("user.*", "superuser.created", False),
        ("user.address.*", "user.created", False),
        ("*", "user.created", True),
        ("*", "outbox.event.dead", False),
        ("*", "email.delivery.exhausted", False),
        ("*", "webhook.endpoint.disabled", False),
        ("*", "task.dead", False),
        ("*", "outboxes.counted", True),
        ("*", "tasks.done", True),
        ("outbox.*", "outbox.event.dead", True),
        ("outbox.event.dead", "outbox.event.dead", True),
        ("task.*", "task.dead", True),
        ("a.b", "axb", False),
        ("_-.*", "_-.9", True),
    ],
)
def test_a_pattern_matches_whole_words_only(pattern: str, type_: str, matches: bool) -> None:
    register(pattern)
    assert bool(names_for(type_)) is matches


def test_a_handler_of_several_overlapping_patterns_is_owed_once() -> None:
    register("user.created", "user.*", "*", "user.created")
    assert names_for("user.created") == ["audit-log"]
    assert registry.deliveries("user.created") == '{"audit-log":null}'


def test_handlers_stand_in_the_order_of_their_registration() -> None:
    for name in ("zebra", "apple", "mango"):
        register("user.created", name=name, source=f"shop.{name}")
    assert names_for("user.created") == ["zebra", "apple", "mango"]


@pytest.mark.parametrize(
    "type_",
    [
        "user", "User.created", "user.", ".created", "user..created", "user created.x", "user.created\n", "user.créé",
        "user.created\x00", "user.*", "*", "", "x." + "y" * 127, "user.٣", None, 7, b"user.created",
    ],
)  # fmt: skip
def test_a_malformed_event_type_is_refused_with_an_example(type_: Any) -> None:
    with pytest.raises(InvalidEventType, match=r'such as "user\.created"') as caught:
        check_type(type_)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, OutboxError)
    assert len(str(caught.value)) < 500


def test_the_longest_event_type_is_accepted() -> None:
    check_type("x." + "y" * 126)


@pytest.mark.parametrize("type_", ["outbox.thing.done", "email.sent", "webhook.sent", "task.finished"])
def test_a_reserved_prefix_cannot_be_emitted_and_the_text_names_all(type_: str) -> None:
    with pytest.raises(InvalidEventType, match=r"reserved.*outbox\., email\., webhook\., task\."):
        check_type(type_)


@pytest.mark.parametrize("type_", ["outboxes.counted", "emails.sent", "task-list.closed", "my.outbox.emptied"])
def test_a_type_that_only_looks_reserved_can_be_emitted(type_: str) -> None:
    check_type(type_)


@pytest.mark.parametrize(
    "pattern",
    [
        "user",
        "user*",
        "*.created",
        "user.*.done",
        "**",
        "",
        ".*",
        "user..*",
        "User.*",
        "user.* ",
        "x." + "y" * 125 + ".*",
    ],
)
def test_a_malformed_pattern_is_refused_and_the_text_names_the_handler(pattern: str) -> None:
    with pytest.raises(InvalidEventType, match=r'"user\.\*" for a prefix') as caught:
        register(pattern)
    assert "'audit-log'" in str(caught.value)
    assert registry.handlers() == ()


@pytest.mark.parametrize("types", [(), (None,), (["user.created"],), ({"user.created"},), (b"user.created",)])
def test_types_that_are_no_strings_are_refused_with_an_example(types: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidEventType, match=r'@on_event\("user\.created"'):
        register(*types)


def test_a_bare_decorator_is_refused() -> None:
    with pytest.raises(TypeError, match="name"):
        on_event(handler_of("shop", "one"))  # type: ignore[arg-type,call-arg]


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a", "7", "audit-log", "a1-b2-c3", "a" * 64])
def test_a_kebab_case_name_is_accepted(name: str) -> None:
    register("user.created", name=name)
    assert names_for("user.created") == [name]


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("AuditLog", "audit-log"),
        ("audit_log", "audit-log"),
        ("audit log", "audit-log"),
        ("-audit--log-", "audit-log"),
        ("shop.handlers.audit", "shop-handlers-audit"),
        ("", "audit-log"),
        ("audit-log\n", "audit-log"),
        ("prüfung", "pr-fung"),
        ("a" * 65, "a" * 64),
        (None, "audit-log"),
        (b"audit-log", "audit-log"),
    ],
)
def test_another_name_is_refused_and_the_text_says_what_to_write(name: Any, suggestion: str) -> None:
    with pytest.raises(InvalidHandlerName, match="kebab-case") as caught:
        register("user.created", name=name)
    assert repr(suggestion) in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("alias", ["Audit", "", None, 3])
def test_an_alias_is_held_to_the_same_form(alias: Any) -> None:
    with pytest.raises(InvalidHandlerName, match="kebab-case"):
        register("user.created", aliases=(alias,))


@pytest.mark.parametrize("aliases", [("audit-log",), ("old", "old")])
def test_a_name_stands_once_among_name_and_aliases(aliases: tuple[str, ...]) -> None:
    with pytest.raises(InvalidHandlerName, match="twice"):
        register("user.created", aliases=aliases)


def test_one_alias_may_be_a_plain_string() -> None:
    on_event("user.created", name="audit-log", aliases="audit-trail")(handler_of("shop", "one"))
    assert registry.handlers()[0].aliases == ("audit-trail",)


def test_aliases_may_come_from_an_iterator_and_the_oldest_names_the_key() -> None:
    on_event("user.created", name="third", aliases=iter(["first", "second"]))(handler_of("shop", "one"))
    (handler,) = registry.handlers()
    assert (handler.aliases, handler.oldest_name) == (("first", "second"), "first")


def test_enum_members_are_registered_by_their_values() -> None:
    on_event(Types.CREATED, name=Names.AUDIT, aliases=[Names.FORMER])(handler_of("shop", "one"))
    (handler,) = registry.handlers()
    assert f"{handler.name} {handler.oldest_name} {handler.patterns[0]}" == "audit-log audit-trail user.created"


# --- clashes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "right", "clash"),
    [
        ("user.created", "user.created", True),
        ("user.created", "user.deleted", False),
        ("user.created", "user.*", True),
        ("user.*", "user.created", True),
        ("user.*", "user.address.*", True),
        ("user.*", "users.*", False),
        ("user.created", "*", True),
        ("*", "*", True),
        ("*", "outbox.event.dead", False),
        ("*", "outbox.*", False),
        ("task.*", "task.dead", True),
        # A type "a.b.c" matches the prefix, "a.b" itself does not.
        ("a.b", "a.b.*", False),
    ],
)
def test_two_functions_of_one_name_clash_when_some_type_could_match_both(left: str, right: str, clash: bool) -> None:
    register(left, source="shop.one")
    if not clash:
        register(right, source="shop.two")
        assert len(registry.handlers()) == 2
        return
    with pytest.raises(DuplicateHandler, match=r"'audit-log' is taken") as caught:
        register(right, source="shop.two")
    text = str(caught.value)
    assert "shop.one" in text
    assert "shop.two" in text
    assert "another name" in text
    assert [handler.source for handler in registry.handlers()] == ["shop.one"]


@pytest.mark.parametrize(
    ("name", "aliases", "other", "others_aliases"),
    [
        ("new", ("old",), "old", ()),
        ("old", (), "new", ("old",)),
        ("one", ("old",), "two", ("old",)),
    ],
)
def test_an_alias_clashes_like_a_name(
    name: str, aliases: tuple[str, ...], other: str, others_aliases: tuple[str, ...]
) -> None:
    register("user.*", name=name, aliases=aliases, source="shop.one")
    with pytest.raises(DuplicateHandler, match="'old' is taken"):
        register("user.created", name=other, aliases=others_aliases, source="shop.two")
    register("order.placed", name=other, aliases=others_aliases, source="shop.two")


def test_registering_the_same_module_and_qualified_name_again_replaces_in_place() -> None:
    for name in ("first", "second", "third"):
        register("user.created", name=name, source=f"shop.{name}")
    replacement = handler_of("shop", "second")
    on_event("user.*", name="second")(replacement)
    assert names_for("user.created") == ["first", "second", "third"]
    assert registry.for_type("user.deleted")[0].function is replacement


def test_two_lambdas_of_one_place_are_two_functions() -> None:
    on_event("user.created", name="audit-log")(lambda event: None)
    with pytest.raises(DuplicateHandler):
        on_event("user.created", name="audit-log")(lambda event: None)


def test_one_function_may_bear_two_names() -> None:
    function = handler_of("shop", "one")
    on_event("user.created", name="first")(function)
    on_event("user.created", name="second")(function)
    assert names_for("user.created") == ["first", "second"]


def test_a_new_registration_changes_what_later_events_are_owed() -> None:
    register("user.created", name="first")
    assert registry.deliveries("user.created") == '{"first":null}'
    register("*", name="second", source="shop.two")
    assert registry.deliveries("user.created") == '{"first":null,"second":null}'


def test_made_up_types_do_not_grow_the_registry_without_end() -> None:
    register("*")
    for number in range(10_100):
        registry.deliveries(f"made.up-{number}")
        registry.resolve(f"made.up-{number}", "audit-log")
    assert len(registry._deliveries) <= 10_000
    assert len(registry._resolved) <= 10_000
    assert registry.deliveries("made.up-again") == '{"audit-log":null}'


def test_discovery_takes_the_module_name_of_the_settings_and_passes_over_apps_without_one() -> None:
    with override_settings(OUTBOX={"HANDLERS_MODULE": "models"}):
        discover_handlers()
    with override_settings(OUTBOX={"HANDLERS_MODULE": "there_is_no_such_module"}):
        discover_handlers()
    assert registry.handlers() == ()


def test_discovery_leaves_wrong_settings_to_the_checks() -> None:
    with override_settings(OUTBOX={"HANDLERS_MODUL": "x"}):
        discover_handlers()


# --- what is registered ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), 86_401, timedelta(0), timedelta(days=2)])
def test_a_timeout_lies_between_zero_and_a_day(timeout: float | timedelta) -> None:
    with pytest.raises(ValueError, match=r"'audit-log'.*between 0 and one day"):
        on_event("user.created", name="audit-log", timeout=timeout)


@pytest.mark.parametrize(("timeout", "seconds"), [(None, None), (0.5, 0.5), (timedelta(minutes=2), 120.0)])
def test_a_timeout_is_kept_in_seconds(timeout: float | timedelta | None, seconds: float | None) -> None:
    on_event("user.created", name="audit-log", timeout=timeout)(handler_of("shop", "one"))
    assert registry.handlers()[0].timeout == seconds


async def _async_handler(event: Event) -> None:
    """Do nothing."""


class _AsyncCallable:
    async def __call__(self, event: Event) -> None:
        """Do nothing."""


@pytest.mark.parametrize("function", [_async_handler, functools.partial(_async_handler), _AsyncCallable()])
def test_an_async_function_in_any_form_is_known_as_one(function: Callable[[Event], Any]) -> None:
    on_event("user.created", name="audit-log")(function)
    assert registry.handlers()[0].is_async
    with pytest.raises(TypeError, match="async and atomic=True"):
        on_event("user.created", name="atomic-one", atomic=True)(function)


def test_a_generator_is_refused_since_calling_it_runs_nothing() -> None:
    def one(event: Event) -> Iterator[None]:
        yield

    async def two(event: Event) -> AsyncIterator[None]:
        yield

    for function in (one, two):
        with pytest.raises(TypeError, match="generator"):
            on_event("user.created", name="audit-log")(function)
    assert registry.handlers() == ()


@pytest.mark.parametrize("thing", [None, "shop.one", 3])
def test_only_a_function_can_be_registered(thing: Any) -> None:
    with pytest.raises(TypeError, match=r"'audit-log'.*not a function"):
        on_event("user.created", name="audit-log")(thing)


def test_a_decorated_function_is_named_by_its_own_place() -> None:
    function = handler_of("shop", "one")

    @on_event("user.created", name="audit-log")
    @functools.wraps(function)
    def wrapper(event: Event) -> None:
        """Do nothing."""

    assert registry.handlers()[0].source == "shop.one"


def test_a_partial_and_a_method_can_be_registered() -> None:
    class Sync:
        def run(self, event: Event) -> None:
            """Do nothing."""

    on_event("user.created", name="bound")(Sync().run)
    on_event("user.created", name="partial")(functools.partial(handler_of("shop", "one")))
    assert names_for("user.created") == ["bound", "partial"]
