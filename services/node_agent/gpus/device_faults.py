"""Faults of GPUs, and which XID events are critical; pure.

The environment variables are those of NVIDIA's device plugin.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from shared.dialects.nvidia.xids import XID_CATALOGUE
from shared.model.devices.device import NO_RESPONSE_CODE, UNNAMED, UnreadDevice
from shared.model.devices.node import NOT_LISTED_CODE, REPLACED_CODE
from shared.model.names import DeviceUuid

DISABLE_VARIABLE = "DP_DISABLE_HEALTHCHECKS"
ENABLE_VARIABLE = "DP_ENABLE_HEALTHCHECKS"
APPLICATION_XIDS = frozenset({13, 31, 43, 45, 68, 109})
_ALL = "all"
_ALL_XIDS = frozenset({_ALL, "xids"})
_RESTART = "restart the program; the GPU works on, and needs no reset"
_RESET = "drain the GPU and reset it"
_REPLACE = "have it replaced (RMA) if that happens again"


@dataclass(frozen=True, slots=True)
class XidGuide:
    meaning: str
    remedy: str


XID_GUIDES: Mapping[int, XidGuide] = {
    13: XidGuide("a program has failed in the compute engine", _RESTART),
    31: XidGuide("a program accessed memory that it does not have", _RESTART),
    43: XidGuide("a program was stopped after an error of its own", _RESTART),
    45: XidGuide("programs were ended after an earlier error", "see the Xid before it"),
    48: XidGuide("double-bit ECC error", f"{_RESET}; {_REPLACE}"),
    61: XidGuide("internal micro-controller halted", _RESET),
    62: XidGuide("internal micro-controller halted", f"{_RESET}; {_REPLACE}"),
    63: XidGuide(
        "a memory row was remapped or a page retired", "reset the GPU at the next opportunity"
    ),
    64: XidGuide("a memory row could not be remapped", f"{_RESET}; {_REPLACE}"),
    68: XidGuide("a program has failed in the video decoder", _RESTART),
    74: XidGuide("NVLink error", f"{_RESET}; check the connectors, and {_REPLACE}"),
    79: XidGuide(
        "the GPU has fallen off the bus",
        f"drain the node and restart it, with its power off; {_REPLACE}",
    ),
    92: XidGuide("many single-bit ECC errors", "nothing yet: watch for Xid 48 and 64"),
    94: XidGuide(
        "contained memory error",
        "restart the pods whose programs have failed, and reset the GPU at the next opportunity",
    ),
    95: XidGuide(
        "uncontained memory error",
        f"{_RESET} before it gets new pods, since all programs on it may have wrong data",
    ),
    109: XidGuide(
        "a program did not yield the GPU in time", f"restart the program; if that recurs, {_RESET}"
    ),
    119: XidGuide(
        "the GPU's system processor does not respond",
        f"{_RESET}, or restart the node if the reset fails",
    ),
    120: XidGuide(
        "the GPU's system processor failed", f"{_RESET}, or restart the node if the reset fails"
    ),
    140: XidGuide("unrecovered memory error", f"{_RESET}; {_REPLACE}"),
}
_OTHER = XidGuide("see NVIDIA's list of Xid errors", XID_CATALOGUE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    code: str
    text: str
    severe: bool = False
    """One occurrence cordons the GPU; others may be transient."""

    def __str__(self) -> str:
        return f"{self.code}: {self.text}"


@dataclass(frozen=True, slots=True)
class Xid:
    device: DeviceUuid
    number: int

    @property
    def meaning(self) -> str:
        guide = XID_GUIDES.get(self.number, _OTHER)
        return f"{guide.meaning}: {guide.remedy}"

    @property
    def fault(self) -> Fault:
        return Fault(code="XidError", text=f"Xid {self.number}, {self.meaning}", severe=True)


def no_response(reason: str) -> Fault:
    return Fault(code=NO_RESPONSE_CODE, text=reason)


SAME_INDEX = Fault(
    code="SameIndex",
    text="the driver reports another GPU with the same minor number: check `nvidia-smi -q`",
    severe=True,
)
ROW_REMAP_FAILED = Fault(
    code="RowRemapFailed",
    text="a memory row could not be remapped: reset the GPU, and replace it if the fault persists",
    severe=True,
)
NOT_LISTED = Fault(
    code=NOT_LISTED_CODE,
    text="the driver no longer lists it: check `nvidia-smi -L` and the kernel log; exclude it by "
    "filterdevices if it was removed",
)
LISTED_AGAIN = Fault(
    code="ListedAgain",
    text="the driver had not listed it: it gets pods again once it has responded for a while",
)
EXCLUDED = Fault(
    code="Excluded",
    text="filterdevices of the node configuration excludes it; its pods keep it until they end",
)


def replaced_by(uuid: DeviceUuid) -> Fault:
    return Fault(
        code=REPLACED_CODE, text=f"{uuid} is in its place on the PCI bus now: delete its pods"
    )


def missing_fault(
    uuid: DeviceUuid, unreadable: Mapping[int, str], unread: Iterable[UnreadDevice] = ()
) -> Fault:
    """The GPU may be there: `unreadable` by NVML, or `unread` by the kernel."""
    reasons = {gpu.uuid: gpu.reason for gpu in unread}
    if reason := reasons.get(uuid) or reasons.get(UNNAMED):
        return no_response(reason)
    if not unreadable:
        return NOT_LISTED
    index, reason = next(iter(unreadable.items()))
    return no_response(
        f"it may be the GPU with driver index {index}, which cannot be read: {reason}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class XidRules:
    disabled: bool = False
    ignored: frozenset[int] = APPLICATION_XIDS
    enabled: frozenset[int] = frozenset()
    """Critical whatever else is set."""
    all_enabled: bool = False
    invalid_words: tuple[str, ...] = ()

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Self:
        """`all` and `xids` mean every XID."""
        disabled = _words(environ.get(DISABLE_VARIABLE, ""))
        enabled = _words(environ.get(ENABLE_VARIABLE, ""))
        words = (disabled - _ALL_XIDS) | (enabled - {_ALL})
        return cls(
            disabled=bool(_ALL_XIDS & disabled),
            ignored=APPLICATION_XIDS | _numbers(disabled),
            enabled=_numbers(enabled),
            all_enabled=_ALL in enabled,
            invalid_words=tuple(sorted(word for word in words if not word.isdecimal())),
        )

    def is_critical(self, xid: int) -> bool:
        if self.all_enabled or xid in self.enabled:
            return True
        return not self.disabled and xid not in self.ignored


def _words(text: str) -> frozenset[str]:
    return frozenset(word.strip().lower() for word in text.split(",") if word.strip())


def _numbers(words: frozenset[str]) -> frozenset[int]:
    return frozenset(int(word) for word in words if word.isdecimal())
