"""Validation of metadata: names, labels and annotations; pure."""

import re

from simcluster.apimachinery.errors import Cause
from simcluster.apimachinery.objects import Json, metadata

_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_QUALIFIED = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_MAX_ANNOTATIONS_BYTES = 256 * 1024
_SUBDOMAIN_TEXT = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or "
    "'.', and must start and end with an alphanumeric character"
)
_RBAC = "rbac.authorization.k8s.io/"
"""In this group, a name is any segment of a path, such as `system:kube-scheduler`."""
_LABEL_TEXT = (
    "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and "
    "must start and end with an alphanumeric character"
)


def is_subdomain(text: str) -> bool:
    """Return whether the text is an RFC 1123 subdomain."""
    return len(text) <= 253 and _SUBDOMAIN.fullmatch(text) is not None


def is_label(text: str) -> bool:
    """Return whether the text is an RFC 1123 label."""
    return len(text) <= 63 and _LABEL.fullmatch(text) is not None


def is_qualified(text: str) -> bool:
    """Return whether the text is a qualified name: a name with an optional DNS prefix."""
    prefix, slash, name = text.rpartition("/")
    if slash and not is_subdomain(prefix):
        return False
    return len(name) <= 63 and _QUALIFIED.fullmatch(name) is not None


def label_name_causes(text: str, field: str) -> list[Cause]:
    """Validate a name that must be an RFC 1123 label, such as a container's name."""
    if is_label(text):
        return []
    return [Cause("FieldValueInvalid", f'Invalid value: "{text}": {_LABEL_TEXT}', field)]


def metadata_causes(obj: Json) -> list[Cause]:
    """Validate an object's metadata; return a cause for each invalid field."""
    meta = metadata(obj)
    name = meta.get("name")
    causes: list[Cause] = []
    if not name:
        text = "Required value: name or generateName is required"
        causes.append(Cause("FieldValueRequired", text, "metadata.name"))
    elif str(obj.get("apiVersion", "")).startswith(_RBAC) and _is_path_segment(str(name)):
        pass
    elif not isinstance(name, str) or not is_subdomain(name):
        text = f'Invalid value: "{name}": {_SUBDOMAIN_TEXT}'
        causes.append(Cause("FieldValueInvalid", text, "metadata.name"))
    return [*causes, *_label_causes(meta.get("labels")), *_annotation_causes(meta)]


def _is_path_segment(name: str) -> bool:
    return name not in {".", ".."} and "/" not in name and "%" not in name


def _label_causes(labels: object) -> list[Cause]:
    if labels is None:
        return []
    if not isinstance(labels, dict):
        return [Cause("FieldValueTypeInvalid", "Invalid value: not a map", "metadata.labels")]
    causes = []
    for key, value in labels.items():
        if not is_qualified(key):
            text = f'Invalid value: "{key}": not a qualified name'
            causes.append(Cause("FieldValueInvalid", text, "metadata.labels"))
        fine = isinstance(value, str) and (
            not value or (len(value) <= 63 and _QUALIFIED.fullmatch(value))
        )
        if not fine:
            text = (
                f'Invalid value: "{value}": a valid label must be an empty string or consist of '
                "alphanumeric characters, '-', '_' or '.', at most 63 of them"
            )
            causes.append(Cause("FieldValueInvalid", text, "metadata.labels"))
    return causes


def _annotation_causes(meta: Json) -> list[Cause]:
    annotations = meta.get("annotations")
    if annotations is None:
        return []
    field = "metadata.annotations"
    if not isinstance(annotations, dict):
        return [Cause("FieldValueTypeInvalid", "Invalid value: not a map", field)]
    bad = [key for key in annotations if not is_qualified(key.lower())]
    causes = [
        Cause("FieldValueInvalid", f'Invalid value: "{key}": not a qualified name', field)
        for key in bad
    ]
    not_text = [key for key, value in annotations.items() if not isinstance(value, str)]
    causes += [
        Cause("FieldValueTypeInvalid", f'Invalid value: annotation "{key}" is not a string', field)
        for key in not_text
    ]
    size = sum(len(key) + len(value) for key, value in annotations.items() if key not in not_text)
    if size > _MAX_ANNOTATIONS_BYTES:
        text = f"Too long: may not be more than {_MAX_ANNOTATIONS_BYTES} bytes"
        causes.append(Cause("FieldValueTooLong", text, field))
    return causes
