"""How long a process has a GPU before others that compute there; pure."""

from typing import Literal, get_args

Interval = Literal["Default", "Short", "Medium", "Long"]
"""NVIDIA's DRA driver's words. A GPU has one for all of its processes, and instances of MIG have
none."""
INTERVALS: tuple[Interval, ...] = get_args(Interval)
"""In the order of the driver's numbers, from 0."""
DEFAULT: Interval = "Default"
