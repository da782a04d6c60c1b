"""The commands: the arguments of each, its help, and where its function is."""

from dataclasses import dataclass
from pathlib import Path

from services.cli.arguments import (
    SCOPES,
    SORTS,
    ClusterArguments,
    LedgerArguments,
    UsageArguments,
    WatchedArguments,
    absolute,
    any_namespace,
    command,
    listed,
    min_runtime,
    namespace,
    no_headers,
    not_empty,
    output,
    pod,
    pod_name,
    schedulers,
    scope,
    selector,
    sort_by,
    volcano_conf,
    watch,
)
from shared.model.errors import RequestError
from shared.model.names import AGENTS_NAMESPACE
from shared.runtime.settings import NATS_SCHEMES, argument


@command("gpus", "inspect.views:gpus", "", "-o wide", "-l pool=training -w", "--json")
class Gpus(WatchedArguments):
    """Show every GPU and its leases."""

    selector: str = selector("nodes")
    output: str = listed("wide", "name")
    sort_by: str = sort_by()
    no_headers: bool = no_headers()


@command(
    "ps",
    "inspect.views:ps",
    "-A",
    "-n team-a -l app=train -o wide",
    "my-pod -n team-a -o json | jq -r '.leases[].node'",
    "--sort-by .created_at -o custom-columns=POD:.name,GPU:.shares[*].index --no-headers",
)
class Ps(WatchedArguments):
    """Show pods with leases, and waiting pods with the reason."""

    pod: str = pod("?")
    namespace: str = namespace(all_=True)
    selector: str = selector("pods")
    output: str = listed("wide", "name")
    sort_by: str = sort_by()
    no_headers: bool = no_headers()


@command("top", "inspect.views:top", "-A", "--sort idle -n team-a", "--once --node gpu-1", "--json")
class Top(WatchedArguments):
    """Show what pods use of their shares, and refresh it."""

    sort: str = argument(SORTS[0], f"default: {SORTS[0]}", one_of=SORTS)
    namespace: str = namespace(all_=True)
    selector: str = selector("pods")
    output: str = listed("wide", "name")
    sort_by: str = sort_by()
    no_headers: bool = no_headers()
    node: str = argument("", "default: all")
    interval: float = argument(2.0, "default: 2", metavar="SECONDS", at_least=0.1)
    once: bool = argument(False, "print it once, as without a terminal")


@command(
    "explain",
    "inspect.views:explain",
    "my-pod",
    "my-pod -n team-a -o wide",
    "deploy/web                         its pod that waits, or why it has none",
    "--request pod.yaml                 how a manifest is parsed; needs no cluster",
    "--request - --gpu H100-80GB < deployment.yaml",
)
class Explain(WatchedArguments):
    """Explain why a pod waits, or why it runs on its node."""

    pod: str = pod("?", workloads=True)
    namespace: str = namespace()
    output: str = output("wide", "name")
    request: str = argument(
        "",
        "read this manifest (- for standard input) instead, and show what its pods request and "
        "what their containers would get",
        metavar="FILE",
    )
    gpu: str = argument(
        "A100-80GB",
        "with --request: the GPUs of the example node, MODEL or MODEL:mig (default: A100-80GB, in "
        "MIG mode where the pod requires it)",
        metavar="MODEL",
    )
    volcano_conf: Path | None = volcano_conf()
    schedulers: tuple[str, ...] = schedulers()

    def check(self) -> None:
        if bool(self.request) == bool(self.pod):
            raise RequestError("name either a POD or, with --request, a manifest")


@command(
    "migrate", "request.plugin_config:migrate", "plugin-configs.yaml", "- -o json < config.yaml"
)
class Migrate:
    """Show what a configuration of NVIDIA's device plugin stands for here; needs no cluster.

    The file is one of the plugin's, or the ConfigMap with several of them.
    """

    file: str = argument(..., "- for standard input", positional=True, metavar="FILE")
    output: str = output()


