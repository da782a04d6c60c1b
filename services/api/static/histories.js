// What the API keeps about the past, as charts: of the cluster, a node, a GPU, a namespace or a pod.
import { Chart, RANGE_S, rangeChoice, rangeQuery } from "./chart.js";
import { el, fetchJson, replaceKeepingFocus } from "./dom.js";

const REFRESH_MS = 30_000;

/** A section of charts with a choice of the range. `chartsOf(history)` returns what to draw, in the order of `labels`. */
export class Histories {
  /** @type {((history: any) => void) | undefined} */
  onload;

  constructor(app, path, labels, chartsOf, title = "Over time") {
    this.app = app;
    this.path = path;
    this.chartsOf = chartsOf;
    this.charts = labels.map((label) => new Chart(label));
    this.choice = el("div");
    this.problem = el("p", { class: "soft", role: "status" });
    this.root = el(
      "section",
      { class: "panel wide histories", "aria-label": title },
      el("header", {}, el("h2", {}, title), this.choice),
      this.problem,
      el(
        "div",
        { class: "charts" },
        ...this.charts.map((chart) => el("div", {}, el("h3", {}, chart.label), chart.root)),
      ),
    );
    this.timer = setInterval(() => this.load(), REFRESH_MS);
    this.update();
  }

  close() {
    clearInterval(this.timer);
    for (const chart of this.charts) chart.close();
  }

  /** Follow the range in the URL. */
  update() {
    const range = rangeQuery(this.app.params());
    if (range === this.range) return;
    this.range = range;
    replaceKeepingFocus(this.choice, [rangeChoice(this.app.params(), this.app.setParams)]);
    this.load();
  }

  async load() {
    const { range } = this;
    try {
      const history = await fetchJson(`${this.path}?${range}`);
      if (range !== this.range) return;
      this.history = history;
      const isPeriod = history.range === "period";
      this.problem.textContent = this.missingText(history, isPeriod);
      const given = this.chartsOf(history);
      for (const [at, chart] of this.charts.entries()) {
        chart.root.parentNode.hidden = !given[at];
        if (given[at])
          await chart.draw({
            at: history.at,
            start: isPeriod ? history.start : history.at.at(-1) - RANGE_S[history.range],
            end: isPeriod ? history.end : undefined,
            ...given[at],
          });
      }
      this.onload?.(history);
    } catch (error) {
      if (range === this.range)
        this.problem.textContent = `The history could not be loaded: ${error.message}`;
    }
  }

  /** Why less is shown than was chosen; empty: all is. */
  missingText({ source, range, start, at }, isPeriod) {
    const hour = this.app.store.now() - RANGE_S["1h"];
    const isShort = isPeriod ? start < hour - 60 : this.range !== `range=${range}`;
    if (source === "memory" && isShort)
      return "The last hour: for more, the API needs the setting --prometheus-url.";
    return isPeriod && !at.length ? "Nothing is recorded of this period." : "";
  }
}

/** Leased and used amounts, percent of a capacity. */
export function percentChart(leased, used, capacity) {
  const of = (values) =>
    values?.map((value) => (value === null || !capacity ? null : (100 * value) / capacity));
  const lines = [{ label: "Leased", colour: "leased", fill: "30", values: of(leased) }];
  if (used) lines.push({ label: "Used", colour: "used", fill: "50", values: of(used) });
  return { unit: "%", highest: 100, lines };
}

/** Leased and used amounts as they are. */
export function amountChart(leased, used, divisor, unit) {
  const of = (values) => values?.map((value) => (value === null ? null : value / divisor));
  const lines = [{ label: "Leased", colour: "leased", fill: "30", values: of(leased) }];
  if (used) lines.push({ label: "Used", colour: "used", fill: "50", values: of(used) });
  return { unit, highest: 1, lines };
}

/** What the leases of a pod or a namespace had and used over time. */
export function leasedHistories(app, path) {
  return new Histories(app, `/api/v1/${path}/history`, ["Memory", "Compute"], (history) => [
    amountChart(history.memory, history.used_memory, 1024, "GiB"),
    amountChart(history.cores, history.used_cores, 100, "GPUs"),
  ]);
}
