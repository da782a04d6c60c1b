// The table of pods: those with a lease, those that wait, and those that have ended within a day.

import { el, fetchJson, setAttribute, setText } from "./dom.js";
import { FilterBar } from "./filter_bar.js";
import { Filter } from "./filters.js";
import { age, mib, percent, short } from "./format.js";
import { drawName } from "./lists.js";
import { url } from "./route.js";
import { Table } from "./table.js";

const REFRESH_MS = 30_000;
const SORT = "-age";

/** The columns of all tables of pods. `now()` is the API's time. */
function columns(now) {
  const used = (part, whole) => (part === null || part === undefined ? null : percent(part, whole));
  const usedText = (part, whole) => (used(part, whole) === null ? "" : `${used(part, whole)} %`);
  return [
    {
      id: "name",
      title: "Pod",
      value: (pod) => `${pod.namespace}/${pod.name}`,
      draw: (cell, pod) =>
        drawName(cell, url("pod", pod.pod), pod.namespace, `${pod.namespace}/${pod.name}`),
      phone: "main",
    },
    {
      id: "state",
      title: "State",
      value: (pod) => pod.state,
      draw: (cell, pod) => {
        setAttribute(cell, "class", `side pod-${pod.state}`);
        setAttribute(cell, "title", pod.reason);
        setText(cell, pod.state);
      },
      phone: "side",
    },
    {
      id: "node",
      title: "Node",
      value: (pod) => pod.node,
      draw: (cell, pod) => drawNode(cell, pod),
      phone: "below",
    },
    { id: "gpu", title: "GPU", value: (pod) => pod.indices, text: (pod) => pod.indices },
    {
      id: "memory",
      csv: "memory_mib",
      title: "Memory",
      value: (pod) => pod.memory,
      text: (pod) => (pod.memory === null ? "" : mib(pod.memory)),
      end: true,
      phone: "below",
    },
    {
      id: "used",
      csv: "memory_used_percent",
      title: "Memory used",
      value: (pod) => used(pod.usedMemory, pod.memory),
      text: (pod) => usedText(pod.usedMemory, pod.memory),
      end: true,
    },
    {
      id: "gpus",
      csv: "gpus",
      title: "GPUs",
      value: (pod) => pod.gpus,
      text: (pod) => (pod.gpus === null ? "" : short(pod.gpus)),
      end: true,
      phone: "below",
      unit: "GPUs",
    },
    {
      id: "busy",
      csv: "cores_used_percent",
      title: "Cores used",
      value: (pod) => used(pod.usedCores, pod.cores || 100),
      text: (pod) => usedText(pod.usedCores, pod.cores || 100),
      end: true,
    },
    {
      id: "age",
      csv: "age_s",
      title: "Age",
      value: (pod) => Math.round(now() - pod.created),
      text: (pod) => age((pod.ended ?? now()) - pod.created),
      end: true,
      phone: "below",
    },
  ];
}

function drawNode(cell, pod) {
  if (!cell.link) {
    cell.link = el("a");
    cell.append(cell.link);
  }
  setAttribute(cell.link, "href", pod.node ? url("node", pod.node) : null);
  setAttribute(cell.link, "title", pod.node);
  setText(cell.link, pod.node);
}

const TEMPLATE = "minmax(180px, 2.4fr) 92px minmax(110px, 1.2fr) 56px 88px 100px 60px 88px 76px";

export function podTable(app, label) {
  return new Table(
    columns(() => app.store.now()),
    { label, template: TEMPLATE, setParams: app.setParams },
  );
}

/** The pods with a lease as rows. */
export function runningRows(store) {
  return [...store.pods().values()].map((pod) => {
    pod.indices ??= pod.devices.map((device) => device.index).join(", ");
    return pod;
  });
}

/** The pods with a lease and those that wait, as rows. */
export function currentRows(store) {
  return [...runningRows(store), ...store.waiting.pods.map(waitingRow)];
}

function waitingRow(pod) {
  return {
    pod: pod.pod,
    namespace: pod.namespace,
    name: pod.name,
    state: "waiting",
    node: "",
    indices: "",
    models: [],
    memory: null,
    cores: null,
    gpus: null,
    created: pod.since,
  };
}

const ENDED = { Succeeded: "succeeded", Failed: "failed" };

/** A pod that has ended, as the API keeps it. */
function endedRow(pod) {
  return {
    pod: pod.pod,
    namespace: pod.namespace,
    name: pod.name,
    state: ENDED[pod.reason] ?? "ended",
    node: pod.node,
    indices: "",
    models: [],
    memory: pod.memory_mib,
    cores: pod.cores_percent,
    gpus: pod.gpus,
    usedMemory: pod.used_memory_mib,
    usedCores: pod.used_cores_percent,
    created: pod.started,
    ended: pod.ended,
    reason: pod.reason,
  };
}

/** The pods of the last day that have ended, of one device or all; none where the API keeps none. */
export async function loadEnded(query = {}, device = "") {
  const params = new URLSearchParams(query);
  const found = await fetchJson(`/api/v1/finished?${params}`).catch(() => ({ pods: [] }));
  return found.pods.filter((pod) => !device || pod.devices.includes(device)).map(endedRow);
}

export class PodsView {
  kinds = ["devices", "waiting"];

  constructor(app) {
    this.app = app;
    this.ended = [];
    this.bar = new FilterBar(app.setFilters, { noun: ["pod"] });
    this.table = podTable(app, "Pods");
    this.bar.offerCsv(this.table, "pods");
    this.empty = el("div");
    this.root = el(
      "div",
      { class: "list" },
      el("h2", { class: "sr" }, "Pods"),
      this.bar.root,
      this.empty,
      this.table.root,
    );
    this.timer = setInterval(() => this.load(), REFRESH_MS);
    this.load();
  }

  close() {
    clearInterval(this.timer);
    this.table.close();
  }

  async load() {
    this.ended = await loadEnded();
    this.draw();
  }

  draw() {
    const { store } = this.app;
    const params = this.app.params();
    const filter = new Filter("pods", params, store);
    const items = [...currentRows(store), ...this.ended];
    const wantsEnded = filter.chosen.state.length || filter.query;
    const found = items.filter((pod) => (wantsEnded || !pod.ended) && filter.shows(pod));
    this.bar.draw(filter, items, found.length);
    this.table.root.hidden = !found.length;
    this.empty.replaceChildren(
      ...(found.length
        ? []
        : [
            this.bar.nothing("No pod has a share of a GPU, and none is waiting.", () =>
              this.app.elsewhere(),
            ),
          ]),
    );
    this.table.draw(found, params.get("sort") ?? SORT, (pod) => pod.pod);
  }

  tick() {
    this.draw();
  }
}
