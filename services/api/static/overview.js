// The overview: what the cluster has, leases, uses and wastes, what waits and why, and what needs a person.

import { instantsOf, RANGES, rangeText } from "./chart.js";
import { colourClass } from "./colours.js";
import { faultText, totals } from "./devices.js";
import { el, facts, fetchJson, panel, replaceKeepingFocus, setProperty, setText } from "./dom.js";
import { FirstPage } from "./first_page.js";
import { Fleet } from "./fleet.js";
import {
  age,
  byName,
  count,
  gpuHours,
  gpus,
  mib,
  percent,
  promiseTexts,
  short,
  words,
} from "./format.js";
import { Histories, percentChart } from "./histories.js";
import { eventParts, podLink, waitingItem, waitingRows } from "./lists.js";
import { url } from "./route.js";
import { nodeClosedReason } from "./store.js";

const FEW_NODES = 12; // of so many, the overview shows the map
const ROWS = 6;
const REFRESH_MS = 30_000;
const USES = {
  used: "Leased and used",
  unmeasured: "Leased, not measured",
  idle: "Leased, but idle",
  stranded: "Free, but too little for any pod",
  unleased: "Free",
};

export class Overview {
  constructor(app) {
    this.app = app;
    this.title = "Overview";
    const { store } = app;
    this.tiles = Object.fromEntries(
      ["gpus", "memory", "compute", "idle", "waiting"].map((name) => [name, new Tile()]),
    );
    this.first = new FirstPage();
    this.histories = new Histories(
      app,
      "/api/v1/history",
      ["Memory", "Compute", "Waiting pods"],
      clusterCharts,
      "Leased and used",
    );
    this.histories.onload = () => this.drawIdle();
    this.fleet = new Fleet(store);
    this.map = panel(
      "GPUs",
      { wide: true, aside: el("a", { href: url("gpus") }, "All GPUs") },
      this.fleet.root,
    );
    this.lists = Object.fromEntries(
      ["reasons", "queue", "idle", "hours", "costs", "sick", "events"].map((name) => [
        name,
        el("ul", { class: `rows-${name}` }),
      ]),
    );
    const more = (view, text) => el("a", { href: url(view) }, text);
    this.waiting = panel(
      "Waiting",
      { id: "waiting", aside: more("waiting", "All waiting pods") },
      this.lists.reasons,
      this.lists.queue,
    );
    this.idle = panel(
      "Longest idle",
      {
        id: "idle",
        aside: el("a", { href: url("pods", null, { state: "idle" }) }, "All idle pods"),
      },
      this.lists.idle,
    );
    this.hours = panel(
      "GPU-hours by namespace",
      { id: "hours", aside: more("namespaces", "All namespaces") },
      this.lists.hours,
    );
    this.costs = panel("Use of all GPU-hours", { id: "costs" }, this.lists.costs);
    this.promises = el("div");
    this.starts = panel("Promised starts, 30 d", { id: "starts" }, this.promises);
    this.starts.hidden = true;
    this.sick = panel(
      "Out of service",
      {
        id: "sick",
        aside: el(
          "a",
          { href: url("gpus", null, { state: ["unhealthy", "closed"] }) },
          "Show them",
        ),
      },
      this.lists.sick,
    );
    this.events = panel(
      "Recent events",
      { id: "events", aside: more("events", "All events") },
      this.lists.events,
    );
    this.root = el(
      "div",
      { class: "overview" },
      el("h2", { class: "sr" }, "Overview"),
      this.first.root,
      this.tileStrip(),
      this.map,
      this.histories.root,
      el(
        "div",
        { class: "panels" },
        this.waiting,
        this.idle,
        this.hours,
        this.costs,
        this.starts,
        this.sick,
        this.events,
      ),
    );
    this.timer = setInterval(() => this.load(), REFRESH_MS);
    this.load();
  }

  tileStrip() {
    return el(
      "div",
      { id: "totals", class: "tiles" },
      ...Object.values(this.tiles).map((tile) => tile.root),
    );
  }

  close() {
    clearInterval(this.timer);
    this.histories.close();
    this.fleet.close();
  }

  update() {
    this.histories.update();
    this.load();
  }

