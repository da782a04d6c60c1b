"""The registry of kinds: their strategies, and the store of their objects."""

import time
from collections.abc import Callable, Mapping

from simcluster.apimachinery.resources import Kinds, Resource
from simcluster.apiserver.admission.policy_configs import (
    AdmissionPolicyStrategy,
    PolicyBindingStrategy,
)
from simcluster.apiserver.admission.webhook_configs import WebhookConfigurationStrategy
from simcluster.apiserver.crd.custom_kinds import CustomKind
from simcluster.apiserver.crd.custom_object_strategy import CustomObjectStrategy
from simcluster.apiserver.crd.definition_controller import serve_definitions
from simcluster.apiserver.crd.definition_strategy import DefinitionStrategy
from simcluster.apiserver.kinds.builtin_resources import BUILTIN
from simcluster.apiserver.kinds.resource_claims import (
    ResourceClaimStrategy,
    ResourceClaimTemplateStrategy,
    ResourceSliceStrategy,
)
from simcluster.apiserver.kinds.storage import (
    ClaimStrategy,
    StorageClassStrategy,
    VolumeStrategy,
)
from simcluster.apiserver.kinds.strategies import (
    DisruptionBudgetStrategy,
    NamespaceStrategy,
    PodStrategy,
    PriorityClassStrategy,
    ResourceQuotaStrategy,
    SecretStrategy,
    ServiceStrategy,
)
from simcluster.apiserver.kinds.workloads import WORKLOAD_STRATEGIES
from simcluster.apiserver.storage.persistence import StorageBackend
from simcluster.apiserver.storage.store import DEFAULT_WINDOW, ObjectStore
from simcluster.apiserver.storage.strategy import KindStrategy

_PLAIN = KindStrategy()
_STRATEGIES: Mapping[str, KindStrategy] = {
    "pods": PodStrategy(),
    "namespaces": NamespaceStrategy(),
    "secrets": SecretStrategy(),
    "services": ServiceStrategy(),
    "priorityclasses": PriorityClassStrategy(),
    "poddisruptionbudgets": DisruptionBudgetStrategy(),
    "resourcequotas": ResourceQuotaStrategy(),
    "persistentvolumeclaims": ClaimStrategy(),
    "persistentvolumes": VolumeStrategy(),
    "storageclasses": StorageClassStrategy(),
    "resourceclaims": ResourceClaimStrategy(),
    "resourceclaimtemplates": ResourceClaimTemplateStrategy(),
    "resourceslices": ResourceSliceStrategy(),
    "customresourcedefinitions": DefinitionStrategy(),
    "validatingadmissionpolicies": AdmissionPolicyStrategy(),
    "validatingadmissionpolicybindings": PolicyBindingStrategy(),
    **WORKLOAD_STRATEGIES,
    "mutatingwebhookconfigurations": WebhookConfigurationStrategy(mutating=True),
    "validatingwebhookconfigurations": WebhookConfigurationStrategy(mutating=False),
}


def strategy_of(kind: Resource) -> KindStrategy:
    """Return the strategy of a kind."""
    if isinstance(kind, CustomKind):
        return CustomObjectStrategy(kind)
    return _STRATEGIES.get(kind.table, _PLAIN)


def open_store(
    backend: StorageBackend | None = None,
    *,
    window: int = DEFAULT_WINDOW,
    clock: Callable[[], float] = time.time,
) -> ObjectStore:
    """Return a store that serves the built-in kinds and those of stored definitions."""
    store = ObjectStore(Kinds(BUILTIN), strategy_of, backend, window=window, clock=clock)
    serve_definitions(store)
    return store
