// One device as a block. It remembers what it has drawn, so that only changes are written to the page.
import { deviceText, el, hue, measuredMib, setAttribute, setText, shareText } from "./dom.js";

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
    this.percent = el("i");
    this.free = el("span", { class: "free" });
    this.bar = el("span", { class: "bar" }, this.free);
    this.use = el("span", { class: "use" });
    this.root.append(el("span", { class: "head" }, this.number, this.model, this.percent), this.bar, this.use);
  }

  /** Draw the device; does nothing if it is unchanged. */
  draw(device, dim) {
    if (this.drawn === device && this.dim === dim) return;
    if (!this.drawn) this.createElements();
    this.drawn = device;
    this.dim = dim;
    const usedPercent = Math.round(100 * device.used_mib / Math.max(device.memory_mib, 1));
    setAttribute(this.root, "class", `dev${device.healthy ? "" : " bad"}${device.excluded ? " excluded" : ""}${dim ? " dim" : ""}`);
    setAttribute(this.root, "aria-label", deviceText(device));
    setText(this.number, `${device.healthy ? "" : "⚠ "}${device.index}`);
    setText(this.model, device.model);
    setText(this.percent, `${usedPercent} %`);
    setFlexGrow(this.free, Math.max(device.memory_mib - device.used_mib, 0));
    setPart(this.use, "--memory", measuredMib(device), device.memory_mib);
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
    setPart(element, "--cores", share.measured?.cores_percent, share.cores_percent || 100);
    setText(element, share.pod ? share.name : "");
    setFlexGrow(element, share.memory_mib);
    setAttribute(element, "data-pod", share.pod ?? "");
    const colour = share.pod ? hue(share.namespace) : null;
    if (element.hue !== colour) {
      element.hue = colour;
      element.style.setProperty("--hue", colour);
    }
  }
}

/** Set the tooltip of a share when the pointer reaches it. */
export function setTooltip(element) {
  if (element?.share && !element.title) element.title = shareText(element.share);
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
