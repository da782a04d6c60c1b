// The drawer: the details of one device, lease or namespace.
import { age, clock, detailsLink, el, measuredMib, measuredText, mib, shareText, swatch } from "./dom.js";

export class Drawer {
  constructor(state) {
    this.state = state;
    this.subject = null;
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
        "MIG layout": device.layout, Memory: `${mib(device.used_mib)} of ${mib(device.memory_mib)} leased`, "In use": used === null ? "" : mib(used), Cores: `${device.used_cores} % reserved`,
        Shares: `${device.used_shares} of ${device.slots}`, "NUMA node": device.numa, Excluded: device.excluded ? "from new shares" : "" }),
      el("h3", {}, "Leases"),
      device.shares.length ? el("ul", {}, ...device.shares.map((share) => el("li", {}, share.pod ? swatch(share.namespace) : null,
        share.pod ? detailsLink("lease", share.pod, shareText(share)) : shareText(share)))) : el("p", {}, "No leases."),
    ];
  }

  async lease(uid) {
    const response = await fetchJson(`/api/v1/leases/${encodeURIComponent(uid)}`);
    const { lease, waiting, trace } = response;
    const pod = lease ?? waiting;
    const sections = [title(`${pod.namespace}/${pod.name}`), el("p", {}, swatch(pod.namespace), detailsLink("namespace", pod.namespace, `namespace ${pod.namespace}`))];
    if (lease) {
      sections.push(facts({ State: lease.state, Node: lease.node, Age: age(this.now() - lease.created_at), Expires: lease.expires_at ? `${clock(lease.expires_at)}, unless bound` : "",
        Dialect: lease.dialect, Gang: lease.gang, Version: lease.version, "Pod UID": lease.pod }),
      el("h3", {}, "Shares"),
      el("ul", {}, ...lease.shares.map((share) => el("li", {}, `${share.container}${share.init ? " (init)" : ""}: ${mib(share.memory_mib)}, ${share.booked_cores} %` +
        `${share.mig ? `, ${share.mig.profile} at ${share.mig.position}` : ""}${measuredText(share)}, fence ${share.fence}, on `, detailsLink("device", share.device, `GPU ${share.index}`)))));
    }
    if (waiting) {
      sections.push(facts({ "Queue position": waiting.position, Priority: waiting.priority, Age: age(this.now() - waiting.since), Reason: waiting.reason, "Next step": waiting.hint }),
        el("ul", {}, ...waiting.nearest.map((node) => el("li", {}, `${node.node}: ${node.reason}`))));
    }
    sections.push(el("h3", {}, "Trace"));
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
    if (history) sections.push(el("h3", {}, history.has_limit ? "Remaining in this window" : "Used in this window"), drawChart(history.points));
    return sections;
  }
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

function drawChart(points) {
  const namespace = "http://www.w3.org/2000/svg";
  const highest = Math.max(...points.map((point) => point.minutes), 0.001), lowest = Math.min(0, ...points.map((point) => point.minutes));
  const start = points[0].at, span = Math.max(points.at(-1).at - start, 1);
  const line = points.map((point, index) => `${index ? "L" : "M"}${(300 * (point.at - start) / span).toFixed(1)} ${(96 - 92 * (point.minutes - lowest) / (highest - lowest)).toFixed(1)}`).join("");
  const chart = document.createElementNS(namespace, "svg"), path = document.createElementNS(namespace, "path");
  chart.setAttribute("viewBox", "0 0 300 100");
  chart.setAttribute("preserveAspectRatio", "none");
  chart.setAttribute("class", "chart");
  chart.setAttribute("role", "img");
  chart.setAttribute("aria-label", `from ${points[0].minutes.toFixed(1)} to ${points.at(-1).minutes.toFixed(1)} GPU-minutes`);
  path.setAttribute("d", line);
  chart.append(path);
  return chart;
}
