"""How much tests of random input try: a quarter on each change, all of it in CI."""

import os

IN_CI = bool(os.environ.get("CI"))


def tries(number: int) -> int:
    """Return how many of `number` examples, runs or rounds are tried here, at least one."""
    return number if IN_CI else max(number // 4, 1)
