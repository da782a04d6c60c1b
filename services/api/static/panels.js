// Panels: waiting pods, namespaces, recent events, totals, and a banner of missing components.
import { age, clock, detailsLink, detailsUrl, el, hue, latency, matches, mib, setAttribute, setText } from "./dom.js";

const MAX_EVENTS = 60;

export class Panels {
  constructor(state) {
    this.state = state;
    this.filter = "";
    this.queue = el("ol");
    this.empty = el("li", {}, "No pod is waiting.");
    this.queue.append(this.empty);
    this.queueHead = el("small");
    this.events = el("ol");
    this.namespaces = el("ul");
    this.root = el("aside", { class: "panels", "aria-label": "Waiting pods, namespaces, recent events" },
      el("section", { id: "waiting", "aria-label": "Waiting" }, el("h2", {}, "Waiting", this.queueHead), this.queue),
      el("section", { id: "namespaces", "aria-label": "Namespaces" }, el("h2", {}, "Namespaces"), this.namespaces),
      el("section", { id: "events", "aria-label": "Recent events" }, el("h2", {}, "Recent events"), this.events));
    this.queueRows = new Rows(this.queue);
    this.namespaceRows = new Rows(this.namespaces);
    this.totals = {};
    const labels = { nodes: "nodes", devices: "GPUs", leased: "of memory leased", waiting: "waiting", unhealthy: "unhealthy" };
    document.getElementById("totals").replaceChildren(...Object.entries(labels).map(([name, label]) => el("span", {}, this.totals[name] = el("b"), ` ${label}`)));
  }

  now() { return Date.now() / 1000 + this.state.clockOffset; }

  drawQueue() {
    const { total, hidden, pods } = this.state.waiting;
    setText(this.queueHead, `${total}${hidden ? `, ${hidden} in other namespaces` : ""}`);
    this.empty.hidden = Boolean(total);
    const shown = pods.filter((pod) => matches(this.filter, `${pod.namespace}/${pod.name}`, pod.reason, pod.gang));
    this.queueRows.draw(shown, (row, pod) => {
      setText(row.side, age(this.now() - pod.since));
      setText(row.before, `${pod.position}. `);
      row.name("lease", pod.pod, pod.namespace, `${pod.namespace}/${pod.name}`);
      setText(row.below, pod.reason);
      row.root.title = pod.hint;
    });
  }

  drawNamespaces() {
    const shown = this.state.namespaces.filter((namespace) => matches(this.filter, namespace.namespace));
    this.namespaceRows.draw(shown, (row, namespace) => {
      setAttribute(row.side, "class", `ms state-${namespace.budget?.state ?? "none"}`);
      setText(row.side, namespace.budget ? `budget ${namespace.budget.state}` : "");
      row.name("namespace", namespace.namespace, namespace.namespace, namespace.namespace);
      setText(row.below, `${namespace.leases} leases on ${namespace.devices} GPUs, ${mib(namespace.memory_mib)}${namespace.waiting ? `, ${namespace.waiting} waiting` : ""}`);
    });
  }

  /** Show only what matches a text in lower case. */
  setFilter(filter) {
    this.filter = filter;
    this.drawQueue();
    this.drawNamespaces();
    for (const item of this.events.children) this.filterEvent(item);
  }

  filterEvent(item) { item.hidden = !matches(this.filter, item.textContent); }

  drawEvents(events) {
    const items = events.slice(-MAX_EVENTS).reverse().map((event) => {
      const kind = event.kind.endsWith("failed") || event.kind.endsWith("refused") || event.kind.startsWith("evict") ? "bad" : event.kind;
      return el("li", {},
        el("span", { class: "ms" }, latency(event.latency_s)), `${clock(event.at)} `,
        el("b", { class: `kind-${kind}` }, event.kind), " ",
        event.pod ? detailsLink("lease", event.pod, `${event.namespace}/${event.name}`) : `${event.namespace}/${event.name}`,
        event.node ? ` on ${event.node}` : "", event.beneficiary ? ` for ${event.beneficiary}` : "", event.text ? el("p", {}, event.text) : null);
    });
    items.forEach((item) => this.filterEvent(item));
    this.events.prepend(...items);
    while (this.events.children.length > MAX_EVENTS) this.events.lastChild.remove();
  }

  drawBanner() {
    const banner = document.getElementById("banner");
    const lines = this.state.problems.filter((problem) => problem.severity === "error")
      .map((problem) => `${problem.text}${problem.since ? ` since ${age(this.now() - problem.since)}` : ""}`);
    if (this.state.offlineSince) lines.unshift(`The API does not respond. Last update: ${clock(this.state.offlineSince)}`);
    banner.hidden = !lines.length;
    const list = banner.querySelector("ul");
    if (list.textContent !== lines.join("")) list.replaceChildren(...lines.map((line) => el("li", {}, line)));
  }

  drawTotals() {
    const { devices, usedMib, totalMib, unhealthy } = this.state.sums;
    const totals = this.totals;
    setText(totals.nodes, `${this.state.nodes.size}`);
    setText(totals.devices, `${devices}`);
    setText(totals.leased, `${totalMib ? Math.round(100 * usedMib / totalMib) : 0} %`);
    setText(totals.waiting, `${this.state.waiting.total}`);
    setText(totals.unhealthy, `${unhealthy}`);
    totals.unhealthy.parentNode.hidden = !unhealthy;
  }
}

/** Reusable rows of a list: only changes are written, and the focus stays. */
class Rows {
  constructor(list) {
    this.list = list;
    this.rows = [];
  }

  draw(items, write) {
    while (this.rows.length > items.length) this.rows.pop().root.remove();
    for (const [at, item] of items.entries()) {
      if (at === this.rows.length) {
        this.rows.push(new Row());
        this.list.append(this.rows[at].root);
      }
      write(this.rows[at], item);
    }
  }
}

class Row {
  constructor() {
    this.side = el("span", { class: "ms" });
    this.before = el("span");
    this.colour = el("span", { class: "swatch", "aria-hidden": "true" });
    this.link = el("a");
    this.below = el("p");
    this.root = el("li", {}, this.side, this.before, this.colour, this.link, this.below);
  }

  name(kind, id, namespace, text) {
    setAttribute(this.link, "href", detailsUrl(kind, id));
    if (this.namespace !== namespace) {
      this.namespace = namespace;
      this.colour.style.setProperty("--hue", hue(namespace));
    }
    setText(this.link, text);
  }
}
