"""The root Secret and its derived objects, authorization by token, and NATS' signed claims."""

import base64
import hashlib
import json
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.auth import root_secret
from services.auth.auth_callout import (
    NODE_NAME_KEY,
    AuthorizationRefusedError,
    AuthorizationRequest,
    ServiceNamespaces,
    encode_grant,
    parse_request,
    user_of_client,
    user_of_token,
)
from services.auth.nats_users import NatsUser, all_users, operator_user
from services.auth.nkeys import ACCOUNT, SERVER, TokenIssuer, decode_key, encode_key, verify_claims
from shared.credentials import certificates
from shared.kubernetes.tokens import TokenUser
from shared.model.errors import RequestError
from shared.model.names import NodeName

NOW = datetime(2031, 5, 1, tzinfo=UTC)
NAMES = ("nats", "redis")
NAMESPACES = ServiceNamespaces(system="leasehold-system", agents="leasehold-agents")
AUTH_USER = next(user for user in all_users([]) if user.name == "auth")

complete = partial(root_secret.complete, namespace="leasehold-system")


def fresh(number: int) -> bytes:
    """Return different bytes each time."""
    fresh.times += 1  # type: ignore[attr-defined]
    return hashlib.shake_128(str(fresh.times).encode()).digest(number)  # type: ignore[attr-defined]


fresh.times = 0  # type: ignore[attr-defined]


def test_existing_secrets_stay_and_only_missing_ones_are_created() -> None:
    first = complete({}, NAMES, NOW, fresh)
    again = complete(first, NAMES, NOW, fresh)
    without = {key: value for key, value in first.items() if key != "redis.binder"}

    second = complete(without, NAMES, NOW, fresh)

    assert again == first
    assert {key for key in first if first[key] != second[key]} == {"redis.binder"}


def test_an_administrator_of_the_operator_and_the_default_user_stay_unchanged() -> None:
    whole = complete({"redis.admin": b"default:given"}, NAMES, NOW, fresh)

    changed = {words[0] for words in root_secret.redis_user_rules(whole)}

    assert whole["redis.admin"] == b"default:given"
    others = {"timekeeper", "extender", "api", "operator"}
    assert changed == {"placer", "planner", "binder"} | others
    ours = root_secret.redis_user_rules(complete({}, NAMES, NOW, fresh))
    assert {words[0] for words in ours} == changed | {"default", "probe"}


def test_the_servers_certificate_is_renewed_by_the_same_authority_half_way_through_its_year() -> (
    None
):
    first = complete({}, NAMES, NOW, fresh)
    early = complete(first, NAMES, NOW + timedelta(days=170), fresh)
    late = complete(first, NAMES, NOW + timedelta(days=190), fresh)
    renamed = complete(first, (*NAMES, "another"), NOW, fresh)

    assert early == first
    assert late["server.crt"] != first["server.crt"]
    assert late["ca.crt"] == first["ca.crt"]
    assert renamed["server.crt"] != first["server.crt"]
    signer = certificates.load(late["ca.crt"])
    certificates.load(late["server.crt"]).verify_directly_issued_by(signer)


@pytest.mark.parametrize(
    ("after", "wanted"),
    [(timedelta(0), True), (timedelta(minutes=6), True), (timedelta(days=8), False)],
)
def test_servers_reload_a_renewed_certificate_for_a_week_and_never_their_first_one(
    after: timedelta, wanted: bool
) -> None:
    first = complete({}, NAMES, NOW, fresh)
    at = NOW + timedelta(days=190)
    late = complete(first, NAMES, at, fresh)

    assert root_secret.should_reload(late, at + after) is wanted
    assert not root_secret.should_reload(first, NOW + after)


def test_no_object_contains_a_secret_that_it_does_not_need() -> None:
    whole = complete({}, NAMES, NOW, fresh)
    objects = {one.name: one for one in root_secret.managed_objects(whole, AUTH_USER, "/etc/nats")}
    secrets = {key: value for key, value in whole.items() if key.startswith("redis.")}

    assert objects["auth-ca"].kind == "configmaps"
    assert set(objects["auth-ca"].data) == {"ca.crt", "rotation"}
    assert {name for name, each in objects.items() if each.for_agents} == {"node-agent-ca"}
    assert objects["node-agent-ca"].data == {"ca.crt": whole["ca.crt"]}
    for name, one in objects.items():
        text = b"".join(one.data.values())
        assert whole["ca.key"] not in text, name
        assert whole["issuer"] not in text, name
        shown = {key for key, value in secrets.items() if value.partition(b":")[2] in text}
        assert shown == ({f"redis.{name[6:]}"} if name.startswith("redis-") else set()), name
    assert "redis-admin" not in objects


def test_the_manifests_install_empty_every_derived_object() -> None:
    from tests.support.auth.cluster import SECRETS  # noqa: PLC0415 - one test

    whole = complete({}, NAMES, NOW, fresh)
    objects = root_secret.managed_objects(whole, AUTH_USER, "/etc/nats")

    assert {one.name for one in objects if one.kind == "secrets"} | {"auth"} == set(SECRETS)


@given(st.binary(min_size=32, max_size=32), st.sampled_from([ACCOUNT, SERVER]))
def test_an_nkey_is_decoded_as_it_was_encoded_and_another_type_is_refused(
    key: bytes, prefix: int
) -> None:
    text = encode_key(prefix, key)

    assert decode_key(prefix, text) == key
    assert text[0] == {ACCOUNT: "A", SERVER: "N"}[prefix]
    with pytest.raises(RequestError):
        decode_key(SERVER if prefix == ACCOUNT else ACCOUNT, text)


