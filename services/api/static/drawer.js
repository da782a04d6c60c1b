// The drawer: the details of one device, lease or namespace.
import { drawChart } from "./chart.js";
import { age, clock, copyButton, detailsLink, el, measuredMib, measuredText, mib, shareText, swatch } from "./dom.js";
import { waterfall } from "./trace.js";

export class Drawer {
  constructor(state) {
    this.state = state;
    this.subject = null;
    this.charts = new Map();
    this.body = el("div");
    this.root = el("dialog", { id: "drawer", "aria-labelledby": "drawer-title" },
      el("button", { class: "close", type: "button", onclick: () => this.root.close() }, "Close"), this.body);
    this.root.addEventListener("click", (event) => { if (event.target === this.root) this.root.close(); });
    this.root.addEventListener("close", () => this.onClose());
    addEventListener("hashchange", () => this.follow());
  }

  /** Show what the fragment of the page's URL names: #KIND/ID. */
  async follow() {
    const [, kind, id] = /^#(device|lease|namespace)\/(.+)$/.exec(location.hash) ?? [];
    this.subject = kind ? [kind, decodeURIComponent(id)] : null;
    this.charts.clear();
    if (!kind) return this.root.close();
    if (!this.root.open) this.root.showModal();
    await this.draw();
  }

  /** Leave the URL of the page itself, as an entry of the history, so that Back opens the drawer again. */
  onClose() {
    if (this.subject) history.pushState(null, "", location.pathname + location.search);
    this.subject = null;
  }

  changed(kind, id) {
    if (this.subject && this.subject[0] === kind && this.subject[1] === id) this.draw();
  }

  async draw() {
    const [kind, id] = this.subject;
    let sections;
    try {
      sections = kind === "device" ? this.device(id) : kind === "lease" ? await this.lease(id) : await this.namespace(id);
    } catch (error) {
      sections = [title("Could not load"), el("p", {}, error.message)];
    }
    if (this.subject && this.subject[0] === kind && this.subject[1] === id) this.replace(sections);
  }

  replace(sections) {
    const focused = this.body.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    this.body.replaceChildren(...sections);
    if (focused) this.body.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
  }

  now() { return Date.now() / 1000 + this.state.clockOffset; }

  device(uuid) {
    const device = this.state.devices.get(uuid);
    if (!device) return [title("This device no longer exists")];
    const used = measuredMib(device);
    return [
      title(`GPU ${device.index} of ${device.node}`),
      facts({ Model: device.model, UUID: device.uuid, Health: device.healthy ? "healthy" : `UNHEALTHY${device.fault ? `: ${device.fault}` : ""}`, Mode: device.mode,
        "MIG layout": device.layout, Memory: `${mib(device.used_memory_mib)} of ${mib(device.memory_mib)} leased`, "In use": used === null ? "" : mib(used), Cores: `${device.used_cores_percent} % reserved`,
        Shares: `${device.used_shares} of ${device.slots}`, "NUMA node": device.numa, "Closed to new pods": device.excluded }),
      el("h3", {}, "Leases"),
      device.shares.length ? el("ul", {}, ...device.shares.map((share) => el("li", {}, share.pod ? swatch(share.namespace) : null,
        share.pod ? detailsLink("lease", share.pod, shareText(share)) : shareText(share)))) : el("p", {}, "No leases."),
      ...this.history("device", uuid),
    ];
  }

  async lease(uid) {
    const pod = await fetchJson(`/api/v1/leases/${encodeURIComponent(uid)}`);
    const { lease, waiting, trace } = pod;
    const sections = [title(`${pod.namespace}/${pod.name}`), el("p", {}, swatch(pod.namespace), detailsLink("namespace", pod.namespace, `namespace ${pod.namespace}`))];
    if (lease) {
      sections.push(facts({ State: lease.state, Node: lease.node, Age: age(this.now() - lease.created_at), Expires: lease.expires_at ? `${clock(lease.expires_at)}, unless bound` : "",
        Dialect: lease.dialect, Gang: lease.gang, Version: lease.version, "Pod UID": lease.pod }),
      el("h3", {}, "Shares"),
      el("ul", {}, ...lease.shares.map((share) => el("li", {}, `${share.container}${share.init ? " (init)" : ""}: ${mib(share.memory_mib)}, ${share.booked_cores} %` +
        `${share.mig ? `, ${share.mig.profile} at ${share.mig.position}` : ""}${measuredText(share)}, fence ${share.fence}, on `, detailsLink("device", share.device, `GPU ${share.index}`)))));
    }
    if (waiting) {
      sections.push(facts({ "Queue position": waiting.position, Priority: waiting.priority, Gang: waiting.gang, Age: age(this.now() - waiting.since), Reason: waiting.reason, "Next step": waiting.hint }),
        el("ul", {}, ...waiting.nearest.map((node) => el("li", {}, `${node.node}: ${node.reason}`))),
        el("h3", {}, "What would make room"), whatIf(pod));
    }
    if (!lease && !waiting) sections.push(el("p", {}, "It has no lease."));
    sections.push(el("h3", {}, "Trace"));
    if (trace.spans.length) sections.push(waterfall(trace.spans));
    if (trace.url) sections.push(el("p", {}, el("a", { href: trace.url, target: "_blank", rel: "noopener noreferrer" }, "Open the trace")));
    sections.push(el("p", {}, el("code", {}, `leasehold trace ${pod.name} -n ${pod.namespace}`)), el("p", {}, el("code", {}, `leasehold explain ${pod.name} -n ${pod.namespace}`)));
    return sections;
  }

