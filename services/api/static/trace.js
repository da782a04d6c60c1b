// A pod's trace as a waterfall: one row per span, its name indented below its parent, all bars on one time axis.
import { el } from "./dom.js";
import { latency } from "./format.js";

export function waterfall(spans) {
  const end = Math.max(...spans.map((span) => span.start_s + span.duration_s), 0.001);
  const parents = new Map(spans.map((span) => [span.span, span.parent]));
  const depth = (id, seen = new Set()) => {
    const parent = parents.get(id);
    return parents.has(parent) && !seen.has(id) ? 1 + depth(parent, seen.add(id)) : 0;
  };
  return el(
    "table",
    { class: "waterfall" },
    el(
      "caption",
      {},
      `${spans.length} ${spans.length === 1 ? "span" : "spans"} in ${latency(end)}`,
    ),
    el(
      "thead",
      {},
      el(
        "tr",
        {},
        ...["Span", "Start", "Duration", "When"].map((title) =>
          el("th", { scope: "col", class: title.toLowerCase() }, title),
        ),
      ),
    ),
    el("tbody", {}, ...spans.map((span) => row(span, depth(span.span), end))),
  );
}

function row(span, depth, end) {
  const bar = el("span", { class: span.ok ? "span" : "span failed" });
  bar.style.setProperty("--from", `${(100 * span.start_s) / end}%`);
  bar.style.setProperty("--width", `${Math.max((100 * span.duration_s) / end, 0.5)}%`);
  const notes = (span.notes ?? []).map((note) => el("p", { class: "soft" }, note));
  const name = el(
    "th",
    { scope: "row" },
    span.service ? `${span.service}: ${span.name}` : span.name,
    span.ok ? null : el("p", { class: "problem" }, span.text || "failed"),
    ...notes,
  );
  name.style.setProperty("--depth", depth);
  return el(
    "tr",
    {},
    name,
    el("td", {}, latency(span.start_s)),
    el("td", {}, latency(span.duration_s)),
    el("td", { class: "when" }, bar),
  );
}