@command(
    "trace",
    "inspect.views:trace",
    "my-pod",
    "6f1e0f5a-8d0e-4a55-b3a0-0f6f5f0a7c11      or the pod's uid",
)
class Trace(ClusterArguments):
    """Show how long each step took until a pod ran."""

    pod: str = pod()
    namespace: str = namespace()
    trace_dir: Path | None = argument(
        None, "read the spans in this directory instead", metavar="DIR"
    )


@command("version", "inspect.views:version", "", "--client", "-o json | jq -r .server.version")
class Version(ClusterArguments):
    """Show the versions of this command and of the cluster's Leasehold."""

    client: bool = argument(False, "only that of this command")


@command("topology", "inspect.views:topology", "", "--mermaid")
class Topology:
    """Show which events the services exchange."""

    mermaid: bool = argument(False, "as a Mermaid flowchart")
    output: str = output()


@command("what-if", "plan.commands:what_if", "pods.yaml --when", "web.yaml -o json", "- < job.yaml")
class WhatIf(ClusterArguments):
    """Show whether the pods of a manifest would fit now, and where. Nothing is created."""

    file: str = argument(..., "manifest; - for standard input", positional=True, metavar="FILE")
    when: bool = argument(False, "also when pods that would wait would start")


@command("defrag", "plan.commands:defrag", "my-pod -n team-a --dry-run", "my-pod -n team-a --evict")
class Defrag(ClusterArguments):
    """Show the fewest pods that would have to move for a waiting pod to fit, or evict them."""

    pod: str = pod()
    namespace: str = namespace()
    dry_run: bool = argument(False, "only show them")
    evict: bool = argument(
        False, "evict them through the Eviction API; their controllers replace them"
    )
    min_runtime_s: float = min_runtime()
    volcano_conf: Path | None = volcano_conf()

    def check(self) -> None:
        if self.dry_run == self.evict:
            raise RequestError("set either --dry-run or --evict")


@command(
    "audit",
    "audit.audit:audit",
    "",
    "--json",
    "--redis-url redis://10.0.0.6:6379/0 --kubeconfig ~/.kube/config",
)
class Audit(LedgerArguments):
    """Compare leases, pods and node agents with each other. Nothing is changed."""

    agents: Path | None = argument(
        None,
        "directory with node agents' checkpoints, as DIR/NODE/checkpoint.json",
        metavar="DIR",
        env="those of the state directory",
    )
    schedulers: tuple[str, ...] = schedulers()
    now: bool = argument(
        False, "do not wait up to 30 s for differences that disappear by themselves"
    )


@command(
    "doctor",
    "doctor.doctor:doctor",
    "",
    "--json",
    "--node gpu-7 --kubelet-dir /var/lib/kubelet --redis-url redis://10.0.0.6:6379/0",
    "                                   on a real node",
    "--only node                        in a node agent's pod, where it is the default",
)
class Doctor(LedgerArguments):
    """Check a node and the components of Leasehold, and show how to solve each problem."""

    only: str = argument(
        "",
        "check only the node, or only the cluster",
        one_of=SCOPES,
        variable="LEASEHOLD_DOCTOR_ONLY",
        env="both",
        read=scope,
    )
    node: str = argument("", "only this node (default: all of `up`; else this machine)")
    kubelet_dir: str = argument("", "of a real node: /var/lib/kubelet", metavar="DIR")
    agent_dir: str = argument("", "the agent's --state-dir", metavar="DIR")
    library_source: str = argument("", "the agent's --library-source", metavar="PATH")
    nats_url: str = argument("", "NATS (default: that of the agent)", schemes=NATS_SCHEMES)


@command("bundle", "bundle.command:bundle", "", "--out bundle.tar.gz --names")
class Bundle(ClusterArguments):
    """Write what support needs into one file: objects, settings, versions, recent events.

    It has no Secrets, variables, arguments or tokens, and other names in place of those of your
    namespaces, pods, nodes, images and users. Its README.txt has the commands that load its nodes
    and pods into a simulated cluster. What your account may not read is left out.
    """

    out: Path | None = argument(
        None, "the file", metavar="FILE", env="leasehold-bundle-TIME.tar.gz here", read=absolute
    )
    names: bool = argument(False, "keep the names of namespaces, pods, nodes, images and users")


