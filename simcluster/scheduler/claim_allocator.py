"""A small first-fit allocator of devices for ResourceClaims; pure.

It is not kube-scheduler's: it takes the first devices of a node that match, and never goes back on
a choice. It knows device classes, selectors, counts, prioritized lists, administrative access,
taints, capacities with request policies, counters and their compatibility groups, and binding
conditions; not constraints between requests.
https://kubernetes.io/docs/concepts/scheduling-eviction/dynamic-resource-allocation/
"""

import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from shared.model.quantity import parse_quantity
from simcluster.apimachinery.objects import Json, JsonValue, at_path, list_at, name_of

MIB = 1 << 20
Matches = Callable[[str, Json], bool]
"""Whether a device, as the variable of this CEL expression, matches it."""
DeviceKey = tuple[str, str, str]
"""Driver, pool and device."""
Counters = dict[tuple[str, str, str], Fraction]
"""Amounts of the counters of a pool, by the pool, the counter set and the counter."""
Groups = dict[tuple[str, str], frozenset[str]]
"""The compatibility groups of a device, by the pool and the counter set."""


@dataclass(frozen=True, slots=True)
class PooledDevice:
    """A device of a node."""

    driver: str
    pool: str
    spec: Json

    @property
    def key(self) -> DeviceKey:
        """Its identity in allocations."""
        return self.driver, self.pool, str(self.spec["name"])

    @property
    def shared(self) -> bool:
        """Whether it can be allocated several times."""
        return bool(self.spec.get("allowMultipleAllocations"))

    def counters(self) -> Counters:
        """Return the counters that it takes."""
        return {
            (self.pool, str(taken["counterSet"]), name): parse_quantity(counter["value"])
            for taken in self.spec.get("consumesCounters") or ()
            for name, counter in taken["counters"].items()
        }

    def groups(self) -> Groups:
        """Return its compatibility groups in each counter set that it takes from."""
        return {
            (self.pool, str(taken["counterSet"])): frozenset(taken.get("compatibilityGroups") or ())
            for taken in self.spec.get("consumesCounters") or ()
        }

    def variable(self) -> Json:
        """Return it as the variable `device` of CEL expressions."""
        attributes: defaultdict[str, Json] = defaultdict(dict)
        for name, value in (self.spec.get("attributes") or {}).items():
            domain, _, own = name.rpartition("/")
            attributes[domain or self.driver][own] = next(iter(value.values()))
        capacity = {
            name: {"quantity": amount["value"]}
            for name, amount in (self.spec.get("capacity") or {}).items()
        }
        return {
            "driver": self.driver,
            "attributes": dict(attributes),
            "capacity": {self.driver: capacity},
            "allowMultipleAllocations": self.shared,
        }


