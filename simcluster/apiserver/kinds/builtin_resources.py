"""The built-in kinds, one row per kind and version; pure."""

from simcluster.apimachinery.resources import Resource

_POD_FIELDS = (
    "spec.nodeName", "spec.restartPolicy", "spec.schedulerName", "spec.serviceAccountName",
    "spec.hostNetwork", "status.phase", "status.podIP", "status.nominatedNodeName",
)  # fmt: skip
_EVENT_FIELDS = (
    "involvedObject.kind", "involvedObject.namespace", "involvedObject.name",
    "involvedObject.uid", "involvedObject.apiVersion", "involvedObject.resourceVersion",
    "involvedObject.fieldPath", "reason", "reportingComponent", "source", "type",
)  # fmt: skip
_NEW_EVENT_FIELDS = (
    "regarding.kind", "regarding.namespace", "regarding.name", "regarding.uid",
    "regarding.apiVersion", "regarding.resourceVersion", "regarding.fieldPath", "reason",
    "reportingController", "type",
)  # fmt: skip
BUILTIN = (
    Resource(plural="namespaces", kind="Namespace", namespaced=False, short_names=("ns",),
             has_status=True, selectable=("status.phase",)),
    Resource(plural="nodes", kind="Node", namespaced=False, short_names=("no",), has_status=True,
             subresources=("proxy",),
             selectable=("spec.unschedulable",)),
    Resource(plural="pods", kind="Pod", short_names=("po",), categories=("all",), has_status=True,
             selectable=_POD_FIELDS,
             subresources=("binding", "eviction", "exec", "attach", "portforward", "log",
                           "ephemeralcontainers")),
    Resource(plural="events", kind="Event", short_names=("ev",), selectable=_EVENT_FIELDS),
    Resource(plural="events", kind="Event", group="events.k8s.io", short_names=("ev",),
             stored_as="events", selectable=_NEW_EVENT_FIELDS),
    Resource(plural="configmaps", kind="ConfigMap", short_names=("cm",)),
    Resource(plural="secrets", kind="Secret", selectable=("type",)),
    Resource(plural="serviceaccounts", kind="ServiceAccount", short_names=("sa",),
             subresources=("token",)),
    Resource(plural="services", kind="Service", short_names=("svc",), categories=("all",),
             has_status=True, selectable=("spec.clusterIP", "spec.type")),
    Resource(plural="resourcequotas", kind="ResourceQuota", short_names=("quota",),
             has_status=True),
    Resource(plural="persistentvolumeclaims", kind="PersistentVolumeClaim", short_names=("pvc",),
             has_status=True),
    Resource(plural="leases", kind="Lease", group="coordination.k8s.io"),
    Resource(plural="priorityclasses", kind="PriorityClass", group="scheduling.k8s.io",
             namespaced=False, short_names=("pc",)),
    Resource(plural="poddisruptionbudgets", kind="PodDisruptionBudget", group="policy",
             short_names=("pdb",), has_status=True),
    Resource(plural="endpoints", kind="Endpoints", short_names=("ep",)),
    Resource(plural="endpointslices", kind="EndpointSlice", group="discovery.k8s.io"),
    Resource(plural="customresourcedefinitions", kind="CustomResourceDefinition",
             group="apiextensions.k8s.io", namespaced=False, short_names=("crd", "crds"),
             categories=("api-extensions",), has_status=True),
    Resource(plural="mutatingwebhookconfigurations", kind="MutatingWebhookConfiguration",
             group="admissionregistration.k8s.io", namespaced=False,
             categories=("api-extensions",)),
    Resource(plural="validatingwebhookconfigurations", kind="ValidatingWebhookConfiguration",
             group="admissionregistration.k8s.io", namespaced=False,
             categories=("api-extensions",)),
    Resource(plural="validatingadmissionpolicies", kind="ValidatingAdmissionPolicy",
             singular_name="validatingadmissionpolicy", group="admissionregistration.k8s.io",
             namespaced=False, categories=("api-extensions",), has_status=True),
    Resource(plural="validatingadmissionpolicybindings", kind="ValidatingAdmissionPolicyBinding",
             group="admissionregistration.k8s.io", namespaced=False,
             categories=("api-extensions",)),
    *(Resource(plural=f"{kind.lower()}s", kind=kind, group="rbac.authorization.k8s.io",
               namespaced=not kind.startswith("Cluster"))
      for kind in ("Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")),
    Resource(plural="runtimeclasses", kind="RuntimeClass", group="node.k8s.io", namespaced=False),
)  # fmt: skip
RESOURCES = {row.table: row for row in BUILTIN if not row.stored_as}
