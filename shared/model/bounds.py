"""Bounds of fields that come from outside, as types that decoders check; pure.

Where Kubernetes or NVIDIA limits a value, the bound is theirs; the others are ours, with room above
what clusters have.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from shared.model.errors import UNDECODABLE, RequestError

RECURSION_LIMIT = 12_000
"""Of processes that read objects of the API server. These have up to 10,000 levels, as Go decodes
them: users choose the parameters of a ResourceClaim, for example. msgspec counts a level as a
call."""
MOST = 2**53 - 1
"""JSON, MessagePack and the ledger's functions represent it exactly."""
MOST_VERSION = 2**52
"""Of versions and fences: the ledger counts in doubles, and could not count on from more."""
MOST_CONTAINERS = 128
"""Of a pod that requests GPUs, init containers included."""
MOST_WITH_GPUS = 32
"""Containers that request GPUs: a node's agent records the lease with each of them."""
MOST_SHARES = 128
"""Of one lease: more than the MIG instances of 16 GPUs."""
LONGEST_MEMO = 16_384
MOST_GROUPS = 64
MOST_CLAIMS = 64
"""PersistentVolumeClaims of a pod; a node has fewer attached volumes."""
MOST_VOLUMES = 1024
"""PersistentVolumes of which one may be bound to a claim."""
MOST_TERMS = 1024
"""Terms of one requirement on nodes that a pod's volumes have."""
MOST_VALUES = 8192
"""Of one requirement on nodes, which may name each node of a cluster."""
MOST_ENTRIES = 256
MOST_HOST_PORTS = 64
"""Resources for ports of one pod."""
"""Of a list or map that an administrator writes."""
MOST_CONSUMERS = 256
"""Pods that may use one ResourceClaim (ResourceClaimReservedForMaxSize)."""
HIGHEST_INDEX = 1023
MOST_DEVICES = 256
"""Of a node."""
MOST_ALLOCATIONS = 4096
"""Containers with devices of a node, far above the pods that a kubelet runs."""
LONGEST_ANNOTATION = 4096
"""Characters of an annotation or label that a dialect reads: a hundred UUIDs."""
MOST_ANNOTATIONS = 131_072
"""Bytes of all annotations of a pod with GPUs: half of what Kubernetes allows. The other half is
for the copy of its lease."""
LONGEST_FIELD = 32_768
"""Bytes of a pod's labels, node selector, affinity or tolerations, each as JSON."""
MOST_FACTS = 262_144
"""Bytes of a node's labels, and of the anti-affinity of its pods, each as JSON."""
LONGEST_MESSAGE = 1024
"""Characters: the API server rejects Events with longer messages."""

SHORT = 63
NAME = 253
KEY = 317
LONG = 1024
"""Kubernetes' limits of labels (and of container and namespace names), of object names, and of keys
with a prefix; and ours for what a component writes."""

ShortText = Annotated[str, Meta(max_length=SHORT)]
"""A label, the name of a namespace, or a word of ours."""
ContainerText = Annotated[str, Meta(max_length=2 * SHORT + 1)]
"""The name of a container; or of a request of a ResourceClaim, `REQUEST/SUBREQUEST` if it has a
choice."""
NameText = Annotated[str, Meta(max_length=NAME)]
KeyText = Annotated[str, Meta(max_length=KEY)]
"""`prefix/name`: a resource, the key of a label; `namespace/name`: a pod group."""
LongText = Annotated[str, Meta(max_length=LONG)]
ChoiceText = Annotated[str, Meta(max_length=128)]
"""A type, model, UUID or mode of devices as the author of a pod wrote it."""
MemoText = Annotated[str, Meta(max_length=LONGEST_MEMO)]
"""Names and priorities of `MOST_CONTAINERS`, as JSON."""
GenerationText = Annotated[str, Meta(max_length=8192)]
"""An instant and the 32 results that an allocation may have."""
UuidText = Annotated[str, Meta(max_length=95)]
"""NVML_DEVICE_UUID_V2_BUFFER_SIZE, less the final zero."""
MessageText = Annotated[str, Meta(max_length=32_768)]
"""A reason for people: the limit of `metav1.Condition.message`."""
CopyText = Annotated[str, Meta(max_length=262_144)]
"""An annotation: Kubernetes limits all of an object's to 256 KiB."""
TraceText = Annotated[str, Meta(max_length=55)]
"""A `traceparent` (https://www.w3.org/TR/trace-context/)."""
LONGEST_MODEL = 96
ModelText = Annotated[str, Meta(max_length=LONGEST_MODEL)]
"""NVML_DEVICE_NAME_V2_BUFFER_SIZE."""