  async load() {
    const [from, to] = instantsOf(this.app.params(), this.app.store.now());
    const period = to ? `from=${from}&to=${to}` : `from=${from}`;
    const paths = [
      `showback?groupBy=namespace&${period}`,
      "idle?limit=6",
      `costs?${period}`,
      "starts",
    ];
    const [hours, idle, costs, starts] = await Promise.all(
      paths.map((path) => fetchJson(`/api/v1/reports/${path}`).catch(() => null)),
    );
    this.report = hours;
    this.costReport = costs;
    this.drawCosts(costs);
    this.drawStarts(promiseTexts(starts?.total));
    this.idleReport = idle;
    this.drawHours();
    this.drawIdle();
  }

  draw(kinds) {
    const has = (...names) => names.some((name) => kinds.has(name));
    const { store } = this.app;
    if (has("reset", "devices", "nodes", "waiting")) {
      this.drawTiles();
      this.drawSick();
      this.first.draw(this.sums.devices, this.leases, store.waiting.total);
    }
    if (has("reset", "devices", "nodes")) this.drawMap();
    if (has("reset", "devices")) this.drawIdle();
    if (has("reset", "waiting")) this.drawWaiting();
    if (has("reset", "namespaces")) this.drawHours();
    if (has("reset", "events")) this.drawEvents();
  }

  drawEvents() {
    const { events } = this.app.store;
    replaceKeepingFocus(
      this.lists.events,
      events.length
        ? events.slice(0, 9).map((event) => el("li", { class: "event" }, ...eventParts(event)))
        : [el("li", { class: "nothing" }, "Nothing has happened since the API started.")],
    );
  }

  tick() {
    this.drawWaiting();
  }

  drawTiles() {
    const { store } = this.app;
    const sums = totals(store);
    this.sums = sums;
    const { total, pods } = store.waiting;
    this.leases = store.pods().size;
    const out = [
      sums.unhealthy && `${sums.unhealthy} unhealthy`,
      sums.closed && `${sums.closed} closed`,
    ]
      .filter(Boolean)
      .join(", ");
    this.tiles.gpus.draw(
      "GPUs",
      `${sums.devices}`,
      `on ${count(store.nodes.size, "node")}, ${sums.free} free, ${sums.leased.toFixed(2)} leased`,
      { href: url("gpus"), alert: out },
    );
    /** @returns {[string, string, {leased: number, used: number}]} */
    const share = (leased, used, whole, amount) => [
      `${percent(leased, whole)} %`,
      sums.measured ? `leased, ${percent(used, whole)} % used` : `leased of ${amount(whole)}`,
      { leased: percent(leased, whole), used: sums.measured ? percent(used, whole) : 0 },
    ];
    this.tiles.memory.draw(
      "Memory",
      ...share(sums.leasedMemory, sums.usedMemory, sums.memory, mib),
    );
    this.tiles.compute.draw(
      "Compute",
      ...share(sums.leasedCores, sums.usedCores, sums.cores, (cores) => `${gpus(cores)} GPUs`),
    );
    const oldest = pods.length ? Math.min(...pods.map((pod) => pod.since)) : null;
    this.tiles.waiting.draw(
      "Waiting pods",
      `${total}`,
      oldest === null ? "" : `longest for ${age(store.now() - oldest)}`,
      { href: url("waiting"), warn: total > 0 },
    );
  }

  drawMap() {
    const { store } = this.app;
    const names = [...store.nodes.keys()].filter((name) => store.nodes.get(name).devices.length);
    this.map.hidden = !names.length || names.length > FEW_NODES;
    if (!this.map.hidden) this.fleet.draw(names.sort(byName), () => true);
  }

  drawWaiting() {
    const { store } = this.app;
    const { total, pods, by_code: byCode } = store.waiting;
    const reasons = Object.entries(byCode)
      .map(([code, number]) => [words(code), number])
      .sort((one, two) => two[1] - one[1])
      .slice(0, ROWS);
    replaceKeepingFocus(
      this.lists.reasons,
      reasons.map(([reason, number]) =>
        bar(
          el(
            "a",
            { href: url("waiting", null, { state: reason }), "data-key": `reason:${reason}` },
            reason,
          ),
          number,
          total,
          count(number, "pod"),
        ),
      ),
    );
    replaceKeepingFocus(
      this.lists.queue,
      pods.length
        ? waitingRows(pods)
            .slice(0, 4)
            .map((row) => waitingItem(row, store.now()))
        : [
            el(
              "li",
              { class: "nothing" },
              total ? "No waiting pod that you may see." : "No pod is waiting.",
            ),
          ],
    );
  }

