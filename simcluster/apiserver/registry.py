"""The registry: each kind with its strategy, and the store that serves them."""

import time
from collections.abc import Callable, Mapping

from simcluster.apimachinery.resources import Kinds, Resource
from simcluster.apiserver.admission.policy_configs import AdmissionPolicies, PolicyBindings
from simcluster.apiserver.admission.webhook_configs import WebhookConfigurations
from simcluster.apiserver.crd.custom_kinds import CustomKind
from simcluster.apiserver.crd.custom_object_strategy import CustomObjects
from simcluster.apiserver.crd.definition_controller import serve_definitions
from simcluster.apiserver.crd.definition_strategy import Definitions
from simcluster.apiserver.kinds.builtin_resources import BUILTIN
from simcluster.apiserver.kinds.strategies import (
    DisruptionBudgets,
    Namespaces,
    Pods,
    PriorityClasses,
    ResourceQuotas,
    Secrets,
    Services,
)
from simcluster.apiserver.storage.persistence import Disk
from simcluster.apiserver.storage.store import DEFAULT_WINDOW, Store
from simcluster.apiserver.storage.strategy import Strategy

_PLAIN = Strategy()
_STRATEGIES: Mapping[str, Strategy] = {
    "pods": Pods(),
    "namespaces": Namespaces(),
    "secrets": Secrets(),
    "services": Services(),
    "priorityclasses": PriorityClasses(),
    "poddisruptionbudgets": DisruptionBudgets(),
    "resourcequotas": ResourceQuotas(),
    "customresourcedefinitions": Definitions(),
    "validatingadmissionpolicies": AdmissionPolicies(),
    "validatingadmissionpolicybindings": PolicyBindings(),
    "mutatingwebhookconfigurations": WebhookConfigurations(mutating=True),
    "validatingwebhookconfigurations": WebhookConfigurations(mutating=False),
}


def strategy_of(kind: Resource) -> Strategy:
    """Return the behaviour of a kind."""
    if isinstance(kind, CustomKind):
        return CustomObjects(kind)
    return _STRATEGIES.get(kind.table, _PLAIN)


def open_store(
    disk: Disk | None = None,
    *,
    window: int = DEFAULT_WINDOW,
    clock: Callable[[], float] = time.time,
) -> Store:
    """Return a store of the built-in kinds, and of those that stored definitions add."""
    store = Store(Kinds(BUILTIN), strategy_of, disk, window=window, clock=clock)
    serve_definitions(store)
    return store
