"""Pods that wait at their budget's scheduling gate, as binders share them in Redis or Valkey.

A copy of what the API server knows, so that none has to be looked for when a budget is refilled:
the watcher tells of each again and again. All methods raise UnavailableError when the server does
not answer.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from shared.ledger.connection import LedgerStore
from shared.model.events.pod_events import BudgetChanged, PodGated
from shared.model.names import Namespace, PodUid

_encode = msgspec.json.Encoder().encode
_gated_of = msgspec.json.Decoder(PodGated).decode
_standing_of = msgspec.json.Decoder(BudgetChanged).decode


class Gates(LedgerStore):
    """What binders share about gated pods."""

    async def put(self, pods: Sequence[PodGated]) -> None:
        """Remember pods; one that is there already is written anew."""
        rows = [(pod.namespace, pod.pod, _encode(pod).decode()) for pod in pods]
        await self._run("save", rows)

    async def drop(self, namespace: Namespace, pods: Sequence[PodUid]) -> None:
        """Forget pods of a namespace."""
        await self._run("remove", namespace, pods)

    async def namespaces(self) -> dict[Namespace, BudgetChanged | None]:
        """Return the namespaces with gated pods, and how their budgets stand if that is known."""
        return {
            Namespace(name): _standing_of(text) if text else None
            for name, text in await self._run("namespaces")
        }

    async def pods(self, namespace: Namespace) -> list[PodGated]:
        """Return the gated pods of a namespace, in no order."""
        return [_gated_of(text) for text in await self._run("list", namespace)]

    async def _run(self, *args: object) -> Any:
        return await self._connection.run("gated_pods", *args, state="any")
