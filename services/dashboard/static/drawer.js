// The drawer: one device, lease or namespace in full.
import { age, clock, el, mib, shareText, swatch } from "./words.js";

export class Drawer {
  constructor(state) {
    this.state = state;
    this.subject = null;
    this.body = el("div");
    this.root = el("dialog", { id: "drawer", "aria-labelledby": "drawer-title" },
      el("button", { class: "close", type: "button", onclick: () => this.root.close() }, "Close"), this.body);
    this.root.addEventListener("click", (event) => { if (event.target === this.root) this.root.close(); });
    this.root.addEventListener("close", () => { this.subject = null; });
  }

  async open(kind, id) {
    this.subject = [kind, id];
    if (!this.root.open) this.root.showModal();
    await this.draw();
  }

  changed(kind, id) {
    if (this.subject && this.subject[0] === kind && this.subject[1] === id) this.draw();
  }

  async draw() {
    const [kind, id] = this.subject;
    let parts;
    try {
      parts = kind === "device" ? this.device(id) : kind === "lease" ? await this.lease(id) : await this.namespace(id);
    } catch (error) {
      parts = [title("Not to be seen"), el("p", {}, error.message)];
    }
    if (this.subject && this.subject[0] === kind && this.subject[1] === id) this.replace(parts);
  }

  replace(parts) {
    const focused = this.body.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    this.body.replaceChildren(...parts);
    if (focused) this.body.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
  }

  link(kind, id, text) {
    return el("button", { class: "plainlink", type: "button", "data-key": `${kind}:${id}`, onclick: () => this.open(kind, id) }, text);
  }

  now() { return Date.now() / 1000 + this.state.ahead; }

  device(uuid) {
    const device = this.state.devices.get(uuid);
    if (!device) return [title("This device is gone")];
    return [
      title(`GPU ${device.index} of ${device.node}`),
      facts({ Model: device.model, UUID: device.uuid, Health: device.healthy ? "healthy" : "UNHEALTHY", Mode: device.mode,
        "MIG layout": device.layout, Memory: `${mib(device.used_mib)} of ${mib(device.memory_mib)}`, Cores: `${device.used_cores} % reserved`,
        Shares: `${device.used_shares} of ${device.slots}`, "NUMA node": device.numa, Closed: device.closed ? "to new shares" : "" }),
      el("h3", {}, "Leases"),
      device.shares.length ? el("ul", {}, ...device.shares.map((share) => el("li", {}, share.pod ? swatch(share.namespace) : null,
        share.pod ? this.link("lease", share.pod, shareText(share)) : shareText(share)))) : el("p", {}, "Nobody is on it."),
    ];
  }

  async lease(pod) {
    const told = await asked(`/api/v1/leases/${encodeURIComponent(pod)}`);
    const { lease, waiting, trace } = told;
    const known = lease ?? waiting;
    const parts = [title(`${known.namespace}/${known.name}`), el("p", {}, swatch(known.namespace), this.link("namespace", known.namespace, `namespace ${known.namespace}`))];
    if (lease) {
      parts.push(facts({ State: lease.state, Node: lease.node, For: age(this.now() - lease.created_at), Until: lease.expires_at ? `${clock(lease.expires_at)}, unless bound` : "",
        "Asked in words of": lease.dialect, Gang: lease.gang, Version: lease.version, "Pod uid": lease.pod }),
      el("h3", {}, "Shares"),
      el("ul", {}, ...lease.shares.map((share) => el("li", {}, `${share.container}${share.init ? " (init)" : ""}: ${mib(share.memory_mib)}, ${share.cores_percent} %` +
        `${share.mig ? `, ${share.mig.profile} at ${share.mig.position}` : ""}, fence ${share.fence}, on `, this.link("device", share.device, `GPU ${share.index}`)))));
    }
    if (waiting) {
      parts.push(facts({ Place: `${waiting.place} in the queue`, Priority: waiting.priority, For: age(this.now() - waiting.since), Why: waiting.reason, "Next to try": waiting.hint }),
        el("ul", {}, ...waiting.nearest.map((one) => el("li", {}, `${one.node}: ${one.reason}`))));
    }
    parts.push(el("h3", {}, "Trace"));
    if (trace.url) parts.push(el("p", {}, el("a", { href: trace.url, target: "_blank", rel: "noopener noreferrer" }, "Open the trace")));
    parts.push(el("p", {}, el("code", {}, `leasehold trace ${known.name} -n ${known.namespace}`)), el("p", {}, el("code", {}, `leasehold explain ${known.name} -n ${known.namespace}`)));
    return parts;
  }

  async namespace(name) {
    const told = await asked(`/api/v1/namespaces/${encodeURIComponent(name)}`);
    const { budget, burn } = told;
    const minutes = (amount) => amount === null ? "no limit" : `${amount.toFixed(1)} GPU-minutes`;
    const parts = [title(`Namespace ${name}`), facts({ Leases: `${told.leases} on ${told.devices} GPUs`, Memory: mib(told.memory_mib), Waiting: told.waiting })];
    if (budget) {
      parts.push(el("h3", {}, "Budget"), facts({ State: budget.state, Window: budget.window, Used: minutes(budget.used_minutes), Left: minutes(budget.remaining_minutes),
        "Burns now": `${(budget.burn_milli_gpu / 1000).toFixed(2)} GPUs`, "Spent at": budget.exhausted_at ? new Date(budget.exhausted_at * 1000).toLocaleString() : "", "New pods": budget.new_pods }));
    }
    if (burn) parts.push(el("h3", {}, burn.has_limit ? "Left in this window" : "Used in this window"), drawBurn(burn.points));
    return parts;
  }
}

function title(text) { return el("h2", { id: "drawer-title" }, text); }

function facts(pairs) {
  const shown = Object.entries(pairs).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return el("dl", {}, ...shown.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, `${value}`)]));
}

async function asked(path) {
  const answer = await fetch(path, { headers: { Accept: "application/json" } });
  const told = await answer.json();
  if (!answer.ok) throw new Error(told.error);
  return told;
}

function drawBurn(points) {
  const space = "http://www.w3.org/2000/svg";
  const most = Math.max(...points.map((one) => one.minutes), 0.001), least = Math.min(0, ...points.map((one) => one.minutes));
  const from = points[0].at, span = Math.max(points.at(-1).at - from, 1);
  const line = points.map((one, at) => `${at ? "L" : "M"}${(300 * (one.at - from) / span).toFixed(1)} ${(96 - 92 * (one.minutes - least) / (most - least)).toFixed(1)}`).join("");
  const picture = document.createElementNS(space, "svg"), path = document.createElementNS(space, "path");
  picture.setAttribute("viewBox", "0 0 300 100");
  picture.setAttribute("preserveAspectRatio", "none");
  picture.setAttribute("class", "burn");
  picture.setAttribute("role", "img");
  picture.setAttribute("aria-label", `from ${points[0].minutes.toFixed(1)} to ${points.at(-1).minutes.toFixed(1)} GPU-minutes`);
  path.setAttribute("d", line);
  picture.append(path);
  return picture;
}
