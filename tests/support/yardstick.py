"""A unit of processor time in which machines are compared, whatever else they do meanwhile."""

import time

ADDITIONS = 1_000_000


def yardstick_s() -> float:
    """Return the processor time of a million additions right now: 0.05 to 0.15 s."""
    began = time.process_time()
    numbers = 0
    while numbers < ADDITIONS:
        numbers += 1
    return time.process_time() - began
