"""`v1 Binding`, as the client sends it; pure."""

from collections.abc import Mapping

import msgspec


class BindingMetadata(msgspec.Struct, frozen=True, omit_defaults=True):
    """Metadata that the API server merges into the pod, and the UID precondition."""

    name: str
    namespace: str
    uid: str
    annotations: Mapping[str, str] = {}
    labels: Mapping[str, str] = {}


class BindingTarget(msgspec.Struct, frozen=True, rename="camel"):
    """The target node."""

    name: str
    kind: str = "Node"
    api_version: str = "v1"


class Binding(msgspec.Struct, frozen=True, rename="camel"):
    """`v1 Binding`."""

    metadata: BindingMetadata
    target: BindingTarget
    kind: str = "Binding"
    api_version: str = "v1"
