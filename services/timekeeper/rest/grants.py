"""Grants: GPU time added to a namespace's open window by somebody who may."""

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Protocol

from services.timekeeper.accounts.accrual import granted
from shared.model.budget import UNITS_PER_GPU_MINUTE, Account, AccountUpdate
from shared.model.errors import ConflictError, RequestError
from shared.model.names import Namespace

ATTEMPTS = 20
_MINUTES = re.compile(r"-?\d{1,9}(\.\d+)?(e-?\d{1,2})?")
"""What is granted stays in the books for ever: nothing that no float could say any more."""
MOST_MINUTES = 10**9


class Store(Protocol):
    """The accounts."""

    async def load(self, wanted: Mapping[Namespace, int | None]) -> list[Account]:
        """Load accounts."""
        ...

    async def save(self, update: AccountUpdate, *, kept_since_ms: int | None = None) -> bool:
        """Write one step; False if the account has moved on, or the grant is there."""
        ...


def units_of(said: object) -> int:
    """Read GPU-minutes. Raises RequestError for what is no number of them, or far too many."""
    text = str(said)
    if isinstance(said, bool) or not _MINUTES.fullmatch(text):
        raise RequestError(f"{said!r} is no number of GPU-minutes such as 120 or -0.5")
    given = Fraction(text)
    if abs(given) > MOST_MINUTES:
        raise RequestError(f"{text} GPU-minutes are too many: {MOST_MINUTES} at most in one grant")
    return round(given * UNITS_PER_GPU_MINUTE)


async def grant(
    store: Store, namespace: Namespace, units: int, *, actor: str, reason: str, key: str
) -> Account:
    """Add units to the open window; a grant with the same key is made once, however often asked.

    Raises RequestError where there is nothing to grant to, ConflictError if others keep writing.
    """
    if not reason.strip():
        raise RequestError("a grant needs a reason: it stays in the ledger")
    if units == 0:
        raise RequestError("a grant of 0 GPU-minutes changes nothing")
    for _ in range(ATTEMPTS):
        (account,) = await store.load({namespace: None})
        if not account.windows or account.windows[-1].limit_units is None:
            raise RequestError(
                f"namespace {namespace} has no budget that could be exhausted; write a GPUBudget "
                "for it first (the timekeeper takes some seconds to see it)"
            )
        update = granted(account, units, actor=actor, reason=reason, key=key)
        if await store.save(update):
            return account
        (after,) = await store.load({namespace: None})
        if after.revision == account.revision:
            return after
    raise ConflictError(f"the account of {namespace} changes all the time; ask again")
