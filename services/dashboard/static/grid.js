// Devices as blocks, by node. Work is done in slices between frames; what is out of sight is not
// laid out at all (content-visibility), so that thousands of devices cost as much as a screenful.
import { deviceText, el, hue, shareText } from "./words.js";

const SLICE_MS = 6;

export class Grid {
  constructor(state, open) {
    this.state = state;
    this.open = open;
    this.blocks = new Map(); // uuid -> button
    this.sections = new Map(); // node -> {section, devices, head}
    this.order = []; // node names, sorted
    this.todo = new Set(); // "n:node" and "d:uuid"
    this.wanted = "";
    this.scheduled = false;
    this.current = null;
    this.root = el("div", { id: "grid", role: "group", "aria-label": "Devices; arrow keys move, Enter opens" });
    this.root.addEventListener("click", (event) => this.click(event));
    this.root.addEventListener("keydown", (event) => this.key(event));
    this.root.addEventListener("focusin", (event) => this.mark(event.target.closest(".dev")));
  }

  node(name) { this.todo.add(`n:${name}`); this.schedule(); }
  device(uuid) { this.todo.add(`d:${uuid}`); this.schedule(); }

  filter(text) {
    this.wanted = text.trim().toLowerCase();
    for (const uuid of this.blocks.keys()) this.todo.add(`d:${uuid}`);
    this.schedule();
  }

  schedule() {
    if (this.scheduled) return;
    this.scheduled = true;
    requestAnimationFrame(() => this.work());
  }

  work() {
    this.scheduled = false;
    const end = performance.now() + SLICE_MS;
    for (const key of this.todo) {
      this.todo.delete(key);
      if (key.startsWith("n:")) this.drawNode(key.slice(2));
      else this.drawDevice(key.slice(2));
      if (performance.now() > end) break;
    }
    if (this.todo.size) this.schedule();
  }

  drawNode(name) {
    const node = this.state.nodes.get(name);
    let shown = this.sections.get(name);
    if (!node) {
      if (shown) {
        shown.section.remove();
        this.sections.delete(name);
        this.order.splice(this.order.indexOf(name), 1);
      }
      return;
    }
    if (!shown) {
      shown = { head: el("small"), devices: el("div", { class: "devices" }) };
      shown.section = el("section", { class: "node", "aria-label": `node ${name}` }, el("h2", {}, name, shown.head), shown.devices);
      const at = this.place(name);
      this.root.insertBefore(shown.section, this.sections.get(this.order[at])?.section ?? null);
      this.order.splice(at, 0, name);
      this.sections.set(name, shown);
    }
    shown.section.classList.toggle("gone", node.gone);
    shown.section.hidden = node.devices.length === 0;
    const blocks = node.devices.map((uuid) => this.block(uuid));
    if (blocks.length !== shown.devices.children.length || blocks.some((one, at) => shown.devices.children[at] !== one)) {
      shown.devices.replaceChildren(...blocks);
    }
    for (const uuid of node.devices) this.drawDevice(uuid);
    this.count(name);
  }

  place(name) {
    let low = 0, high = this.order.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.order[middle].localeCompare(name, "en", { numeric: true }) < 0) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  block(uuid) {
    let made = this.blocks.get(uuid);
    if (!made) {
      made = el("button", { class: "dev", type: "button", tabindex: "-1" });
      made.dataset.uuid = uuid;
      this.blocks.set(uuid, made);
      if (!this.current) this.mark(made);
    }
    return made;
  }

  drawDevice(uuid) {
    const device = this.state.devices.get(uuid);
    const block = this.blocks.get(uuid);
    if (!device || !block) {
      if (block) { block.remove(); this.blocks.delete(uuid); if (this.current === block) this.current = null; }
      return;
    }
    block.classList.toggle("bad", !device.healthy);
    block.classList.toggle("closed", device.closed);
    block.classList.toggle("dim", !this.matches(device));
    block.setAttribute("aria-label", deviceText(device));
    const parts = device.shares.filter((share) => !share.init || device.shares.length === 1).map(drawShare);
    const free = el("span", { class: "free" });
    free.style.flexGrow = Math.max(device.memory_mib - device.used_mib, 0);
    block.replaceChildren(
      el("span", { class: "head" }, el("b", {}, `${device.healthy ? "" : "⚠ "}${device.index}`), el("span", {}, device.model), el("span", {}, `${Math.round(100 * device.used_mib / Math.max(device.memory_mib, 1))} %`)),
      el("span", { class: "bar" }, ...parts, free),
    );
    this.count(device.node);
  }

  count(name) {
    const node = this.state.nodes.get(name), shown = this.sections.get(name);
    if (!node || !shown) return;
    const busy = node.devices.filter((uuid) => this.state.devices.get(uuid)?.shares.length).length;
    const text = `${busy} of ${node.devices.length} GPUs in use${node.unschedulable ? ", cordoned" : ""}${node.gone ? ", gone" : ""}`;
    if (shown.head.textContent !== text) shown.head.textContent = text;
  }

  matches(device) {
    if (!this.wanted) return true;
    const words = [device.node, device.model, device.uuid, ...device.shares.flatMap((share) => share.pod ? [`${share.namespace}/${share.name}`] : [])];
    return words.some((word) => word.toLowerCase().includes(this.wanted));
  }

  click(event) {
    const share = event.target.closest(".share");
    const block = event.target.closest(".dev");
    if (share?.dataset.pod && event.detail > 0) this.open("lease", share.dataset.pod);
    else if (block) this.open("device", block.dataset.uuid);
  }

  mark(block) {
    if (!block || block === this.current) return;
    this.current?.setAttribute("tabindex", "-1");
    block.setAttribute("tabindex", "0");
    this.current = block;
  }

  key(event) {
    const block = event.target.closest(".dev");
    if (!block) return;
    const all = [...this.root.querySelectorAll(".dev")];
    const at = all.indexOf(block);
    const next = { ArrowRight: () => all[at + 1], ArrowLeft: () => all[at - 1], Home: () => all[0], End: () => all.at(-1),
      ArrowDown: () => below(block, all.slice(at + 1)), ArrowUp: () => below(block, all.slice(0, at).reverse()) }[event.key]?.();
    if (!next) return;
    event.preventDefault();
    next.focus();
  }
}

function drawShare(share) {
  const made = el("span", { class: `share ${share.state}${share.pod ? "" : " hidden-one"}` }, share.pod ? share.name : "");
  made.title = shareText(share);
  made.style.flexGrow = share.memory_mib;
  if (share.pod) {
    made.dataset.pod = share.pod;
    made.style.setProperty("--hue", hue(share.namespace));
  }
  return made;
}

/** The nearest block of the next line. */
function below(block, following) {
  const from = block.getBoundingClientRect();
  const line = following.slice(0, 100).map((one) => [one, one.getBoundingClientRect()]).filter(([, box]) => Math.abs(box.top - from.top) > 5);
  if (!line.length) return undefined;
  const top = line[0][1].top;
  return line.filter(([, box]) => Math.abs(box.top - top) < 5).sort((one, two) => Math.abs(one[1].left - from.left) - Math.abs(two[1].left - from.left))[0][0];
}
