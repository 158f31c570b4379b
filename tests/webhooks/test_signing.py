"""Signatures: the vectors of the specification, the published library, and what a receiver must refuse."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from standardwebhooks.webhooks import Webhook

from django_outbox.errors import InvalidSignature
from django_outbox.webhooks.signing import new_secret, secret_key, sign, verify
from tests.webhooks.cases import CASES, rows

A = "whsec_" + base64.b64encode(bytes(range(32))).decode()
B = "whsec_" + base64.b64encode(bytes(range(32, 64))).decode()
NOW = 1_674_087_231
BODY = b'{"type":"contact.created","data":{"n":1.0}}'


def headers(*signatures: str, id_: str = "msg_1", timestamp: int | str = NOW) -> dict[str, str]:
    return {"webhook-id": id_, "webhook-timestamp": str(timestamp), "webhook-signature": " ".join(signatures)}


def body_of(vector: dict[str, Any]) -> bytes:
    if "body_base64" in vector:
        return base64.b64decode(vector["body_base64"])
    return str(vector["body_utf8"]).encode()


@pytest.mark.parametrize("vector", rows(CASES["signatures"]["vectors"]))
def test_a_vector_is_signed_as_it_says(vector: dict[str, Any]) -> None:
    given = (vector["secret"], vector["webhook_id"], vector["webhook_timestamp"], body_of(vector))
    assert sign(*given) == vector["expected"]


@pytest.mark.parametrize("case", rows(CASES["signatures"]["negative"]))
def test_a_signature_made_the_wrong_way_does_not_verify(case: dict[str, Any]) -> None:
    (spec,) = (each for each in CASES["signatures"]["vectors"] if each["name"] == "spec-event")
    sent = headers(case["wrong"], id_=spec["webhook_id"], timestamp=spec["webhook_timestamp"])
    with pytest.raises(InvalidSignature, match="No signature"):
        verify(spec["secret"], sent, body_of(spec), now=spec["webhook_timestamp"])
    sent["webhook-signature"] = case["must_not_equal"]
    assert verify(spec["secret"], sent, body_of(spec), now=spec["webhook_timestamp"])["type"] == "contact.created"


@pytest.mark.parametrize("body", [BODY, '{"n":"Zoë 日本 🎉"}'.encode(), b"[]"])
def test_the_published_library_verifies_ours_and_we_verify_its(body: bytes) -> None:
    import time
    from datetime import UTC, datetime

    secret, now = new_secret(), int(time.time())
    ours = headers(sign(secret, "msg_1", now, body), timestamp=now)
    assert Webhook(secret).verify(body, ours) == json.loads(body)
    theirs = Webhook(secret).sign("msg_1", datetime.fromtimestamp(now, UTC), body.decode())
    assert theirs == sign(secret, "msg_1", now, body)
    assert verify(secret, ours, body) == json.loads(body)


def test_during_an_overlap_either_secret_verifies() -> None:
    sent = headers(sign(B, "msg_1", NOW, BODY), sign(A, "msg_1", NOW, BODY))
    for secrets in (A, B, [A], (B, A), [new_secret(), A]):
        assert verify(secrets, sent, BODY, now=NOW)["data"] == {"n": 1.0}
    with pytest.raises(InvalidSignature):
        verify(new_secret(), sent, BODY, now=NOW)
    with pytest.raises(InvalidSignature):
        verify([], sent, BODY, now=NOW)


def test_an_ed25519_signature_verifies_with_the_public_key() -> None:
    pytest.importorskip("cryptography")
    (vector,) = (each for each in CASES["signatures"]["vectors"] if each["name"] == "ed25519")
    sent = headers("v1,AAAA", vector["expected"], id_=vector["webhook_id"], timestamp=vector["webhook_timestamp"])
    assert verify(vector["public_key"], sent, body_of(vector), now=vector["webhook_timestamp"])
    for wrong in ("v1a,AAAA", "v1a,!", vector["expected"][:-4] + "AAAA", "v1," + vector["expected"][4:]):
        with pytest.raises(InvalidSignature):
            verify(
                vector["public_key"],
                sent | {"webhook-signature": wrong},
                body_of(vector),
                now=vector["webhook_timestamp"],
            )


@pytest.mark.parametrize("age", [-300, 0, 300])
def test_a_timestamp_within_the_tolerance_is_taken(age: int) -> None:
    sent = headers(sign(A, "msg_1", NOW, BODY))
    assert verify(A, sent, BODY, now=NOW + age)


@pytest.mark.parametrize("age", [-301, 301, 10**9])
def test_a_timestamp_outside_the_tolerance_is_refused(age: int) -> None:
    sent = headers(sign(A, "msg_1", NOW, BODY))
    with pytest.raises(InvalidSignature, match="timestamp is"):
        verify(A, sent, BODY, now=NOW + age)
    assert verify(A, sent, BODY, now=NOW + age, tolerance_seconds=10**10)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("webhook-id", None),
        ("webhook-id", ""),
        ("webhook-id", "a b"),
        ("webhook-timestamp", None),
        ("webhook-timestamp", "now"),
        ("webhook-timestamp", "1e9"),
        ("webhook-timestamp", "-1674087231"),
        ("webhook-timestamp", "١٦٧٤٠٨٧٢٣١"),
        ("webhook-timestamp", "9" * 10_000),
        ("webhook-signature", None),
        ("webhook-signature", ""),
        ("webhook-signature", "  "),
        ("webhook-signature", "v1"),
        ("webhook-signature", "v1,"),
        ("webhook-signature", "v2,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="),
        ("webhook-signature", "v1,\ud800é"),
    ],
)
def test_a_missing_or_malformed_header_is_an_invalid_signature(name: str, value: str | None) -> None:
    sent = headers(sign(A, "msg_1", NOW, BODY))
    if value is None:
        del sent[name]
    else:
        sent[name] = value
    with pytest.raises(InvalidSignature):
        verify(A, sent, BODY, now=NOW)


def test_the_case_of_header_names_and_more_spaces_do_not_matter() -> None:
    sent = {name.title(): value for name, value in headers("v1,x", "", sign(A, "msg_1", NOW, BODY), "").items()}
    assert verify(A, sent, BODY, now=NOW)


@pytest.mark.parametrize("change", ["body", "id", "timestamp"])
def test_whatever_is_changed_after_signing_is_noticed(change: str) -> None:
    sent = headers(sign(A, "msg_1", NOW, BODY))
    body = BODY
    if change == "body":
        body = BODY.replace(b"1.0", b"1")
    elif change == "id":
        sent["webhook-id"] = "msg_2"
    else:
        sent["webhook-timestamp"] = str(NOW + 1)
    with pytest.raises(InvalidSignature, match="No signature"):
        verify(A, sent, body, now=NOW)


@pytest.mark.parametrize("body", [b"", b"\xff", b"NaN", b"[" * 100_000, b"{"])
def test_a_signed_body_that_is_not_json_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidSignature, match="not JSON"):
        verify(A, headers(sign(A, "msg_1", NOW, body)), body, now=NOW)


def test_a_body_that_was_decoded_already_is_refused_in_words() -> None:
    with pytest.raises(TypeError, match="raw bytes"):
        verify(A, headers(sign(A, "msg_1", NOW, BODY)), BODY.decode(), now=NOW)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "secret",
    [
        "",
        "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
        "whsec_",
        "whsec_short",
        "whsec_" + base64.b64encode(bytes(23)).decode(),
        "whsec_" + base64.b64encode(bytes(65)).decode(),
        "whsec_" + base64.urlsafe_b64encode(b"\xff" * 32).decode(),
        "whsk_" + base64.b64encode(bytes(31)).decode(),
    ],
)
def test_a_malformed_secret_is_refused_without_being_quoted(secret: str) -> None:
    with pytest.raises(ValueError, match=r"webhook|key") as caught:
        sign(secret, "msg_1", NOW, BODY)
    assert not secret[6:] or secret[6:] not in str(caught.value)


def test_a_new_secret_holds_256_bits_and_is_never_the_same() -> None:
    assert len({new_secret() for _ in range(100)}) == 100
    assert len(secret_key(new_secret())) == 32
