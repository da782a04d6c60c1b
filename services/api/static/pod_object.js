// A pod as the API server has it: what it requests, its conditions, its Events and its manifest.
import { copyButton, el, facts, fetchJson } from "./dom.js";
import { age, when } from "./format.js";

const pairs = (amounts) =>
  Object.entries(amounts)
    .map(([name, amount]) => `${name}: ${amount}`)
    .join(", ");

export class PodObject {
  /** `page` has the parts; `name` is NAMESPACE/NAME. */
  constructor(page) {
    this.page = page;
    this.request = page.part("Requested", { wide: true });
    this.events = page.part("Kubernetes Events", { wide: true });
    this.object = page.part("Object", { wide: true });
    this.parts = [this.request, this.events, this.object];
    for (const part of this.parts) part.hidden = true;
  }

  async load({ namespace, name, pod, has_object: isReadable }) {
    if (!isReadable) return;
    const path = `/api/v1/pods/${encodeURIComponent(namespace)}/${encodeURIComponent(name)}`;
    this.problem = "";
    try {
      const found = await fetchJson(path);
      this.found = found.pod === pod ? found : null;
      if (!this.found) this.problem = "The pod that has this name now is another one.";
    } catch (error) {
      this.found = null;
      this.problem = error.message;
    }
  }

  draw(now) {
    const { found } = this;
    if (!found) {
      this.events.fill(
        ...(this.problem ? [el("p", { class: "soft" }, sentence(this.problem))] : []),
      );
      this.request.fill();
      this.object.fill();
      return;
    }
    this.request.fill(
      facts({
        Owner: found.owner || "none: no controller creates it again",
        Phase: [found.phase, found.reason].filter(Boolean).join(": "),
        Scheduler: found.scheduler,
        Priority: [found.priority ?? "", found.priority_class && `(${found.priority_class})`]
          .filter((text) => text !== "")
          .join(" "),
        "Node selector": pairs(found.node_selector),
        "Scheduling gates": found.gates.join(", "),
        Created: found.created ? when(found.created) : "",
        Ended: found.ended ? when(found.ended) : "",
      }),
      containerTable(found.containers),
      conditionTable(found.conditions),
    );
    this.events.fill(
      found.events_hidden
        ? el("p", { class: "soft" }, sentence(found.events_hidden))
        : found.events.length
          ? eventTable(found.events, now)
          : el("p", { class: "nothing" }, "None: the API server keeps them for an hour."),
    );
    this.showManifest(found.manifest);
  }

  /** Show the manifest; a second time only if it is another, since it may be open. */
  showManifest(manifest) {
    if (this.manifest === manifest) return;
    this.manifest = manifest;
    const text = el("pre", { tabindex: "0", "aria-label": "Manifest" }, manifest);
    this.object.fill(
      el(
        "details",
        {},
        el("summary", {}, "YAML, with the values of variables hidden"),
        ...copyButton(text),
        text,
      ),
    );
  }
}

function sentence(text) {
  return `${text.charAt(0).toUpperCase()}${text.slice(1)}${text.endsWith(".") ? "" : "."}`;
}

function table(label, titles, rows) {
  return el(
    "div",
    { class: "scrolls", role: "region", "aria-label": label, tabindex: "0" },
    el(
      "table",
      { class: "quiet" },
      el("thead", {}, el("tr", {}, ...titles.map((title) => el("th", { scope: "col" }, title)))),
      el(
        "tbody",
        {},
        ...rows.map(([first, ...others]) =>
          el(
            "tr",
            {},
            el("th", { scope: "row" }, first),
            ...others.map((text) => el("td", {}, text)),
          ),
        ),
      ),
    ),
  );
}

function containerTable(containers) {
  return table(
    "Containers",
    ["Container", "Image", "Requests", "Limits", "State", "Started", "Ended", "Restarts"],
    containers.map((container) => [
      `${container.name}${container.init ? " (init)" : ""}`,
      container.image,
      pairs(container.requests),
      pairs(container.limits),
      container.state,
      container.started ? when(container.started) : "",
      container.ended ? when(container.ended) : "",
      `${container.restarts}`,
    ]),
  );
}

function conditionTable(conditions) {
  if (!conditions.length) return null;
  return table(
    "Conditions",
    ["Condition", "Status", "Since", "Reason", "Message"],
    conditions.map(({ type, status, at, reason, message }) => [
      type,
      status,
      at ? when(at) : "",
      reason,
      message,
    ]),
  );
}

function eventTable(events, now) {
  return table(
    "Events of the pod",
    ["Reason", "Type", "Age", "From", "Message"],
    events.map(({ reason, type, at, count, source, message }) => [
      reason,
      type,
      `${at ? age(now - at) : ""}${count > 1 ? `, ${count} times` : ""}`,
      source,
      message,
    ]),
  );
}
