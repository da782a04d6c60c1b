"""What README and docs/try.md print of the first hour is what the code prints today."""

import re
from typing import Any

import yaml

from services.api.projection.visible_cluster import VisibleCluster
from services.cli.audit import audit
from services.cli.audit.snapshot import Snapshot
from services.cli.inspect import render
from services.cli.pod_summary import PodSummary
from services.cli.up.status import EXAMPLE
from services.webhook.pod_admission import DeviceMaximum
from shared.dialects.dialect import Rules
from shared.dialects.pod_requests import parse_pod_request
from shared.model.events.request_reply import UsageReply
from shared.model.leases.lease import Lease, LeaseState, ShareMeasurement
from shared.model.leases.ledger import NodeTotals, counted_use
from shared.model.names import NodeName
from shared.model.requests.placement import Refusal
from shared.placing.explained import place_explained
from tests.support import build
from tests.support.api.board import projected, seen
from tests.support.placer.placing import index_of
from tests.support.snapshots import drawn
from tests.support.webhook.reviews import applied, decided, reviewed
from tools.generate.pages import DOCS, ROOT

TRY = (DOCS / "try.md").read_text()
T4_MIB = 15_360
LARGEST = DeviceMaximum(memory_mib=T4_MIB, memory_units=T4_MIB)
WIDTH = 160


def first_pod(**amounts: int) -> dict[str, Any]:
    """Return the pod that `make up` writes, with other amounts of `nvidia.com/`."""
    pod: dict[str, Any] = yaml.safe_load(EXAMPLE)
    limits = pod["spec"]["containers"][0]["resources"]["limits"]
    limits |= {f"nvidia.com/{name}": amount for name, amount in amounts.items()}
    pod["spec"]["containers"][0]["resources"]["limits"] = {
        name: str(amount) for name, amount in limits.items()
    }
    return pod


def sample_after(text: str) -> str:
    """Return the first block of code of the page after a text."""
    block = re.search(r"^```\w*\n(.*?)^```", TRY.partition(text)[2], re.MULTILINE | re.DOTALL)
    assert block is not None
    return block[1]


def leased(pod: str, node: str, gpu: int, mib: int, cores: int) -> Lease:
    share = build.share(
        f"GPU-{node}-{gpu}", gpu, device_mib=T4_MIB, memory_mib=mib, cores_percent=cores, slot=0,
        fence=1,
    )  # fmt: skip
    return build.lease(pod, node, share, state=LeaseState.ACTIVE)


def nodes(*leases: Lease, served: tuple[str, ...] = ()) -> list[NodeTotals]:
    """Return the two nodes of `make up`, with four T4 each."""
    uses, _ = counted_use(leases)
    return [
        NodeTotals(
            node=build.ledger_node(
                name,
                *(
                    (gpu, uses[gpu.uuid]) if gpu.uuid in uses else gpu
                    for gpu in build.devices(4, name, model="Tesla T4", memory_mib=T4_MIB)
                ),
                served=served,
                allocatable=build.PLENTY,
            ),
            leases=tuple(lease for lease in leases if lease.node == name),
        )
        for name in ("node-0", "node-1")
    ]


def screen(*used: tuple[Lease, int, int]) -> VisibleCluster:
    """Return what the API shows of leases with MiB and percent in use."""
    board = projected(*nodes(*(lease for lease, _, _ in used)))
    shares = tuple(
        ShareMeasurement(
            pod=lease.pod,
            namespace=lease.namespace,
            name=lease.name,
            container="main",
            device=lease.shares[0].device,
            memory_mib=mib,
            cores_percent=cores,
            processes=1,
        )
        for lease, mib, cores in used
    )
    reply = UsageReply(measured_at=0.0, shares=shares)
    board.update_measured(NodeName("node-0"), reply, now=0.0, idle_after_s=600)
    return seen(board)


def test_both_pages_name_the_limits_of_the_first_pod() -> None:
    limits = yaml.safe_load(EXAMPLE)["spec"]["containers"][0]["resources"]["limits"]
    written = [f"{name}: {amount}" for name, amount in limits.items()]

    assert f"# {', '.join(written)}\n" in (ROOT / "README.md").read_text()
    assert all(f"`{limit}`" in TRY for limit in written)


def test_a_denial_is_what_admission_says() -> None:
    decision = decided(first_pod(gpumem=20_000), largest=LARGEST)

    prefix = 'admission webhook "pods.leasehold.dev" denied the request: '
    shown = sample_after("**A request that cannot be granted is denied at once.**")
    assert " ".join(shown.split()) == prefix + decision.message


def test_a_waiting_pod_has_the_refusal_of_the_page() -> None:
    held = [
        leased(f"p{node}{gpu}", f"node-{node}", gpu, 3000, 0) for node in (0, 1) for gpu in range(4)
    ]
    pod = first_pod(gpumem=15_000)
    request = parse_pod_request(reviewed(applied(pod, decided(pod, largest=LARGEST))), Rules())
    index = index_of(*(totals.node for totals in nodes(*held, served=("nvidia.com/gpu",))))

    refusal = place_explained(request, index, build.dice())

    assert isinstance(refusal, Refusal)
    assert sample_after("**A pod that has to wait says why**").strip() == refusal.text


def test_the_list_of_gpus_is_that_of_the_command() -> None:
    first = leased("first", "node-0", 0, 3000, 50)
    lines = drawn(render.gpus(screen((first, 0, 0)).gpus(), WIDTH), WIDTH).splitlines()

    shown = sample_after("**Everyone can see who has what**").splitlines()
    begin, end = shown.index("$ leasehold gpus") + 1, shown.index("  ...")
    assert lines[: end - begin] == shown[begin:end]
    assert lines[-1] == shown[end + 1]


def test_an_audit_that_finds_nothing_says_what_it_compared() -> None:
    first = leased("first", "node-0", 0, 3000, 50)
    pod = PodSummary(pod=first.pod, namespace=first.namespace, name=first.name)
    checkpoints = {NodeName(name): () for name in ("node-0", "node-1")}
    agreed = Snapshot(read_at=0.0, nodes=tuple(nodes(first)), pods=(pod,), allocations=checkpoints)
    devices = build.devices(8, "gpu-node-1", model="Tesla T4", memory_mib=T4_MIB)
    empty = NodeTotals(node=build.ledger_node("gpu-node-1", *devices), leases=())
    installed = Snapshot(read_at=0.0, nodes=(empty,))

    texts = [drawn(audit.render(snapshot, ()), WIDTH) for snapshot in (agreed, installed)]

    assert f"$ leasehold audit\n{texts[0]}```" in TRY
    assert f"leasehold audit         # {texts[1]}" in (DOCS / "install.md").read_text()


def test_the_table_of_use_is_that_of_the_command() -> None:
    pods = [
        (leased(name, "node-0", 0, 3000, cores), 256, used)
        for name, cores, used in (("quarter", 25, 24), ("rest", 75, 70))
    ]
    view = screen(*pods).leases()

    table = render.top_table(render.top_rows(view, sort="pod"), view)

    lines = [line.rstrip() for line in drawn(table, WIDTH).splitlines()]
    shown = sample_after("`leasehold top` and the page show what each got").splitlines()
    assert shown == ["$ leasehold top", *lines]
