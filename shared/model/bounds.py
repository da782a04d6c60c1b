"""Bounds of fields that come from outside, as types that decoders check; pure."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from shared.model.errors import UNDECODABLE, RequestError

RECURSION_LIMIT = 12_000
"""The API server's objects have up to 10,000 levels, as Go decodes them; msgspec counts a level as
a call."""
MOST = 2**53 - 1
"""Exact in JSON, MessagePack and Lua."""
MOST_VERSION = 2**52
"""Of versions and fences: the ledger's doubles could not count on from more."""
MOST_CONTAINERS = 128
MOST_WITH_GPUS = 32
MOST_SHARES = 128
"""Of one lease: more than the MIG instances of 16 GPUs."""
LONGEST_MEMO = 16_384
MOST_GROUPS = 64
MOST_CLAIMS = 64
MOST_VOLUMES = 1024
MOST_TERMS = 1024
MOST_VALUES = 8192
"""Of one requirement on nodes, which may name each node of a cluster."""
MOST_ENTRIES = 256
MOST_HOST_PORTS = 64
"""Of a list or map that an administrator writes, or resources for a pod's ports."""
MOST_CONSUMERS = 256
"""ResourceClaimReservedForMaxSize."""
HIGHEST_INDEX = 1023
MOST_DEVICES = 256
MOST_ALLOCATIONS = 4096
"""Containers with devices of a node."""
LONGEST_ANNOTATION = 4096
MOST_ANNOTATIONS = 131_072
"""Bytes: half of Kubernetes' limit, since the pod's lease is copied there."""
LONGEST_FIELD = 32_768
"""Bytes of a pod's labels, node selector, affinity or tolerations, as JSON."""
MOST_FACTS = 262_144
"""Bytes of a node's labels, or of the anti-affinity of its pods."""
LONGEST_MESSAGE = 1024
"""Characters: the API server rejects Events with longer messages."""

SHORT = 63
NAME = 253
KEY = 317
LONG = 1024
"""Of labels, of object names, of keys with a prefix, and of a component's text."""

ShortText = Annotated[str, Meta(max_length=SHORT)]
"""A label, the name of a namespace, or a word of ours."""
ContainerText = Annotated[str, Meta(max_length=2 * SHORT + 1)]
"""A container, or `REQUEST/SUBREQUEST` of a ResourceClaim."""
NameText = Annotated[str, Meta(max_length=NAME)]
KeyText = Annotated[str, Meta(max_length=KEY)]
"""`prefix/name` of a resource or label, or `namespace/name` of a pod group."""
LongText = Annotated[str, Meta(max_length=LONG)]
ChoiceText = Annotated[str, Meta(max_length=128)]
MemoText = Annotated[str, Meta(max_length=LONGEST_MEMO)]
"""Names and priorities of `MOST_CONTAINERS`, as JSON."""
GenerationText = Annotated[str, Meta(max_length=8192)]
UuidText = Annotated[str, Meta(max_length=95)]
"""NVML_DEVICE_UUID_V2_BUFFER_SIZE, less the final zero."""
MessageText = Annotated[str, Meta(max_length=32_768)]
"""The limit of `metav1.Condition.message`."""
CopyText = Annotated[str, Meta(max_length=262_144)]
"""Kubernetes' limit of all annotations of an object."""
TraceText = Annotated[str, Meta(max_length=55)]
"""A `traceparent` (https://www.w3.org/TR/trace-context/)."""
LONGEST_MODEL = 96
ModelText = Annotated[str, Meta(max_length=LONGEST_MODEL)]
"""NVML_DEVICE_NAME_V2_BUFFER_SIZE."""

Amount = Annotated[int, Meta(ge=0, le=MOST)]
SignedAmount = Annotated[int, Meta(ge=-MOST, le=MOST)]
MOST_MIB = 2**24
"""16 TiB."""
Mib = Annotated[int, Meta(ge=0, le=MOST_MIB)]
Percent = Annotated[int, Meta(ge=0, le=100)]
BILLION = 10**9
Billionths = Annotated[int, Meta(ge=0, le=BILLION)]
Count = Annotated[int, Meta(ge=0, le=65_535)]
Index = Annotated[int, Meta(ge=-1, le=HIGHEST_INDEX)]
"""-1 if unknown."""
Fence = Annotated[int, Meta(ge=0, lt=MOST_VERSION)]
Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Shares = Annotated[int, Meta(ge=0, le=MOST_SHARES)]
Units = Annotated[int, Meta(ge=1 - 2**63, le=2**63 - 1)]
Revision = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""A resource version of the API server, as etcd counts."""
Members = Annotated[int, Meta(ge=1, le=999_999)]
LATEST_S = 2.4e11
"""Unix time that has a date with the run time of any pod added."""
Seconds = Annotated[float, Meta(ge=0, le=LATEST_S)]
"""A duration or Unix time; also refuses NaN."""
Difference = Annotated[float, Meta(ge=-LATEST_S, le=LATEST_S)]
"""Between two clocks, one of which may be behind, or set back meanwhile."""
MOST_RUN_S = 2**31 - 1
RunTime = Annotated[int, Meta(ge=0, le=MOST_RUN_S)]

Reading = Annotated[float, Meta(ge=0, le=1e6)]
"""Degrees Celsius, watts, MHz or percent."""

Groups = Annotated[tuple[LongText, ...], Meta(max_length=MOST_GROUPS)]
Choices = Annotated[tuple[ChoiceText, ...], Meta(max_length=256)]
TopologyKeys = Annotated[tuple[KeyText, ...], Meta(max_length=4)]
Labels = Mapping[KeyText, ShortText]
Resources = Annotated[dict[KeyText, Amount], Meta(max_length=MOST_ENTRIES)]
Amounts = Annotated[Mapping[KeyText, Amount], Meta(max_length=MOST_ENTRIES)]


_encode = msgspec.msgpack.Encoder().encode


def check_bounds(value: Any, what: str) -> None:
    try:
        msgspec.msgpack.decode(_encode(value), type=type(value))
    except (*UNDECODABLE, OverflowError) as error:
        raise RequestError(f"{what}: a field is out of its bounds: {error}") from error


def check_text(name: str, text: str, longest: int = LONGEST_ANNOTATION) -> None:
    if len(text) > longest:
        raise RequestError(f"{name} has {len(text)} characters; at most {longest} are allowed")


def check_size(name: str, size: int, most: int = LONGEST_FIELD) -> None:
    if size > most:
        raise RequestError(f"{name} has {size} bytes as JSON; at most {most} are allowed")


def printable(text: str) -> str:
    r"""Escape what could change how a terminal, log or Event shows the rest, such as `\n`."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else repr(character)[1:-1] for character in text
    )


def printable_lines(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))


def cut(message: str) -> str:
    """Make a message one printable line, as long as the API server accepts."""
    message = printable(message[: LONGEST_MESSAGE + 1])
    return message if len(message) <= LONGEST_MESSAGE else message[: LONGEST_MESSAGE - 1] + "…"
