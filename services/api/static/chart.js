// Charts over time, drawn by uPlot, which is loaded with the first of them.
import { el } from "./dom.js";

const HEIGHT = 150;
let loading = null;

function loadLibrary() {
  loading ??= new Promise((resolve, reject) => {
    document.head.append(el("link", { rel: "stylesheet", href: "/static/uplot.css" }),
      el("script", { src: "/static/uplot.js", onload: () => resolve(window.uPlot), onerror: () => reject(new Error("uplot.js")) }));
  });
  return loading;
}

/**
 * Add a chart to an element, once it is on the page: `at` in Unix seconds, `lines` as [{label, values, colour, dashed}].
 * `highest`: what the axis of amounts contains at least; `end`: the last instant of that of time; `shown`: the
 * index of the amounts in the legend until the pointer chooses others.
 */
export async function drawChart(parent, { label, at, lines, unit, highest, end = at.at(-1), shown = at.length - 1 }) {
  const uPlot = await loadLibrary();
  if (!parent.isConnected) return;
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  const start = Math.min(at[0], end - 60);
  const axis = { stroke: colour("soft"), grid: { stroke: colour("line"), width: 1 }, ticks: { stroke: colour("line") }, font: "11px system-ui" };
  const value = (_, amount) => amount === null || amount === undefined ? "–" : `${round(amount)} ${unit}`;
  parent.setAttribute("role", "group");
  parent.setAttribute("aria-label", label);
  new uPlot({
    width: parent.clientWidth, height: HEIGHT, cursor: { y: false, drag: { x: false, y: false } }, hooks: { ready: [(plot) => plot.setLegend({ idx: shown })] },
    scales: { x: { range: [start, end] }, y: { range: (_, low, high) => [Math.min(low ?? 0, 0), Math.max(high ?? 0, highest) * 1.05] } },
    axes: [{ ...axis, size: 28 }, { ...axis, size: 52, values: (_, ticks) => ticks.map((tick) => round(tick)) }],
    series: [{ label: "Time", value: (_, time) => time ? new Date(time * 1000).toLocaleString() : "–" },
      ...lines.map((line) => ({ label: line.label, stroke: colour(line.colour), width: 1.5, dash: line.dashed ? [5, 4] : undefined, value, spanGaps: Boolean(line.dashed), points: { show: at.length < 3 } }))],
  }, [at, ...lines.map((line) => line.values)], parent);
}

const round = (amount) => Math.abs(amount) >= 100 ? Math.round(amount) : Number(amount.toFixed(1));