Amount = Annotated[int, Meta(ge=0, le=MOST)]
SignedAmount = Annotated[int, Meta(ge=-MOST, le=MOST)]
MOST_MIB = 2**24
"""Of a device, or of a share of it: at most 16 TiB."""
Mib = Annotated[int, Meta(ge=0, le=MOST_MIB)]
Percent = Annotated[int, Meta(ge=0, le=100)]
BILLION = 10**9
Billionths = Annotated[int, Meta(ge=0, le=BILLION)]
Count = Annotated[int, Meta(ge=0, le=65_535)]
"""Of things on one node."""
Index = Annotated[int, Meta(ge=-1, le=HIGHEST_INDEX)]
"""Of a device on its node, or a NUMA node; -1 if unknown."""
Fence = Annotated[int, Meta(ge=0, lt=MOST_VERSION)]
Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
"""Kubernetes' int32."""
Shares = Annotated[int, Meta(ge=0, le=MOST_SHARES)]
"""Devices of one container."""
Units = Annotated[int, Meta(ge=1 - 2**63, le=2**63 - 1)]
"""GPU time of a budget."""
Revision = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""A resource version of the API server, as etcd counts."""
Members = Annotated[int, Meta(ge=1, le=999_999)]
LATEST_S = 2.4e11
"""In Unix seconds: it has a date with the run time of any pod added."""
Seconds = Annotated[float, Meta(ge=0, le=LATEST_S)]
"""A duration, or an instant in Unix seconds; also refuses NaN."""
Difference = Annotated[float, Meta(ge=-LATEST_S, le=LATEST_S)]
"""Seconds between instants of two clocks, one of which may be behind, or set back meanwhile."""
MOST_RUN_S = 2**31 - 1
RunTime = Annotated[int, Meta(ge=0, le=MOST_RUN_S)]
"""Whole seconds: Kubernetes' int32."""

Reading = Annotated[float, Meta(ge=0, le=1e6)]
"""Of a device's sensor: degrees Celsius, watts, MHz or percent."""

Groups = Annotated[tuple[LongText, ...], Meta(max_length=MOST_GROUPS)]
Choices = Annotated[tuple[ChoiceText, ...], Meta(max_length=256)]
TopologyKeys = Annotated[tuple[KeyText, ...], Meta(max_length=4)]
Labels = Mapping[KeyText, ShortText]
Resources = Annotated[dict[KeyText, Amount], Meta(max_length=MOST_ENTRIES)]
Amounts = Annotated[Mapping[KeyText, Amount], Meta(max_length=MOST_ENTRIES)]
SignedAmounts = Annotated[Mapping[KeyText, SignedAmount], Meta(max_length=MOST_ENTRIES)]


_encode = msgspec.msgpack.Encoder().encode


def check_bounds(value: Any, what: str) -> None:
    """Raise RequestError if a field of `value` is beyond the bound of its type."""
    try:
        msgspec.msgpack.decode(_encode(value), type=type(value))
    except (*UNDECODABLE, OverflowError) as error:
        raise RequestError(f"{what}: a field is out of its bounds: {error}") from error


def check_text(name: str, text: str, longest: int = LONGEST_ANNOTATION) -> None:
    """Raise RequestError for a text of more than `longest` characters."""
    if len(text) > longest:
        raise RequestError(f"{name} has {len(text)} characters; at most {longest} are allowed")


def check_size(name: str, size: int, most: int = LONGEST_FIELD) -> None:
    """Raise RequestError for a field of more than `most` bytes as JSON."""
    if size > most:
        raise RequestError(f"{name} has {size} bytes as JSON; at most {most} are allowed")


def printable(text: str) -> str:
    r"""Escape everything in a text that could change how a terminal, log or Event shows the rest.

    For example, a line break becomes `\n`.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else repr(character)[1:-1] for character in text
    )


def printable_lines(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))


def cut(message: str) -> str:
    """Return a message for people in one printable line, cut at the API server's limit."""
    message = printable(message[: LONGEST_MESSAGE + 1])
    return message if len(message) <= LONGEST_MESSAGE else message[: LONGEST_MESSAGE - 1] + "…"
