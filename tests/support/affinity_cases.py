"""Where kube-scheduler places pods by affinity to pods and by spread: a table of cases.

By https://kubernetes.io/docs/concepts/scheduling-eviction/assign-pod-node/#inter-pod-affinity-and-anti-affinity
and https://kubernetes.io/docs/concepts/scheduling-eviction/topology-spread-constraints/.
"""

from tests.support.affinity_case import (
    AFFINITY,
    ANTI_AFFINITY,
    EVERYWHERE,
    EXISTING,
    HOST,
    RACK,
    ZONED,
    Case,
    by,
    db,
    pod,
    to,
    trains,
    weighted,
)
from tests.support.spread_cases import SPREAD_CASES

NOT_A1 = "a2 b1 b2 c1 bare"
NOT_ZONE_A = "b1 b2 c1 bare"
TO_ITSELF = to("app=train")

AFFINITY_CASES: dict[str, Case] = {
    "no rule": Case(pod=pod(), running=[db("a1")], fits=EVERYWHERE),
    "in the zone of a pod": Case(
        pod=pod(near=[to("app=db")]), running=[db("a1")], fits="a1 a2", reasons=(AFFINITY,)
    ),
    "on the node of a pod": Case(
        pod=pod(near=[to("app=db", HOST)]), running=[db("a1")], fits="a1", reasons=(AFFINITY,)
    ),
    "in the rack of a pod": Case(
        pod=pod(near=[to("app=db", RACK)]), running=[db("b2")], fits="b2", reasons=(AFFINITY,)
    ),
    "in the zones of several pods": Case(
        pod=pod(near=[to("app=db")]),
        running=[db("a1"), db("c1")],
        fits="a1 a2 c1",
        reasons=(AFFINITY,),
    ),
    "no pod is selected": Case(
        pod=pod(near=[to("app=db")]), running=trains("a1"), reasons=(AFFINITY,)
    ),
    "the selected pod has no node yet": Case(
        pod=pod(near=[to("app=db")]), running=[db("", "db")], reasons=(AFFINITY,)
    ),
    "the selected pod has succeeded": Case(
        pod=pod(near=[to("app=db")]), running=[db("a1", phase="Succeeded")], reasons=(AFFINITY,)
    ),
    "the selected pod has failed": Case(
        pod=pod(near=[to("app=db")]), running=[db("a1", phase="Failed")], reasons=(AFFINITY,)
    ),
    "the selected pod is being deleted": Case(
        pod=pod(near=[to("app=db")]),
        running=[db("a1", deleted=True)],
        fits="a1 a2",
        reasons=(AFFINITY,),
    ),
    "the selected pod is starting": Case(
        pod=pod(near=[to("app=db")]),
        running=[db("a1", phase="Pending")],
        fits="a1 a2",
        reasons=(AFFINITY,),
    ),
    "the node of the selected pod has no such label": Case(
        pod=pod(near=[to("app=db")]), running=[db("bare")], reasons=(AFFINITY,)
    ),
    "a pod of another namespace": Case(
        pod=pod(near=[to("app=db")]), running=[db("a1", namespace="other")], reasons=(AFFINITY,)
    ),
    "a pod of a named namespace": Case(
        pod=pod(near=[to("app=db", namespaces=["other"])]),
        running=[db("a1", namespace="other")],
        fits="a1 a2",
        reasons=(AFFINITY,),
    ),
    "named namespaces leave out its own": Case(
        pod=pod(near=[to("app=db", namespaces=["other"])]),
        running=[db("a1")],
        reasons=(AFFINITY,),
    ),
    "two named namespaces": Case(
        pod=pod(near=[to("app=db", namespaces=["other", "third"])]),
        running=[db("a1", namespace="other"), db("c1", namespace="third"), db("b1")],
        fits="a1 a2 c1",
        reasons=(AFFINITY,),
    ),
    "namespaces by label": Case(
        pod=pod(near=[to("app=db", namespaceSelector={"matchLabels": {"team": "blue"}})]),
        running=[db("a1", namespace="other"), db("b1"), db("c1", namespace="third")],
        fits="a1 a2",
        reasons=(AFFINITY,),
    ),
    "namespaces by label select its own": Case(
        pod=pod(near=[to("app=db", namespaceSelector=by("team", "Exists"))]),
        running=[db("b1"), db("c1", namespace="third")],
        fits="b1 b2",
        reasons=(AFFINITY,),
    ),
    "an empty selector of namespaces selects all": Case(
        pod=pod(near=[to("app=db", namespaceSelector={})]),
        running=[db("c1", namespace="third")],
        fits="c1",
        reasons=(AFFINITY,),
    ),
    "a selector of namespaces that selects none": Case(
        pod=pod(near=[to("app=db", namespaceSelector={"matchLabels": {"team": "green"}})]),
        running=[db("a1"), db("b1", namespace="other")],
        reasons=(AFFINITY,),
    ),
    "namespaces by name and by label add up": Case(
        pod=pod(
            near=[
                to(
                    "app=db",
                    namespaces=["third"],
                    namespaceSelector={"matchLabels": {"team": "blue"}},
                )
            ]
        ),
        running=[db("a1", namespace="other"), db("c1", namespace="third"), db("b1")],
        fits="a1 a2 c1",
        reasons=(AFFINITY,),
    ),
    "a pod that both terms select": Case(
        pod=pod(near=[to("app=db"), to(by("app", "Exists"), HOST)]),
        running=[db("a1")],
        fits="a1",
        reasons=(AFFINITY,),
    ),
    "no pod that both terms select": Case(
        pod=pod(near=[to("app=db"), to("app=cache")]),
        running=[db("a1"), pod("cache", "app=cache", "a2")],
        reasons=(AFFINITY,),
    ),
    "a pod that both terms select, and one that one does": Case(
        pod=pod(near=[to("app=db"), to("tier=1")]),
        running=[db("a1"), pod("both", "app=db,tier=1", "b1")],
        fits="b1 b2",
        reasons=(AFFINITY,),
    ),
    "all labels of a selector have to match": Case(
        pod=pod(near=[to("app=db,tier=1")]),
        running=[db("a1"), pod("both", "app=db,tier=1", "b1")],
        fits="b1 b2",
        reasons=(AFFINITY,),
    ),
    "a label in a list": Case(
        pod=pod(near=[to(by("app", "In", "db", "cache"))]),
        running=[pod("cache", "app=cache", "a2"), pod("web", "app=web", "b1")],
        fits="a1 a2",
        reasons=(AFFINITY,),
    ),
    "a label not in a list, which a pod without it is not either": Case(
        pod=pod(near=[to(by("app", "NotIn", "db"))]),
        running=[db("a1"), pod("plain", "", "b1")],
        fits="b1 b2",
        reasons=(AFFINITY,),
    ),
    "a label that exists": Case(
        pod=pod(near=[to(by("tier", "Exists"))]),
        running=[db("a1"), pod("x", "tier=", "c1")],
        fits="c1",
        reasons=(AFFINITY,),
    ),
    "a label that does not exist": Case(
        pod=pod(near=[to(by("app", "DoesNotExist"))]),
        running=[db("a1"), pod("x", "tier=1", "c1")],
        fits="c1",
        reasons=(AFFINITY,),
    ),
    "an empty selector selects all pods of the namespace": Case(
        pod=pod(near=[to({})]),
        running=[db("a1"), db("b1", namespace="other")],
        fits="a1 a2",
        reasons=(AFFINITY,),
    ),
    "without a selector no pod is selected": Case(
        pod=pod(near=[to(None)]), running=[db("a1")], reasons=(AFFINITY,)
    ),
    "of two terms one is without a selector": Case(
        pod=pod(near=[to("app=db"), to(None, HOST)]), running=[db("a1")], reasons=(AFFINITY,)
    ),
    # The first pod of a group whose pods want to be together.
    "the first pod of its group": Case(
        pod=pod(near=[TO_ITSELF]), running=[db("a1")], fits=ZONED, reasons=(AFFINITY,)
    ),
    "the second pod of its group": Case(
        pod=pod(near=[TO_ITSELF]), running=trains("b1"), fits="b1 b2", reasons=(AFFINITY,)
    ),
    "the others of its group have ended": Case(
        pod=pod(near=[TO_ITSELF]),
        running=trains("b1", phase="Succeeded"),
        fits=ZONED,
        reasons=(AFFINITY,),
    ),
    "the others of its group have no node yet": Case(
        pod=pod(near=[TO_ITSELF]), running=trains("", ""), fits=ZONED, reasons=(AFFINITY,)
    ),
    "the first of its namespace": Case(
        pod=pod(near=[TO_ITSELF]),
        running=trains("b1", namespace="other"),
        fits=ZONED,
        reasons=(AFFINITY,),
    ),
    "another of its group runs where no zone is": Case(
        pod=pod(near=[TO_ITSELF]), running=trains("bare"), fits=ZONED, reasons=(AFFINITY,)
    ),
    "another of its group runs where one of two labels is": Case(
        pod=pod(near=[TO_ITSELF, to("app=train", HOST)]),
        running=trains("bare"),
        reasons=(AFFINITY,),
    ),
    "the first pod needs all labels": Case(
        pod=pod(near=[to("app=train", HOST), TO_ITSELF]), fits=ZONED, reasons=(AFFINITY,)
    ),
    "one of two terms selects the pod itself": Case(
        pod=pod(near=[TO_ITSELF, to("app=db")]), reasons=(AFFINITY,)
    ),
    "both terms select the pod itself": Case(
        pod=pod(labels="app=train,tier=1", near=[TO_ITSELF, to("tier=1", RACK)]),
        fits=ZONED,
        reasons=(AFFINITY,),
    ),
    "the first pod, whose term names another namespace": Case(
        pod=pod(near=[to("app=train", namespaces=["other"])]), reasons=(AFFINITY,)
    ),
    "the first pod, whose term names its own namespace": Case(
        pod=pod(near=[to("app=train", namespaces=["other", "default"])]),
        fits=ZONED,
        reasons=(AFFINITY,),
    ),
    "the first pod, whose namespace is selected by its labels": Case(
        pod=pod(near=[to("app=train", namespaceSelector={"matchLabels": {"team": "red"}})]),
        fits=ZONED,
        reasons=(AFFINITY,),
    ),
    "the first pod, whose namespace is not selected by its labels": Case(
        pod=pod(near=[to("app=train", namespaceSelector={"matchLabels": {"team": "blue"}})]),
        reasons=(AFFINITY,),
    ),
    "pods with the same value of a label": Case(
        pod=pod(labels="app=train,run=2", near=[to("app=train", matchLabelKeys=["run"])]),
        running=[pod("old", "app=train,run=1", "a1"), pod("new", "app=train,run=2", "b1")],
        fits="b1 b2",
        reasons=(AFFINITY,),
    ),
    "a label of which the values should match is missing": Case(
        pod=pod(near=[to("app=train", matchLabelKeys=["run"])]),
        running=[pod("old", "app=train,run=1", "a1")],
        fits="a1 a2",
        reasons=(AFFINITY,),
    ),
    "the first pod with its value of a label": Case(
        pod=pod(labels="app=train,run=2", near=[to("app=train", matchLabelKeys=["run"])]),
        running=[pod("old", "app=train,run=1", "a1")],
        fits=ZONED,
        reasons=(AFFINITY,),
    ),
    "pods with another value of a label": Case(
        pod=pod(labels="tenant=x", near=[to(by("tenant", "Exists"), mismatchLabelKeys=["tenant"])]),
        running=[pod("own", "tenant=x", "a1"), pod("foreign", "tenant=y", "b1")],
        fits="b1 b2",
        reasons=(AFFINITY,),
    ),
}

