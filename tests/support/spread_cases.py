"""Where kube-scheduler places pods by their topology spread constraints: a table of cases."""

from tests.support.affinity_case import (
    AFFINITY,
    CORDONED,
    EVERYWHERE,
    HOST,
    NO_LABEL,
    NODE_AFFINITY,
    RACK,
    SPREAD,
    TAINTED,
    ZONE,
    ZONED,
    Case,
    by,
    db,
    node,
    pod,
    spread,
    to,
    trains,
    with_node,
)

CLOSED = with_node(
    "c1", {ZONE: "c", RACK: "r5"}, taints=[{"key": "closed", "effect": "NoSchedule"}]
)
AVOIDED = with_node(
    "c1", {ZONE: "c", RACK: "r5"}, taints=[{"key": "closed", "effect": "PreferNoSchedule"}]
)
UNSCHEDULABLE = with_node("c1", {ZONE: "c", RACK: "r5"}, unschedulable=True)
TOLERATES = [{"key": "closed", "operator": "Exists"}]
IN_A_OR_B = by(ZONE, "In", "a", "b")

SPREAD_CASES: dict[str, Case] = {
    "the first pod to be spread": Case(
        pod=pod(spreads=[spread()]), fits=ZONED, reasons=(NO_LABEL,)
    ),
    "not beside the only one": Case(
        pod=pod(spreads=[spread()]),
        running=trains("a1"),
        fits="b1 b2 c1",
        reasons=(NO_LABEL, SPREAD),
    ),
    "the zone with the fewest": Case(
        pod=pod(spreads=[spread()]),
        running=trains("a1", "b1"),
        fits="c1",
        reasons=(NO_LABEL, SPREAD),
    ),
    "all zones have as many": Case(
        pod=pod(spreads=[spread()]),
        running=trains("a1", "b1", "c1"),
        fits=ZONED,
        reasons=(NO_LABEL,),
    ),
    "two on different nodes of a zone": Case(
        pod=pod(spreads=[spread()]),
        running=trains("a1", "a2", "b1", "c1"),
        fits="b1 b2 c1",
        reasons=(NO_LABEL, SPREAD),
    ),
    "a skew of two": Case(
        pod=pod(spreads=[spread(skew=2)]),
        running=trains("a1", "a2", "b1"),
        fits="b1 b2 c1",
        reasons=(NO_LABEL, SPREAD),
    ),
    "a skew of three": Case(
        pod=pod(spreads=[spread(skew=3)]),
        running=trains("a1", "a2", "a1", "b1"),
        fits="b1 b2 c1",
        reasons=(NO_LABEL, SPREAD),
    ),
    "a pod that is not selected itself": Case(
        pod=pod(spreads=[spread("app=db")]),
        running=[db("a1")],
        fits=ZONED,
        reasons=(NO_LABEL,),
    ),
    "a pod that is not selected itself, where there are two": Case(
        pod=pod(spreads=[spread("app=db")]),
        running=[db("a1"), db("a2")],
        fits="b1 b2 c1",
        reasons=(NO_LABEL, SPREAD),
    ),
    "over nodes": Case(
        pod=pod(spreads=[spread(key=HOST)]),
        running=trains("a1", "bare"),
        fits="a2 b1 b2 c1",
        reasons=(SPREAD,),
    ),
    "over zones and nodes": Case(
        pod=pod(spreads=[spread(), spread(key=HOST)]),
        running=trains("a1", "b1", "c1"),
        fits="a2 b2",
        reasons=(NO_LABEL, SPREAD),
    ),
    "zones and nodes leave nothing": Case(
        pod=pod(spreads=[spread(), spread(key=HOST)]),
        running=trains("a1", "a1", "b1", "b2", "c1"),
        reasons=(NO_LABEL, SPREAD),
    ),
    "a pod on a node without one of the labels is not counted": Case(
        pod=pod(spreads=[spread(), spread(key=HOST, skew=1)]),
        running=trains("bare", "bare"),
        fits=ZONED,
        reasons=(NO_LABEL,),
    ),
    "over racks, one of which no node is in": Case(
        pod=pod(spreads=[spread(key="example.com/row")]), reasons=(NO_LABEL,)
    ),
    "a label that one node alone has": Case(
        pod=pod(spreads=[spread(key="example.com/row")]),
        nodes=with_node("c1", {ZONE: "c", "example.com/row": "1"}),
        running=trains("c1", "c1"),
        fits="c1",
        reasons=(NO_LABEL,),
    ),
    "at least three domains": Case(
        pod=pod(spreads=[spread(minDomains=3)]),
        running=trains("a1", "b1", "c1"),
        fits=ZONED,
        reasons=(NO_LABEL,),
    ),
    "fewer domains than there should be": Case(
        pod=pod(spreads=[spread(minDomains=4)]),
        running=trains("a1", "b1", "c1"),
        reasons=(NO_LABEL, SPREAD),
    ),
    "fewer domains than there should be, one without pods": Case(
        pod=pod(spreads=[spread(minDomains=4)]),
        running=trains("a1", "b1"),
        fits="c1",
        reasons=(NO_LABEL, SPREAD),
    ),
    "fewer domains than there should be, and a skew of two": Case(
        pod=pod(spreads=[spread(minDomains=4, skew=2)]),
        running=trains("a1", "b1", "c1", "c1"),
        fits="a1 a2 b1 b2",
        reasons=(NO_LABEL, SPREAD),
    ),
    "another zone makes enough domains": Case(
        pod=pod(spreads=[spread(minDomains=4)]),
        nodes=with_node("d1", {ZONE: "d"}),
        running=trains("a1", "b1", "c1", "d1"),
        fits=f"{ZONED} d1",
        reasons=(NO_LABEL,),
    ),
    "zones that its node affinity excludes do not count": Case(
        pod=pod(spreads=[spread()], nodes=IN_A_OR_B),
        running=trains("a1", "b1"),
        fits="a1 a2 b1 b2",
        reasons=(NODE_AFFINITY,),
    ),
    "zones that its node selector excludes do not count": Case(
        pod=pod(spreads=[spread()], nodeSelector={ZONE: "a"}),
        running=trains("a1", "a2"),
        fits="a1 a2",
        reasons=(NODE_AFFINITY,),
    ),
    "zones that its node affinity excludes count": Case(
        pod=pod(spreads=[spread(nodeAffinityPolicy="Ignore")], nodes=IN_A_OR_B),
        running=trains("a1", "b1"),
        reasons=(NODE_AFFINITY, SPREAD),
    ),
    "pods on nodes that its node affinity excludes do not count": Case(
        pod=pod(spreads=[spread()], nodes=by(RACK, "In", "r1", "r3")),
        running=trains("a2"),
        fits="a1 b1",
        reasons=(NODE_AFFINITY,),
    ),
    "pods on nodes that its node affinity excludes count": Case(
        pod=pod(spreads=[spread(nodeAffinityPolicy="Ignore")], nodes=by(RACK, "In", "r1", "r3")),
        running=trains("a2"),
        fits="b1",
        reasons=(NODE_AFFINITY, SPREAD),
    ),
    "fewer domains by its node affinity than there should be": Case(
        pod=pod(spreads=[spread(minDomains=3)], nodes=IN_A_OR_B),
        running=trains("a1"),
        fits="b1 b2",
        reasons=(NODE_AFFINITY, SPREAD),
    ),
    "a tainted zone counts": Case(
        pod=pod(spreads=[spread()]),
        nodes=CLOSED,
        running=trains("a1", "b1"),
        reasons=(NO_LABEL, SPREAD, TAINTED),
    ),
    "a tainted zone does not count": Case(
        pod=pod(spreads=[spread(nodeTaintsPolicy="Honor")]),
        nodes=CLOSED,
        running=trains("a1", "b1"),
        fits="a1 a2 b1 b2",
        reasons=(NO_LABEL, TAINTED),
    ),
    "a tainted zone that the pod tolerates counts": Case(
        pod=pod(spreads=[spread(nodeTaintsPolicy="Honor")], tolerations=TOLERATES),
        nodes=CLOSED,
        running=trains("a1", "b1"),
        fits="c1",
        reasons=(NO_LABEL, SPREAD),
    ),
    "a zone with a soft taint counts": Case(
        pod=pod(spreads=[spread(nodeTaintsPolicy="Honor")]),
        nodes=AVOIDED,
        running=trains("a1", "b1"),
        fits="c1",
        reasons=(NO_LABEL, SPREAD),
    ),
    "pods on a tainted node do not count": Case(
        pod=pod(spreads=[spread(nodeTaintsPolicy="Honor", skew=2)]),
        nodes=(*CLOSED, node("c2", {ZONE: "c"})),
        running=trains("c1", "c1", "c2"),
        fits="a1 a2 b1 b2 c2",
        reasons=(NO_LABEL, TAINTED),
    ),
    "a zone whose only node is cordoned counts": Case(
        pod=pod(spreads=[spread()]),
        nodes=UNSCHEDULABLE,
        running=trains("a1", "b1"),
        reasons=(NO_LABEL, SPREAD, CORDONED),
    ),
    "pods that are being deleted do not count": Case(
        pod=pod(spreads=[spread()]),
        running=trains("a1", deleted=True),
        fits=ZONED,
        reasons=(NO_LABEL,),
    ),
    "pods that have ended do not count": Case(
        pod=pod(spreads=[spread()]),
        running=trains("a1", "b1", phase="Succeeded"),
        fits=ZONED,
        reasons=(NO_LABEL,),
    ),
    "pods that have failed do not count": Case(
        pod=pod(spreads=[spread()]),
        running=trains("a1", phase="Failed"),
        fits=ZONED,
        reasons=(NO_LABEL,),
    ),
    "pods without a node do not count": Case(
        pod=pod(spreads=[spread()]), running=trains(""), fits=ZONED, reasons=(NO_LABEL,)
    ),
    "pods of other namespaces do not count": Case(
        pod=pod(spreads=[spread()]),
        running=trains("a1", namespace="other"),
        fits=ZONED,
        reasons=(NO_LABEL,),
    ),
    "pods of other workloads do not count": Case(
        pod=pod(spreads=[spread()]), running=[db("a1")], fits=ZONED, reasons=(NO_LABEL,)
    ),
    "an empty selector counts no pods": Case(
        pod=pod(spreads=[spread({})]),
        running=trains("a1", "a2"),
        fits=ZONED,
        reasons=(NO_LABEL,),
    ),
    "without a selector no pods count": Case(
        pod=pod(spreads=[spread(None)]),
        running=trains("a1", "a2"),
        fits=ZONED,
        reasons=(NO_LABEL,),
    ),
    "pods by an expression": Case(
        pod=pod(spreads=[spread(by("app", "In", "train", "db"))]),
        running=[db("a1"), *trains("b1")],
        fits="c1",
        reasons=(NO_LABEL, SPREAD),
    ),
    "pods of the same revision": Case(
        pod=pod(labels="app=train,run=2", spreads=[spread(matchLabelKeys=["run"])]),
        running=[pod("old", "app=train,run=1", "a1"), pod("new", "app=train,run=2", "b1")],
        fits="a1 a2 c1",
        reasons=(NO_LABEL, SPREAD),
    ),
    "the first pod of a revision": Case(
        pod=pod(labels="app=train,run=2", spreads=[spread(matchLabelKeys=["run"])]),
        running=[pod("old", "app=train,run=1", "a1")],
        fits=ZONED,
        reasons=(NO_LABEL,),
    ),
    "a revision that the pod has not": Case(
        pod=pod(spreads=[spread(matchLabelKeys=["run"])]),
        running=[pod("old", "app=train,run=1", "a1")],
        fits="b1 b2 c1",
        reasons=(NO_LABEL, SPREAD),
    ),
    "two selectors over one label": Case(
        pod=pod(spreads=[spread(), spread("app=db", skew=1)]),
        running=[*trains("a1"), db("b1"), db("b2")],
        fits="c1",
        reasons=(NO_LABEL, SPREAD),
    ),
    "spread and affinity": Case(
        pod=pod(spreads=[spread()], near=[to("app=db")]),
        running=[*trains("a1"), db("a2"), db("c1")],
        fits="c1",
        reasons=(NO_LABEL, SPREAD, AFFINITY),
    ),
    # Constraints that are preferences.
    "schedule anyway": Case(
        pod=pod(spreads=[spread(whenUnsatisfiable="ScheduleAnyway")]),
        running=trains("a1", "a2", "b1"),
        fits=EVERYWHERE,
        best="c1",
    ),
    "schedule anyway, over nodes": Case(
        pod=pod(spreads=[spread(key=HOST, whenUnsatisfiable="ScheduleAnyway")]),
        running=trains("a1", "b1", "bare"),
        fits=EVERYWHERE,
        best="a2 b2 c1",
    ),
    "schedule anyway where all have as many": Case(
        pod=pod(spreads=[spread(whenUnsatisfiable="ScheduleAnyway")]),
        running=trains("a1", "b1", "c1"),
        fits=EVERYWHERE,
    ),
    "required over zones, preferred over nodes": Case(
        pod=pod(spreads=[spread(skew=2), spread(key=HOST, whenUnsatisfiable="ScheduleAnyway")]),
        running=trains("a1", "b1", "b2", "c1"),
        fits=ZONED,
        reasons=(NO_LABEL,),
        best="a2",
    ),
}