@command(
    "budget",
    "admin.budget:budget",
    "",
    "team-a --json",
    'grant team-a 120 --reason "deadline on Friday"',
)
class BudgetArguments(ClusterArguments):
    """Show GPU-time budgets, or grant GPU time to a namespace."""

    namespace: str = any_namespace()
    watch: bool = watch()
    output: str = listed("wide", "name")
    sort_by: str = sort_by()
    no_headers: bool = no_headers()
    words: tuple[str, ...] = argument(
        (),
        "a namespace; or: grant NAMESPACE MINUTES",
        positional=True,
        nargs="*",
        metavar="NAMESPACE",
        read=not_empty,
    )
    reason: str = argument("", "reason for the grant, stored in the ledger")


@command(
    "report",
    "admin.reports:report",
    "--window 2031-05 --csv",
    "--from 2031-05-01T00:00:00Z --to 2031-05-08T00:00:00Z --group-by namespace",
    "--cost                   what all GPUs were used for in the last 30 days, and what that cost",
    "--cost --from 2031-05-01T00:00:00Z --to 2031-06-01T00:00:00Z --csv > focus.csv",
    "--idle                   what is held now without being used, by namespace and owner",
    "--idle --idle-after 60 --json",
    "--starts                 how many promised starts were kept, and how early they were known",
)
class Report(UsageArguments):
    """Sum up GPU time, costs, GPUs that are leased without use, or promised starts."""

    window: str = argument("", "only this window, such as 2031-05")
    from_: str = argument("", "only GPU time since then, RFC 3339", metavar="TIME")
    to: str = argument("", "only GPU time before then, RFC 3339", metavar="TIME")
    group_by: str = argument("", "sum by these of namespace, model, class", metavar="NAME,..")
    output: str = output("wide", "csv")
    cost: bool = argument(
        False,
        "GPU-hours used, idle, stranded (free, but too little for any share of the last week) and "
        "unleased, with their costs; as csv, in the columns of FOCUS",
    )
    step: str = argument(
        "", "with --cost: one row per hour or day; default of csv: day", one_of=("hour", "day")
    )
    idle: bool = argument(False, "GPU-hours and MiB-hours of the shares that are idle now")
    starts: bool = argument(False, "promised starts that were kept, and how early they were known")

    def check(self) -> None:
        others = {"--window": self.window, "--group-by": self.group_by, "--starts": self.starts}
        as_csv = {"--csv": self.output == "csv"}
        if self.cost:
            what = "--cost reports all GPUs"
            unused = {**others, "--idle": self.idle}
        elif self.idle:
            what = "--idle reports what is held now"
            unused = {**others, "--from": self.from_, "--to": self.to, **as_csv}
        else:
            what = "--starts reports promises"
            unused = {**others, **as_csv, "--starts": False} if self.starts else {}
        if names := ", ".join(name for name, value in unused.items() if value):
            raise RequestError(f"{what}: omit {names}")
        if self.step and not self.cost:
            raise RequestError("--step has an effect with --cost only")


@command("preemptions", "admin.preemptions:preemptions", "", "--dry-run my-pod -n team-a", "--json")
class PreemptionsArguments(ClusterArguments):
    """Show preemptions and evictions, or the pods that would be evicted for a pod."""

    watch: bool = watch()
    output: str = listed()
    sort_by: str = sort_by()
    no_headers: bool = no_headers()
    dry_run: str = argument(
        "", "show which pods would be evicted for this pod", metavar="POD", read=pod_name
    )
    namespace: str = namespace()
    min_runtime_s: float | None = argument(
        None, "with --dry-run, instead of the planner's setting", metavar="SECONDS"
    )

    def check(self) -> None:
        if not self.dry_run and (self.namespace or self.min_runtime_s is not None):
            raise RequestError("-n and --min-runtime-s have an effect with --dry-run POD only")