  async namespace(name) {
    const namespace = await fetchJson(`/api/v1/namespaces/${encodeURIComponent(name)}`);
    const { budget, budget_history: history } = namespace;
    const minutes = (amount) => amount === null ? "no limit" : `${amount.toFixed(1)} GPU-minutes`;
    const sections = [title(`Namespace ${name}`), facts({ Leases: `${namespace.leases} on ${namespace.devices} GPUs`, Memory: mib(namespace.memory_mib), Waiting: namespace.waiting })];
    if (budget) {
      sections.push(el("h3", {}, "Budget"), facts({ State: budget.state, Window: budget.window, Used: minutes(budget.used_minutes), Remaining: minutes(budget.remaining_minutes),
        "Current rate": `${(budget.current_rate_milli_gpu / 1000).toFixed(2)} GPUs`, "Exhausted at": budget.exhausted_at ? new Date(budget.exhausted_at * 1000).toLocaleString() : "", "New pods": budget.new_pods }));
    }
    if (history) sections.push(el("h3", {}, "GPU-minutes used in this window"), this.chart(`budget:${name}`, () => budgetChart(history, budget)));
    sections.push(...this.history("namespace", name));
    return sections;
  }

  /** The last day of a device or namespace; the amounts are loaded once per opening. */
  history(kind, id) {
    const path = `/api/v1/${kind}s/${encodeURIComponent(id)}/history`;
    return [el("h3", {}, kind === "device" ? "Last day, percent of the GPU" : "Last day, GiB"), this.chart(`${kind}:${id}`, async () => historyChart(await fetchJson(path), kind))];
  }

  /** A chart that is kept while its subject is open, however often that changes. */
  chart(key, load) {
    if (this.charts.has(key)) return this.charts.get(key);
    const parent = el("div", { class: "chart" });
    this.charts.set(key, parent);
    Promise.resolve().then(load).then((chart) => whenAdded(parent, () => drawChart(parent, chart)))
      .catch((error) => parent.replaceChildren(`Could not load: ${error.message}`));
    return parent;
  }
}

function whenAdded(parent, draw) {
  return parent.isConnected ? draw() : new Promise((done) => requestAnimationFrame(done)).then(draw);
}

function historyChart(history, kind) {
  const isDevice = kind === "device";
  const unit = (name) => !name.includes("memory") ? 1 : isDevice ? history.memory_capacity / 100 : 1024;
  const line = (name, label, colour, dashed) => history[name] && { label, colour, dashed, values: history[name].map((value) => value === null ? null : value / unit(name)) };
  const lines = isDevice
    ? [line("memory", "Memory leased", "link"), line("used_memory", "Memory used", "good"), line("cores", "Cores leased", "warn"), line("used_cores", "Cores used", "soft")]
    : [line("memory", "Memory leased", "link"), line("used_memory", "Memory used", "good")];
  return { label: isDevice ? "Percent of the GPU, last day" : "GiB, last day", at: history.at, lines: lines.filter(Boolean), unit: isDevice ? "%" : "GiB", highest: isDevice ? 100 : 1 };
}

/** What is used, the limit, and how it goes on at the current rate. */
function budgetChart(history, budget) {
  const { points, limit_minutes: limit, end } = history, last = points.at(-1);
  const until = budget?.exhausted_at && limit !== null && budget.exhausted_at > last.at ? Math.min(budget.exhausted_at, end ?? Infinity) : null;
  const at = [...points.map((point) => point.at), ...(until ? [until] : []), ...(end && end > (until ?? last.at) ? [end] : [])];
  const column = (value) => at.map((instant, index) => value(instant, index));
  const lines = [{ label: "Used", colour: "link", values: column((_, index) => points[index]?.minutes ?? null) }];
  if (limit !== null) lines.push({ label: "Limit", colour: "bad", dashed: true, values: column(() => limit) });
  if (until) {
    const rate = budget.current_rate_milli_gpu / 60000; // GPU-minutes per second
    lines.push({ label: "At the current rate", colour: "soft", dashed: true, values: column((instant) => instant >= last.at && instant <= until ? last.minutes + rate * (instant - last.at) : null) });
  }
  return { label: "GPU-minutes used in this window", at, lines, unit: "min", highest: 1, end: at.at(-1), shown: points.length - 1 };
}

/** The command that shows whose end, or which more nodes, would let a waiting pod run. */
function whatIf(pod) {
  const command = el("code", {}, `kubectl get pod ${pod.name} -n ${pod.namespace} -o yaml | leasehold what-if -`);
  return el("p", {}, command, " ", ...copyButton(command));
}

function title(text) { return el("h2", { id: "drawer-title" }, text); }

function facts(pairs) {
  const shown = Object.entries(pairs).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return el("dl", {}, ...shown.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, `${value}`)]));
}

async function fetchJson(path) {
  const response = await fetch(path, { headers: { Accept: "application/json" } });
  const body = await response.json();
  if (!response.ok) throw new Error(body.error);
  return body;
}
