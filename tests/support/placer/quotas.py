"""A namespace with a quota: what its pods hold, and why the quota refuses another placement."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace

from shared.model.budgets.charges import charge_of
from shared.model.budgets.quota import Quota, QuotaExcess, QuotaLimits, QuotaUsage
from shared.model.devices.node import NodeFacts
from shared.model.leases.lease import Share
from shared.model.names import DeviceUuid


@dataclass(frozen=True)
class Team:
    """`tests/integration/ledger/test_quotas.py` compares it with the ledger."""

    quota: Quota
    used: Mapping[str, QuotaUsage] = field(default_factory=dict)
    """By model; the total under the empty name."""

    def holding(self, **amounts: int) -> "Team":
        """Return the team with other pods that hold so much, each on cards of its own."""
        cards = {DeviceUuid(f"GPU-held-{n}"): 1 for n in range(amounts.pop("cards", 1))}
        usage = QuotaUsage(**amounts, devices=cards)
        names = ("", *(model for model, _ in self.quota.models))
        return replace(self, used=dict.fromkeys(names, usage))

    def excesses(
        self, shares: Iterable[Share], facts: NodeFacts, pods: int = 1
    ) -> tuple[QuotaExcess, ...]:
        """Return why the quota refuses shares on a node; nothing if it does not.

        The same shares are for each of so many pods of a gang, on cards of their own.
        """
        quota = self.quota
        held = tuple(shares)
        if quota.pools and facts.labels.get(quota.pool_label) not in quota.pools:
            return (QuotaExcess(measure="pool", label=quota.pool_label, values=quota.pools),)
        names = tuple(model for model, _ in quota.models)
        if quota.only_models and not all(any(self._of(s, m, facts) for m in names) for s in held):
            return (QuotaExcess(measure="model", label=quota.model_label, values=names),)
        excesses = [*self._beyond(quota.limits, "", held, pods)]
        for model, limits in quota.models:
            of_model = [share for share in held if self._of(share, model, facts)]
            excesses += self._beyond(limits, model, of_model, pods)
        return tuple(excesses)

    def _of(self, share: Share, model: str, facts: NodeFacts) -> bool:
        if self.quota.model_label:
            return facts.labels.get(self.quota.model_label) == model
        return model.lower() in share.device_model.lower()

    def _beyond(
        self, limits: QuotaLimits, model: str, shares: Sequence[Share], pods: int
    ) -> Iterator[QuotaExcess]:
        wanted = charge_of(shares, {share.device: share.device_mib for share in shares})
        used = self.used.get(model, QuotaUsage())
        more = len(wanted.devices.keys() - used.devices.keys())
        rows = (
            ("cores", limits.cores_milli, used.cores_milli, wanted.cores_milli),
            ("milliGPU", limits.milli_gpu, used.milli_gpu, wanted.milli_gpu),
            ("memoryMiB", limits.memory_mib, used.memory_mib, wanted.memory_mib),
            ("cards", limits.cards, len(used.devices), more),
        )
        for measure, limit, now, requested in rows:
            before = [n * requested for n in range(pods) if requested > 0]
            by_gang = next((n for n in before if now + n + requested > (limit or 0)), None)
            if limit is None or by_gang is None:
                continue
            held_cards = tuple(sorted(used.devices)) if measure == "cards" else ()
            yield QuotaExcess(
                measure=measure,
                model=model,
                limit=limit,
                used=now + by_gang,
                requested=requested,
                by_gang=by_gang,
                label=self.quota.model_label if model else "",
                values=(model, *self._forbidden_beside(model)) if model else held_cards,
            )

    def _forbidden_beside(self, model: str) -> Iterator[str]:
        for other, limits in self.quota.models:
            if other != model and 0 in astuple(limits):
                yield other
