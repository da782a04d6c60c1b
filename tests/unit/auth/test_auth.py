"""What the auth service keeps and hands out, whom it lets in, and NATS' signed claims."""

import base64
import hashlib
import json
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.auth import secrets
from services.auth.auth_callout import (
    NODE_NAME,
    Caller,
    RefusedError,
    Reviewed,
    admission,
    read_caller,
    user_for,
)
from services.auth.nats_users import bus_users
from services.auth.nkeys import ACCOUNT, SERVER, Issuer, decode_key, encode_key, read_claims
from services.topology import SERVICES, roles
from shared.credentials import certificates
from shared.model.errors import RequestError
from shared.model.names import NodeName

NOW = datetime(2031, 5, 1, tzinfo=UTC)
NAMES = ("nats", "redis")
AUTH = next(user for user in bus_users([]) if user.name == "auth")


def fresh(number: int) -> bytes:
    """Bytes that are other ones each time."""
    fresh.times += 1  # type: ignore[attr-defined]
    return hashlib.shake_128(str(fresh.times).encode()).digest(number)  # type: ignore[attr-defined]


fresh.times = 0  # type: ignore[attr-defined]


def test_what_is_there_stays_and_only_what_is_missing_is_made() -> None:
    first = secrets.completed({}, NAMES, NOW, fresh)
    again = secrets.completed(first, NAMES, NOW, fresh)
    without = {key: value for key, value in first.items() if key != "redis.binder"}

    second = secrets.completed(without, NAMES, NOW, fresh)

    assert again == first
    assert {key for key in first if first[key] != second[key]} == {"redis.binder"}


def test_an_operators_own_administrator_is_kept_and_neither_it_nor_default_is_touched() -> None:
    whole = secrets.completed({"redis.admin": b"default:given"}, NAMES, NOW, fresh)

    told = {words[0] for words in secrets.users_at_redis(whole)}

    assert whole["redis.admin"] == b"default:given"
    assert told == {"placer", "binder", "timekeeper", "dashboard", "operator"}
    ours = secrets.users_at_redis(secrets.completed({}, NAMES, NOW, fresh))
    assert {words[0] for words in ours} == told | {"default", "probe"}


def test_the_servers_certificate_is_renewed_by_the_same_authority_half_way_through_its_year() -> (
    None
):
    first = secrets.completed({}, NAMES, NOW, fresh)
    early = secrets.completed(first, NAMES, NOW + timedelta(days=170), fresh)
    late = secrets.completed(first, NAMES, NOW + timedelta(days=190), fresh)
    renamed = secrets.completed(first, (*NAMES, "another"), NOW, fresh)

    assert early == first
    assert late["server.crt"] != first["server.crt"]
    assert late["ca.crt"] == first["ca.crt"]
    assert renamed["server.crt"] != first["server.crt"]
    signer = certificates.load(late["ca.crt"])
    certificates.load(late["server.crt"]).verify_directly_issued_by(signer)


@pytest.mark.parametrize(
    ("after", "wanted"),
    [(timedelta(0), False), (timedelta(minutes=6), True), (timedelta(days=8), False)],
)
def test_servers_are_told_of_a_renewed_certificate_once_they_surely_have_it(
    after: timedelta, wanted: bool
) -> None:
    first = secrets.completed({}, NAMES, NOW, fresh)
    at = NOW + timedelta(days=190)
    late = secrets.completed(first, NAMES, at, fresh)

    assert secrets.is_to_reload(late, at + after) is wanted
    assert not secrets.is_to_reload(first, NOW + after)


def test_no_secret_goes_where_it_does_not_belong() -> None:
    whole = secrets.completed({}, NAMES, NOW, fresh)
    handed = {one.name: one for one in secrets.handouts(whole, AUTH, "/etc/nats")}

    assert handed["auth-ca"].kind == "configmaps"
    assert set(handed["auth-ca"].data) == {"ca.crt"}
    for name, one in handed.items():
        text = b"".join(one.data.values())
        assert whole["ca.key"] not in text, name
        assert whole["issuer"] not in text, name
    assert "redis-admin" not in handed


