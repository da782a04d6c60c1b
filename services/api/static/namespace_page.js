// The page of a namespace.
import { Chart, instantsOf, periodOf } from "./chart.js";
import { Detail, PodsOf } from "./detail.js";
import { el, facts, fetchJson } from "./dom.js";
import { count, gpuHours, mib, money, promiseTexts, short, when } from "./format.js";
import { leasedHistories } from "./histories.js";
import { waitingItem, waitingRows } from "./lists.js";
import { url } from "./route.js";

const GRANTS_S = 30 * 86400;
const MOST_PAGES = 5; // of the ledger, 1000 entries each
const MOST_GRANTS = 10;
const UNITS_PER_GPU_HOUR = 3.6e9; // milli-GPU-milliseconds; of a budget in money, a unit of it

export class NamespacePage extends Detail {
  constructor(app, name) {
    super(app, name, [["Namespaces", url("namespaces")]]);
    this.title = name;
    this.facts = this.part("Namespace");
    this.budget = this.part("Budget");
    this.commands = this.part("Commands");
    this.showCommands({
      "Its pods and leases": `kubectl leasehold ps -n ${name}`,
      "Its budget": `kubectl leasehold budget ${name}`,
    });
    this.costs = this.part("GPU time and cost");
    this.promises = this.part("Promised starts, 30 d");
    this.changes = this.part("Granted by whom");
    this.waits = this.part("Waiting", { wide: true });
    this.chart = new Chart("GPU-minutes used in this window");
    this.window = this.part("GPU-minutes used in this window", { wide: true });
    this.histories = leasedHistories(app, `namespaces/${encodeURIComponent(name)}`);
    this.pods = new PodsOf(app, { namespace: name }, (pod) => pod.namespace === name);
    this.closing = [this.chart, this.pods];
    for (const part of [
      this.window,
      this.budget,
      this.costs,
      this.promises,
      this.changes,
      this.waits,
    ])
      part.hidden = true;
    this.body.append(
      this.facts,
      this.budget,
      this.costs,
      this.promises,
      this.changes,
      this.commands,
      this.waits,
      this.histories.root,
      this.window,
      this.pods.root,
    );
    this.poll();
  }

  async load() {
    const name = encodeURIComponent(this.id);
    await Promise.all([this.loadCosts(), this.loadPromises(), this.loadGrants(name)]);
    this.found = await fetchJson(`/api/v1/namespaces/${name}`);
  }

  update() {
    super.update();
    this.loadCosts().then(() => this.drawCosts());
  }

  /** Load what its GPUs were used for: of a day, of a week, and of the period that is chosen. */
  async loadCosts() {
    const params = this.app.params();
    const now = this.app.store.now();
    const since = (range) => instantsOf(new URLSearchParams({ range }), now);
    const chosen = periodOf(params) ? instantsOf(params, now) : null;
    const periods = { "1 d": since("1d"), "7 d": since("7d"), ...(chosen && { Period: chosen }) };
    this.periods = await Promise.all(
      Object.entries(periods).map(async ([title, [from, to]]) => {
        const query = new URLSearchParams({ from, ...(to && { to }) });
        const report = await fetchJson(`/api/v1/reports/costs?${query}`).catch(() => null);
        return [title, report];
      }),
    );
  }

  async loadPromises() {
    const report = await fetchJson("/api/v1/reports/starts").catch(() => null);
    this.kept = promiseTexts(report?.namespaces.find((sums) => sums.namespace === this.id));
  }

  async loadGrants(name) {
    const from = new Date((this.app.store.now() - GRANTS_S) * 1000).toISOString();
    this.grants = [];
    let cursor = "";
    for (let page = 0; page < MOST_PAGES; page++) {
      const query = new URLSearchParams(cursor ? { from, cursor } : { from });
      const read = await fetchJson(`/api/v1/budgets/${name}/ledger?${query}`).catch(() => null);
      this.grants.push(...(read?.entries ?? []).filter((entry) => entry.kind === "grant"));
      cursor = read?.cursor;
      if (!cursor) return;
    }
  }

  drawCosts() {
    const rows = (this.periods ?? []).flatMap(([title, report]) => {
      const lines = report?.lines.filter((line) => line.namespace === this.id) ?? [];
      const sum = (field, use) =>
        lines
          .filter((line) => !use || line.use === use)
          .reduce((all, line) => all + Number(line[field] ?? 0), 0);
      if (!lines.length) return [];
      const cost = report.currency ? `, ${money(sum("cost"), report.currency)}` : "";
      const idle = sum("gpu_hours", "idle");
      const waste = idle
        ? `; ${gpuHours(idle)} of it idle${report.currency ? `, ${money(sum("cost", "idle"), report.currency)}` : ""}`
        : "";
      return [[title, `${gpuHours(sum("gpu_hours"))}${cost}${waste}`]];
    });
    this.costs.fill(...(rows.length ? [facts(Object.fromEntries(rows))] : []));
  }

