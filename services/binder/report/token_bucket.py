"""A token bucket: so many at once, so many a second in the long run. The time is an argument."""

from dataclasses import dataclass


@dataclass(slots=True)
class TokenBucket:
    """Full at first; `burst` tokens at most, `per_s` new ones a second."""

    per_s: float
    burst: float
    left: float
    at: float

    @classmethod
    def full(cls, *, per_s: float, burst: float, now: float) -> "TokenBucket":
        """Return a bucket that nobody has taken from."""
        return cls(per_s=per_s, burst=burst, left=burst, at=now)

    def take(self, now: float) -> bool:
        """Take a token if there is one."""
        self._fill(now)
        if self.left < 1:
            return False
        self.left -= 1
        return True

    def wait_s(self, now: float) -> float:
        """Return how long until there is a token."""
        self._fill(now)
        return max(0.0, (1 - self.left) / self.per_s)

    def _fill(self, now: float) -> None:
        self.left = min(self.burst, self.left + max(0.0, now - self.at) * self.per_s)
        self.at = max(self.at, now)