@given(st.text(max_size=80))
def test_text_that_is_not_an_nkey_is_refused(text: str) -> None:
    with pytest.raises(RequestError):
        decode_key(ACCOUNT, text)


@given(st.data())
def test_claims_are_accepted_only_as_they_were_signed(
    data: st.DataObject,
) -> None:
    token = TokenIssuer(b"s" * 32).sign({"iss": TokenIssuer(b"s" * 32).public, "says": "this"})
    place = data.draw(st.integers(0, len(token) - 2))
    other = data.draw(st.sampled_from("AZaz09-_."))

    assert verify_claims(token, kind=ACCOUNT)["says"] == "this"
    changed = token[:place] + other + token[place + 1 :]
    if changed != token:
        with pytest.raises(RequestError):
            verify_claims(changed, kind=ACCOUNT)


@given(st.text(max_size=200))
def test_a_malformed_authorization_request_is_refused(text: str) -> None:
    with pytest.raises(RequestError):
        parse_request(text)


@pytest.mark.parametrize(
    "user",
    [
        "system:serviceaccount:leasehold-system:default",
        "system:serviceaccount:team-a:binder",
        "system:serviceaccount:leasehold-system:binder:binder",
        "system:serviceaccount:leasehold-agents:binder",
        "system:serviceaccount:leasehold-agents:operator",
        "system:serviceaccount:leasehold-system:node-agent",
        "binder",
        "system:node:node-a",
        "",
    ],
)
def test_only_accounts_of_services_in_their_own_namespace_are_authorized(user: str) -> None:
    with pytest.raises(AuthorizationRefusedError):
        user_of_token(TokenUser(username=user, extra={}), NAMESPACES)


@pytest.mark.parametrize("nodes", [[], [""], ["a", "b"]], ids=str)
def test_an_agent_whose_token_does_not_name_one_node_is_not_authorized(nodes: list[str]) -> None:
    user = "system:serviceaccount:leasehold-agents:node-agent"

    with pytest.raises(AuthorizationRefusedError, match="does not name its node"):
        user_of_token(TokenUser(username=user, extra={NODE_NAME_KEY: tuple(nodes)}), NAMESPACES)


def user_of(account: str, named: str, *, combined_scheduler: bool) -> NatsUser:
    """The user of a connection with the token of an account whose client names a user."""
    namespace = "leasehold-agents" if account == "node-agent" else "leasehold-system"
    reviewed = TokenUser(
        username=f"system:serviceaccount:{namespace}:{account}", extra={NODE_NAME_KEY: ("node-a",)}
    )
    user = user_of_token(reviewed, NAMESPACES)
    return user_of_client(user, named, combined_scheduler=combined_scheduler)


USERS = {user.name: user for user in all_users([NodeName("node-a")])}


@pytest.mark.parametrize("named", ["watcher", "placer", "planner"])
def test_the_binders_token_authorizes_other_services_only_where_they_are_in_its_process(
    named: str,
) -> None:
    assert user_of("binder", named, combined_scheduler=True) == USERS[named]
    with pytest.raises(AuthorizationRefusedError, match="without --combined-scheduler"):
        user_of("binder", named, combined_scheduler=False)


@pytest.mark.parametrize("combined_scheduler", [False, True])
@pytest.mark.parametrize("named", ["binder", "", "admin", "auth", "operator", "node-agent.node-a"])
def test_the_binders_token_authorizes_no_other_user(named: str, combined_scheduler: bool) -> None:
    assert user_of("binder", named, combined_scheduler=combined_scheduler) == USERS["binder"]


@pytest.mark.parametrize("combined_scheduler", [False, True])
@pytest.mark.parametrize("named", ["watcher", "placer", "planner", "binder"])
@pytest.mark.parametrize(
    "account", sorted({*USERS} - {"binder", "node-agent.node-a"} | {"node-agent"})
)
def test_with_another_token_the_name_of_the_client_is_ignored(
    account: str, named: str, combined_scheduler: bool
) -> None:
    own = "node-agent.node-a" if account == "node-agent" else account

    assert user_of(account, named, combined_scheduler=combined_scheduler) == USERS[own]


def granted_to(user: NatsUser) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the response to a connection, and the claims of the token in it."""
    issuer = TokenIssuer(b"i" * 32)
    caller = AuthorizationRequest(server="N-server", user_key="U-key", token="")
    answer = verify_claims(encode_grant(issuer, caller, user, now_s=1000, life_s=60), kind=ACCOUNT)
    body = answer["nats"]["jwt"].split(".")[1]
    return answer, json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))


def test_a_user_that_publishes_nothing_is_denied_everything() -> None:
    """To the server, an empty list of permitted subjects permits all."""
    _, user = granted_to(operator_user())

    assert user["nats"]["pub"] == {"deny": [">"]}


def test_a_grant_expires_and_is_for_the_connection_of_the_request() -> None:
    answer, user = granted_to(AUTH_USER)

    assert (answer["aud"], answer["sub"]) == ("N-server", "U-key")
    assert (user["sub"], user["aud"], user["exp"]) == ("U-key", "LEASEHOLD", 1060)
    assert user["nats"]["pub"]["allow"] == list(AUTH_USER.publish)
