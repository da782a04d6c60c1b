// The page of a pod.
import { colourClass } from "./colours.js";
import { Detail, shareItem } from "./detail.js";
import { el, facts, fetchJson } from "./dom.js";
import { age, clock, count, gpuHours, mib, money, percent, when, words } from "./format.js";
import { leasedHistories } from "./histories.js";
import { PodObject } from "./pod_object.js";
import { url } from "./route.js";
import { waterfall } from "./trace.js";

const POD_POLL_MS = 15_000; // its events load it at once

export class PodPage extends Detail {
  kinds = ["devices", "waiting", "events"];

  constructor(app, uid) {
    super(app, uid, [["Pods", url("pods")]], POD_POLL_MS);
    this.lastEvent = app.store.events[0]?.number ?? 0;
    this.title = "Pod";
    this.why = this.part("Why it waits", { wide: true });
    this.facts = this.part("Pod");
    this.shares = this.part("Shares");
    this.processes = this.part("Processes on GPUs");
    this.commands = this.part("Commands");
    this.trace = this.part("From its admission to its container", { wide: true });
    this.plan = this.part("What would be evicted for it");
    this.object = new PodObject(this);
    this.body.append(
      this.why,
      this.facts,
      this.plan,
      this.shares,
      this.processes,
      this.commands,
      this.trace,
      ...this.object.parts,
    );
    for (const part of [this.why, this.plan, this.shares, this.processes, this.trace])
      part.hidden = true;
    this.poll();
  }

  async load() {
    if (this.id.includes("/")) this.id = await uidOf(this.id);
    this.found = await fetchJson(`/api/v1/leases/${encodeURIComponent(this.id)}`);
    // Not awaited: a slow API server does not delay the rest.
    this.object.load(this.found).then(() => this.object.draw(this.app.store.now()));
  }

  /** Show which pods a preemption would evict, as a binder would plan it now. */
  async askPlan() {
    this.planned = true;
    this.plan.fill(el("p", { class: "soft" }, "Planning…"));
    const found = await fetchJson(`/api/v1/preemptions/${encodeURIComponent(this.id)}`).catch(
      (error) => ({ reason: error.message }),
    );
    const { plan, reason } = found;
    const victims = plan?.victims ?? [];
    this.plan.fill(
      el(
        "p",
        {},
        plan
          ? `It would run on ${plan.node}${victims.length ? " without these pods:" : "."}`
          : `No preemption would help: ${reason}`,
      ),
      el(
        "ul",
        { class: "plain" },
        ...victims.map((victim) =>
          el(
            "li",
            {},
            `${victim.pod}, which loses ${gpuHours(victim.gpu_s_lost / 3600)}${victim.bare ? "; no controller replaces it" : ""}`,
          ),
        ),
      ),
    );
  }

  /** Load the pod again if something has happened to it. */
  follow() {
    const { events } = this.app.store;
    const last = this.lastEvent;
    this.lastEvent = events[0]?.number ?? 0;
    if (events.some((event) => event.pod === this.id && event.number > last)) this.poll();
  }

