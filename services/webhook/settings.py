"""What the webhook is told."""

from dataclasses import dataclass
from pathlib import Path

from services.webhook.admission import Policy
from shared.dialects import SCHEDULERS
from shared.dialects.dialect import Rules
from shared.dialects.pod_requests import enabled
from shared.model.errors import RequestError
from shared.runtime.settings import ServiceSettings, setting

ABOUT = """Admits pods: refuses requests that could not be granted and what would free a pod of its
limits, completes the rest. Any number of replicas may run."""

EXAMPLES = (
    "python -m services.webhook --listen 0.0.0.0:8443 --secret leasehold-system/webhook \\",
    "    --names webhook.leasehold-system.svc              # in a cluster",
    "python -m services.webhook --kubeconfig .leasehold/kubeconfig --tls-dir .leasehold/webhook \\",
    "    --url https://127.0.0.1                           # beside a simulated cluster",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookSettings(ServiceSettings):
    """Flags of `python -m services.webhook`."""

    listen: str = setting("127.0.0.1:0", "HOST:PORT on which the API server calls; port 0: any")
    kubeconfig: Path | None = setting(
        None, "kubeconfig; default: $KUBECONFIG, in-cluster, ~/.kube/config"
    )
    names: tuple[str, ...] = setting(
        ("127.0.0.1", "localhost"), "names and addresses in the certificate"
    )
    secret: str = setting("", "NAMESPACE/NAME of the Secret that replicas share the certificate in")
    tls_dir: Path | None = setting(None, "directory for the certificate, instead of a Secret")
    url: str = setting(
        "", "register the webhook at this URL (its port is added) instead of behind a Service"
    )
    drain_s: float = setting(
        0.0, "seconds to answer on when told to stop, for API servers that do not know it yet"
    )
    scheduler: str = setting("leasehold", "given to GPU pods that name none")
    schedulers: tuple[str, ...] = setting(
        SCHEDULERS,
        "pods with these schedulerName values are ours",
    )
    dialects: tuple[str, ...] = setting((), "dialects spoken, with commas; none named: all")
    strict_namespaces: tuple[str, ...] = setting(
        (),
        "namespaces whose pods take MIG instances and whole devices only; *: all; as for watchers",
    )
    runtime_class: str = setting("", "runtimeClassName of GPU pods that name none")
    in_budget_class: str = setting("", "priority class of GPU pods while their budget lasts")
    out_of_budget_class: str = setting("", "priority class of GPU pods when it is spent")
    vendor_messages: tuple[str, ...] = setting(
        (),
        "refuse pods with the messages of these dialects' own webhooks, with commas: tencent for "
        "GPUSharing's, koordinator",
    )
    allow_privileged: bool = setting(False, "GPU pods may have privileged containers")
    allow_unread_secrets: bool = setting(
        False, "envFrom may name secrets, which are never looked into"
    )

    allow_larger_requests: bool = setting(
        False,
        "pods may ask for more memory than the largest device has, where larger nodes may yet come",
    )

    @property
    def policy(self) -> Policy:
        """The choices, checked. Raises RequestError naming a dialect that there is not."""
        rules = Rules(enabled=self.dialects, strict_namespaces=self.strict_namespaces)
        enabled(rules)
        enabled(Rules(enabled=self.vendor_messages))
        return Policy(
            scheduler=self.scheduler,
            schedulers=frozenset({self.scheduler, *self.schedulers}),
            rules=rules,
            vendor_messages=frozenset(self.vendor_messages),
            runtime_class=self.runtime_class,
            in_budget_class=self.in_budget_class,
            out_of_budget_class=self.out_of_budget_class,
            privileged=self.allow_privileged,
            unread_secrets=self.allow_unread_secrets,
            larger=self.allow_larger_requests,
        )

    @property
    def secret_name(self) -> tuple[str, str]:
        """Namespace and name of the Secret. Raises RequestError if no place was named."""
        namespace, _, name = self.secret.partition("/")
        if not namespace or not name:
            raise RequestError("--secret NAMESPACE/NAME or --tls-dir DIRECTORY is needed")
        return namespace, name