  drawGrants(currency) {
    const amount = (units) =>
      currency ? money(units / UNITS_PER_GPU_HOUR, currency) : gpuHours(units / UNITS_PER_GPU_HOUR);
    this.changes.fill(
      ...(this.grants?.length
        ? [
            el(
              "ul",
              { class: "plain" },
              ...this.grants
                .slice(-MOST_GRANTS)
                .reverse()
                .map((entry) =>
                  el(
                    "li",
                    {},
                    el("time", { class: "soft" }, when(entry.ts / 1000)),
                    ` ${entry.actor}: ${amount(Number(entry.units))}`,
                    entry.reason ? `, ${entry.reason}` : "",
                  ),
                ),
            ),
          ]
        : []),
    );
  }

  draw(kinds) {
    const { store } = this.app;
    const namespace = store.namespaces.find((one) => one.namespace === this.id) ?? this.found;
    this.drawCosts();
    this.promises.fill(...(this.kept ? [facts(this.kept)] : []));
    this.drawGrants(namespace?.budget?.currency);
    if (!namespace) return this.head(this.id, this.gone ? "nothing leased" : "", "");
    const budget = newest(namespace.budget, this.found?.budget);
    const minutes = (amount) =>
      amount === null
        ? "no limit"
        : budget.currency
          ? `${(amount / 60).toFixed(2)} ${budget.currency}`
          : `${amount.toFixed(1)} GPU-minutes`;
    this.head(
      this.id,
      budget ? `budget ${budget.state}` : "",
      { ok: "good", warning: "warn" }[budget?.state] ?? "bad",
    );
    this.facts.fill(
      facts({
        Leases: `${namespace.leases} on ${count(namespace.devices, "GPU")}`,
        Memory: `${mib(namespace.memory_mib)} leased`,
        GPUs: `${short(namespace.milli_gpu / 1000)} leased`,
        Waiting: namespace.waiting ? count(namespace.waiting, "pod") : "",
      }),
    );
    this.budget.fill(
      ...(budget
        ? [
            facts({
              Window: budget.window.split("+")[0],
              Used: minutes(budget.used_minutes),
              Remaining: minutes(budget.remaining_minutes),
              "Current rate": `${(budget.current_rate_milli_gpu / 1000).toFixed(2)} ${budget.currency ? `${budget.currency} per hour` : "GPUs"}`,
              "Exhausted at": budget.exhausted_at ? when(budget.exhausted_at) : "",
              "New pods": budget.new_pods,
            }),
          ]
        : []),
    );
    const waiting = store.waiting.pods.filter((pod) => pod.namespace === this.id);
    this.waits.fill(
      ...(waiting.length
        ? [
            el(
              "ol",
              { class: "cards" },
              ...waitingRows(waiting).map((row) => waitingItem(row, store.now(), true)),
            ),
          ]
        : []),
    );
    this.drawBudget(budget);
    if (kinds.has("reset") || kinds.has("devices")) this.pods.draw();
  }

  drawBudget(budget) {
    const history = this.found?.budget_history;
    if (!history) return;
    if (this.window.hidden) this.window.fill(this.chart.root);
    if (this.drawn === this.found) return;
    this.drawn = this.found;
    this.chart.draw(budgetChart(history, budget));
  }
}

/** The budget that was read last: changes of its state are reported at once, amounts once a minute. */
function newest(one, two) {
  return (two?.at ?? 0) > (one?.at ?? 0) ? two : one;
}

/** What is used, in money if the budget is, the limit, and how it goes on at the current rate. */
function budgetChart(history, budget) {
  const currency = budget?.currency;
  const amount = (minutes) => (currency ? minutes / 60 : minutes);
  const { points, limit_minutes: limit, end } = history;
  const last = points.at(-1);
  const until =
    budget?.exhausted_at && limit !== null && budget.exhausted_at > last.at
      ? Math.min(budget.exhausted_at, end ?? Infinity)
      : null;
  const at = [
    ...points.map((point) => point.at),
    ...(until ? [until] : []),
    ...(end && end > (until ?? last.at) ? [end] : []),
  ];
  const column = (value) => at.map((instant, index) => value(instant, index));
  /** @type {{label: string, colour: string, fill?: string, dashed?: boolean, values: any[]}[]} */
  const lines = [
    {
      label: "Used",
      colour: "used",
      fill: "40",
      values: column((_, index) => (points[index] ? amount(points[index].minutes) : null)),
    },
  ];
  if (limit !== null)
    lines.push({
      label: "Limit",
      colour: "bad",
      dashed: true,
      values: column(() => amount(limit)),
    });
  if (until) {
    const rate = budget.current_rate_milli_gpu / 60000; // GPU-minutes per second
    lines.push({
      label: "At the current rate",
      colour: "soft",
      dashed: true,
      values: column((instant) =>
        instant >= last.at && instant <= until
          ? amount(last.minutes + rate * (instant - last.at))
          : null,
      ),
    });
  }
  return {
    at,
    lines,
    unit: currency || "min",
    highest: 1,
    end: at.at(-1),
    shown: points.length - 1,
  };
}