  draw(kinds) {
    if (kinds.has("events")) this.follow();
    const pod = this.found;
    if (!pod) return this.head(this.gone ? "No such pod" : "…", this.gone ?? "", "");
    const { lease, waiting, trace } = pod;
    const running = this.app.store.pods().get(this.id);
    const state = waiting
      ? "waiting"
      : (running?.state ?? lease?.state ?? (pod.finished?.reason || "ended").toLowerCase());
    this.title = `${pod.namespace}/${pod.name}`;
    document.title = `${this.title} · Leasehold`;
    this.head(this.title, state, `pod-${state}`);
    this.name.className = "";
    this.facts.fill(
      facts({
        Namespace: el(
          "a",
          { href: url("namespace", pod.namespace), class: "name", "data-key": "namespace" },
          el("span", { class: `dot ${colourClass(pod.namespace)}`, "aria-hidden": "true" }),
          pod.namespace,
        ),
        ...(lease ? leaseFacts(lease, this.app.store.now()) : {}),
        ...(waiting ? waitingFacts(waiting, this.app.store.now()) : {}),
        ...(pod.finished && !lease && !waiting ? finishedFacts(pod.finished) : {}),
        Gang: pod.gang ? gangText(pod.gang) : "",
        ...costFacts(pod.cost),
        "Pod UID": pod.pod,
        Link: el(
          "a",
          { href: `#/pod/${encodeURI(this.title)}`, "data-key": "link" },
          `#/pod/${this.title}`,
        ),
      }),
      ...(lease || waiting || pod.finished ? [] : [el("p", { class: "soft" }, "It has no lease.")]),
    );
    this.why.fill(...(waiting ? whyParts(waiting) : []));
    if (!waiting) this.plan.fill();
    else if (!this.planned)
      this.plan.fill(
        el(
          "button",
          { type: "button", "data-key": "plan", onclick: () => this.askPlan() },
          "Find out",
        ),
        el("p", { class: "soft" }, "Shows the pods only: none is evicted."),
      );
    this.shares.fill(
      ...(lease
        ? [
            el(
              "ul",
              { class: "shares" },
              ...lease.shares.map((share) =>
                shareItem(
                  share,
                  pod.namespace,
                  el(
                    "a",
                    {
                      href: url("gpu", share.device),
                      "data-key": `gpu:${share.device}:${share.container}`,
                    },
                    `GPU ${share.index}`,
                  ),
                  `${share.container}${share.init ? " (init)" : ""}`,
                ),
              ),
            ),
          ]
        : []),
    );
    this.processes.fill(...(pod.processes?.length ? [processList(pod.processes)] : []));
    this.showCommands(podCommands(pod, Boolean(waiting)));
    this.object.draw(this.app.store.now());
    if (!this.histories && (lease || pod.finished)) {
      // a pod without a lease has none
      this.histories = leasedHistories(this.app, `leases/${encodeURIComponent(this.id)}`);
      this.trace.before(this.histories.root);
    }
    this.trace.fill(
      ...(trace.spans.length ? [waterfall(trace.spans)] : []),
      ...(trace.url
        ? [
            el(
              "p",
              {},
              el(
                "a",
                {
                  href: trace.url,
                  target: "_blank",
                  rel: "noopener noreferrer",
                  "data-key": "trace",
                },
                "Open the trace",
              ),
            ),
          ]
        : []),
    );
  }
}

/** The UID of the pod that has, or had last, a name of the form NAMESPACE/NAME. */
async function uidOf(id) {
  const [namespace, name] = id.split("/");
  const query = new URLSearchParams({ namespace, name });
  const { leases, waiting } = await fetchJson(`/api/v1/leases?${query}`);
  const live = leases.find((lease) => !lease.claim) ?? waiting[0];
  if (live) return live.pod;
  const { pods } = await fetchJson(`/api/v1/finished?${query}`);
  if (pods.length) return pods[0].pod;
  const reason = `no pod ${id} that you may see has a lease, waits, or finished within a day`;
  throw Object.assign(new Error(reason), { status: 404 });
}

/** Its processes as the driver lists them, with their PIDs on the node and in the container. */
function processList(processes) {
  return el(
    "ul",
    { class: "plain" },
    ...processes.map((process) => {
      const inside = process.inner_pid ? `, ${process.inner_pid} in ${process.container}` : "";
      const uses = [
        `GPU ${process.index}`,
        process.memory_mib !== null && mib(process.memory_mib),
        process.cores_percent !== null && `${process.cores_percent} % of the cores`,
      ].filter(Boolean);
      return el(
        "li",
        {},
        el("b", {}, process.command || "?"),
        el("span", { class: "soft" }, ` PID ${process.pid}${inside}: ${uses.join(", ")}`),
      );
    }),
  );
}

/** What a pod costs and draws, and which part of its GPU time is idle. */
function costFacts(cost) {
  if (!cost) return {};
  const { gpu_hours: hours, idle_gpu_hours: idle, currency, power_w: watts } = cost;
  const hasPrice = cost.so_far !== null;
  return {
    "GPU time so far": gpuHours(hours),
    Wasted: idle ? `${percent(idle, hours)} %: ${gpuHours(idle)} idle` : "",
    Cost: hasPrice
      ? `${money(cost.so_far, currency)}, ${money(cost.per_hour, currency)} per hour`
      : "",
    Power: watts === null ? "" : `${Math.round(watts)} W, its part of what its GPUs draw`,
  };
}

