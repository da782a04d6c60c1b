"""Grants: GPU time that is added to a namespace's open window."""

import re
from fractions import Fraction

from services.timekeeper.accounts.accrual import grant_update
from shared.ledger.budgets import Budgets
from shared.model.budget import UNITS_PER_GPU_MINUTE, Account
from shared.model.errors import ConflictError, RequestError
from shared.model.names import Namespace

ATTEMPTS = 20
_MINUTES = re.compile(r"-?\d{1,9}(\.\d{1,30})?(e-?\d{1,2})?")
"""Grants are never deleted from the ledger, so amounts that no float can represent are refused."""
MAX_MINUTES = 10**9


def parse_gpu_minutes(value: object) -> int:
    """Parse GPU-minutes into units. Raises RequestError for an invalid or too large number."""
    text = str(value)
    if isinstance(value, bool) or not _MINUTES.fullmatch(text):
        raise RequestError(f"{value!r} is not a number of GPU-minutes such as 120 or -0.5")
    amount = Fraction(text)
    if abs(amount) > MAX_MINUTES:
        raise RequestError(f"{text} GPU-minutes are too many: {MAX_MINUTES} at most in one grant")
    return round(amount * UNITS_PER_GPU_MINUTE)


async def add_grant(
    store: Budgets, namespace: Namespace, units: int, *, actor: str, reason: str, key: str
) -> Account:
    """Add units to the open window; grants with the same key are added once.

    Raises RequestError without a budget to grant to, ConflictError if others keep writing.
    """
    if not reason.strip():
        raise RequestError("a grant needs a reason, which the ledger stores")
    if units == 0:
        raise RequestError("a grant of 0 GPU-minutes changes nothing")
    for _ in range(ATTEMPTS):
        (account,) = await store.load({namespace: None})
        if not account.windows or account.windows[-1].limit_units is None:
            raise RequestError(
                f"namespace {namespace} has no budget with a limit; create a GPUBudget for it "
                "first (the timekeeper reads it within seconds)"
            )
        update = grant_update(account, units, actor=actor, reason=reason, key=key)
        if await store.save(update):
            return account
        (after,) = await store.load({namespace: None})
        if after.revision == account.revision:
            return after
    raise ConflictError(f"the account of {namespace} changes too often; try again")
