"""The webhook's settings."""

from dataclasses import dataclass
from pathlib import Path

from services.webhook.pod_admission import AdmissionPolicy, SchedulerChoice
from shared.dialects import DIALECTS, GPU_RESOURCES, KUBE_SCHEDULER, RESOURCE_PREFIXES, SCHEDULERS
from shared.dialects.dialect import Rules
from shared.dialects.pod_requests import enabled
from shared.dialects.protected_paths import HOST_PATHS
from shared.model.errors import RequestError
from shared.model.requests.request import LEAST_SHARE_MIB
from shared.runtime.settings import ApiServerSettings, ServiceSettings, setting

ABOUT = """Reviews new pods: denies GPU requests that can never be granted and pods that could
exceed their limits, completes the others. Any number of replicas may run."""

EXAMPLES = (
    "python -m services.webhook --listen 0.0.0.0:8443 --secret leasehold-system/webhook \\",
    "    --names webhook.leasehold-system.svc              # in a cluster",
    "python -m services.webhook --kubeconfig .leasehold/accounts/webhook \\",
    "    --tls-dir .leasehold/webhook \\",
    "    --url https://127.0.0.1                           # beside a simulated cluster",
)

KUBE_SCHEDULER_CHOICE = "kube-scheduler"


def _resource_name(text: str) -> tuple[str, str]:
    """Parse OTHER=NAME. Raises RequestError."""
    other, _, name = text.partition("=")
    why = ""
    if not (other and name):
        why = "must be OTHER=NAME"
    elif name not in GPU_RESOURCES:
        why = f"{name} is no resource of GPUs here"
    elif other in GPU_RESOURCES:
        why = f"{other} is a resource itself"
    elif not other.startswith(RESOURCE_PREFIXES):
        why = f"the other name must begin with one of {', '.join(RESOURCE_PREFIXES)}"
    if why:
        raise RequestError(f"--resource-names {text!r}: {why}")
    return other, name


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookSettings(ApiServerSettings, ServiceSettings):
    listen: str = setting(
        "127.0.0.1:0", "HOST:PORT that the API server calls; port 0: any", address=True
    )
    names: tuple[str, ...] = setting(
        ("127.0.0.1", "localhost"), "names and addresses in the certificate"
    )
    secret: str = setting("", "NAMESPACE/NAME of the Secret with the replicas' certificate")
    tls_dir: Path | None = setting(None, "directory for the certificate, instead of a Secret")
    client_ca_file: Path | None = setting(
        None,
        "PEM file with the CA of API servers' client certificates, without which no caller is "
        "served; unset: anyone is, and allocations of ResourceClaims are not answered as they are "
        "written",
    )
    client_name: str = setting(
        "", "DNS name in the client certificates that are accepted; empty: any"
    )
    url: str = setting(
        "",
        "register the webhook at this URL instead of behind a Service; its port is that of "
        "--listen unless the URL has one",
    )
    drain_s: float = setting(
        0.0, "seconds to respond after SIGTERM, until API servers no longer call this replica"
    )
    default_scheduler: str = setting("leasehold", "scheduler of GPU pods that do not choose one")
    schedulers: tuple[str, ...] = setting(
        SCHEDULERS,
        "schedulerName values of the pods that Leasehold schedules",
    )
    kube_scheduler: bool = setting(
        False,
        "a kube-scheduler with Leasehold's extender is installed: it gets pods with fields that "
        "placers do not support, which are denied otherwise",
    )
    all_pods_by: str = setting(
        "placer",
        "which scheduler gets pods that both could place: placer or kube-scheduler",
        one_of=("placer", KUBE_SCHEDULER_CHOICE),
    )
    systems: tuple[str, ...] = setting(
        (), "systems that are served, comma-separated; empty: all", one_of=tuple(DIALECTS)
    )
    resource_names: tuple[str, ...] = setting(
        (),
        "OTHER=NAME, comma-separated: replace the resource name OTHER in pods by NAME",
    )
    strict_namespaces: tuple[str, ...] = setting(
        (),
        "namespaces whose pods get only MIG instances and whole devices; *: all; the same value "
        "as for watchers",
    )
    runtime_class: str = setting("", "runtimeClassName of GPU pods that do not set one")
    in_budget_class: str = setting("", "priority class of GPU pods while their budget lasts")
    out_of_budget_class: str = setting("", "priority class of GPU pods when it is exhausted")
    vendor_messages: tuple[str, ...] = setting(
        (),
        "deny pods with the messages that these systems' own webhooks use: tencent (GPUSharing), "
        "koordinator",
        one_of=tuple(DIALECTS),
    )
    allow_privileged: bool = setting(False, "GPU pods may have privileged containers")
    host_paths: tuple[str, ...] = setting(
        HOST_PATHS,
        "directories of nodes that contain only data, below which GPU pods may mount a hostPath",
    )
    allow_env_from: bool = setting(
        False,
        "allow envFrom without a prefix in containers with GPUs; safe only if all nodes use CDI",
    )
    quotas: Path | None = setting(
        None, "YAML file of GPUQuota objects, for their run times; the same as for watchers"
    )
    least_share_mib: int = setting(
        LEAST_SHARE_MIB,
        "MiB of a device below which a request is warned of, as no CUDA program could start",
        at_least=1,
    )
    allow_larger_requests: bool = setting(
        False,
        "admit requests for more memory than the largest GPU has, if larger nodes can be added",
    )

    def check(self) -> None:
        _ = self.policy
        if self.client_name and self.client_ca_file is None:
            raise RequestError("--client-name needs --client-ca-file, which has its authority")
        if self.tls_dir is None:
            _ = self.secret_name

    @property
    def policy(self) -> AdmissionPolicy:
        rules = Rules(enabled=self.systems, strict_namespaces=self.strict_namespaces)
        enabled(rules)
        enabled(Rules(enabled=self.vendor_messages))
        return AdmissionPolicy(
            schedulers=self._scheduler_choice,
            rules=rules,
            resource_names=dict(map(_resource_name, self.resource_names)),
            vendor_messages=frozenset(self.vendor_messages),
            runtime_class=self.runtime_class,
            in_budget_class=self.in_budget_class,
            out_of_budget_class=self.out_of_budget_class,
            allow_privileged=self.allow_privileged,
            allow_env_from=self.allow_env_from,
            host_paths=self.host_paths,
            allow_larger_requests=self.allow_larger_requests,
            least_share_mib=self.least_share_mib,
        )

    @property
    def _scheduler_choice(self) -> SchedulerChoice:
        all_pods = self.all_pods_by == KUBE_SCHEDULER_CHOICE
        if all_pods and not self.kube_scheduler:
            raise RequestError(
                "--all-pods-by kube-scheduler needs --kube-scheduler: add the component "
                "kube-scheduler"
            )
        handover = KUBE_SCHEDULER if self.kube_scheduler else ""
        return SchedulerChoice(
            placer=self.default_scheduler,
            served=frozenset(filter(None, {self.default_scheduler, *self.schedulers, handover})),
            handover=handover,
            all_pods=all_pods,
        )

    @property
    def secret_name(self) -> tuple[str, str]:
        namespace, _, name = self.secret.partition("/")
        if not namespace or not name:
            raise RequestError("--secret NAMESPACE/NAME or --tls-dir DIRECTORY is needed")
        return namespace, name
