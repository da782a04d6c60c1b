"""Service account tokens: TokenRequests and TokenReviews.

A token is a signed JWT for some audiences. It is valid until it expires, or until its account, or
the pod, node or secret that it is bound to, is deleted. Nothing is stored: a review looks up the
objects. In contrast to Kubernetes, tokens are signed with a symmetric key, because no other program
verifies them.
"""

import base64
import hashlib
import hmac
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from simcluster.apimachinery.errors import ApiError, Cause
from simcluster.apimachinery.objects import Json, at_path, decode, encode, rfc3339
from simcluster.apiserver.storage.records import ObjectRecord
from simcluster.apiserver.storage.store import ObjectStore

AUDIENCE = "https://kubernetes.default.svc.cluster.local"
"""The API server's audience, and the issuer."""
ADMIN: Json = {
    "username": "kubernetes-admin",
    "groups": ["system:masters", "system:authenticated"],
}
EXTRA = "authentication.kubernetes.io"
_HOUR_S = 3600
_LEAST_S, _MOST_S = 600, 1 << 32
_BOUND_KINDS = {"Pod": "pods", "Node": "nodes", "Secret": "secrets"}
_INVALID = "invalid bearer token"
_INVALIDATED = "service account token has been invalidated"


class TokenError(Exception):
    """The token is invalid; the message is the reason, and may be empty."""


