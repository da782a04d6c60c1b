"""What is registered with an API server to be called, and the endpoints that answer; pure."""

from msgspec import Struct

from shared.kubernetes.types import ObjectMeta


class ServiceReference(Struct, frozen=True, gc=False):
    namespace: str = ""
    name: str = ""


class _ClientConfig(Struct, frozen=True, gc=False):
    service: ServiceReference | None = None


class _Webhook(Struct, frozen=True, rename="camel", gc=False):
    client_config: _ClientConfig = _ClientConfig()


class _ApiServiceSpec(Struct, frozen=True, gc=False):
    service: ServiceReference | None = None


class Registration(Struct, frozen=True, gc=False):
    metadata: ObjectMeta = ObjectMeta()
    webhooks: tuple[_Webhook, ...] = ()
    spec: _ApiServiceSpec = _ApiServiceSpec()

    @property
    def services(self) -> frozenset[ServiceReference]:
        named = (webhook.client_config.service for webhook in self.webhooks)
        return frozenset(service for service in (*named, self.spec.service) if service is not None)


class _ServiceSpec(Struct, frozen=True, rename="camel", gc=False):
    external_name: str = ""


class RegisteredService(Struct, frozen=True, gc=False):
    spec: _ServiceSpec = _ServiceSpec()

    @property
    def is_outside(self) -> bool:
        """A name outside the cluster has no endpoints."""
        return bool(self.spec.external_name)


class _Conditions(Struct, frozen=True, gc=False):
    ready: bool | None = None


class _Endpoint(Struct, frozen=True, gc=False):
    addresses: tuple[str, ...] = ()
    conditions: _Conditions = _Conditions()


class _Address(Struct, frozen=True, gc=False):
    ip: str = ""


class _Subset(Struct, frozen=True, gc=False):
    addresses: tuple[_Address, ...] = ()


class ServiceEndpoints(Struct, frozen=True, gc=False):
    endpoints: tuple[_Endpoint, ...] | None = ()
    subsets: tuple[_Subset, ...] | None = ()

    @property
    def is_ready(self) -> bool:
        """Unknown readiness counts as ready."""
        of_slice = any(
            endpoint.addresses and endpoint.conditions.ready is not False
            for endpoint in self.endpoints or ()
        )
        return of_slice or any(subset.addresses for subset in self.subsets or ())
