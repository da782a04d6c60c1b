// What waits, what happens, namespaces, and who is silent.
import { age, clock, el, hue, mib, put, say, took } from "./words.js";

const LINES = 60;

export class Panels {
  constructor(state, open) {
    this.state = state;
    this.open = open;
    this.queue = el("ol");
    this.none = el("li", {}, "Nothing waits.");
    this.queue.append(this.none);
    this.queueHead = el("small");
    this.ticker = el("ol");
    this.names = el("ul");
    this.root = el("aside", { class: "panels", "aria-label": "Waiting pods, namespaces, news" },
      el("section", { id: "waiting", "aria-label": "Waiting" }, el("h2", {}, "Waiting", this.queueHead), this.queue),
      el("section", { id: "namespaces", "aria-label": "Namespaces" }, el("h2", {}, "Namespaces"), this.names),
      el("section", { id: "ticker", "aria-label": "News" }, el("h2", {}, "News"), this.ticker));
    this.queueRows = new Rows(this.queue, open);
    this.nameRows = new Rows(this.names, open);
    this.totals = {};
    const words = { nodes: "nodes", devices: "GPUs", full: "of memory leased", waiting: "waiting", bad: "unhealthy" };
    document.getElementById("totals").replaceChildren(...Object.entries(words).map(([name, word]) => el("span", {}, this.totals[name] = el("b"), ` ${word}`)));
  }

  now() { return Date.now() / 1000 + this.state.ahead; }

  drawQueue() {
    const { total, hidden, pods } = this.state.waiting;
    say(this.queueHead, `${total}${hidden ? `, ${hidden} of them of others` : ""}`);
    this.none.hidden = Boolean(total);
    this.queueRows.draw(pods, (row, pod) => {
      say(row.side, age(this.now() - pod.since));
      say(row.before, `${pod.place}. `);
      row.name("lease", pod.pod, pod.namespace, `${pod.namespace}/${pod.name}`);
      say(row.below, pod.reason);
    });
  }

  drawNames() {
    this.nameRows.draw(this.state.namespaces, (row, one) => {
      put(row.side, "class", `ms state-${one.budget?.state ?? "none"}`);
      say(row.side, one.budget ? `budget ${one.budget.state}` : "");
      row.name("namespace", one.namespace, one.namespace, one.namespace);
      say(row.below, `${one.leases} leases on ${one.devices} GPUs, ${mib(one.memory_mib)}${one.waiting ? `, ${one.waiting} waiting` : ""}`);
    });
  }

  drawTicker(lines) {
    const made = lines.slice(-LINES).reverse().map((line) => {
      const kind = line.kind.endsWith("failed") || line.kind.endsWith("refused") ? "bad" : line.kind;
      return el("li", {},
        el("span", { class: "ms" }, took(line.latency_s)), `${clock(line.at)} `,
        el("b", { class: `kind-${kind}` }, line.kind), " ",
        line.pod ? this.link("lease", line.pod, `${line.namespace}/${line.name}`) : `${line.namespace}/${line.name}`,
        line.node ? ` on ${line.node}` : "", line.text ? el("p", {}, line.text) : null);
    });
    this.ticker.prepend(...made);
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
    const { devices, held, all, bad } = this.state.sums;
    const of = this.totals;
    say(of.nodes, `${this.state.nodes.size}`);
    say(of.devices, `${devices}`);
    say(of.full, `${all ? Math.round(100 * held / all) : 0} %`);
    say(of.waiting, `${this.state.waiting.total}`);
    say(of.bad, `${bad}`);
    of.bad.parentNode.hidden = !bad;
  }

  link(kind, id, text) {
    return el("button", { class: "plainlink", type: "button", onclick: () => this.open(kind, id) }, text);
  }
}

/** Lines of a list that are written over, so that only what differs is touched and focus stays. */
class Rows {
  constructor(list, open) {
    this.list = list;
    this.open = open;
    this.rows = [];
  }

  draw(items, write) {
    while (this.rows.length > items.length) this.rows.pop().root.remove();
    for (const [at, item] of items.entries()) {
      if (at === this.rows.length) {
        this.rows.push(new Row(this.open));
        this.list.append(this.rows[at].root);
      }
      write(this.rows[at], item);
    }
  }
}

class Row {
  constructor(open) {
    this.side = el("span", { class: "ms" });
    this.before = el("span");
    this.colour = el("span", { class: "swatch", "aria-hidden": "true" });
    this.link = el("button", { class: "plainlink", type: "button", onclick: () => open(this.kind, this.id) });
    this.below = el("p");
    this.root = el("li", {}, this.side, this.before, this.colour, this.link, this.below);
  }

  name(kind, id, namespace, text) {
    this.kind = kind;
    this.id = id;
    if (this.namespace !== namespace) {
      this.namespace = namespace;
      this.colour.style.setProperty("--hue", hue(namespace));
    }
    say(this.link, text);
  }
}
