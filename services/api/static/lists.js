// The lists: GPUs, waiting pods, namespaces, events. All are narrowed by the words and facets in the URL.
import { colourClass } from "./colours.js";
import { el, setAttribute, setText } from "./dom.js";
import { FilterBar } from "./filter_bar.js";
import { Filter, reasonOf } from "./filters.js";
import { Fleet } from "./fleet.js";
import { age, byName, clock, count, latency, mib, short } from "./format.js";
import { url } from "./route.js";
import { Table } from "./table.js";
import { VirtualRows } from "./virtual.js";

/** A list with a heading, its filters, and what is shown if it is empty. */
class List {
  constructor(app, kind, title, bar, body) {
    this.app = app;
    this.kind = kind;
    this.title = title;
    this.bar = new FilterBar(app.setFilters, bar);
    this.empty = el("div");
    this.body = body;
    this.root = el(
      "div",
      { class: "list" },
      el("h2", { class: "sr" }, title),
      this.bar.root,
      this.empty,
      body,
    );
  }

  /** Narrow items, and return those that are shown. */
  narrow(items, nothing) {
    this.filter = new Filter(this.kind, this.app.params(), this.app.store);
    const found = this.filter.active ? items.filter((item) => this.filter.shows(item)) : items;
    this.bar.draw(this.filter, items, found.length);
    this.body.hidden = !found.length;
    this.empty.replaceChildren(
      ...(found.length ? [] : [this.bar.nothing(nothing, () => this.app.elsewhere())]),
    );
    return found;
  }
}

export class GpusView extends List {
  kinds = ["devices", "nodes"];

  constructor(app) {
    const fleet = new Fleet(app.store);
    super(app, "gpus", "GPUs", { noun: ["GPU"], free: true }, fleet.root);
    this.fleet = fleet;
    this.colour = el(
      "select",
      { "aria-label": "Colour by", onchange: () => app.setFilters({ colour: this.colour.value }) },
      el("option", { value: "" }, "Colour by namespace"),
      el("option", { value: "use" }, "Colour by use"),
    );
    this.bar.clear.before(this.colour);
  }

  close() {
    this.fleet.close();
  }

  draw() {
    const { store } = this.app;
    const found = this.narrow([...store.devices.values()], "No node has reported a GPU yet.");
    const names = [...new Set(found.map((device) => device.node))].sort(byName);
    this.colour.value = this.app.params().get("colour") === "use" ? "use" : "";
    if (names.length)
      this.fleet.draw(
        names,
        (device) => !this.filter.active || this.filter.shows(device),
        this.colour.value === "use",
      );
  }
}

export class WaitingView extends List {
  kinds = ["waiting"];

  constructor(app) {
    const list = el("ol", { class: "cards", "aria-label": "Waiting pods" });
    super(app, "waiting", "Waiting", { noun: ["waiting pod"], titles: { state: "Reason" } }, list);
    this.list = list;
    this.more = el("p", { class: "soft" });
    this.root.append(this.more);
    this.bar.root.append(
      el("a", { class: "end", href: url("whatif") }, "What if there were another pod?"),
    );
  }

  draw() {
    const { store } = this.app;
    const { total, hidden, pods } = store.waiting;
    const found = this.narrow(
      pods,
      hidden ? "No waiting pod that you may see." : "No pod is waiting.",
    );
    this.list.replaceChildren(
      ...waitingRows(found).map((pods) => waitingItem(pods, store.now(), true)),
    );
    const others = total - hidden - pods.length;
    this.more.textContent = [
      others > 0 && `${others} more wait after these.`,
      hidden &&
        `${count(hidden, "pod")} of other namespaces ${hidden === 1 ? "waits" : "wait"}, too.`,
    ]
      .filter(Boolean)
      .join(" ");
  }

  tick() {
    this.draw();
  }
}

/** The rows for waiting pods, each the pods of a gang that wait for the same reason. */
export function waitingRows(pods) {
  const rows = new Map();
  for (const pod of pods) rows.set(pod.first_alike, [...(rows.get(pod.first_alike) ?? []), pod]);
  return [...rows.values()];
}

/** A waiting pod, and how many others wait with it: why, and what to try. */
export function waitingItem([pod, ...others], now, full = false) {
  const position = pod.position ? `${pod.position}.` : "";
  return el(
    "li",
    { class: `waits${pod.permanent ? " permanent" : ""}` },
    el(
      "div",
      { class: "line" },
      position ? el("span", { class: "soft" }, position) : null,
      podLink(pod),
      others.length ? el("span", { class: "soft" }, `and ${others.length} more`) : null,
      el("span", { class: "tag" }, reasonOf(pod)),
      pod.gang ? el("span", { class: "tag plain" }, `gang ${pod.gang}`) : null,
      el("span", { class: "end soft" }, age(now - pod.since)),
    ),
    pod.start ? el("p", { class: "start" }, pod.start.text) : null,
    el("p", {}, pod.reason),
    pod.hint && full ? el("p", { class: "hint" }, pod.hint) : null,
  );
}

