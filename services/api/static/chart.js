// Charts over time, drawn by uPlot, which is loaded with the first of them. The left and right arrow keys move the cursor.
import { el, setText } from "./dom.js";
import { short } from "./format.js";

const HEIGHT = 150;
const MINUTE = 60;
const HOUR = 3600;
const DAY = 86400;
const STEPS = [
  MINUTE,
  5 * MINUTE,
  10 * MINUTE,
  15 * MINUTE,
  30 * MINUTE,
  HOUR,
  2 * HOUR,
  3 * HOUR,
  6 * HOUR,
  12 * HOUR,
  DAY,
  2 * DAY,
  7 * DAY,
];
export const RANGE_S = { "1h": HOUR, "1d": DAY, "7d": 7 * DAY };
export const RANGES = { "1h": "1 h", "1d": "1 d", "7d": "7 d" };
const EVENING = 20;
const MORNING = 8;
let loading = null;

function loadLibrary() {
  loading ??= new Promise((resolve, reject) => {
    document.head.append(
      el("link", { rel: "stylesheet", href: "/static/uplot.css" }),
      el("script", {
        src: "/static/uplot.js",
        onload: () => resolve(/** @type {any} */ (window).uPlot),
        onerror: () => reject(new Error("uplot.js could not be loaded")),
      }),
    );
  });
  return loading;
}

/** The choice of a range, in the URL as `range`, or of a period, there as `from` and `to`. */
export function rangeChoice(params, setParams) {
  const period = periodOf(params);
  const current = period ? "" : rangeOf(params);
  return el(
    "div",
    { class: "ranges", role: "group", "aria-label": "Range" },
    ...Object.entries(RANGES).map(([range, text]) =>
      el(
        "button",
        {
          type: "button",
          "aria-pressed": `${range === current}`,
          "data-key": `range-${range}`,
          onclick: () => setParams({ range: range === "1d" ? "" : range, from: "", to: "" }),
        },
        text,
      ),
    ),
    ...periodChoice(period, setParams),
  );
}

/** A button and the form that it opens: two instants of this computer's clock. */
function periodChoice(period, setParams) {
  const apply = (from, to) =>
    setParams({ range: "", from: from.toISOString(), to: to.toISOString() });
  const night = lastNight();
  const input = (name, at) =>
    el("input", { type: "datetime-local", name, required: true, step: "60", value: localTime(at) });
  const form = el(
    "form",
    {
      popover: "auto",
      id: "period",
      class: "menu period",
      "aria-label": "Period",
      onsubmit: (event) => {
        event.preventDefault();
        const { from, to } = form.elements;
        const isLater = new Date(to.value) > new Date(from.value);
        to.setCustomValidity(isLater ? "" : "Choose a time after the beginning.");
        if (form.reportValidity()) apply(new Date(from.value), new Date(to.value));
      },
      oninput: () => form.elements.to.setCustomValidity(""),
    },
    el("label", {}, "From", input("from", period?.from ?? night[0])),
    el("label", {}, "To", input("to", period?.to ?? night[1])),
    el("button", {}, "Show"),
    el("button", { type: "button", class: "small", onclick: () => apply(...night) }, "Last night"),
  );
  const button = el(
    "button",
    {
      type: "button",
      "aria-pressed": `${Boolean(period)}`,
      "aria-haspopup": "true",
      "data-key": "range-period",
      popovertarget: form.id,
    },
    period ? `${shortTime(period.from)} – ${shortTime(period.to)}` : "Period",
  );
  form.addEventListener("beforetoggle", () => {
    const box = button.getBoundingClientRect();
    form.style.left = `${Math.max(Math.min(box.left, innerWidth - 296), 8)}px`;
    form.style.top = `${box.bottom + 4}px`;
  });
  return [button, form];
}

/** From yesterday evening until this morning, or until now. */
function lastNight() {
  const from = new Date();
  from.setDate(from.getDate() - 1);
  from.setHours(EVENING, 0, 0, 0);
  const to = new Date();
  to.setHours(MORNING, 0, 0, 0);
  return [from, to > new Date() ? new Date() : to];
}

/** An instant as the value of an input. */
function localTime(at) {
  return new Date(at.getTime() - at.getTimezoneOffset() * 60_000).toISOString().slice(0, 16);
}

function shortTime(at) {
  return at.toLocaleString("en-GB", {
    day: "numeric",
    month: "short",
    hour: "2-digit",
    minute: "2-digit",
  });
}

/** The period in the URL, or null if there is none. */
export function periodOf(params) {
  const [from, to] = ["from", "to"].map((name) => new Date(params.get(name) ?? ""));
  return from < to ? { from, to } : null;
}

/** The range or the period in the URL, as parameters of the API. */
export function rangeQuery(params) {
  const period = periodOf(params);
  return period
    ? `from=${period.from.toISOString()}&to=${period.to.toISOString()}`
    : `range=${rangeOf(params)}`;
}

/** The range or the period in the URL as two instants, RFC 3339; the second is empty for now. */
export function instantsOf(params, now) {
  const period = periodOf(params);
  return period
    ? [period.from.toISOString(), period.to.toISOString()]
    : [new Date((now - RANGE_S[rangeOf(params)]) * 1000).toISOString(), ""];
}

/** What the range or the period is called after `in`. */
export function rangeText(params) {
  return periodOf(params) ? "this period" : RANGES[rangeOf(params)];
}

export function rangeOf(params) {
  return RANGES[params.get("range")] ? params.get("range") : "1d";
}

