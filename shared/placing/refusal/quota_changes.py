"""The least change of a pod with which its namespace's quota allows it; pure.

Every change is tried: parsed again, placed, and counted as the ledger counts.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import islice

from msgspec import structs

from shared.dialects import DIALECTS
from shared.dialects.dialect import Dialect
from shared.model.budgets.charges import charge_of
from shared.model.budgets.quota import QuotaExcess, QuotaUsage
from shared.model.leases.lease import Share
from shared.model.requests.request import (
    LEAST_SHARE_MIB,
    GpuRequest,
    PodRequest,
    TopologyScope,
)
from shared.placing.advice import QuotaChanges, changes_between
from shared.placing.choice.container_choice import share_mib
from shared.placing.choice.device_choice import build_shares, choose_devices
from shared.placing.index.node_index import NodeIndex, placement_key
from shared.placing.index.threshold_column import positions_in, store
from shared.placing.mirror.node_mirror import MirroredNode
from shared.placing.node_filters import check_all
from shared.placing.refusal.changes import (
    changed_to_fit,
    fewer_gpus,
    is_tiny,
    read_again,
    resized,
    with_containers,
    with_cores,
    with_resources,
)
from shared.placing.refusal.refusals import COMPARED_NODES, idle

TRIES = 8
CACHED_CHANGES = 1024
_FITS = Fraction(1)
Measured = Callable[[PodRequest], Fraction | None]
"""The allowed part of what a pod counts, at most 1, or None if nothing fits."""
Where = Callable[[PodRequest, NodeIndex], tuple[MirroredNode, tuple[Share, ...]] | None]
Shrink = Callable[..., GpuRequest]
"""`part` is of what the container requests."""


@dataclass(frozen=True, slots=True)
class Allowance:
    measure: str
    most: int
    model: str = ""
    label: str = ""
    """It names the model, or "" if devices' own names do."""

    @classmethod
    def of(cls, excess: QuotaExcess, most: int) -> "Allowance":
        return cls(excess.measure, most, excess.model, excess.label)

    def counts(self, shares: tuple[Share, ...], node: MirroredNode) -> int:
        if self.model and self.label:
            shares = shares if node.facts.labels.get(self.label) == self.model else ()
        elif self.model:
            name = self.model.lower()
            shares = tuple([share for share in shares if name in share.device_model.lower()])
        sizes = {share.device: share.device_mib for share in shares}
        return _amount(charge_of(shares, sizes), self.measure)


def _amount(charge: QuotaUsage, measure: str) -> int:
    return {
        "cores": charge.cores_milli,
        "milliGPU": charge.milli_gpu,
        "memoryMiB": charge.memory_mib,
        "cards": len(charge.devices),
    }[measure]


def changes_within(
    request: PodRequest, allowances: Sequence[Allowance], index: NodeIndex, where: Where
) -> QuotaChanges:
    """The changes hold on nodes of every kind that the pod allows, or else where it is placed."""
    key = placement_key(request), tuple(allowances), index.mirror.inventory_changes.end
    cached = index.quota_changes.get(key)
    if cached is not None:
        return cached
    changed = _changed_within(request, allowances, index, where)
    changes = () if changed is None else changes_between(request, changed)
    return store(index.quota_changes, key, QuotaChanges(changes), CACHED_CHANGES)


def _changed_within(
    request: PodRequest, allowances: Sequence[Allowance], index: NodeIndex, where: Where
) -> PodRequest | None:
    dialect = DIALECTS.get(request.dialect)
    if dialect is None or any(allowance.most < 1 for allowance in allowances):
        return None
    nodes = list(_idle_kinds(request, index))
    fitting = [node for node in nodes if choose_devices(request, node) is not None]
    if not fitting:
        return None
    smallest = min(fitting, key=lambda node: min([device.total_mib for device in node.devices]))
    trial = _Trial(request, dialect, smallest, allowances)
    return trial.within(partial(_on_all, nodes, allowances)) or trial.within(
        partial(_where_placed, index, where, allowances)
    )


def _idle_kinds(request: PodRequest, index: NodeIndex) -> Iterator[MirroredNode]:
    index.sets.positions.catch_up()
    kinds = index.sets.kinds_of_hardware(
        request.resources,
        uuids=bool(request.selection.uuids or request.selection.not_uuids),
        locations=request.topology_scope is not TopologyScope.NODE,
    )
    for _, alike in kinds[:COMPARED_NODES]:
        for position in positions_in(alike, COMPARED_NODES):
            node = index.sets.positions.nodes[position]
            if node is None or not node.devices:
                continue
            free = idle(node, index)
            if check_all(request, free.facts, free.free_resources, free.serving) is None:
                yield free
                break


def _on_all(
    nodes: Iterable[MirroredNode], allowances: Sequence[Allowance], request: PodRequest
) -> Fraction | None:
    parts = [
        _allowed_part(build_shares(picks), node, allowances)
        for node in nodes
        if (picks := choose_devices(request, node)) is not None
    ]
    return min(parts, default=None)


def _where_placed(
    index: NodeIndex, where: Where, allowances: Sequence[Allowance], request: PodRequest
) -> Fraction | None:
    placed = where(request, index)
    return None if placed is None else _allowed_part(placed[1], placed[0], allowances)


