"""Checks of budgets, of readiness under faults, of traces, audits and reasons; pure."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from math import ceil
from typing import Any

from tests.proof.history import Finding, History
from tests.proof.observations import RawCharge, RawLedger, Resources, Sample

UNREADY_S = 10.0
"""A part that cannot work has to be unready after the time in which service has to resume."""
CORDON_S = 5.0
"""A cordon has to be obeyed after this time, while nothing else is wrong."""
MORE_MIB = 64
"""A part may use this much more at the end: what it needs at most, and its allocator keeps."""
MORE_KEYS = 20
"""Redis may have so many more lasting keys: some kinds come with the first pod."""
SIMULATORS = frozenset({"simcluster"})
"""The API server's history of objects grows, as etcd's does until it is compacted."""
_NUMBER = re.compile(r"\d")
_ADVICE = re.compile(r"(?:vgpu-memory|gpumem): (\d+)\b")
_NOTHING = re.compile(r"at most 0\b|: 0\b(?!/)")
_SENTENCE = re.compile(r"[.:;] ?\S+ \S+")


def s6_budgets_are_exact(sample: Sample, history: History) -> Iterator[Finding]:
    """A window's usage is the sum of its charges; a lease's charges touch and do not overlap."""
    ledger = sample.ledger
    if ledger is None or not ledger.charges:
        return
    yield from _window_sums(ledger)
    by_lease: defaultdict[str, list[RawCharge]] = defaultdict(list)
    for charge in ledger.charges:
        if charge.kind == "charge":
            by_lease[charge.lease].append(charge)
    for lease, charges in sorted(by_lease.items()):
        pod = lease.partition("/")[0]
        expected = _weight(lease, sample, history)
        end_ms = None
        for charge in sorted(charges, key=lambda entry: entry.start_ms):
            text = ""
            if expected and charge.weight != expected:
                text = f"its weight is {charge.weight} and by its request {expected} milli-GPU"
            if charge.units != charge.weight * (charge.end_ms - charge.start_ms):
                text = f"{charge.units} units are not {charge.weight} x its interval"
            if end_ms is not None and charge.start_ms != end_ms:
                text = f"a charge begins {charge.start_ms - end_ms} ms after the one before ends"
            if text:
                yield history.about("S6", pod, text)
            end_ms = charge.end_ms


def _weight(lease: str, sample: Sample, history: History) -> int:
    """Return the weight by what a lease's pod requests, in milli-GPU, or 0 if it is unknown.

    The larger part of a device's cores and memory counts, of each device; of a MIG device the
    instance, which may be larger than the request, and which only a lease that was seen shows.
    """
    pod, created_ms, *_ = lease.split("/")
    seen = history.pods.get(pod)
    instances = history.instance_mib.get(f"{pod}/{created_ms}")
    if seen is None or seen.resized or instances is None:
        return 0
    want = seen.want
    mib = Fraction(instances, want.gpus) if instances else Fraction(want.mib)
    part = max(Fraction(want.cores, sample.hardware.cores), mib / sample.hardware.mib)
    return ceil(1000 * part * want.gpus)


def _window_sums(ledger: RawLedger) -> Iterator[Finding]:
    charged: defaultdict[str, int] = defaultdict(int)
    for charge in ledger.charges:
        if not charge.reason.startswith("the limit was"):  # its units are of the limit
            charged[charge.window] += charge.units
    for window, used in sorted(ledger.used_units.items()):
        if used != charged[window]:
            text = f"used are {used} units, its entries add up to {charged[window]}"
            yield Finding(check="S6", subject=f"window {window}", text=text)


def p7_a_part_that_cannot_work_is_unready(sample: Sample, history: History) -> Iterator[Finding]:
    """A part without a server that it needs answers /readyz with a reason."""
    for part, since in sorted(history.cannot_work.items()):
        if sample.at - since < UNREADY_S:
            continue
        reason = sample.unready.get(part)
        if not reason:
            what = "says that it is ready" if reason is None else "gives no reason"
            text = f"cannot work ({', '.join(sample.faults)}) and {what}"
            yield Finding(check="P7", subject=part, text=text)


def p7_a_cordon_is_obeyed(sample: Sample, history: History) -> Iterator[Finding]:
    """No pod is bound to a node that was cordoned long before, while nothing else is wrong."""
    if not {"cordon"}.issuperset(sample.faults):
        return
    for name, node in (sample.nodes or {}).items():
        if not node.cordoned:
            history.cordoned_since.pop(name, None)
            continue
        since = history.cordoned_since.setdefault(name, sample.at)
        from_at = max(since, history.quiet_since) + CORDON_S
        for uid, bound_at in history.bound_at.items():
            pod = history.pods[uid]
            if pod.node == name and bound_at > from_at and not pod.forged:
                text = f"bound to {name} {bound_at - since:.0f} s after it was cordoned"
                yield history.about("P7", uid, text)


def p7_only_a_hostile_agent_is_distrusted(sample: Sample, history: History) -> Iterator[Finding]:
    """No node gets no pods since its agent is refused, unless somebody else speaks in its name."""
    for node in sorted((sample.ledger.distrusted if sample.ledger else set()) - history.hostile):
        text = "it gets no pods since its agent's messages are refused"
        yield Finding(check="P7", subject=f"node {node}", text=text)


def m1_nothing_is_left(begin: Resources, end: Resources) -> Iterator[Finding]:
    """Without pods, each part uses no more than at the beginning, within a tolerance."""
    for part, mib in sorted(end.memory_mib.items()):
        before = begin.memory_mib.get(part, mib)
        if part not in SIMULATORS and mib > before + MORE_MIB:
            text = f"{before} MiB at the beginning, {mib} at the end, {MORE_MIB} more are allowed"
            yield Finding(check="M1", subject=part, text=text)
    if end.keys > begin.keys + MORE_KEYS:
        text = f"{begin.keys} lasting keys at the beginning, {end.keys} at the end"
        yield Finding(check="M1", subject="Redis", text=text)


def m4_no_request_of_a_service_is_denied(sample: Sample, _: History) -> Iterator[Finding]:
    """Each service has the rights that it uses, and writes only what the policies let it write."""
    for part, text in sorted(sample.denied.items()):
        yield Finding(check="M4", subject=part, text=text)


def o1_one_pod_one_trace(spans: Iterable[Mapping[str, Any]], history: History) -> Iterator[Finding]:
    """All spans of a bound pod have one trace, and there are some."""
    traces: defaultdict[str, set[str]] = defaultdict(set)
    for span in spans:
        if uid := span.get("attributes", {}).get("k8s.pod.uid"):
            traces[uid].add(span["trace"])
    for uid in sorted(history.bound_at):
        if len(traces[uid]) != 1 and not history.pods[uid].forged:
            text = f"it has {len(traces[uid])} traces: {sorted(traces[uid])}"
            yield history.about("O1", uid, text)


def o2_the_audit_sees_what_we_see(
    audit: Mapping[str, Any], lasting: Iterable[str], *, settling: bool
) -> Iterator[Finding]:
    """The product's audit reports a difference exactly if the judge has found one.

    `lasting` are the judge's; `settling`: it has some that may still go away.
    """
    differences = sorted(lasting)
    reported = [
        f"{difference['invariant']} {difference['subject']}"
        for difference in audit.get("differences", ())
    ]
    if differences and not reported:
        text = f"it reports none, although {differences[0]}"
        yield Finding(check="O2", subject="audit", text=text)
    if reported and not differences and not settling:
        first = audit["differences"][0]
        text = f"it reports {len(reported)}, first {first}, and the judge finds none"
        yield Finding(check="O2", subject=f"audit {first['subject']}", text=text)


def o3_a_refusal_has_reason_numbers_and_advice(
    sample: Sample, history: History
) -> Iterator[Finding]:
    """The condition of a pod that waits has a reason, numbers, and something to do next."""
    for pod in (sample.pods or {}).values():
        if pod.node or not pod.message:
            continue
        lacks = [
            what
            for what, there in (
                ("a reason", pod.reason),
                ("numbers", _NUMBER.search(pod.message)),
                ("what to do next", _SENTENCE.search(pod.message)),
            )
            if not there
        ]
        advised = _ADVICE.search(pod.message)
        if advised and int(advised[1]) >= pod.want.mib:
            lacks.append(f"advice to request less than the {pod.want.mib} MiB that it requests")
        if _NOTHING.search(pod.message):
            lacks.append("advice to request something")
        if lacks:
            text = f"without {' and '.join(lacks)}: {pod.reason!r} {pod.message!r}"
            yield history.about("O3", pod.uid, text)
