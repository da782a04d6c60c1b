// The pages of a pod and of a namespace.
import { Chart } from "./chart.js";
import { colourClass } from "./colours.js";
import { Detail, PodsOf, shareItem } from "./detail.js";
import { el, facts, fetchJson } from "./dom.js";
import { age, clock, count, gpuHours, mib, short, when, words } from "./format.js";
import { amountChart, Histories } from "./histories.js";
import { waitingItem, waitingRows } from "./lists.js";
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
    this.commands = this.part("Commands");
    this.trace = this.part("From its admission to its container", { wide: true });
    this.plan = this.part("What would be evicted for it");
    this.body.append(this.why, this.facts, this.plan, this.shares, this.commands, this.trace);
    for (const part of [this.why, this.plan, this.shares, this.trace]) part.hidden = true;
    this.poll();
  }

  async load() {
    this.found = await fetchJson(`/api/v1/leases/${encodeURIComponent(this.id)}`);
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
        "Pod UID": pod.pod,
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
    this.showCommands(podCommands(pod, Boolean(waiting)));
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

/** What the leases of a pod or a namespace had and used over time. */
function leasedHistories(app, path) {
  return new Histories(app, `/api/v1/${path}/history`, ["Memory", "Compute"], (history) => [
    amountChart(history.memory, history.used_memory, 1024, "GiB"),
    amountChart(history.cores, history.used_cores, 100, "GPUs"),
  ]);
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
    "GPU time": gpuHours(pod.gpu_hours),
    "Idle GPU time": pod.idle_gpu_hours === null ? "" : gpuHours(pod.idle_gpu_hours),
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

export class NamespacePage extends Detail {
  constructor(app, name) {
    super(app, name, [["Namespaces", url("namespaces")]]);
    this.title = name;
    this.facts = this.part("Namespace");
    this.budget = this.part("Budget");
    this.commands = this.part("Commands");
    this.showCommands({
      "Its pods and leases": `kubectl leasehold ps -n ${name}`,
      "Its budget": `kubectl leasehold budget ${name}`,
    });
    this.waits = this.part("Waiting", { wide: true });
    this.chart = new Chart("GPU-minutes used in this window");
    this.window = this.part("GPU-minutes used in this window", { wide: true });
    this.histories = leasedHistories(app, `namespaces/${encodeURIComponent(name)}`);
    this.pods = new PodsOf(app, { namespace: name }, (pod) => pod.namespace === name);
    this.closing = [this.chart, this.pods];
    this.window.hidden = this.budget.hidden = this.waits.hidden = true;
    this.body.append(
      this.facts,
      this.budget,
      this.commands,
      this.waits,
      this.histories.root,
      this.window,
      this.pods.root,
    );
    this.poll();
  }

  async load() {
    this.found = await fetchJson(`/api/v1/namespaces/${encodeURIComponent(this.id)}`);
  }

  draw(kinds) {
    const { store } = this.app;
    const namespace = store.namespaces.find((one) => one.namespace === this.id) ?? this.found;
    if (!namespace) return this.head(this.id, this.gone ? "nothing leased" : "", "");
    const { budget } = namespace;
    const minutes = (amount) =>
      amount === null
        ? "no limit"
        : budget.currency
          ? `${(amount / 60).toFixed(2)} ${budget.currency}`
          : `${amount.toFixed(1)} GPU-minutes`;
    this.head(
      this.id,
      budget ? `budget ${budget.state}` : "",
      { ok: "good", warning: "warn" }[budget?.state] ?? "bad",
    );
    this.facts.fill(
      facts({
        Leases: `${namespace.leases} on ${count(namespace.devices, "GPU")}`,
        Memory: `${mib(namespace.memory_mib)} leased`,
        GPUs: `${short(namespace.milli_gpu / 1000)} leased`,
        Waiting: namespace.waiting ? count(namespace.waiting, "pod") : "",
      }),
    );
    this.budget.fill(
      ...(budget
        ? [
            facts({
              Window: budget.window.split("+")[0],
              Used: minutes(budget.used_minutes),
              Remaining: minutes(budget.remaining_minutes),
              "Current rate": `${(budget.current_rate_milli_gpu / 1000).toFixed(2)} ${budget.currency ? `${budget.currency} per hour` : "GPUs"}`,
              "Exhausted at": budget.exhausted_at ? when(budget.exhausted_at) : "",
              "New pods": budget.new_pods,
            }),
          ]
        : []),
    );
    const waiting = store.waiting.pods.filter((pod) => pod.namespace === this.id);
    this.waits.fill(
      ...(waiting.length
        ? [
            el(
              "ol",
              { class: "cards" },
              ...waitingRows(waiting).map((row) => waitingItem(row, store.now(), true)),
            ),
          ]
        : []),
    );
    this.drawBudget(budget);
    if (kinds.has("reset") || kinds.has("devices")) this.pods.draw();
  }

  drawBudget(budget) {
    const history = this.found?.budget_history;
    if (!history) return;
    if (this.window.hidden) this.window.fill(this.chart.root);
    if (this.drawn === this.found) return;
    this.drawn = this.found;
    this.chart.draw(budgetChart(history, budget));
  }
}

/** What is used, the limit, and how it goes on at the current rate. */
function budgetChart(history, budget) {
  const { points, limit_minutes: limit, end } = history;
  const last = points.at(-1);
  const until =
    budget?.exhausted_at && limit !== null && budget.exhausted_at > last.at
      ? Math.min(budget.exhausted_at, end ?? Infinity)
      : null;
  const at = [
    ...points.map((point) => point.at),
    ...(until ? [until] : []),
    ...(end && end > (until ?? last.at) ? [end] : []),
  ];
  const column = (value) => at.map((instant, index) => value(instant, index));
  /** @type {{label: string, colour: string, fill?: string, dashed?: boolean, values: any[]}[]} */
  const lines = [
    {
      label: "Used",
      colour: "used",
      fill: "40",
      values: column((_, index) => points[index]?.minutes ?? null),
    },
  ];
  if (limit !== null)
    lines.push({ label: "Limit", colour: "bad", dashed: true, values: column(() => limit) });
  if (until) {
    const rate = budget.current_rate_milli_gpu / 60000; // GPU-minutes per second
    lines.push({
      label: "At the current rate",
      colour: "soft",
      dashed: true,
      values: column((instant) =>
        instant >= last.at && instant <= until ? last.minutes + rate * (instant - last.at) : null,
      ),
    });
  }
  return { at, lines, unit: "min", highest: 1, end: at.at(-1), shown: points.length - 1 };
}
