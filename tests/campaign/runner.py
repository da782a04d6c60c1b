"""Runs a campaign: rounds of pods and faults, each followed by calm in which it must settle."""

import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from shared.kubernetes.errors import NotFoundError
from shared.model.errors import ConflictError, LeaseholdError
from tests.campaign.events import CampaignEvent, changes, stories
from tests.campaign.report import CampaignResult
from tests.campaign.schedule import SERVICES, Fault, PodAction, Round
from tests.campaign.stack.cluster import CampaignCluster, campaign_cluster, resident_mib
from tests.campaign.stack.faults import FaultInjector
from tests.campaign.stack.observer import PODS, Observer, read_spans
from tests.campaign.workload import RESIZED_ANNOTATION, PodPlan, manifest
from tests.proof.history import Finding
from tests.proof.judge import Judge
from tests.proof.observations import Resources, Sample
from tests.support.stack import command

SAMPLE_S = 0.25
SETTLE_LIMIT_S = 45.0
SETTLED_SAMPLES = 3
"""As many samples in a row without anything outstanding are quiescence."""
LONG_CALM_S = 5.0
"""From here on it is reported what was awaited last."""
CREATE_LIMIT_S = 8.0
RETRY_S = 0.2

Report = Callable[[str], None]


class CampaignRunner:
    """One campaign on one cluster."""

    def __init__(
        self, cluster: CampaignCluster, *, seed: int, patience: float, report: Report
    ) -> None:
        self.cluster = cluster
        self.report = report
        self.observer = Observer(cluster)
        self.injector = FaultInjector(cluster)
        self.judge = Judge(patience)
        self.settle_limit_s = SETTLE_LIMIT_S * patience
        self.events: list[CampaignEvent] = []
        self.result = CampaignResult(seed=seed)
        self.began_at = time.time()
        self._reported = 0
        """How many violations were reported."""
        self._awaited: tuple[Finding, ...] = ()
        """What the last sample before quiescence waited for."""
        self._sample: Sample | None = None
        self._new_sample = asyncio.Condition()

    async def run(self, rounds: Sequence[Round], seconds: float) -> CampaignResult:
        """Run rounds until all are done or the time is over; then clear up and judge the rest."""
        async with self.observer.session(), asyncio.TaskGroup() as tasks:
            sampling = tasks.create_task(self._sample_forever())
            await self._start()
            await self._settle()
            if not self.cluster.clocks.compiler:
                self.report("no C compiler (cc or gcc): faults of kind `clock` do nothing")
            await self.injector.upgrade_drivers()
            await self._settle()
            self.result.begin = await self._resources()
            for planned_round in rounds:
                if time.time() - self.began_at > seconds:
                    break
                await self._run_round(planned_round)
            await self._delete_all_pods()
            await self._settle()
            self.result.end = await self._resources()
            self.judge.judge_resources(self.result.begin, self.result.end, time.time())
            sampling.cancel()
        spans = await asyncio.to_thread(read_spans, self.cluster.directory.traces)
        self.judge.judge_traces(spans, time.time())
        self._report_stories()
        self.result.violations = self.judge.violations
        self.result.coverage = str(self.judge.coverage)
        self.result.pods = len(self.judge.history.pods)
        return self.result

    async def _run_round(self, planned_round: Round) -> None:
        self.judge.begin_round(
            redis_lost=planned_round.rebuilds, hostile=planned_round.hostile_nodes
        )
        began_at = time.time()
        names = ", ".join(map(str, planned_round.faults))
        if "redis-rollback" in planned_round.kinds:
            await self.injector.save_redis()
        async with asyncio.TaskGroup() as tasks:
            for pods in planned_round.pods:
                tasks.create_task(self._at(began_at + pods.at_s, self._act(pods)))
            for fault in planned_round.faults:
                tasks.create_task(self._at(began_at + fault.at_s, self._make(fault)))
        quiet_s = await self._settle()
        await self._audit()
        self.result.rounds += 1
        for kind in planned_round.kinds:
            self.result.quiet_s.setdefault(kind, []).append(quiet_s)
        self.report(
            f"{time.time() - self.began_at:6.0f} s  round {planned_round.number}: {names}; "
            f"settled after {quiet_s:.1f} s{self._last_of(quiet_s)}, "
            f"violations {len(self.judge.violations)}"
        )
        self._report_stories()

    def _last_of(self, quiet_s: float) -> str:
        """Return what was awaited last in a calm that was long."""
        if quiet_s < LONG_CALM_S or not self._awaited:
            return ""
        shown = "; ".join(
            f"{finding.check} {finding.subject}: {finding.text}" for finding in self._awaited[:3]
        )
        return f" (last: {shown})"

    def _report_stories(self) -> None:
        """Report the violations that were found since the last call."""
        violations = self.judge.violations[self._reported :]
        self._reported += len(violations)
        for story in stories(violations, self.events, self.began_at):
            self.report(f"{story}\n")

    async def _at(self, at: float, action: Awaitable[None]) -> None:
        await asyncio.sleep(max(at - time.time(), 0.0))
        await action

    async def _make(self, fault: Fault) -> None:
        self.result.faults[fault.kind] += 1
        self._note(f"fault begins: {fault}")
        await self.injector.begin(fault)
        await asyncio.sleep(fault.lasts_s)
        await self.injector.end(fault)
        self._note(f"fault ends: {fault.kind} {fault.target}")

    def _note(self, text: str) -> None:
        self.events.append(CampaignEvent(at=time.time(), text=text, fault=True))

    async def _act(self, action: PodAction) -> None:
        """Create or delete a pod; try again while the API server does not answer."""
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(contextlib.suppress(TimeoutError))
            await stack.enter_async_context(asyncio.timeout(CREATE_LIMIT_S))
            while not await self._acted(action):
                await asyncio.sleep(RETRY_S)

    async def _acted(self, action: PodAction) -> bool:
        kube = self.cluster.kube
        path = f"{PODS}/{action.name}"
        try:
            if action.verb == "resize":
                await self._resize(action.pod)
            elif action.pod is not None:
                created = json.loads(await kube.create(PODS, manifest(action.pod)))
                self.cluster.limits.make_pod(created["metadata"]["uid"])
            else:
                await kube.delete(path, grace_s=0 if action.verb == "remove" else None)
        except NotFoundError:
            return True
        except ConflictError:  # the pod of this name is still there
            return False
        except LeaseholdError as error:
            return action.pod is not None and "denied" in str(error)
        return True

    async def _resize(self, pod: PodPlan | None) -> None:
        """Resize a bound pod's share, which may be refused; it counts as no more than that."""
        assert pod is not None
        if not json.loads(await self.cluster.kube.read(f"{PODS}/{pod.name}"))["spec"].get(
            "nodeName"
        ):
            return
        annotations = manifest(pod)["metadata"]["annotations"] | {RESIZED_ANNOTATION: "1"}
        patch = {"metadata": {"annotations": annotations}}
        await self.cluster.kube.patch_merge(f"{PODS}/{pod.name}", patch)
        flags = ("--memory", f"{pod.want.mib}Mi", "-c", "main", "--state", str(self.cluster.root))
        await command("resize", pod.name, *flags)

    async def _delete_all_pods(self) -> None:
        sample = await self._next_sample()
        names = [pod.name for pod in (sample.pods or {}).values()]
        await asyncio.gather(
            *(self._act(PodAction(at_s=0.0, verb="delete", name=name)) for name in names)
        )

    # Samples

    async def _sample_forever(self) -> None:
        while True:
            faults = tuple(fault.kind for fault in self.injector.at_work)
            sample = await self.observer.sample(faults)
            self.events += changes(self._sample, sample)
            self.judge.observe(sample, cannot_work=self.injector.cannot_work())
            self._sample = sample
            async with self._new_sample:
                self._new_sample.notify_all()
            await asyncio.sleep(SAMPLE_S)

    async def _next_sample(self) -> Sample:
        async with self._new_sample:
            await self._new_sample.wait()
        assert self._sample is not None
        return self._sample

    async def _start(self) -> None:
        """Wait until every part is ready: no promise says how long a first start takes."""
        until = time.time() + self.settle_limit_s
        while (await self._next_sample()).unready and time.time() < until:
            pass

    async def _settle(self) -> float:
        """Wait until nothing is outstanding; return how long that took. Judge what stays."""
        ended_at = time.time()
        self.judge.end_faults(ended_at)
        in_a_row = 0
        quiet_at = ended_at
        self._awaited = ()
        while in_a_row < SETTLED_SAMPLES:
            sample = await self._next_sample()
            if sample.at < ended_at:
                continue
            self.judge.judge_liveness(sample.at)
            if not self.judge.is_settled():
                in_a_row = 0
                self._awaited = self.judge.outstanding
            else:
                in_a_row += 1
                quiet_at = sample.at if in_a_row == 1 else quiet_at
            if sample.at - ended_at > self.settle_limit_s:
                self._restart_all()
                return sample.at - ended_at
        return quiet_at - ended_at

    def _restart_all(self) -> None:
        """Restart every part, as an operator would who sees no other way."""
        self._note("did not settle: every part but Redis and the API server is restarted")
        for part in (*SERVICES, "nats"):
            self.cluster.send_signal(part, signal.SIGKILL)

    async def _audit(self) -> None:
        state = ("--state", str(self.cluster.root))
        done = await command("audit", "--json", *state, limit_s=120.0)
        await self._next_sample()
        with contextlib.suppress(ValueError):
            self.judge.judge_audit(json.loads(done.out), time.time())

    async def _resources(self) -> Resources:
        ledger = (await self._next_sample()).ledger
        return Resources(memory_mib=resident_mib(self.cluster), keys=ledger.keys if ledger else 0)


async def run_campaign(
    rounds: Sequence[Round], *, seed: int, seconds: float, patience: float, kept: Path | None
) -> tuple[CampaignResult, list[CampaignEvent], float]:
    """Run a campaign on a stack of its own; return its result, what happened and its beginning."""
    async with campaign_cluster(kept=kept) as cluster:
        runner = CampaignRunner(
            cluster,
            seed=seed,
            patience=patience,
            report=lambda text: print(text, file=sys.stderr),
        )
        result = await runner.run(rounds, seconds)
        return result, runner.events, runner.began_at
