"""Variables for kubectl and helm."""

from collections.abc import Mapping

NO_GARBAGE: Mapping[str, str] = {"GOGC": "off", "GOMEMLIMIT": "256MiB"}
"""They end before they have used this much memory, and need a fifth less processor time if they
do not look for what they could free."""
