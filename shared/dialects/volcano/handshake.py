"""`volcano.sh/node-vgpu-handshake`: how schedulers before Volcano 1.14.3 learn that a plugin lives.

The plugin writes `Reported <time>`; such a scheduler turns it into `Requesting_<time>`, and into
`Deleted_<time>` when no new report came for a minute. Times here are UTC; those schedulers write
their local time and read it as UTC, which only they can mend.
"""

from datetime import UTC, datetime

HANDSHAKE = "volcano.sh/node-vgpu-handshake"
REPORT_S = 20.0
"""How often a plugin reports: Volcano's own does so every 30 s."""
SILENCE_S = 60.0
"""Age of an unanswered request from which on the node is taken for gone."""
_REQUESTING, _DELETED = "Requesting_", "Deleted_"


def reported(now_s: float) -> str:
    """Return what a plugin that lives writes, in the text form that Go gives a time."""
    at = datetime.fromtimestamp(now_s, tz=UTC)
    return f"Reported {at:%Y-%m-%d %H:%M:%S.%f} +0000 UTC"


def is_gone(text: str | None, now_s: float) -> bool:
    """Say whether a handshake means that the node's plugin is gone; without one it does not."""
    if text is None:
        return False
    if text.startswith(_DELETED):
        return True
    if not text.startswith(_REQUESTING):
        return False
    try:
        asked = datetime.strptime(text.removeprefix(_REQUESTING) + "+0000", "%Y.%m.%d %H:%M:%S%z")
    except ValueError:
        return True
    return now_s - asked.timestamp() > SILENCE_S