  /** The pods that hold most without using it: by GPU-hours where the API adds them up, else by time. */
  drawIdle() {
    const { store } = this.app;
    const idle = [...store.pods().values()].filter((pod) => pod.state === "idle");
    const hours = this.costReport?.lines.length
      ? idleCosts(this.costReport)
      : this.histories.history && idleHours(this.histories.history);
    const now = `${count(idle.length, "pod")} now`;
    const [amount, unit] = hours === null || hours === undefined ? [] : gpuHours(hours).split(" ");
    this.tiles.idle.draw(
      "Leased, but idle",
      amount ?? `${idle.length}`,
      amount ? `${unit} in ${this.idleRange()}, ${now}` : now,
      { href: url("pods", null, { state: "idle" }) },
    );
    const rows = this.idleReport?.pods.length
      ? this.idleReport.pods.slice(0, ROWS).map((pod) => ({
          pod,
          amount: pod.gpu_hours,
          text: `${gpuHours(pod.gpu_hours)}, ${mib(pod.memory_mib)}`,
        }))
      : idle
          .sort((one, two) => one.idleSince - two.idleSince)
          .slice(0, ROWS)
          .map((pod) => ({
            pod,
            amount: store.now() - pod.idleSince,
            text: `${age(store.now() - pod.idleSince)}, ${mib(pod.memory)}`,
          }));
    const most = Math.max(...rows.map((row) => row.amount), 0);
    replaceKeepingFocus(
      this.lists.idle,
      rows.length
        ? rows.map(({ pod, amount, text }) => bar(podLink(pod), amount, most, text))
        : [el("li", { class: "nothing" }, "No pod is idle.")],
    );
  }

  /** What the time is called of which idle GPU-hours are shown: without costs, that of the charts. */
  idleRange() {
    return this.costReport?.lines.length
      ? rangeText(this.app.params())
      : (RANGES[this.histories.history.range] ?? rangeText(this.app.params()));
  }

  drawHours() {
    const sums = new Map();
    for (const row of this.report?.rows ?? [])
      sums.set(row.namespace, (sums.get(row.namespace) ?? 0) + Number(row.gpu_minutes) / 60);
    for (const [name, minutes] of Object.entries(this.report?.not_charged ?? {}))
      sums.set(name, (sums.get(name) ?? 0) + Number(minutes) / 60);
    const unit = sums.size ? "" : "GPUs now";
    if (!sums.size)
      for (const one of this.app.store.namespaces)
        if (one.leases) sums.set(one.namespace, one.milli_gpu / 1000);
    const rows = [...sums].sort((one, two) => two[1] - one[1]).slice(0, 8);
    const most = rows[0]?.[1] ?? 0;
    replaceKeepingFocus(
      this.lists.hours,
      rows.length
        ? rows.map(([name, hours]) =>
            bar(
              el(
                "a",
                { href: url("namespace", name), class: "name", "data-key": `namespace:${name}` },
                el("span", { class: `dot ${colourClass(name)}`, "aria-hidden": "true" }),
                name,
              ),
              hours,
              most,
              unit ? `${short(hours)} ${unit}` : gpuHours(hours),
              colourClass(name),
            ),
          )
        : [el("li", { class: "nothing" }, "No namespace that you may see has used a GPU.")],
    );
  }

  /** What all GPUs were used for in the range, and what that cost. */
  drawCosts(report) {
    const lines = report?.lines ?? [];
    const sum = (use, field) =>
      lines.filter((line) => line.use === use).reduce((all, line) => all + Number(line[field]), 0);
    const rows = Object.keys(USES)
      .map((use) => ({ use, hours: sum(use, "gpu_hours"), cost: sum(use, "cost") }))
      .filter(({ hours }) => hours);
    const most = Math.max(...rows.map((row) => row.hours), 0);
    this.costs.hidden = !rows.length;
    replaceKeepingFocus(
      this.lists.costs,
      rows.map(({ use, hours, cost }) =>
        bar(
          el("span", { class: "name" }, USES[use]),
          hours,
          most,
          report.currency
            ? `${gpuHours(hours)}, ${cost.toFixed(2)} ${report.currency}`
            : gpuHours(hours),
        ),
      ),
    );
  }

