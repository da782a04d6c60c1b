"""Webhook configurations: defaults and validation."""

import base64
import binascii
import ssl
from collections.abc import Iterator
from urllib.parse import urlsplit

from simcluster.apimachinery.errors import ApiError, Cause
from simcluster.apimachinery.names import is_subdomain, metadata_causes
from simcluster.apimachinery.objects import Json, JsonValue, json_text
from simcluster.apiserver.cel import condition_causes
from simcluster.apiserver.storage.strategy import KindStrategy, ObjectLookup

_OPERATIONS = frozenset({"*", "CREATE", "UPDATE", "DELETE", "CONNECT"})


def _wrong(field: str, value: JsonValue, text: str) -> Cause:
    return Cause("FieldValueInvalid", f"Invalid value: {json_text(value)}: {text}", field)


def _one_of(field: str, value: JsonValue, allowed: tuple[str, ...]) -> Iterator[Cause]:
    if value not in allowed:
        listed = ", ".join(f'"{value}"' for value in allowed)
        text = f"Unsupported value: {json_text(value)}: supported values: {listed}"
        yield Cause("FieldValueNotSupported", text, field)


def _required(field: str, text: str = "") -> Cause:
    return Cause("FieldValueRequired", f"Required value: {text}".removesuffix(": "), field)


class WebhookConfigurationStrategy(KindStrategy):
    """The strategy of mutating and of validating configurations."""

    has_generation = True

    def __init__(self, *, mutating: bool) -> None:
        self.mutating = mutating

    def apply_defaults(self, obj: Json, cluster: ObjectLookup) -> None:
        """Set policies, selectors and the timeout."""
        for hook in obj.get("webhooks") or ():
            if not isinstance(hook, dict):
                raise ApiError.bad_request("a webhook must be a map")
            hook.setdefault("failurePolicy", "Fail")
            hook.setdefault("matchPolicy", "Equivalent")
            hook.setdefault("timeoutSeconds", 10)
            hook.setdefault("namespaceSelector", {})
            hook.setdefault("objectSelector", {})
            if self.mutating:
                hook.setdefault("reinvocationPolicy", "Never")
            for rule in hook.get("rules") or ():
                rule.setdefault("scope", "*")
            service = (hook.get("clientConfig") or {}).get("service")
            if service:
                service.setdefault("port", 443)

    def validate(self, obj: Json) -> list[Cause]:
        """Validate every webhook."""
        causes = metadata_causes(obj)
        seen: set[str] = set()
        for at, hook in enumerate(obj.get("webhooks") or ()):
            path = f"webhooks[{at}]"
            name = str(hook.get("name") or "")
            if not is_subdomain(name) or name.count(".") < 2:
                text = "should be a domain with at least three segments separated by dots"
                causes.append(_wrong(f"{path}.name", name, text))
            elif name in seen:
                causes.append(
                    Cause(
                        "FieldValueDuplicate", f"Duplicate value: {json_text(name)}", f"{path}.name"
                    )
                )
            seen.add(name)
            causes += [*_hook_causes(hook, path), *_client_causes(hook, f"{path}.clientConfig")]
        return causes

    def changes_generation(self, new: Json, old: Json) -> bool:
        """Any change of the webhooks counts."""
        return bool(new.get("webhooks") != old.get("webhooks"))


def _hook_causes(hook: Json, path: str) -> Iterator[Cause]:
    yield from _one_of(f"{path}.failurePolicy", hook["failurePolicy"], ("Fail", "Ignore"))
    yield from _one_of(f"{path}.matchPolicy", hook["matchPolicy"], ("Equivalent", "Exact"))
    if not hook.get("sideEffects"):
        yield _required(f"{path}.sideEffects", "must specify one of None, NoneOnDryRun")
    else:
        yield from _one_of(f"{path}.sideEffects", hook["sideEffects"], ("None", "NoneOnDryRun"))
    if "reinvocationPolicy" in hook:
        field = f"{path}.reinvocationPolicy"
        yield from _one_of(field, hook["reinvocationPolicy"], ("Never", "IfNeeded"))
    if not 1 <= int(hook["timeoutSeconds"]) <= 30:
        text = "the timeout value must be between 1 and 30 seconds"
        yield _wrong(f"{path}.timeoutSeconds", hook["timeoutSeconds"], text)
    reviews = hook.get("admissionReviewVersions") or []
    if not reviews:
        yield _required(f"{path}.admissionReviewVersions", "must specify one of v1, v1beta1")
    elif "v1" not in reviews:
        yield _wrong(f"{path}.admissionReviewVersions", reviews, "must include v1")
    yield from rule_causes(hook.get("rules") or (), f"{path}.rules")
    yield from condition_causes(hook.get("matchConditions") or (), f"{path}.matchConditions")


def rule_causes(rules: JsonValue, path: str) -> Iterator[Cause]:
    """Require operations, groups, versions and resources in each rule."""
    for at, rule in enumerate(rules):
        for field in ("operations", "apiGroups", "apiVersions", "resources"):
            if not rule.get(field):
                yield _required(f"{path}[{at}].{field}")
        for operation in rule.get("operations") or ():
            if operation not in _OPERATIONS:
                yield from _one_of(f"{path}[{at}].operations", operation, tuple(_OPERATIONS))


def _client_causes(hook: Json, path: str) -> Iterator[Cause]:
    config = hook.get("clientConfig") or {}
    url = config.get("url")
    service = config.get("service") or {}
    if bool(url) == bool(service):
        yield _required(path, "exactly one of url or service is required")
    elif url:
        parts = urlsplit(url)
        if parts.scheme != "https":
            text = "'https' is the only allowed URL scheme; desired format: https://host[/path]"
            yield _wrong(f"{path}.url", parts.scheme, text)
        if not parts.hostname:
            text = "host must be specified; desired format: https://host[/path]"
            yield _wrong(f"{path}.url", parts.netloc, text)
    else:
        for field in ("name", "namespace"):
            if not service.get(field):
                yield _required(f"{path}.service.{field}")
    bundle = config.get("caBundle")
    if bundle:
        try:
            ssl.create_default_context(cadata=base64.b64decode(bundle, validate=True).decode())
        except (ValueError, binascii.Error, ssl.SSLError) as error:
            yield _wrong(f"{path}.caBundle", "...", f"unable to load root certificates: {error}")
