"""The placer's settings."""

from dataclasses import dataclass

from shared.runtime.settings import LedgerSettings, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacerSettings(LedgerSettings):
    reservation_ttl: float = setting(
        30.0, "seconds until an unbound reservation expires", at_least=0.1
    )