export function podLink(pod) {
  return el(
    "a",
    { href: url("pod", pod.pod), class: "name", "data-key": `pod:${pod.pod}` },
    el("span", { class: `dot ${colourClass(pod.namespace)}`, "aria-hidden": "true" }),
    `${pod.namespace}/${pod.name}`,
  );
}

/** Fill a table's cell with a link in a namespace's colour. */
export function drawName(cell, href, namespace, text) {
  if (!cell.link) {
    cell.dot = el("span", { "aria-hidden": "true" });
    cell.text = el("span");
    cell.link = el("a", { class: "name" }, cell.dot, cell.text);
    cell.append(cell.link);
  }
  setAttribute(cell.link, "href", href);
  setAttribute(cell.link, "title", text);
  setAttribute(cell.dot, "class", `dot ${namespace ? colourClass(namespace) : ""}`);
  setText(cell.text, text);
}

export class NamespacesView extends List {
  kinds = ["namespaces"];

  constructor(app) {
    const budget = (namespace) => namespace.budget?.state ?? "";
    const table = new Table(
      [
        {
          id: "name",
          title: "Namespace",
          value: (one) => one.namespace,
          draw: (cell, one) =>
            drawName(cell, url("namespace", one.namespace), one.namespace, one.namespace),
          phone: "main",
        },
        {
          id: "leases",
          title: "Leases",
          value: (one) => one.leases,
          text: (one) => `${one.leases}`,
          end: true,
          phone: "side",
          unit: "leases",
        },
        {
          id: "gpus",
          csv: "milli_gpu",
          title: "GPUs leased",
          value: (one) => one.milli_gpu,
          text: (one) => short(one.milli_gpu / 1000),
          end: true,
        },
        {
          id: "on",
          title: "On GPUs",
          value: (one) => one.devices,
          text: (one) => `${one.devices}`,
          end: true,
        },
        {
          id: "memory",
          csv: "memory_mib",
          title: "Memory leased",
          value: (one) => one.memory_mib,
          text: (one) => mib(one.memory_mib),
          end: true,
          phone: "below",
        },
        {
          id: "waiting",
          title: "Waiting",
          value: (one) => one.waiting,
          text: (one) => (one.waiting ? `${one.waiting}` : ""),
          end: true,
          phone: "below",
          unit: "waiting",
        },
        {
          id: "budget",
          title: "Budget",
          value: budget,
          draw: (cell, one) => {
            setAttribute(cell, "class", `below state-${budget(one) || "none"}`);
            setText(cell, budget(one));
          },
          phone: "below",
        },
      ],
      {
        label: "Namespaces",
        template: "minmax(160px, 2fr) repeat(5, minmax(80px, 1fr)) minmax(90px, 1fr)",
        setParams: app.setParams,
      },
    );
    super(app, "namespaces", "Namespaces", { noun: ["namespace"] }, table.root);
    this.bar.offerCsv(table, "namespaces");
    this.table = table;
  }

  close() {
    this.table.close();
  }

  draw() {
    const found = this.narrow(
      this.app.store.namespaces,
      "No namespace that you may see has a lease.",
    );
    this.table.draw(found, this.app.params().get("sort") ?? "name", (one) => one.namespace);
  }
}

export class EventsView extends List {
  kinds = ["events"];

  constructor(app) {
    const rows = el("div", { class: "rows", role: "list", "aria-label": "Events" });
    super(
      app,
      "events",
      "Events",
      { noun: ["event"], titles: { state: "Kind" } },
      el("div", { class: "events" }, rows),
    );
    this.rows = new VirtualRows(rows, {
      make: () => new EventRow(),
      height: () => parseFloat(getComputedStyle(this.body).getPropertyValue("--event-row")) || 30,
    });
  }

  close() {
    this.rows.close();
  }

  draw() {
    this.rows.set(
      this.narrow(this.app.store.events, "Nothing has happened since the API started."),
      (event) => event.number,
    );
  }
}

class EventRow {
  constructor() {
    this.root = el("div", { role: "listitem", class: "event" });
  }

  draw(event) {
    if (this.event === event) return;
    this.event = event;
    this.root.replaceChildren(...eventParts(event));
  }
}

/** What an event without a pod is about: an object of the cluster, or a namespace. */
function subjectOf(event) {
  return [event.namespace, event.name].filter(Boolean).join("/");
}

/** One event: its time, its kind, its pod, and what came of it. */
export function eventParts(event) {
  const kind =
    event.kind.endsWith("failed") ||
    event.kind.endsWith("refused") ||
    event.kind.startsWith("evict") ||
    event.kind === "problem"
      ? "bad"
      : event.kind;
  const where = [event.node && `on ${event.node}`, event.beneficiary && `for ${event.beneficiary}`]
    .filter(Boolean)
    .join(" ");
  const about = [where, event.text].filter(Boolean).join(": ");
  return [
    el("time", { class: "soft" }, clock(event.at)),
    el("b", { class: `kind-${kind}` }, event.kind),
    event.pod ? podLink(event) : el("span", { class: "name" }, subjectOf(event)),
    el("span", { class: "about", title: about }, about),
    el("span", { class: "soft end" }, latency(event.latency_s)),
  ];
}