@dataclass(slots=True)
class Members:
    """The groups of devices that are allocated at the same time, in each counter set."""

    groups: defaultdict[tuple[str, str], list[frozenset[str]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def admit(self, device: PooledDevice) -> bool:
        """Return whether the devices of each set have a group in common with it, or all none."""
        return all(
            not any(own) if not groups else bool(groups.intersection(*own))
            for key, groups in device.groups().items()
            if (own := self.groups[key])
        )

    def add(self, device: PooledDevice) -> None:
        """Add a device."""
        for key, groups in device.groups().items():
            self.groups[key].append(groups)


@dataclass(slots=True)
class AllocatedCapacity:
    """What is allocated of devices.

    A device that is allocated several times takes its counters once.
    """

    consumed: dict[DeviceKey, dict[str, Fraction]] = field(default_factory=dict)

    def counters_left(self, devices: Iterable[PooledDevice], counters: Counters) -> Counters:
        """Return what these allocated devices leave of counters."""
        left = dict(counters)
        for device in devices:
            if device.key in self.consumed:
                for key, amount in device.counters().items():
                    left[key] = left.get(key, Fraction(0)) - amount
        return left

    def members(self, devices: Iterable[PooledDevice]) -> Members:
        """Return the groups of these devices, of those that are allocated."""
        members = Members()
        for device in devices:
            if device.key in self.consumed:
                members.add(device)
        return members

    def add(self, results: Iterable[Json]) -> None:
        """Add the results of an allocation; those for administrative access take nothing."""
        for result in results:
            if result.get("adminAccess"):
                continue
            key = (result["driver"], result["pool"], result["device"])
            own = self.consumed.setdefault(key, {})
            for name, amount in (result.get("consumedCapacity") or {}).items():
                own[name] = own.get(name, Fraction(0)) + parse_quantity(amount)


@dataclass(frozen=True, slots=True)
class NodePools:
    """The devices of a node, of the newest generation of each pool, in slice order."""

    devices: tuple[PooledDevice, ...]
    counters: Counters


def pools_of(node: str, slices: Iterable[Json]) -> NodePools:
    """Return the pools of a node."""
    own = [
        resource_slice
        for resource_slice in slices
        if at_path(resource_slice, "spec.nodeName") == node
    ]
    newest: dict[tuple[str, str], int] = {}
    for resource_slice in own:
        pool = resource_slice["spec"]["pool"]
        key = (resource_slice["spec"]["driver"], pool["name"])
        newest[key] = max(newest.get(key, 0), pool["generation"])
    current = [
        resource_slice["spec"]
        for resource_slice in sorted(own, key=name_of)
        if resource_slice["spec"]["pool"]["generation"]
        == newest[resource_slice["spec"]["driver"], resource_slice["spec"]["pool"]["name"]]
    ]
    devices = tuple(
        PooledDevice(spec["driver"], spec["pool"]["name"], device)
        for spec in current
        for device in spec.get("devices") or ()
    )
    return NodePools(devices, _shared_counters(current))


def _shared_counters(specs: Iterable[Json]) -> Counters:
    return {
        (spec["pool"]["name"], counters["name"], name): parse_quantity(counter["value"])
        for spec in specs
        for counters in spec.get("sharedCounters") or ()
        for name, counter in counters["counters"].items()
    }


class ClaimAllocator:
    """Allocates claims on one node, one after the other."""

    def __init__(
        self,
        pools: NodePools,
        usage: AllocatedCapacity,
        classes: Mapping[str, Json],
        matches: Matches,
    ) -> None:
        self._devices = pools.devices
        self._counters = pools.counters
        self._usage = usage
        self._classes = classes
        self._matches = matches

    def allocate(self, claim: Json) -> list[Json] | None:
        """Return the results for all requests of a claim; None: they do not fit here."""
        results: list[Json] = []
        for request in list_at(claim, "spec.devices.requests"):
            allocation = next(self._alternatives(request), None)
            if allocation is None:
                return None
            results += allocation
        return results

    def _alternatives(self, request: Json) -> Iterator[list[Json]]:
        """Yield what fits: a request's devices, or those of each choice of a prioritized list."""
        if request.get("exactly"):
            choices = [(request["name"], request["exactly"])]
        else:
            choices = [
                (f"{request['name']}/{subrequest['name']}", subrequest)
                for subrequest in request.get("firstAvailable") or ()
            ]
        for name, wanted in choices:
            results = self._results(name, wanted)
            if results:
                self._usage.add(results)
                yield results

    def _results(self, name: str, wanted: Json) -> list[Json]:
        matching = [device for device in self._devices if self._is_eligible(device, wanted)]
        left = self._usage.counters_left(self._devices, self._counters)
        members = self._usage.members(self._devices)
        is_all = wanted.get("allocationMode") == "All"
        count = len(matching) if is_all else int(wanted.get("count") or 1)
        fitting: list[Json] = []
        for device in matching:
            result = self._result(name, device, wanted)
            if (
                result is not None
                and len(fitting) < count
                and self._takes(device, wanted, left, members)
            ):
                fitting.append(result)
        return fitting if len(fitting) == count else []

    def _takes(self, device: PooledDevice, wanted: Json, left: Counters, members: Members) -> bool:
        """Take a device's counters of what is left of them, if they suffice and its groups fit."""
        if wanted.get("adminAccess") or device.key in self._usage.consumed:
            return True
        taken = device.counters()
        if not members.admit(device) or any(
            left.get(key, Fraction(0)) < amount for key, amount in taken.items()
        ):
            return False
        members.add(device)
        left.update({key: left[key] - amount for key, amount in taken.items()})
        return True

    def _is_eligible(self, device: PooledDevice, wanted: Json) -> bool:
        device_class = self._classes.get(str(wanted.get("deviceClassName")))
        if device_class is None:
            return False
        selectors = [*list_at(device_class, "spec.selectors"), *(wanted.get("selectors") or ())]
        return all(
            self._matches(str(at_path(selector, "cel.expression")), device.variable())
            for selector in selectors
        ) and all(
            _tolerates(wanted.get("tolerations") or (), taint)
            for taint in device.spec.get("taints") or ()
        )

    def _result(self, name: str, device: PooledDevice, wanted: Json) -> Json | None:
        driver, pool, own_name = device.key
        result: Json = {"request": name, "driver": driver, "pool": pool, "device": own_name}
        for conditions in ("bindingConditions", "bindingFailureConditions"):
            if device.spec.get(conditions):
                result[conditions] = device.spec[conditions]
        if wanted.get("adminAccess"):
            return {**result, "adminAccess": True}
        used = self._usage.consumed.get(device.key)
        if not device.shared:
            return result if used is None else None
        consumed = consumed_capacity(device.spec, at_path(wanted, "capacity.requests") or {})
        if consumed is None or not _fits(device.spec, used or {}, consumed):
            return None
        amounts = {key: _written(amount) for key, amount in consumed.items()}
        return {**result, "shareID": str(uuid.uuid4()), "consumedCapacity": amounts}


def consumed_capacity(device: Json, requests: Mapping[str, str]) -> dict[str, Fraction] | None:
    """Return what a request takes of each capacity, rounded up by its policy; None: too much."""
    consumed: dict[str, Fraction] = {}
    for name, capacity in (device.get("capacity") or {}).items():
        policy = capacity.get("requestPolicy") or {}
        default = policy.get("default", capacity["value"])
        amount = _rounded(parse_quantity(requests.get(name, default)), policy)
        if amount is None:
            return None
        consumed[name] = amount
    return None if requests.keys() - consumed.keys() else consumed


def _rounded(amount: Fraction, policy: Json) -> Fraction | None:
    values = sorted(map(parse_quantity, policy.get("validValues") or ()))
    if values:
        return next((value for value in values if value >= amount), None)
    bounds = policy.get("validRange") or {}
    least = parse_quantity(bounds.get("min", "0"))
    amount = max(amount, least)
    if "step" in bounds:
        step = parse_quantity(bounds["step"])
        amount = least + -(-(amount - least) // step) * step
    return None if "max" in bounds and amount > parse_quantity(bounds["max"]) else amount


def _fits(device: Json, used: Mapping[str, Fraction], more: Mapping[str, Fraction]) -> bool:
    return all(
        used.get(name, Fraction(0)) + amount <= parse_quantity(device["capacity"][name]["value"])
        for name, amount in more.items()
    )


def _written(amount: Fraction) -> str:
    mib, rest = divmod(amount, MIB)
    return str(amount) if rest or not mib else f"{mib}Mi"


def _tolerates(tolerations: Iterable[Json], taint: Json) -> bool:
    if taint.get("effect") == "None":
        return True
    return any(
        toleration.get("key") in {None, "", taint.get("key")}
        and toleration.get("effect") in {None, "", taint.get("effect")}
        and (toleration.get("operator") == "Exists" or _value(toleration) == _value(taint))
        for toleration in tolerations
    )


def _value(entry: Json) -> JsonValue:
    return entry.get("value") or ""