ANTI_AFFINITY_CASES: dict[str, Case] = {
    "not on the node of a pod": Case(
        pod=pod(apart=[to("app=db", HOST)]),
        running=[db("a1")],
        fits=NOT_A1,
        reasons=(ANTI_AFFINITY,),
    ),
    "not in the zone of a pod": Case(
        pod=pod(apart=[to("app=db")]),
        running=[db("a1")],
        fits=NOT_ZONE_A,
        reasons=(ANTI_AFFINITY,),
    ),
    "not in the rack of a pod": Case(
        pod=pod(apart=[to("app=db", RACK)]),
        running=[db("a1"), db("c1")],
        fits="a2 b1 b2 bare",
        reasons=(ANTI_AFFINITY,),
    ),
    "apart from pods of its own group": Case(
        pod=pod(apart=[to("app=train", HOST)]),
        running=trains("a1", "b1"),
        fits="a2 b2 c1 bare",
        reasons=(ANTI_AFFINITY,),
    ),
    "no node is left": Case(
        pod=pod(apart=[to("app=db", HOST)]),
        running=[db(name) for name in EVERYWHERE.split()],
        reasons=(ANTI_AFFINITY,),
    ),
    "apart from a pod whose node has no such label": Case(
        pod=pod(apart=[to("app=db")]), running=[db("bare")], fits=EVERYWHERE
    ),
    "apart from a pod that has ended": Case(
        pod=pod(apart=[to("app=db")]), running=[db("a1", phase="Succeeded")], fits=EVERYWHERE
    ),
    "apart from a pod that is being deleted": Case(
        pod=pod(apart=[to("app=db")]),
        running=[db("a1", deleted=True)],
        fits=NOT_ZONE_A,
        reasons=(ANTI_AFFINITY,),
    ),
    "apart from a pod without a node": Case(
        pod=pod(apart=[to("app=db")]), running=[db("", "db")], fits=EVERYWHERE
    ),
    "apart from pods of its own namespace": Case(
        pod=pod(apart=[to("app=db")]), running=[db("a1", namespace="other")], fits=EVERYWHERE
    ),
    "apart from pods of another namespace": Case(
        pod=pod(apart=[to("app=db", namespaces=["other"])]),
        running=[db("a1", namespace="other"), db("b1")],
        fits=NOT_ZONE_A,
        reasons=(ANTI_AFFINITY,),
    ),
    "apart from pods of namespaces by label": Case(
        pod=pod(apart=[to("app=db", namespaceSelector={"matchLabels": {"team": "blue"}})]),
        running=[db("a1", namespace="other"), db("b1"), db("c1", namespace="third")],
        fits=NOT_ZONE_A,
        reasons=(ANTI_AFFINITY,),
    ),
    "apart from pods of all namespaces": Case(
        pod=pod(apart=[to("app=db", namespaceSelector={})]),
        running=[db("a1", namespace="other"), db("c1", namespace="third")],
        fits="b1 b2 bare",
        reasons=(ANTI_AFFINITY,),
    ),
    "apart from two kinds of pods": Case(
        pod=pod(apart=[to("app=db", HOST), to("app=cache")]),
        running=[db("a1"), pod("cache", "app=cache", "b1")],
        fits="a2 c1 bare",
        reasons=(ANTI_AFFINITY,),
    ),
    "apart from all pods of the namespace": Case(
        pod=pod(apart=[to({}, HOST)]),
        running=[db("a1"), pod("plain", "", "c1"), db("b1", namespace="other")],
        fits="a2 b1 b2 bare",
        reasons=(ANTI_AFFINITY,),
    ),
    "apart from nothing": Case(pod=pod(apart=[to(None)]), running=[db("a1")], fits=EVERYWHERE),
    "apart from pods with the same value of a label": Case(
        pod=pod(labels="app=train,run=2", apart=[to("app=train", HOST, matchLabelKeys=["run"])]),
        running=[pod("old", "app=train,run=1", "a1"), pod("new", "app=train,run=2", "b1")],
        fits="a1 a2 b2 c1 bare",
        reasons=(ANTI_AFFINITY,),
    ),
    "apart from other tenants": Case(
        pod=pod(
            labels="tenant=x", apart=[to(by("tenant", "Exists"), mismatchLabelKeys=["tenant"])]
        ),
        running=[pod("own", "tenant=x", "a1"), pod("foreign", "tenant=y", "b1")],
        fits="a1 a2 c1 bare",
        reasons=(ANTI_AFFINITY,),
    ),
    "near one pod, apart from it too": Case(
        pod=pod(near=[to("app=db")], apart=[to("app=db", HOST)]),
        running=[db("a1")],
        fits="a2",
        reasons=(AFFINITY, ANTI_AFFINITY),
    ),
    "together in a zone, each on a node of its own": Case(
        pod=pod(near=[TO_ITSELF], apart=[to("app=train", HOST)]),
        running=trains("b1"),
        fits="b2",
        reasons=(AFFINITY, ANTI_AFFINITY),
    ),
}