@dataclass(frozen=True, slots=True)
class ServiceAccountTokens:
    """Issues and reviews tokens; `secret` is the administrator's token."""

    store: ObjectStore
    secret: str

    def mounted_token(self, namespace: str, name: str, node: str) -> str:
        """Return a token as a pod on this node has it (empty: none); it is bound to no object."""
        bound = {"node": {"name": node}} if node else {}
        claims = self._claims_of(namespace, name, bound, int(self.store.clock()))
        return self._signed({**claims, "aud": [AUDIENCE], "exp": claims["iat"] + _MOST_S})

    def issue(self, namespace: str, name: str, request: Json) -> Json:
        """Issue the token of a TokenRequest; 404, 409 or 422 if that is not possible."""
        spec = request.get("spec") or {}
        expires_s = spec.get("expirationSeconds", _HOUR_S)
        _check_duration(expires_s)
        audiences = list(spec.get("audiences") or [AUDIENCE])
        now_s = int(self.store.clock())
        bound = self._bound_object_claims(namespace, name, spec.get("boundObjectRef"))
        claims: Json = {
            **self._claims_of(namespace, name, bound, now_s),
            "aud": audiences,
            "exp": now_s + expires_s,
        }
        return {
            "kind": "TokenRequest",
            "apiVersion": "authentication.k8s.io/v1",
            "metadata": {"name": name, "namespace": namespace, "creationTimestamp": rfc3339(now_s)},
            "spec": {**spec, "audiences": audiences, "expirationSeconds": expires_s},
            "status": {
                "token": self._signed(claims),
                "expirationTimestamp": rfc3339(now_s + expires_s),
            },
        }

    def _claims_of(self, namespace: str, name: str, bound: Json, now_s: int) -> Json:
        """Return the claims of every token of an account."""
        account = _reference(self.store.read("serviceaccounts", namespace, name))
        return {
            "iat": now_s,
            "nbf": now_s,
            "iss": AUDIENCE,
            "jti": str(uuid.uuid4()),
            "sub": f"system:serviceaccount:{namespace}:{name}",
            "kubernetes.io": {"namespace": namespace, "serviceaccount": account, **bound},
        }

    def _bound_object_claims(self, namespace: str, account: str, reference: Json | None) -> Json:
        """Return the claims of the bound object; those of a pod include its node."""
        if not reference:
            return {}
        kind = str(reference.get("kind"))
        name = str(reference.get("name"))
        if kind not in _BOUND_KINDS or reference.get("apiVersion", "v1") not in {"v1", ""}:
            group = reference.get("apiVersion", "")
            raise ApiError.bad_request(f"cannot bind token to object of type {group}, Kind={kind}")
        obj = self.store.read(_BOUND_KINDS[kind], None if kind == "Node" else namespace, name)
        if kind == "Pod" and at_path(obj, "spec.serviceAccountName") != account:
            raise ApiError.bad_request(
                f'cannot bind token for serviceaccount "{account}" to pod running with different '
                "serviceaccount name."
            )
        wanted = reference.get("uid")
        uid = obj["metadata"]["uid"]
        if wanted and wanted != uid:
            raise ApiError.conflict(
                kind,
                name,
                f"the UID in the bound object reference ({wanted}) does not match the UID in "
                "record. The object might have been deleted and then recreated",
            )
        claims = {kind.lower(): _reference(obj)}
        node = at_path(obj, "spec.nodeName") if kind == "Pod" else None
        if node:
            record = self.store.find("nodes", None, node)
            claims["node"] = {"name": node} if record is None else _reference(record.obj)
        return claims

    def review(self, request: Json) -> Json:
        """Return the completed TokenReview."""
        spec = request.get("spec") or {}
        token = spec.get("token")
        if not token:
            raise ApiError.bad_request("token is required for TokenReview in authentication")
        wanted = list(spec.get("audiences") or [AUDIENCE])
        status: Json
        try:
            user, audiences = self.authenticate(str(token), wanted)
        except TokenError as error:
            texts = [text for text in (_INVALID, str(error)) if text]
            error_text = texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"
            status = {"authenticated": False, "user": {}, "error": error_text}
        else:
            status = {"authenticated": True, "user": user, "audiences": audiences}
        return {
            "kind": "TokenReview",
            "apiVersion": "authentication.k8s.io/v1",
            "metadata": {"creationTimestamp": None},
            "spec": spec,
            "status": status,
        }

    def authenticate(
        self, token: str, wanted: Sequence[str] = (AUDIENCE,)
    ) -> tuple[Json, list[str]]:
        """Return the user of a token, and its audiences among `wanted`; raises TokenError."""
        if hmac.compare_digest(token.encode(), self.secret.encode()):
            if AUDIENCE not in wanted:
                raise TokenError("")
            return ADMIN, [AUDIENCE]
        claims = self._claims(token)
        audiences = [audience for audience in wanted if audience in claims["aud"]]
        if not audiences:
            raise TokenError(
                f"token audiences {_quoted(claims['aud'])} is invalid for the target audiences "
                f"{_quoted(wanted)}"
            )
        if self.store.clock() >= claims["exp"]:
            raise TokenError("service account token has expired")
        return self._user(claims), audiences

    def _user(self, claims: Json) -> Json:
        private = claims["kubernetes.io"]
        namespace = private["namespace"]
        account = private["serviceaccount"]
        record = self.store.find("serviceaccounts", namespace, account["name"])
        if record is None:
            raise TokenError(f'serviceaccounts "{account["name"]}" not found')
        if record.obj["metadata"]["uid"] != account["uid"]:
            raise TokenError(
                f"service account UID ({record.obj['metadata']['uid']}) does not match claim "
                f"({account['uid']})"
            )
        extra = {f"{EXTRA}/credential-id": [f"JTI={claims['jti']}"]}
        for kind in ("secret", "pod"):
            if kind in private:
                self._check_bound_object(
                    self.store.find(f"{kind}s", namespace, private[kind]["name"]), private, kind
                )
        if "pod" in private:
            extra |= {f"{EXTRA}/pod-{key}": [text] for key, text in private["pod"].items()}
        elif "uid" in private.get("node", {}):  # of a pod's node only the name counts
            self._check_bound_object(
                self.store.find("nodes", None, private["node"]["name"]), private, "node"
            )
        if "node" in private:
            extra |= {f"{EXTRA}/node-{key}": [text] for key, text in private["node"].items()}
        return {
            "username": claims["sub"],
            "uid": account["uid"],
            "groups": [
                "system:serviceaccounts",
                f"system:serviceaccounts:{namespace}",
                "system:authenticated",
            ],
            "extra": extra,
        }

    def _check_bound_object(self, record: ObjectRecord | None, private: Json, kind: str) -> None:
        """Refuse a token whose bound object was deleted or replaced."""
        if record is None:
            raise TokenError(_INVALIDATED)
        uid = record.obj["metadata"]["uid"]
        claimed = private[kind]["uid"]
        if uid != claimed:
            raise TokenError(
                f"{kind} UID ({uid}) does not match service account {kind} ref claim ({claimed})"
            )

    def _signed(self, claims: Json) -> str:
        head = _base64url(encode({"alg": "HS256", "typ": "JWT"}))
        body = f"{head}.{_base64url(encode(claims))}"
        return f"{body}.{self._signature(body)}"

    def _signature(self, body: str) -> str:
        key = hashlib.sha256(b"service accounts of " + self.secret.encode()).digest()
        return _base64url(hmac.digest(key, body.encode(), "sha256"))

    def _claims(self, token: str) -> Json:
        body, _, signature = token.rpartition(".")
        if not hmac.compare_digest(self._signature(body).encode(), signature.encode()):
            raise TokenError("")
        try:
            padded = body.partition(".")[2] + "=="
            claims: Json = decode(base64.urlsafe_b64decode(padded))
        except (ValueError, msgspec.DecodeError) as error:
            raise TokenError("") from error
        return claims


def _check_duration(seconds: Any) -> None:
    text = ""
    if seconds < _LEAST_S:
        text = "may not specify a duration less than 10 minutes"
    elif seconds > _MOST_S:
        text = "may not specify a duration larger than 2^32 seconds"
    if text:
        cause = Cause("FieldValueInvalid", f"Invalid value: {seconds}: {text}",
                      "spec.expirationSeconds")  # fmt: skip
        raise ApiError.invalid("TokenRequest", "authentication.k8s.io", "", [cause])


def _reference(obj: Json) -> Json:
    return {"name": obj["metadata"]["name"], "uid": obj["metadata"]["uid"]}


def _quoted(texts: Sequence[str]) -> str:
    return "[" + " ".join(f'"{text}"' for text in texts) + "]"


def _base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
