"""Grants: GPU time added to a namespace's open window by somebody who may."""

from collections.abc import Mapping
from typing import Protocol

from services.timekeeper.accrual import granted
from shared.model.budget import Account, Update
from shared.model.errors import ConflictError, RequestError
from shared.model.names import Namespace

ATTEMPTS = 20


class Store(Protocol):
    """The accounts."""

    async def load(self, wanted: Mapping[Namespace, int | None]) -> list[Account]:
        """Load accounts."""
        ...

    async def save(self, update: Update, *, kept_since_ms: int | None = None) -> bool:
        """Write one step; False if the account has moved on, or the grant is there."""
        ...


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