EXISTING_CASES: dict[str, Case] = {
    "a pod keeps others out of its zone": Case(
        pod=pod(),
        running=[db("a1", apart=[to("app=train")])],
        fits=NOT_ZONE_A,
        reasons=(EXISTING,),
    ),
    "a pod keeps others off its node": Case(
        pod=pod(),
        running=[db("a1", apart=[to("app=train", HOST)])],
        fits=NOT_A1,
        reasons=(EXISTING,),
    ),
    "a pod keeps others out, not this one": Case(
        pod=pod(), running=[db("a1", apart=[to("app=web")])], fits=EVERYWHERE
    ),
    "a pod of another namespace keeps its own out": Case(
        pod=pod(), running=[db("a1", namespace="other", apart=[to("app=train")])], fits=EVERYWHERE
    ),
    "a pod keeps those of a named namespace out": Case(
        pod=pod(),
        running=[db("a1", namespace="other", apart=[to("app=train", namespaces=["default"])])],
        fits=NOT_ZONE_A,
        reasons=(EXISTING,),
    ),
    "a pod keeps those of namespaces by label out": Case(
        pod=pod(),
        running=[
            db(
                "a1",
                namespace="other",
                apart=[to("app=train", namespaceSelector={"matchLabels": {"team": "red"}})],
            )
        ],
        fits=NOT_ZONE_A,
        reasons=(EXISTING,),
    ),
    "a pod that has ended keeps none out": Case(
        pod=pod(),
        running=[db("a1", phase="Failed", apart=[to("app=train")])],
        fits=EVERYWHERE,
    ),
    "a pod that is being deleted keeps others out": Case(
        pod=pod(),
        running=[db("a1", deleted=True, apart=[to("app=train")])],
        fits=NOT_ZONE_A,
        reasons=(EXISTING,),
    ),
    "a pod without a node keeps none out": Case(
        pod=pod(), running=[db("", "db", apart=[to("app=train")])], fits=EVERYWHERE
    ),
    "a pod on a node without the label keeps none out": Case(
        pod=pod(), running=[db("bare", apart=[to("app=train")])], fits=EVERYWHERE
    ),
    "affinity of a running pod keeps none out": Case(
        pod=pod(), running=[db("a1", near=[to("app=db")])], fits=EVERYWHERE
    ),
    "preferred anti-affinity of a running pod keeps none out": Case(
        pod=pod(), running=[db("a1", dislikes=[weighted(100, to("app=train"))])], fits=EVERYWHERE
    ),
    "a pod that wants to be where it is kept out": Case(
        pod=pod(near=[to("app=db")]),
        running=[db("a1", apart=[to("app=train", HOST)])],
        fits="a2",
        reasons=(AFFINITY, EXISTING),
    ),
}