def test_what_the_manifests_install_empty_is_what_is_handed_out() -> None:
    from tests.support.auth.cluster import SECRETS  # noqa: PLC0415 - one test

    whole = secrets.completed({}, NAMES, NOW, fresh)
    handed = secrets.handouts(whole, AUTH, "/etc/nats")

    assert {one.name for one in handed if one.kind == "secrets"} | {"auth"} == set(SECRETS)


@given(st.binary(min_size=32, max_size=32), st.sampled_from([ACCOUNT, SERVER]))
def test_a_key_of_nats_is_read_as_it_was_written_and_none_of_another_kind(
    key: bytes, prefix: int
) -> None:
    text = encode_key(prefix, key)

    assert decode_key(prefix, text) == key
    assert text[0] == {ACCOUNT: "A", SERVER: "N"}[prefix]
    with pytest.raises(RequestError):
        decode_key(SERVER if prefix == ACCOUNT else ACCOUNT, text)


@given(st.text(max_size=80))
def test_text_that_is_no_key_is_refused(text: str) -> None:
    with pytest.raises(RequestError):
        decode_key(ACCOUNT, text)


@given(st.data())
def test_claims_are_believed_as_they_were_signed_and_not_if_anything_is_changed(
    data: st.DataObject,
) -> None:
    token = Issuer(b"s" * 32).sign({"iss": Issuer(b"s" * 32).public, "says": "this"})
    place = data.draw(st.integers(0, len(token) - 2))
    other = data.draw(st.sampled_from("AZaz09-_."))

    assert read_claims(token, kind=ACCOUNT)["says"] == "this"
    changed = token[:place] + other + token[place + 1 :]
    if changed != token:
        with pytest.raises(RequestError):
            read_claims(changed, kind=ACCOUNT)


@given(st.text(max_size=200))
def test_what_no_server_of_nats_asks_is_refused_and_nothing_else_happens(text: str) -> None:
    with pytest.raises(RequestError):
        read_caller(text)


@pytest.mark.parametrize(
    "user",
    [
        "system:serviceaccount:leasehold-system:default",
        "system:serviceaccount:team-a:binder",
        "system:serviceaccount:leasehold-system:binder:binder",
        "binder",
        "system:node:node-a",
        "",
    ],
)
def test_only_accounts_of_services_in_our_own_namespace_are_somebody(user: str) -> None:
    with pytest.raises(RefusedError):
        user_for(Reviewed(user=user, extra={}), "leasehold-system", SERVICES, roles())


@pytest.mark.parametrize("nodes", [[], [""], ["a", "b"]], ids=str)
def test_an_agent_whose_token_does_not_name_one_node_is_nobody(nodes: list[str]) -> None:
    user = "system:serviceaccount:leasehold-system:node-agent"

    with pytest.raises(RefusedError, match="does not name its node"):
        user_for(
            Reviewed(user=user, extra={NODE_NAME: nodes}), "leasehold-system", SERVICES, roles()
        )


def test_an_agents_rights_are_those_of_its_node_as_the_declared_users_have_them() -> None:
    user = "system:serviceaccount:leasehold-system:node-agent"
    reviewed = Reviewed(user=user, extra={NODE_NAME: ["gpu.example"]})

    found = user_for(reviewed, "leasehold-system", SERVICES, roles())

    declared = {one.name: one for one in bus_users([NodeName("gpu.example")])}
    assert found == declared["node-agent.gpu.example"]


def test_an_admission_ends_and_is_for_the_connection_that_was_asked_about() -> None:
    issuer = Issuer(b"i" * 32)
    caller = Caller(server="N-server", user_key="U-key", token="")

    answer = read_claims(admission(issuer, caller, AUTH, now_s=1000, life_s=60), kind=ACCOUNT)
    body = answer["nats"]["jwt"].split(".")[1]
    user = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))

    assert (answer["aud"], answer["sub"]) == ("N-server", "U-key")
    assert (user["sub"], user["aud"], user["exp"]) == ("U-key", "$G", 1060)
    assert user["nats"]["pub"]["allow"] == list(AUTH.publish)
