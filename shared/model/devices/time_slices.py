"""How long a process has a GPU before others that compute there have their turn; pure."""

from typing import Literal, get_args

Interval = Literal["Default", "Short", "Medium", "Long"]
"""In the words of NVIDIA's DRA driver; how many ms each is, the GPU's driver decides. A GPU has one
for all of its processes, and instances of MIG have none."""
INTERVALS: tuple[Interval, ...] = get_args(Interval)
"""In the order of the numbers that the driver has for them, from 0."""
DEFAULT: Interval = "Default"
