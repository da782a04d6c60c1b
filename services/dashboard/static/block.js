// One device as a block. What is on the page is kept beside it, so that only what differs is written.
import { deviceText, el, hue, put, say, shareText } from "./words.js";

export class Block {
  constructor(uuid) {
    this.root = el("button", { class: "dev", type: "button", tabindex: "-1" });
    this.root.dataset.uuid = uuid;
    this.shares = [];
    this.drawn = null;
  }

  begin() {
    this.number = el("b");
    this.model = el("span");
    this.percent = el("i");
    this.free = el("span", { class: "free" });
    this.bar = el("span", { class: "bar" }, this.free);
    this.root.append(el("span", { class: "head" }, this.number, this.model, this.percent), this.bar);
  }

  /** Show the device; nothing is done where it looks the same. */
  draw(device, dim) {
    if (this.drawn === device && this.dim === dim) return;
    if (!this.drawn) this.begin();
    this.drawn = device;
    this.dim = dim;
    const full = Math.round(100 * device.used_mib / Math.max(device.memory_mib, 1));
    put(this.root, "class", `dev${device.healthy ? "" : " bad"}${device.closed ? " closed" : ""}${dim ? " dim" : ""}`);
    put(this.root, "aria-label", deviceText(device));
    say(this.number, `${device.healthy ? "" : "⚠ "}${device.index}`);
    say(this.model, device.model);
    say(this.percent, `${full} %`);
    grow(this.free, Math.max(device.memory_mib - device.used_mib, 0));
    const shares = device.shares.filter((share) => !share.init || device.shares.length === 1);
    while (this.shares.length > shares.length) this.shares.pop().remove();
    for (const [at, share] of shares.entries()) this.drawShare(at, share);
  }

  drawShare(at, share) {
    let made = this.shares[at];
    if (!made) {
      made = el("span");
      this.shares.push(made);
      this.bar.insertBefore(made, this.free);
    }
    made.share = share;
    made.removeAttribute("title");
    put(made, "class", `share ${share.state}${share.pod ? "" : " hidden-one"}`);
    say(made, share.pod ? share.name : "");
    grow(made, share.memory_mib);
    put(made, "data-pod", share.pod ?? "");
    const colour = share.pod ? hue(share.namespace) : null;
    if (made.hue !== colour) {
      made.hue = colour;
      made.style.setProperty("--hue", colour);
    }
  }
}

/** The words for a share, made when somebody points at it. */
export function explain(shown) {
  if (shown?.share && !shown.title) shown.title = shareText(shown.share);
}

function grow(element, amount) {
  if (element.amount === amount) return;
  element.amount = amount;
  element.style.flexGrow = amount;
}