PREFERRED_CASES: dict[str, Case] = {
    "prefers the zone of a pod": Case(
        pod=pod(likes=[weighted(1, to("app=db"))]),
        running=[db("b1")],
        fits=EVERYWHERE,
        best="b1 b2",
    ),
    "prefers other nodes than that of a pod": Case(
        pod=pod(dislikes=[weighted(50, to("app=db", HOST))]),
        running=[db("a1")],
        fits=EVERYWHERE,
        best=NOT_A1,
    ),
    "the higher weight counts": Case(
        pod=pod(likes=[weighted(10, to("app=db")), weighted(90, to("app=cache"))]),
        running=[db("a1"), pod("cache", "app=cache", "b1")],
        fits=EVERYWHERE,
        best="b1 b2",
    ),
    "each selected pod counts": Case(
        pod=pod(likes=[weighted(10, to("app=db"))]),
        running=[db("a1"), db("a2"), db("c1")],
        fits=EVERYWHERE,
        best="a1 a2",
    ),
    "likes and dislikes add up": Case(
        pod=pod(likes=[weighted(50, to("app=db"))], dislikes=[weighted(20, to("app=db", HOST))]),
        running=[db("a1")],
        fits=EVERYWHERE,
        best="a2",
    ),
    "prefers nothing where no pod is selected": Case(
        pod=pod(likes=[weighted(100, to("app=db"))]), fits=EVERYWHERE
    ),
    "requires a zone, and prefers a node there": Case(
        pod=pod(near=[to("app=db")], likes=[weighted(5, to("app=db", HOST))]),
        running=[db("a2")],
        fits="a1 a2",
        reasons=(AFFINITY,),
        best="a2",
    ),
    "prefers the zone of a pod of another namespace": Case(
        pod=pod(likes=[weighted(5, to("app=db", namespaces=["other"]))]),
        running=[db("a2"), db("c1", namespace="other")],
        fits=EVERYWHERE,
        best="c1",
    ),
}

CASES: dict[str, Case] = {
    **AFFINITY_CASES,
    **ANTI_AFFINITY_CASES,
    **EXISTING_CASES,
    **PREFERRED_CASES,
    **SPREAD_CASES,
}
