"""Versions of Redis and Valkey with known vulnerabilities; pure."""

from collections.abc import Mapping

Version = tuple[int, ...]

AS_OF = "November 2026"
PATCHED: Mapping[str, tuple[Version, ...]] = {
    "Valkey": ((7, 2, 14), (8, 0, 10), (8, 1, 9), (9, 0, 5), (9, 1, 1)),
    "Redis": ((7, 2, 15), (7, 4, 10), (8, 2, 8), (8, 4, 5), (8, 6, 5), (8, 8, 1)),
}
"""The first patch of each maintained minor version without a vulnerability known `AS_OF`.

From the security releases of 21 July 2026 (Valkey) and 24 July 2026 (Redis).
"""


def patched_version(program: str, version: str) -> str:
    """Return the version to upgrade to; empty if `version` has no known vulnerability.

    That is the patched version of the same minor version, or of the next one that is maintained.
    Also empty if the version has another form than numbers with dots.
    """
    numbers = tuple(int(part) if part.isdecimal() else -1 for part in version.split("."))
    if -1 in numbers:
        return ""
    minor = numbers[:2]
    later = [patched for patched in PATCHED[program] if patched[:2] >= minor]
    if not later or numbers >= later[0]:
        return ""
    return ".".join(map(str, later[0]))