function leaseFacts(lease, now) {
  const unhealthy = Object.entries(lease.unhealthy_devices ?? {})
    .map(([, fault]) => fault)
    .join("; ");
  return {
    Node: el("a", { href: url("node", lease.node), "data-key": "node" }, lease.node),
    Age: `${age(now - lease.created_at)}, since ${when(lease.created_at)}`,
    Expires: lease.expires_at ? `${clock(lease.expires_at)}, unless bound` : "",
    Until: lease.ends_by ? `${when(lease.ends_by)} at the latest` : "",
    "Resource names": lease.system,
    "Its GPU is unhealthy": unhealthy,
    "Why this node": lease.weighed,
  };
}

function finishedFacts(pod) {
  const used = [
    pod.used_memory_mib !== null && mib(pod.used_memory_mib),
    pod.used_cores_percent !== null && `${pod.used_cores_percent} % of the cores`,
  ]
    .filter(Boolean)
    .join(", ");
  return {
    Node: el("a", { href: url("node", pod.node), "data-key": "node" }, pod.node),
    Ended: `${when(pod.ended)}, after ${age(pod.ended - pod.started)}`,
    Reason: pod.reason,
    Leased: `${mib(pod.memory_mib)}, ${pod.cores_percent} % of the cores`,
    "Average use": used,
  };
}

function gangText({ name, min_member: least, holding, waiting }) {
  return `${name}: ${count(holding.length, "pod")} with a lease, ${waiting.length} waiting${least ? `, ${least} run together` : ""}`;
}

function waitingFacts(waiting, now) {
  const place = waiting.queue;
  return {
    "Waits for": age(now - waiting.since),
    Position: waiting.position
      ? `${waiting.position}${place ? ` of ${place.of}` : ""}${place?.after ? `, after ${place.after}${place.after_reason ? ` (${place.after_reason})` : ""}` : ""}`
      : "",
    Priority: waiting.priority,
  };
}

/** The reason, what to try, and the nodes that are nearest to fitting. */
function whyParts(waiting) {
  return [
    el("p", { class: "reason" }, waiting.reason),
    waiting.start || waiting.no_end
      ? el("p", { class: "start" }, waiting.start?.text ?? waiting.no_end)
      : null,
    waiting.filter_reason && waiting.scheduler_reason
      ? el("p", { class: "soft" }, `Leasehold's extender refused it last: ${waiting.filter_reason}`)
      : null,
    waiting.hint ? el("p", { class: "hint" }, waiting.hint) : null,
    el(
      "ul",
      { class: "counts" },
      ...waiting.counts
        .filter((one) => one.nodes)
        .map((one) =>
          el(
            "li",
            {},
            el("b", {}, `${one.nodes}`),
            ` ${one.nodes === 1 ? "node" : "nodes"}: ${words(one.reason)}`,
          ),
        ),
    ),
    waiting.nearest?.length ? el("h3", {}, "Nearest nodes") : null,
    waiting.nearest?.length
      ? el(
          "ul",
          { class: "plain" },
          ...waiting.nearest.map((node) =>
            el(
              "li",
              {},
              el("a", { href: url("node", node.node), "data-key": `near:${node.node}` }, node.node),
              `: ${node.reason}`,
            ),
          ),
        )
      : null,
  ].filter(Boolean);
}

function podCommands({ name, namespace }, waits) {
  const pod = `${name} -n ${namespace}`;
  return {
    [waits ? "Why it waits" : "Why it runs there"]: `kubectl leasehold explain ${pod}`,
    ...(waits
      ? { "What would make room": `kubectl get pod ${pod} -o yaml | kubectl leasehold what-if -` }
      : { "Its log": `kubectl logs ${pod}` }),
    "Its events": `kubectl describe pod ${pod}`,
    "Its trace": `kubectl leasehold trace ${pod}`,
  };
}