@command(
    "resize",
    "admin.resize:resize",
    "my-pod --memory 6Gi",
    "my-pod -n team-a -c trainer --memory 12Gi --cores 40",
    "my-pod --cores 20 --json",
)
class Resize(ClusterArguments):
    """Change the share of a running container.

    The container keeps running. Additional memory is available to its next allocation. Memory can
    shrink to the amount that the container uses. Each of several GPUs gets the new size. Cores
    apply to processes that start after the resize: running processes keep their limit. The size of
    MIG instances and whole devices is fixed. Requesting the same size again changes nothing.
    """

    pod: str = pod()
    namespace: str = namespace()
    container: str = argument(
        "", "required where several containers have shares", "-c", metavar="NAME"
    )
    memory: str = argument("", "of each of its GPUs: 6Gi, 6144Mi", metavar="SIZE")
    cores: int | None = argument(
        None, "of each of its GPUs: 1 to 99", metavar="PERCENT", at_least=1, at_most=100
    )

    def check(self) -> None:
        if not self.memory and self.cores is None:
            raise RequestError("set --memory 6Gi, --cores 30, or both")


@dataclass(frozen=True, kw_only=True)
class GpuArguments(ClusterArguments):
    gpu: str = argument(
        ...,
        "index or UUID on the node, as in `leasehold gpus -o wide`",
        positional=True,
        metavar="NODE/GPU",
    )


@command("cordon", "admin.cordon:cordon", 'gpu-1/3 --reason "fan is loud"')
class Cordon(GpuArguments):
    """Cordon a GPU: it gets no new pods. Pods that use it stay.

    It sets the annotation cordon.leasehold.dev/gpu-INDEX of the node: your account needs the right
    to patch nodes. To close all GPUs of a node: kubectl cordon NODE.
    """

    reason: str = argument("", "shown with the GPU", metavar="TEXT")


@command("uncordon", "admin.cordon:uncordon", "gpu-1/3")
class Uncordon(GpuArguments):
    """Uncordon a GPU: it gets new pods again.

    Your account needs the right to patch nodes.
    """


@command(
    "credentials",
    "credentials:show",
    "--nats",
    "--redis",
    "--out credentials --nodes gpu-1,gpu-2 --names nats,redis",
)
class CredentialArguments:
    """Show the users of NATS and Redis and their permissions, or write them with secrets."""

    nats: bool = argument(False, "show only nats-server's configuration")
    redis: bool = argument(False, "show only the ACL file of Valkey or Redis")
    nodes: tuple[str, ...] = argument((), "nodes whose agents have a NATS user", metavar="NAME,..")
    out: Path | None = argument(
        None,
        "write them to this directory, with a secret and a file for each user; keeps secrets",
        metavar="DIR",
    )
    names: tuple[str, ...] = argument(
        (),
        "with --out: also make certificates for servers of these names and addresses",
        metavar="NAME,..",
    )
    shared: bool = argument(False, "with --out: let the files' group read them, too")


@command(
    "node-keys",
    "admin.node_keys:node_keys",
    "--node gpu-1 --out gpu-1",
    "--out /etc/leasehold/keys --kubeconfig /etc/leasehold/keys/kubeconfig",
    "--node gpu-1 --out gpu-1 --days 7",
)
class NodeKeys:
    """Write or renew the tokens of a node agent that is a systemd unit.

    For a node agent that runs as a systemd unit of its node instead of in a pod, and so has no
    projected tokens. The command requests two tokens of the agent's service account that are bound
    to the Node: one for the API server and the kubelet, one for NATS. They are valid for this node
    only, until they expire or the Node is deleted. The command also writes the certificate
    authority of NATS and, unless one exists, a kubeconfig with the first token and the server of
    the kubeconfig in use.

    An administrator runs it the first time and copies the directory to the node. Afterwards the
    node renews its own tokens with that kubeconfig, if the component node-unit is installed.
    """

    out: Path = argument(..., "directory to write, for its owner only", metavar="DIR")
    node: str = argument("", "the node", env="this machine")
    days: int = argument(30, "how long the tokens are valid (default: 30)", at_least=1)
    namespace: str = namespace(AGENTS_NAMESPACE)
    kubeconfig: Path | None = argument(None, "the API server", env="as kubectl finds it")
