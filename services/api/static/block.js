// One device as a block. It remembers what it has drawn, so that only changes are written to the page.
import { deviceText, el, faultText, hue, measuredCores, mib, model, setAttribute, setText, shareText } from "./dom.js";

export class Block {
  constructor(uuid) {
    this.root = el("button", { class: "dev", type: "button", tabindex: "-1" });
    this.root.dataset.uuid = uuid;
    this.shares = [];
    this.drawn = null;
  }

  createElements() {
    this.number = el("b");
    this.model = el("span");
    this.free = el("span", { class: "free" });
    this.bar = el("span", { class: "bar" }, this.free);
    this.cores = el("span", { class: "cores" });
    this.amounts = el("span", { class: "amounts" });
    this.root.append(el("span", { class: "head" }, this.number, this.model), this.bar, this.cores, this.amounts);
  }

  /** Draw the device; does nothing if it is unchanged. */
  draw(device, hidden) {
    if (this.drawn === device && this.hidden === hidden) return;
    if (!this.drawn) this.createElements();
    this.drawn = device;
    this.hidden = hidden;
    setAttribute(this.root, "class", `dev${device.healthy ? "" : " bad"}${device.excluded ? " excluded" : ""}`);
    this.root.hidden = hidden;
    this.root.removeAttribute("title");
    setAttribute(this.root, "aria-description", deviceText(device));
    setText(this.number, `${device.healthy ? "" : "⚠ "}${device.index}`);
    setText(this.model, model(device));
    setText(this.amounts, device.healthy ? amounts(device) : faultText(device));
    setFlexGrow(this.free, Math.max(device.memory_mib - device.used_memory_mib, 0));
    setPart(this.cores, "--leased", device.used_cores_percent, 100);
    setPart(this.cores, "--measured", measuredCores(device), 100);
    const shares = device.shares.filter((share) => !share.init || device.shares.length === 1);
    while (this.shares.length > shares.length) this.shares.pop().remove();
    for (const [at, share] of shares.entries()) this.drawShare(at, share);
  }

  drawShare(at, share) {
    let element = this.shares[at];
    if (!element) {
      element = el("span");
      this.shares.push(element);
      this.bar.insertBefore(element, this.free);
    }
    element.share = share;
    element.removeAttribute("title");
    setAttribute(element, "class", `share ${share.state}${share.pod ? "" : " anonymous"}${share.measured ? " measured" : ""}${share.measured?.idle ? " idle" : ""}`);
    setPart(element, "--memory", share.measured?.memory_mib, share.memory_mib);
    setPart(element, "--cores", share.measured?.cores_percent, share.booked_cores || 100);
    setText(element, [share.mig?.profile, share.name].filter(Boolean).join(" "));
    setFlexGrow(element, share.memory_mib);
    setAttribute(element, "data-pod", share.pod ?? "");
    const colour = share.pod ? hue(share.namespace) : null;
    if (element.hue !== colour) {
      element.hue = colour;
      element.style.setProperty("--hue", colour);
    }
  }
}

function amounts(device) {
  const cores = device.mode === "mig" ? `${device.used_shares} of ${device.slots} instances` : `${device.used_cores_percent} % cores`;
  return `${Math.round(100 * device.used_memory_mib / Math.max(device.memory_mib, 1))} % of ${mib(device.memory_mib)}, ${cores}`;
}

/** What the parts of a block mean; made when it is opened. */
export function legend() {
  const parts = el("dl");
  return el("details", { class: "legend", ontoggle: () => { if (!parts.firstChild) parts.append(...legendParts()); } },
    el("summary", {}, "Legend"), parts);
}

function legendParts() {
  const picture = (outer, inner, style) => {
    const element = el("span", { class: inner });
    element.style.cssText = style;
    return el("dt", { "aria-hidden": "true" }, el("span", { class: outer }, element));
  };
  const lease = (kind, text, style = "") => [picture("bar", `share ${kind}`, `flex-grow: 1; ${style}`), el("dd", {}, text)];
  return [
    lease("active", "a lease: its memory, in the colour of its namespace"),
    lease("active measured", "measured use of it: of the cores at the top, of the memory at the bottom", "--memory: 60%; --cores: 40%"),
    lease("active idle", "a lease that is not used"),
    lease("bound", "a lease whose container has not started"),
    lease("reserved", "a reservation"),
    lease("anonymous", "a lease of a namespace that you may not see"),
    [picture("", "cores", "--leased: 70%; --measured: 30%"), el("dd", {}, "cores of the GPU: leased, and within them measured")],
  ].flat();
}

/** Set the tooltip of a share, or of a device, when the pointer reaches it. */
export function setTooltip(element, device) {
  if (element && !element.title) element.title = element.share ? shareText(element.share) : deviceText(device);
}

/** Set the length of a bar that shows how much of an amount is in use. */
function setPart(element, name, used, amount) {
  const part = `${Math.min(Math.round(100 * (used ?? 0) / Math.max(amount, 1)), 100)}%`;
  const parts = element.parts ??= {};
  if (parts[name] === part) return;
  parts[name] = part;
  element.style.setProperty(name, part);
}

function setFlexGrow(element, amount) {
  if (element.amount === amount) return;
  element.amount = amount;
  element.style.flexGrow = amount;
}
