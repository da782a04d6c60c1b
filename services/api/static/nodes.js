// The table of nodes: which are open to new pods, and what of their GPUs is leased, used and idle.
import { freeMib, measuredCores, measuredMib, model } from "./devices.js";
import { el, setAttribute, setText } from "./dom.js";
import { FilterBar } from "./filter_bar.js";
import { Filter } from "./filters.js";
import { mib, percent } from "./format.js";
import { drawName } from "./lists.js";
import { url } from "./route.js";
import { nodeClosedReason } from "./store.js";
import { Table } from "./table.js";

const TEMPLATE = "minmax(140px, 2fr) 110px minmax(110px, 1.2fr) repeat(8, minmax(70px, 1fr))";
const KINDS = { "in service": "good", closed: "warn", unhealthy: "bad" };

export function nodesWithGpus(store) {
  return [...store.nodes.values()].filter((node) => node.devices.length);
}

export function nodeRows(store) {
  return nodesWithGpus(store).map((node) => nodeRow(store, node));
}

function nodeRow(store, node) {
  const devices = store.devicesOf(node.node);
  const sum = (amount) => devices.reduce((all, device) => all + (amount(device) ?? 0), 0);
  const isMeasured = devices.some((device) => measuredMib(device) !== null);
  const sick = devices.filter((device) => !device.healthy).length;
  const closed = nodeClosedReason(node);
  const memory = sum((device) => device.memory_mib);
  return {
    node: node.node,
    state: closed ? "closed" : sick ? "unhealthy" : "in service",
    why: closed || (sick ? `${sick} of ${devices.length} GPUs` : ""),
    models: [...new Set(devices.map(model))],
    gpus: devices.length,
    free: devices.filter((device) => device.phase === "Free").length,
    leased: sum((device) => device.milli_gpu) / 1000,
    idle: sum((device) => device.idle_milli_gpu) / 1000,
    memory: percent(
      sum((device) => device.used_memory_mib),
      memory,
    ),
    used: isMeasured ? percent(sum(measuredMib), memory) : null,
    busy: isMeasured ? percent(sum(measuredCores), 100 * devices.length) : null,
    largest: Math.max(0, ...devices.map((device) => freeMib(device, store.closedReason(device)))),
  };
}

const amount = (id, title, text, more = {}) => ({
  id,
  title,
  value: (node) => node[id],
  text: (node) => (node[id] === null ? "" : text(node[id])),
  end: true,
  ...more,
});
const ofHundred = (value) => `${value} %`;
const COLUMNS = [
  {
    id: "name",
    title: "Node",
    value: (node) => node.node,
    draw: (cell, node) => drawName(cell, url("node", node.node), "", node.node),
    phone: "main",
  },
  {
    id: "state",
    title: "State",
    value: (node) => node.state,
    draw: (cell, node) => {
      setAttribute(cell, "class", `side kind-${KINDS[node.state]}`);
      setAttribute(cell, "title", node.why);
      setText(cell, node.state);
    },
    phone: "side",
  },
  {
    id: "models",
    title: "Models",
    value: (node) => node.models.join(", "),
    text: (node) => node.models.join(", "),
    phone: "below",
  },
  amount("gpus", "GPUs", String, { phone: "below", unit: "GPUs" }),
  amount("free", "Free", String),
  amount("leased", "Leased", (gpus) => gpus.toFixed(2), { csv: "gpus_leased" }),
  amount("idle", "Idle", (gpus) => (gpus ? gpus.toFixed(2) : ""), { csv: "gpus_idle" }),
  amount("memory", "Memory leased", ofHundred, { phone: "below", csv: "memory_leased_percent" }),
  amount("used", "Memory used", ofHundred, { csv: "memory_used_percent" }),
  amount("busy", "GPUs used", ofHundred, { csv: "cores_used_percent" }),
  amount("largest", "Largest share", mib, { csv: "largest_free_mib" }),
];

export class NodesView {
  kinds = ["devices", "nodes"];

  constructor(app) {
    this.app = app;
    this.title = "Nodes";
    this.bar = new FilterBar(app.setFilters, { noun: ["node"] });
    this.table = new Table(COLUMNS, {
      label: "Nodes",
      template: TEMPLATE,
      setParams: app.setParams,
    });
    this.bar.offerCsv(this.table, "nodes");
    this.empty = el("div");
    this.root = el(
      "div",
      { class: "list" },
      el("h2", { class: "sr" }, "Nodes"),
      this.bar.root,
      this.empty,
      this.table.root,
    );
  }

  close() {
    this.table.close();
  }

  draw() {
    const { store } = this.app;
    const filter = new Filter("nodes", this.app.params(), store);
    const rows = nodeRows(store);
    const shown = rows.filter((node) => filter.shows(node));
    this.bar.draw(filter, rows, shown.length);
    this.table.root.hidden = !shown.length;
    this.empty.replaceChildren(
      ...(shown.length
        ? []
        : [this.bar.nothing("No node has reported a GPU yet.", () => this.app.elsewhere())]),
    );
    this.table.draw(shown, this.app.params().get("sort") ?? "name", (node) => node.node);
  }
}
