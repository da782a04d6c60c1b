"""Checks of request bodies: unknown fields, and the fields that events.k8s.io/v1 requires; pure.

The known fields are the metadata of every kind, and a pod's spec, containers and resources. All
other fields of built-in kinds are accepted as they are.
"""

from collections.abc import Iterator, Mapping

from simcluster.apimachinery.errors import ApiError, Cause
from simcluster.apimachinery.objects import Json, json_text
from simcluster.apimachinery.resources import Resource
from simcluster.apiserver.crd.custom_kinds import CustomKind
from simcluster.apiserver.crd.schema_shape import prune


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_METADATA = _names(
    "name generateName namespace selfLink uid resourceVersion generation creationTimestamp "
    "deletionTimestamp deletionGracePeriodSeconds labels annotations ownerReferences finalizers "
    "managedFields"
)
_POD = _names("apiVersion kind metadata spec status")
_POD_SPEC = _names(
    "volumes initContainers containers ephemeralContainers restartPolicy "
    "terminationGracePeriodSeconds activeDeadlineSeconds dnsPolicy nodeSelector serviceAccountName "
    "serviceAccount automountServiceAccountToken nodeName hostNetwork hostPID hostIPC "
    "shareProcessNamespace securityContext imagePullSecrets hostname subdomain affinity "
    "schedulerName tolerations hostAliases priorityClassName priority dnsConfig readinessGates "
    "runtimeClassName enableServiceLinks preemptionPolicy overhead topologySpreadConstraints "
    "setHostnameAsFQDN os hostUsers schedulingGates resourceClaims resources hostnameOverride "
    "workloadRef schedulingGroup"
)
_CONTAINER = _names(
    "name image command args workingDir ports envFrom env resources resizePolicy restartPolicy "
    "restartPolicyRules volumeMounts volumeDevices livenessProbe readinessProbe startupProbe "
    "lifecycle terminationMessagePath terminationMessagePolicy imagePullPolicy securityContext "
    "stdin stdinOnce tty targetContainerName"
)
_RESOURCES = _names("limits requests claims")
_CONTAINER_LISTS = ("initContainers", "containers", "ephemeralContainers")


def drop_unknown_fields(kind: Resource, obj: Json, query: Mapping[str, str]) -> list[str]:
    """Drop unknown fields, in place, and return the warnings; 400 in mode `Strict`."""
    mode = query.get("fieldValidation") or "Warn"
    if mode not in {"Strict", "Warn", "Ignore"}:
        raise ApiError.bad_request(
            f'fieldValidation: Unsupported value: "{mode}": supported values: '
            '"Ignore", "Strict", "Warn"'
        )
    dropped = []
    for path, below, known in _known_fields(kind, obj):
        for name in [name for name in below if name not in known]:
            dropped.append(f'unknown field "{path}{name}"')
            del below[name]
    if isinstance(kind, CustomKind):
        dropped += [f'unknown field "{path}"' for path in prune(kind.schema, obj)]
    if dropped and mode == "Strict":
        raise ApiError.bad_request(
            f'{kind.kind} in version "{kind.version}" cannot be handled as a {kind.kind}: '
            f"strict decoding error: {', '.join(dropped)}"
        )
    return dropped if mode == "Warn" else []


def _known_fields(kind: Resource, obj: Json) -> Iterator[tuple[str, Json, frozenset[str]]]:
    if isinstance(obj.get("metadata"), dict):
        yield "metadata.", obj["metadata"], _METADATA
    if kind.table != "pods":
        return
    yield "", obj, _POD
    spec = obj.get("spec")
    if not isinstance(spec, dict):
        return
    yield "spec.", spec, _POD_SPEC
    for field in _CONTAINER_LISTS:
        containers = spec.get(field)
        for at, container in enumerate(containers if isinstance(containers, list) else ()):
            if isinstance(container, dict):
                path = f"spec.{field}[{at}]."
                yield path, container, _CONTAINER
                if isinstance(container.get("resources"), dict):
                    yield f"{path}resources.", container["resources"], _RESOURCES


_REQUIRED = ("eventTime", "reportingController", "reportingInstance", "action", "reason")
_DEPRECATED = {
    "firstTimestamp": "deprecatedFirstTimestamp",
    "lastTimestamp": "deprecatedLastTimestamp",
    "count": "deprecatedCount",
    "source": "deprecatedSource",
}


def new_event_causes(event: Json) -> Iterator[Cause]:
    """Validate a new event; causes have the field names of core/v1, as in Kubernetes."""
    for field in _REQUIRED:
        if not event.get(field):
            yield Cause("FieldValueRequired", "Required value", field)
    if event.get("type") not in {"Normal", "Warning"}:
        text = f'Invalid value: "": has invalid value: {event.get("type") or ""}'
        yield Cause("FieldValueInvalid", text, "type")
    for field, name in _DEPRECATED.items():
        if event.get(name):
            yield Cause("FieldValueInvalid", 'Invalid value: "": needs to be unset', field)
    series = event.get("series")
    if isinstance(series, dict) and int(series.get("count") or 0) < 2:
        text = f"Invalid value: {json_text(series.get('count'))}: should be at least 2"
        yield Cause("FieldValueInvalid", text, "series.count")