/** A chart that is kept, however often its amounts change. */
export class Chart {
  constructor(label) {
    this.label = label;
    this.plot = el("div", { class: "plot" });
    this.legend = el("div", { class: "series" });
    this.root = el(
      "div",
      {
        class: "chart",
        role: "group",
        "aria-label": label,
        tabindex: "0",
        onkeydown: (event) => this.onKey(event),
      },
      this.legend,
      this.plot,
    );
    this.root.addEventListener("blur", () => this.chart?.setCursor({ left: -10, top: -10 }));
    this.observer = new ResizeObserver(() =>
      this.chart?.setSize({ width: this.plot.clientWidth, height: HEIGHT }),
    );
    this.observer.observe(this.plot);
    this.repaint = () => {
      this.drop();
      if (this.given) this.draw(this.given);
    };
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", this.repaint);
  }

  close() {
    this.observer.disconnect();
    matchMedia("(prefers-color-scheme: dark)").removeEventListener("change", this.repaint);
    this.drop();
  }

  drop() {
    this.chart?.destroy();
    this.chart = null;
  }

  /**
   * Draw amounts: `at` in Unix seconds, `lines` as [{label, values, colour, fill, dashed}]. `highest`: what the axis of amounts contains
   * at least; `end`: the last instant of that of time; `shown`: the index of the amounts that the legend has without a cursor.
   */
  async draw(given) {
    this.given = given;
    let uPlot;
    try {
      uPlot = await loadLibrary();
    } catch (error) {
      this.plot.replaceChildren(error.message);
      return;
    }
    if (this.given !== given || !this.root.isConnected || !this.plot.clientWidth) return;
    const shape = given.lines.map((line) => line.label).join();
    if (this.chart && this.shape !== shape) this.drop();
    const data = [given.at, ...given.lines.map((line) => line.values)];
    if (this.chart) this.chart.setData(data);
    else this.create(uPlot, data, given);
    this.shape = shape;
    this.showAt(this.chart.cursor.idx);
  }

  create(uPlot, data, { lines, unit }) {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    const axis = {
      stroke: colour("soft"),
      grid: { stroke: colour("line"), width: 1 },
      ticks: { show: false },
      font: "11px system-ui, sans-serif",
    };
    this.values = lines.map(() => el("b"));
    this.instant = el("span", { class: "soft" });
    this.legend.replaceChildren(
      ...lines.map((line, at) =>
        el("span", {}, swatch(line, colour), `${line.label} `, this.values[at]),
      ),
      this.instant,
    );
    this.chart = new uPlot(
      {
        width: this.plot.clientWidth,
        height: HEIGHT,
        legend: { show: false },
        padding: [8, 22, 0, 0],
        cursor: { y: false, drag: { x: false, y: false }, points: { size: 6 } },
        hooks: { setCursor: [(plot) => this.showAt(plot.cursor.idx)] },
        scales: {
          x: { range: () => this.range() },
          y: {
            range: (_, low, high) => [
              Math.min(low ?? 0, 0),
              Math.max(high ?? 0, this.given.highest) * 1.05,
            ],
          },
        },
        axes: [
          { ...axis, size: 24, space: 64, incrs: STEPS, values: (_, ticks) => timeLabels(ticks) },
          {
            ...axis,
            size: 44,
            space: 34,
            values: (_, ticks) => ticks.map((tick) => `${short(tick)}${unit === "%" ? " %" : ""}`),
          },
        ],
        series: [
          {},
          ...lines.map((line) => ({
            stroke: colour(line.colour),
            fill: line.fill ? `${colour(line.colour)}${line.fill}` : undefined,
            width: line.dashed ? 1 : 1.5,
            dash: line.dashed ? [5, 4] : undefined,
            spanGaps: Boolean(line.dashed),
            points: { show: data[0].length < 3 },
          })),
        ],
      },
      data,
      this.plot,
    );
  }

  range() {
    const { at, start = at[0], end = at.at(-1) } = this.given;
    return [Math.min(start, end - MINUTE), end];
  }

  /** Show the amounts at an index; without a cursor, the latest ones. */
  showAt(index) {
    const { at, lines, unit, shown = at.length - 1 } = this.given;
    const chosen = index ?? shown;
    for (const [number, line] of lines.entries())
      setText(this.values[number], amountText(line.values[chosen], unit));
    setText(
      this.instant,
      index === null || index === undefined
        ? ""
        : new Date(at[chosen] * 1000).toLocaleString("en-GB", {
            dateStyle: "medium",
            timeStyle: "short",
          }),
    );
  }

  onKey(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || !this.chart) return;
    event.preventDefault();
    const { at } = this.given;
    const index = Math.min(Math.max((this.chart.cursor.idx ?? at.length) + step, 0), at.length - 1);
    this.chart.setCursor({ left: this.chart.valToPos(at[index], "x"), top: 10 });
  }
}

function amountText(amount, unit) {
  return amount === null || amount === undefined
    ? "–"
    : `${short(amount)} ${amount === 1 ? unit.replace(/s$/, "") : unit}`;
}

function swatch(line, colour) {
  const mark = el("i", { class: line.dashed ? "dashed" : "", "aria-hidden": "true" });
  mark.style.borderColor = colour(line.colour);
  return mark;
}

/** Times of the axis: hours and minutes, and the day where it begins. */
function timeLabels(ticks) {
  const step = ticks.length > 1 ? ticks[1] - ticks[0] : 0;
  return ticks.map((tick) => {
    const date = new Date(tick * 1000);
    const isMidnight = !date.getHours() && !date.getMinutes();
    if (isMidnight || step >= DAY)
      return date.toLocaleDateString("en-GB", { weekday: "short", day: "numeric" });
    return date.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
  });
}