def _allowed_part(
    shares: tuple[Share, ...], node: MirroredNode, allowances: Iterable[Allowance]
) -> Fraction:
    counts = [(allowance.most, allowance.counts(shares, node)) for allowance in allowances]
    return min([Fraction(most, max(count, most)) for most, count in counts])


def changes_elsewhere(
    request: PodRequest, excesses: Iterable[QuotaExcess], index: NodeIndex
) -> QuotaChanges:
    """Return the fewest changes with which the pod runs on a node that the quota allows."""
    excesses = tuple(excesses)
    key = placement_key(request), excesses, index.mirror.inventory_changes.end
    cached = index.quota_changes.get(key)
    if cached is not None:
        return cached
    elsewhere = _elsewhere(request, excesses, index)
    return store(index.quota_changes, key, elsewhere, CACHED_CHANGES)


def _elsewhere(
    request: PodRequest, excesses: Sequence[QuotaExcess], index: NodeIndex
) -> QuotaChanges:
    possible = list[QuotaChanges]()
    for node in islice(_allowed_nodes(excesses, index), COMPARED_NODES):
        changed = changed_to_fit(request, idle(node, index))
        if changed is not None:
            possible.append(QuotaChanges(changes_between(request, changed), node.name))
    return min(possible, key=lambda way: len(way.changes), default=QuotaChanges())


def _allowed_nodes(excesses: Sequence[QuotaExcess], index: NodeIndex) -> Iterator[MirroredNode]:
    for node in index.mirror.nodes.values():
        if node.devices and all(_allows(excess, node) for excess in excesses):
            yield node


def _allows(excess: QuotaExcess, node: MirroredNode) -> bool:
    if not excess.names_places:
        return True
    if excess.label:
        is_named = node.facts.labels.get(excess.label) in excess.values
        return is_named != bool(excess.model)
    names = [value.lower() for value in excess.values]
    models = [device.device.model.lower() for device in node.devices]
    if excess.model:
        return not any(name in model for name in names for model in models)
    return all(any(name in model for name in names) for model in models)


@dataclass(frozen=True, slots=True)
class _Trial:
    request: PodRequest
    dialect: Dialect
    node: MirroredNode
    """Idle. The unchanged pod fits it, and a part of a GPU of this size fits all such nodes."""
    allowances: Sequence[Allowance]

    def within(self, measured: Measured) -> PodRequest | None:
        """Whole devices stay whole if possible."""
        smallest: PodRequest | None = None
        for changed in self._candidates(measured):
            if not is_tiny(changed, self.request, self.node):
                return changed
            smallest = smallest or changed
        return smallest

    def _candidates(self, measured: Measured) -> Iterator[PodRequest]:
        most = max([container.gpus for container in self.request.containers])
        fewer = [fewer_gpus(gpus)(self.request, self.node, None) for gpus in range(most, 0, -1)]
        if any(container.whole for container in self.request.containers):
            for changed in fewer[1:]:
                read = self._read(changed)
                if read is not None and measured(read) == _FITS:
                    yield read
        for changed in fewer:
            for shrink in self._shrinks():
                read = self._shrunk(changed, shrink, measured)
                if read is not None:
                    yield read

    def _shrinks(self) -> Sequence[Shrink]:
        """Those that take least come first."""
        if self._measures == {"memoryMiB"}:
            return (self._with_less_memory,)
        return self._with_less_cores, self._with_less_memory, self._with_less_of_both

    @property
    def _measures(self) -> set[str]:
        return {allowance.measure for allowance in self.allowances}

    def _shrunk(self, request: PodRequest, shrink: Shrink, measured: Measured) -> PodRequest | None:
        part = _FITS
        last: PodRequest | None = None
        for _ in range(TRIES):
            read = self._read(with_containers(request, partial(shrink, part=part)))
            if read is None or read == last:
                return None
            allowed = measured(read)
            if allowed is None or allowed == _FITS:
                return None if allowed is None else read
            last = read
            part *= allowed
        return None

    def _read(self, changed: PodRequest) -> PodRequest | None:
        changed = with_resources(changed, self.request)
        read = read_again(self.request, changed, self.dialect)
        return read if read is not None and self._is_usable(read) else None

    def _is_usable(self, changed: PodRequest) -> bool:
        device = self.node.devices[0]
        pairs = zip(changed.containers, self.request.containers, strict=True)
        return all(
            share_mib(now, device) >= min(share_mib(before, device), LEAST_SHARE_MIB)
            for now, before in pairs
        )

    def _with_less_memory(self, container: GpuRequest, part: Fraction) -> GpuRequest:
        device = self.node.devices[0]
        return resized(container, int(share_mib(container, device) * part), device, self.dialect)

    def _with_less_of_both(self, container: GpuRequest, part: Fraction) -> GpuRequest:
        return self._with_less_cores(self._with_less_memory(container, part), part)

    def _with_less_cores(self, container: GpuRequest, part: Fraction) -> GpuRequest:
        """Cores that are not requested count as the part of the memory."""
        if container.whole or part == _FITS:
            return container
        if container.cores_percent:
            return with_cores(container, int(container.cores_percent * part))
        if "cores" not in self._measures:
            return container
        device = self.node.devices[0]
        counted = Fraction(100 * share_mib(container, device), device.total_mib)
        return structs.replace(container, cores_percent=max(1, int(counted * part)))
