// One GPU as a cell of the map. It remembers what it has drawn, so that only changes are written to the page.
import { colourClass, USE_STEPS, useClass } from "./colours.js";
import {
  deviceText,
  faultText,
  lastingShares,
  measuredCores,
  reservationText,
  shareText,
} from "./devices.js";
import { el, setAttribute, setProperty, setText } from "./dom.js";
import { mib } from "./format.js";

export class Cell {
  constructor() {
    this.number = el("b");
    this.amount = el("span");
    this.free = el("span", { class: "free" });
    this.bar = el("span", { class: "bar" }, this.free);
    this.cores = el("span", { class: "cores" });
    this.note = el("span", { class: "note" });
    this.root = el(
      "div",
      { class: "dev", role: "gridcell", tabindex: "-1" },
      el("span", { class: "head" }, this.number, this.amount),
      this.bar,
      this.cores,
      this.note,
    );
    this.shares = [];
  }

  /** Draw a device; does nothing if it is unchanged. */
  draw(device, { closed, dim, byUse }) {
    if (
      this.device === device &&
      this.closed === closed &&
      this.dim === dim &&
      this.byUse === byUse
    )
      return;
    this.device = device;
    this.closed = closed;
    this.dim = dim;
    this.byUse = byUse;
    setAttribute(
      this.root,
      "class",
      `dev${device.healthy ? "" : " bad"}${closed ? " closed" : ""}${dim ? " dim" : ""}`,
    );
    setAttribute(this.root, "data-uuid", device.uuid);
    this.root.removeAttribute("title");
    setAttribute(this.root, "aria-description", deviceText(device, closed));
    setText(this.number, `${device.index}`);
    setText(this.amount, amounts(device));
    const note = closed ? `closed: ${closed}` : reservationText(device);
    setText(this.note, device.healthy ? note : faultText(device));
    setProperty(this.free, "flex-grow", Math.max(device.memory_mib - device.used_memory_mib, 0));
    setProperty(this.cores, "--leased", part(device.used_cores_percent, 100));
    const used = measuredCores(device);
    setProperty(this.cores, "--measured", used === null ? null : part(used, 100));
    const shares = lastingShares(device);
    while (this.shares.length > shares.length) this.shares.pop().remove();
    for (const [at, [share, held]] of shares.entries()) this.drawShare(at, share, held);
  }

  drawShare(at, share, held) {
    let element = this.shares[at];
    if (!element) {
      element = el("span");
      this.shares.push(element);
      this.bar.insertBefore(element, this.free);
    }
    const { measured } = share;
    const colour = this.byUse
      ? useClass(measuredCores(this.device))
      : share.pod
        ? colourClass(share.namespace)
        : "anonymous";
    element.share = share;
    element.removeAttribute("title");
    setAttribute(
      element,
      "class",
      `share ${share.state} ${colour}${measured ? " measured" : ""}${measured?.idle && !this.byUse ? " idle" : ""}`,
    );
    const used = measured ? part(measured.memory_mib, share.memory_mib) : null;
    setProperty(element, "--memory", used);
    setText(element, [share.mig?.profile, share.name].filter(Boolean).join(" "));
    setProperty(element, "flex-grow", held);
    setAttribute(element, "data-pod", share.pod ?? "");
  }

  /** Set the tooltip of the element under the pointer. */
  explain(element) {
    const share = element.closest(".share");
    if (share) share.title ||= shareText(share.share);
    else this.root.title ||= deviceText(this.device, this.closed);
  }
}

function amounts(device) {
  return device.mode === "mig"
    ? `${device.used_shares}/${device.slots} instances`
    : `${mib(device.used_memory_mib).replace(/ .*/, "")} of ${mib(device.memory_mib)}`;
}

function part(used, amount) {
  return `${Math.min(Math.round((100 * (used ?? 0)) / Math.max(amount, 1)), 100)}%`;
}

/** What the colours mean where a GPU is coloured by how busy its cores are. */
export function useScale() {
  const entry = (kind, text) =>
    el(
      "div",
      {},
      el("dt", { "aria-hidden": "true" }, el("span", { class: `swatch ${kind}` })),
      el("dd", {}, text),
    );
  const steps = USE_STEPS.map((from, at) =>
    entry(`u${at}`, from ? `${from} to ${(USE_STEPS[at + 1] ?? 101) - 1} %` : "0 %"),
  );
  return el(
    "div",
    { class: "use", hidden: true },
    el("p", { class: "soft" }, "Cores of the GPU in use"),
    el("dl", { class: "legend" }, ...steps, entry("anonymous", "not measured")),
  );
}

/** What the parts of a cell mean. */
export function legend() {
  const entry = (picture, text) =>
    el("div", {}, el("dt", { "aria-hidden": "true" }, picture), el("dd", {}, text));
  const share = (kind) => el("span", { class: `swatch ${kind}` });
  const used = share("c0");
  const cores = el("span", { class: "cores" });
  setProperty(used, "--memory", "60%");
  setProperty(cores, "--leased", "80%");
  setProperty(cores, "--measured", "35%");
  const parts = el(
    "dl",
    { class: "legend" },
    entry(used, "memory: leased, in the colour of the namespace or of use, and used"),
    entry(cores, "cores: leased and used"),
    entry(share("idle c0"), "leased, but idle"),
    entry(share("bound c0"), "its container has not started"),
    entry(share("anonymous"), "of a namespace that you may not see"),
    entry(el("span", { class: "key-bad" }), "unhealthy"),
    entry(el("span", { class: "key-closed" }), "gets no new pods"),
  );
  return el("details", { class: "key" }, el("summary", {}, "Legend"), parts);
}
