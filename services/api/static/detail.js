// What the pages of one node, GPU, pod or namespace have in common: a heading, sections, a poll for details.
import { colourClass } from "./colours.js";
import { command, el, panel, replaceKeepingFocus } from "./dom.js";
import { mib, when } from "./format.js";
import { loadEnded, podTable, runningRows } from "./pods.js";
import { url } from "./route.js";

const POLL_MS = 5000;

/** A page about one thing. Subclasses fill `parts`, and `load` what they poll. */
export class Detail {
  kinds = ["devices", "nodes", "waiting", "namespaces"];
  /** @type {import("./histories.js").Histories | undefined} */
  histories;
  commands;

  constructor(app, id, crumbs, pollMs = POLL_MS) {
    this.app = app;
    this.id = id;
    this.name = el("h2");
    this.badge = el("span", { class: "tag" });
    this.body = el("div", { class: "detail" });
    this.root = el(
      "div",
      { class: "page" },
      el(
        "nav",
        { class: "crumbs", "aria-label": "Path" },
        ...crumbs.map(([text, href]) => el("a", { href }, text)),
      ),
      el("div", { class: "title" }, this.name, this.badge),
      this.body,
    );
    this.closing = [];
    this.timer = setInterval(() => this.poll(), pollMs);
  }

  close() {
    clearInterval(this.timer);
    for (const one of [this.histories, ...this.closing]) one?.close();
  }

  /** Load what the page polls. */
  async load() {}

  /** @param {Set<string>} _kinds what has changed */
  draw(_kinds) {}

  update() {
    this.histories?.update();
    this.draw(new Set(["reset"]));
  }

  async poll() {
    try {
      await this.load();
    } catch (error) {
      if (error.status === 404) this.gone = error.message;
    }
    this.draw(new Set(["reset"]));
  }

  /** Show commands; a second time only if they are others, since what was copied is said beside them. */
  showCommands(pairs) {
    const texts = Object.values(pairs).join("\n");
    if (this.shownCommands === texts) return;
    this.shownCommands = texts;
    this.commands.fill(...Object.entries(pairs).map(([what, text]) => command(text, what)));
  }

  head(name, state, kind) {
    this.name.textContent = name;
    this.badge.textContent = state;
    this.badge.className = `tag ${kind}`;
    this.badge.hidden = !state;
  }

  /** A part that is filled again and again. */
  part(title, options = {}) {
    const body = el("div");
    const root = panel(title, options, body);
    root.fill = (...children) => {
      root.hidden = !children.length;
      replaceKeepingFocus(body, children.flat());
    };
    return root;
  }
}

/** The pods of one node, GPU or namespace: those with a lease, and those that have ended within a day. */
export class PodsOf {
  constructor(app, query, isOne, { device = "", title = "Pods" } = {}) {
    this.app = app;
    this.device = device;
    this.query = query;
    this.isOne = isOne;
    this.ended = [];
    this.table = podTable(app, title);
    this.empty = el("p", { class: "nothing" }, "None.");
    this.root = panel(
      title,
      { wide: true, aside: el("a", { href: url("pods", null, query) }, "Filter them") },
      this.empty,
      this.table.root,
    );
    this.load();
  }

  close() {
    this.table.close();
  }

  async load() {
    this.ended = await loadEnded(this.query, this.device);
    this.draw();
  }

  draw() {
    const rows = [...runningRows(this.app.store).filter(this.isOne), ...this.ended];
    this.empty.hidden = Boolean(rows.length);
    this.table.root.hidden = !rows.length;
    this.table.draw(rows, this.app.params().get("sort") ?? "-age", (pod) => pod.pod);
  }
}

/** The hardware of a device as gauges; nothing where no agent reports it. */
export function hardware(found) {
  if (!found) return [];
  const gauge = (name, value, unit, part) =>
    value === null || value === undefined
      ? null
      : el(
          "div",
          { class: "gauge" },
          el("span", { class: "soft" }, name),
          el("b", {}, `${Math.round(value)}`),
          el("small", {}, unit),
          part === undefined ? null : meter(part),
        );
  return [
    el(
      "div",
      { class: "gauges" },
      gauge("Temperature", found.temperature_c, "°C", found.temperature_c),
      gauge(
        "Power",
        found.power_w,
        powerUnit(found),
        found.power_limit_w ? (100 * found.power_w) / found.power_limit_w : undefined,
      ),
      gauge("Busy", found.busy_percent, "%", found.busy_percent),
      gauge("Clock", found.sm_clock_mhz, "MHz"),
      gauge("Memory clock", found.memory_clock_mhz, "MHz"),
    ),
    found.throttle?.length
      ? el("p", { class: "warn" }, `Slowed down by: ${found.throttle.join(", ")}.`)
      : null,
    found.xids?.length
      ? el(
          "ul",
          { class: "plain" },
          ...found.xids.map((xid) =>
            el(
              "li",
              {},
              el("b", { class: "kind-bad" }, `Xid ${xid.number}`),
              ` ${when(xid.at)}${xid.meaning ? `: ${xid.meaning}` : ""}`,
            ),
          ),
        )
      : el("p", { class: "soft" }, "No Xid errors."),
  ].filter(Boolean);
}

