"""What can be wrong with a GPU, and which of the driver's XID events mean that something is; pure.

The environment variables are those of NVIDIA's device plugin and of the plugins made from it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from shared.model.names import DeviceUuid

DISABLE_VARIABLE = "DP_DISABLE_HEALTHCHECKS"
ENABLE_VARIABLE = "DP_ENABLE_HEALTHCHECKS"
APPLICATION_XIDS = frozenset({13, 31, 43, 45, 68, 109})
"""What a program does wrong; the next one finds the GPU as good as before."""
_ALL = "all"
_ALL_XIDS = frozenset({_ALL, "xids"})
_MEANINGS = {
    48: "double-bit ECC error",
    61: "internal micro-controller halted",
    62: "internal micro-controller halted",
    63: "a memory row was remapped or a page retired",
    64: "a memory row could not be remapped",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    92: "many single-bit ECC errors",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "the GPU's system processor does not answer",
    120: "the GPU's system processor failed",
    140: "unrecovered memory error",
}
"""https://docs.nvidia.com/deploy/xid-errors/"""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that is wrong with a GPU: for machines, and for people."""

    code: str
    """In CamelCase."""
    text: str
    severe: bool = False
    """One sight of it is enough; otherwise it may have been a hiccup."""

    def __str__(self) -> str:
        return f"{self.code}: {self.text}"


@dataclass(frozen=True, slots=True)
class Xid:
    """An XID event of a GPU."""

    device: DeviceUuid
    number: int

    @property
    def fault(self) -> Fault:
        """Return what it says about the GPU."""
        meaning = _MEANINGS.get(self.number, "see NVIDIA's list of XID errors")
        return Fault("XidError", f"Xid {self.number}, {meaning}", severe=True)


def no_response(reason: str) -> Fault:
    """Return the fault of a GPU about which the driver says nothing."""
    return Fault("NoAnswer", reason)


ROW_REMAP_FAILED = Fault(
    "MemoryBroken",
    "a memory row could not be remapped: reset the GPU, and replace it if that stays",
    severe=True,
)
NOT_LISTED = Fault("Gone", "the driver does not list it any more")


@dataclass(frozen=True, slots=True, kw_only=True)
class XidRules:
    """Which XIDs condemn a GPU."""

    disabled: bool = False
    ignored: frozenset[int] = APPLICATION_XIDS
    enabled: frozenset[int] = frozenset()
    """These do whatever else is said."""
    all_enabled: bool = False
    invalid_words: tuple[str, ...] = ()
    """Words of the environment that mean nothing."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Self:
        """Read the environment: XIDs to ignore besides the usual, and XIDs that count all the same.

        Each is a list of numbers; `all` (and `xids`, among those to ignore) means every one.
        """
        disabled, enabled = (
            _words(environ.get(DISABLE_VARIABLE, "")),
            _words(environ.get(ENABLE_VARIABLE, "")),
        )
        return cls(
            disabled=bool(_ALL_XIDS & disabled),
            ignored=APPLICATION_XIDS | _numbers(disabled),
            enabled=_numbers(enabled),
            all_enabled=_ALL in enabled,
            invalid_words=tuple(
                sorted(
                    word
                    for word in (disabled - _ALL_XIDS) | (enabled - {_ALL})
                    if not word.isdecimal()
                )
            ),
        )

    def is_critical(self, xid: int) -> bool:
        """Say whether an XID means that the GPU is sick."""
        if self.all_enabled or xid in self.enabled:
            return True
        return not self.disabled and xid not in self.ignored


def _words(text: str) -> frozenset[str]:
    return frozenset(word.strip().lower() for word in text.split(",") if word.strip())


def _numbers(words: frozenset[str]) -> frozenset[int]:
    return frozenset(int(word) for word in words if word.isdecimal())