  drawStarts(texts) {
    this.starts.hidden = !texts;
    replaceKeepingFocus(this.promises, texts ? [facts(texts)] : []);
  }

  /** GPUs and nodes that get no pods, with the reason. */
  drawSick() {
    const { store } = this.app;
    const rows = [];
    for (const device of store.devices.values()) {
      if (!device.healthy)
        rows.push([
          0,
          url("gpu", device.uuid),
          `${device.node} GPU ${device.index}`,
          faultText(device),
          "bad",
        ]);
      else if (device.excluded)
        rows.push([
          1,
          url("gpu", device.uuid),
          `${device.node} GPU ${device.index}`,
          device.excluded,
          "warn",
        ]);
    }
    for (const node of store.nodes.values())
      if (nodeClosedReason(node))
        rows.push([2, url("node", node.node), node.node, nodeClosedReason(node), "warn"]);
    rows.sort((one, two) => one[0] - two[0] || byName(one[2], two[2]));
    this.sick.hidden = !rows.length;
    replaceKeepingFocus(
      this.lists.sick,
      rows
        .slice(0, ROWS)
        .map(([, href, name, why, kind]) =>
          el(
            "li",
            {},
            el("span", { class: `mark ${kind}`, "aria-hidden": "true" }),
            el("a", { href, "data-key": href }, name),
            el("span", { class: "about", title: why }, why),
          ),
        ),
    );
  }
}

/** A row with a bar behind its name. */
function bar(name, amount, most, text, colour = "") {
  const fill = el("span", { class: `fill ${colour}`, "aria-hidden": "true" });
  setProperty(fill, "--part", `${most ? Math.max((100 * amount) / most, 1) : 0}%`);
  return el(
    "li",
    { class: "bar-row" },
    name,
    el("span", { class: "end" }, text),
    el("span", { class: "track" }, fill),
  );
}

/** What was idle of the GPU-hours that are recorded, as in the report of costs. */
function idleCosts({ lines }) {
  return lines.reduce((sum, line) => sum + (line.use === "idle" ? Number(line.gpu_hours) : 0), 0);
}

function idleHours({ at, idle }) {
  if (!idle) return null;
  let hours = 0;
  for (let number = 1; number < at.length; number++)
    hours += (((idle[number] ?? 0) / 100) * (at[number] - at[number - 1])) / 3600;
  return hours;
}

function clusterCharts(history) {
  const waiting = Object.entries(history.waiting ?? {});
  const sum = history.at.map((_, at) =>
    waiting.reduce((all, [, values]) => all + (values[at] ?? 0), 0),
  );
  return [
    percentChart(history.memory, history.used_memory, history.memory_capacity),
    percentChart(history.cores, history.used_cores, history.cores_capacity),
    history.waiting
      ? {
          unit: "pods",
          highest: 4,
          lines: [{ label: "Waiting", colour: "wait", fill: "40", values: sum }],
        }
      : null,
  ];
}

class Tile {
  constructor() {
    this.name = el("span", { class: "soft" });
    this.value = el("b");
    this.text = el("span", { class: "soft" });
    this.alert = el("span", { class: "alert" });
    this.bar = el("span", { class: "meter", "aria-hidden": "true" });
    this.root = el("a", { class: "tile" }, this.name, this.value, this.text, this.alert, this.bar);
  }

  /**
   * @param {string} name
   * @param {string} value
   * @param {string} text
   * @param {{href?: string, alert?: string, warn?: boolean, leased?: number, used?: number}} [options]
   */
  draw(name, value, text, { href, alert = "", warn = false, leased, used } = {}) {
    setText(this.name, name);
    setText(this.value, value);
    setText(this.text, text);
    setText(this.alert, alert);
    if (href) this.root.href = href;
    this.root.classList.toggle("warn", warn);
    this.bar.hidden = leased === undefined;
    setProperty(this.bar, "--whole", `${leased ?? 0}%`);
    setProperty(this.bar, "--part", `${used ?? 0}%`);
  }
}