/** The hardware of several devices as a table; nothing where no agent reports it. */
export function hardwareTable(devices) {
  const known = devices.filter((device) => device.hardware);
  const amount = (value, unit) =>
    value === null || value === undefined ? "–" : `${Math.round(value)} ${unit}`;
  if (!known.length) return [];
  const titles = [
    "GPU",
    "Temperature",
    "Power",
    "Busy",
    "Clock",
    "Memory clock",
    "Slowed down by",
    "Xid errors",
  ];
  const row = ({ uuid, index, hardware: found }) =>
    el(
      "tr",
      {},
      el(
        "th",
        { scope: "row" },
        el("a", { href: url("gpu", uuid), "data-key": `hardware:${uuid}` }, `GPU ${index}`),
      ),
      ...[
        amount(found.temperature_c, "°C"),
        amount(found.power_w, powerUnit(found)),
        amount(found.busy_percent, "%"),
        amount(found.sm_clock_mhz, "MHz"),
        amount(found.memory_clock_mhz, "MHz"),
        (found.throttle ?? []).join(", "),
        (found.xids ?? []).map((xid) => `${xid.number} at ${when(xid.at)}`).join(", "),
      ].map((text) => el("td", {}, text)),
    );
  return [
    el(
      "div",
      { class: "scrolls", role: "region", "aria-label": "Hardware of all GPUs", tabindex: "0" },
      el(
        "table",
        { class: "quiet" },
        el("thead", {}, el("tr", {}, ...titles.map((title) => el("th", { scope: "col" }, title)))),
        el("tbody", {}, ...known.map(row)),
      ),
    ),
  ];
}

function powerUnit(found) {
  return found.power_limit_w ? `of ${Math.round(found.power_limit_w)} W` : "W";
}

function meter(part) {
  const element = el("span", { class: "meter", "aria-hidden": "true" });
  element.style.setProperty("--part", `${Math.min(Math.max(part, 0), 100)}%`);
  return element;
}

/** To what a share was held when its limits were last read back, or how it differs from its lease; empty: there is nothing to say. */
function readBackText({ held_memory_mib, held_cores_percent, held_difference, read_back_at }) {
  const amounts = [
    held_memory_mib !== null && mib(held_memory_mib),
    held_cores_percent && `${held_cores_percent} % of the cores`,
  ].filter(Boolean);
  const held = read_back_at && amounts.length ? `held to ${amounts.join(" and ")}` : "";
  const text = held_difference ? `DIFFERS: ${held_difference}` : held;
  return text && read_back_at ? `${text}, read back ${when(read_back_at)}` : text;
}

/** One share of a namespace, or of a hidden one, with what it holds and uses, below a link and a note. */
export function shareItem(share, namespace, link, note) {
  const { measured } = share;
  const meter = el("span", {
    class: `meter ${namespace ? colourClass(namespace) : ""}`,
    "aria-hidden": "true",
  });
  meter.style.setProperty(
    "--part",
    `${measured?.memory_mib ? Math.min((100 * measured.memory_mib) / share.memory_mib, 100) : 0}%`,
  );
  const use = measured
    ? [
        measured.memory_mib !== null && `uses ${mib(measured.memory_mib)}`,
        measured.cores_percent !== null && `${measured.cores_percent} % of the cores`,
        measured.idle && `idle since ${when(measured.idle_since)}`,
        readBackText(measured),
      ]
        .filter(Boolean)
        .join(", ")
    : "not measured";
  const what = `${mib(share.memory_mib)}${share.booked_cores ? `, ${share.booked_cores} % of the cores` : ""}${share.mig ? `, ${share.mig.profile} at ${share.mig.position}` : ""}${share.held_text ? `; ${share.held_text}` : ""}`;
  return el(
    "li",
    {},
    el("div", { class: "line" }, link, el("span", { class: "soft end" }, note)),
    el("div", { class: "soft" }, !namespace ? what : `${what}; ${use}`),
    meter,
  );
}
