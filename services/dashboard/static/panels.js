// What waits, what happens, namespaces, and who is silent.
import { age, clock, el, mib, swatch, took } from "./words.js";

const LINES = 60;

export class Panels {
  constructor(state, open) {
    this.state = state;
    this.open = open;
    this.queue = el("ol");
    this.queueHead = el("small");
    this.ticker = el("ol");
    this.names = el("ul");
    this.root = el("aside", { class: "panels", "aria-label": "Waiting pods, namespaces, news" },
      el("section", { id: "waiting", "aria-label": "Waiting" }, el("h2", {}, "Waiting", this.queueHead), this.queue),
      el("section", { id: "namespaces", "aria-label": "Namespaces" }, el("h2", {}, "Namespaces"), this.names),
      el("section", { id: "ticker", "aria-label": "News" }, el("h2", {}, "News"), this.ticker));
  }

  now() { return Date.now() / 1000 + this.state.ahead; }

  drawQueue() {
    const { total, hidden, pods } = this.state.waiting;
    this.queueHead.textContent = `${total}${hidden ? `, ${hidden} of them of others` : ""}`;
    this.queue.replaceChildren(...pods.map((pod) => el("li", {},
      el("span", { class: "ms" }, age(this.now() - pod.since)),
      `${pod.place}. `, swatch(pod.namespace), this.link("lease", pod.pod, `${pod.namespace}/${pod.name}`),
      el("p", {}, pod.reason))));
    if (!total) this.queue.replaceChildren(el("li", {}, "Nothing waits."));
  }

  drawNames() {
    this.names.replaceChildren(...this.state.namespaces.map((one) => el("li", {},
      el("span", { class: `ms state-${one.budget?.state ?? "none"}` }, one.budget ? `budget ${one.budget.state}` : ""),
      swatch(one.namespace), this.link("namespace", one.namespace, one.namespace),
      el("p", {}, `${one.leases} leases on ${one.devices} GPUs, ${mib(one.memory_mib)}${one.waiting ? `, ${one.waiting} waiting` : ""}`))));
  }

  drawTicker(lines) {
    for (const line of lines) {
      const kind = line.kind.endsWith("failed") || line.kind.endsWith("refused") ? "bad" : line.kind;
      this.ticker.prepend(el("li", {},
        el("span", { class: "ms" }, took(line.latency_s)), `${clock(line.at)} `,
        el("b", { class: `kind-${kind}` }, line.kind), " ",
        line.pod ? this.link("lease", line.pod, `${line.namespace}/${line.name}`) : `${line.namespace}/${line.name}`,
        line.node ? ` on ${line.node}` : "", line.text ? el("p", {}, line.text) : null));
    }
    while (this.ticker.children.length > LINES) this.ticker.lastChild.remove();
  }

  drawBanner() {
    const banner = document.getElementById("banner");
    const lines = this.state.silent.map((one) => `${one.text} since ${age(this.now() - one.since)}`);
    if (this.state.offline) lines.unshift(`The dashboard does not answer: what is shown was true at ${clock(this.state.offline)}`);
    banner.hidden = !lines.length;
    const list = banner.querySelector("ul");
    if (list.textContent !== lines.join("")) list.replaceChildren(...lines.map((line) => el("li", {}, line)));
  }

  drawTotals() {
    const devices = [...this.state.devices.values()];
    const held = devices.reduce((sum, one) => sum + one.used_mib, 0);
    const all = devices.reduce((sum, one) => sum + one.memory_mib, 0);
    const bad = devices.filter((one) => !one.healthy).length;
    const pair = (number, word) => el("span", {}, el("b", {}, `${number}`), ` ${word}`);
    document.getElementById("totals").replaceChildren(pair(this.state.nodes.size, "nodes"), pair(devices.length, "GPUs"),
      pair(`${all ? Math.round(100 * held / all) : 0} %`, "of memory leased"), pair(this.state.waiting.total, "waiting"),
      ...(bad ? [pair(bad, "unhealthy")] : []));
  }

  link(kind, id, text) {
    return el("button", { class: "plainlink", type: "button", onclick: () => this.open(kind, id) }, text);
  }
}
