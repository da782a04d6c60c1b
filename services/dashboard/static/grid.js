// Devices as blocks, by node. What is in sight is drawn in slices between frames, the rest when nothing
// else is to be done; what is out of sight is not laid out at all (content-visibility). So thousands of
// devices cost as much as a screenful.
import { Block, explain } from "./block.js";
import { el, say } from "./words.js";

const SLICE_MS = 5;
const TELLS = "ContentVisibilityAutoStateChangeEvent" in window; // what is laid out; else all of it counts as in sight
const BLOCK_WIDTH = 174, BLOCK_HEIGHT = 64, HEAD_HEIGHT = 23;

export class Grid {
  constructor(state, open) {
    this.state = state;
    this.open = open;
    this.blocks = new Map(); // uuid -> Block
    this.sections = new Map(); // node -> {section, devices, head, near, uuids}
    this.order = []; // node names, sorted
    this.nodes = new Set(); // to be drawn, as the next three
    this.near = new Set(); // devices in sight
    this.far = new Set(); // devices out of sight
    this.counts = new Set(); // nodes
    this.wanted = "";
    this.framed = false;
    this.idling = false;
    this.current = null;
    this.columns = 1;
    this.root = el("div", { id: "grid", role: "group", "aria-label": "Devices; arrow keys move, Enter opens" });
    this.root.addEventListener("click", (event) => this.click(event));
    this.root.addEventListener("keydown", (event) => this.key(event));
    this.root.addEventListener("focusin", (event) => this.mark(event.target.closest(".dev")));
    this.root.addEventListener("pointerover", (event) => explain(event.target.closest(".share")));
    this.root.addEventListener("contentvisibilityautostatechange", (event) => this.look(event));
    new ResizeObserver(() => this.fit()).observe(this.root);
  }

  node(name) { this.nodes.add(name); this.schedule(); }

  device(uuid) {
    const device = this.state.devices.get(uuid);
    const near = !device || this.sections.get(device.node)?.near;
    (near ? this.near : this.far).add(uuid);
    this.schedule();
  }

  filter(text) {
    this.wanted = text.trim().toLowerCase();
    for (const uuid of this.blocks.keys()) this.device(uuid);
  }

  /** Note that a node is laid out from now on, or no longer. */
  look({ target, skipped }) {
    const shown = this.sections.get(target.dataset.node);
    if (!shown) return;
    shown.near = !skipped;
    if (skipped) return;
    for (const uuid of shown.uuids) if (this.far.delete(uuid)) this.near.add(uuid);
    this.schedule();
  }

  schedule() {
    if (!this.framed && (this.nodes.size || this.near.size || this.counts.size)) {
      this.framed = true;
      requestAnimationFrame(() => { this.framed = false; this.work(performance.now() + SLICE_MS); });
    }
    if (!this.idling && this.far.size) {
      this.idling = true;
      idle((left) => { this.idling = false; this.drain(this.far, (uuid) => this.drawDevice(uuid), left); this.schedule(); });
    }
  }

  work(end) {
    this.drain(this.near, (uuid) => this.drawDevice(uuid), () => end - performance.now());
    this.drain(this.nodes, (name) => this.drawNode(name), () => end - performance.now());
    this.drain(this.counts, (name) => this.count(name), () => end - performance.now());
    this.schedule();
  }

  drain(todo, draw, left) {
    for (const key of todo) {
      if (left() <= 0) return;
      todo.delete(key);
      draw(key);
    }
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
      shown = { head: el("small"), devices: el("div", { class: "devices" }), near: !TELLS, uuids: [] };
      shown.section = el("section", { class: "node", "aria-label": `node ${name}` }, el("h2", {}, name, shown.head), shown.devices);
      shown.section.dataset.node = name;
      const at = this.place(name);
      this.root.insertBefore(shown.section, this.sections.get(this.order[at])?.section ?? null);
      this.order.splice(at, 0, name);
      this.sections.set(name, shown);
    }
    shown.section.classList.toggle("gone", node.gone);
    shown.section.hidden = node.devices.length === 0;
    if (shown.uuids.join() !== node.devices.join()) {
      shown.uuids = node.devices;
      shown.devices.replaceChildren(...node.devices.map((uuid) => this.block(uuid).root));
      this.keep(shown);
      for (const uuid of node.devices) this.device(uuid);
    }
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

  /** Keep as much room for a node that is not laid out as it will need. */
  keep(shown) {
    const height = HEAD_HEIGHT + BLOCK_HEIGHT * Math.ceil(shown.uuids.length / this.columns);
    shown.section.style.containIntrinsicHeight = `auto ${height}px`;
  }

  fit() {
    const columns = Math.max(Math.floor((this.root.clientWidth + 6) / BLOCK_WIDTH), 1);
    if (columns === this.columns) return;
    this.columns = columns;
    for (const shown of this.sections.values()) this.keep(shown);
  }

  block(uuid) {
    let made = this.blocks.get(uuid);
    if (!made) {
      made = new Block(uuid);
      this.blocks.set(uuid, made);
      if (!this.current) this.mark(made.root);
    }
    return made;
  }

  drawDevice(uuid) {
    const device = this.state.devices.get(uuid);
    const block = this.blocks.get(uuid);
    if (device && block) {
      block.draw(device, !this.matches(device));
      this.counts.add(device.node);
    } else if (block) {
      block.root.remove();
      this.blocks.delete(uuid);
      if (this.current === block.root) this.current = null;
    }
  }

  count(name) {
    const node = this.state.nodes.get(name), shown = this.sections.get(name);
    if (!node || !shown) return;
    const busy = node.devices.filter((uuid) => this.state.devices.get(uuid)?.shares.length).length;
    say(shown.head, `${busy} of ${node.devices.length} GPUs in use${node.unschedulable ? ", cordoned" : ""}${node.gone ? ", gone" : ""}`);
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

/** Call back when nothing else is to be done, with a function that tells how many ms are left. */
function idle(callback) {
  if (window.requestIdleCallback) requestIdleCallback((deadline) => callback(() => deadline.timeRemaining()));
  else setTimeout(() => { const end = performance.now() + SLICE_MS; callback(() => end - performance.now()); }, 50);
}

/** The nearest block of the next line. */
function below(block, following) {
  const from = block.getBoundingClientRect();
  const line = following.slice(0, 100).map((one) => [one, one.getBoundingClientRect()]).filter(([, box]) => Math.abs(box.top - from.top) > 5);
  if (!line.length) return undefined;
  const top = line[0][1].top;
  return line.filter(([, box]) => Math.abs(box.top - top) < 5).sort((one, two) => Math.abs(one[1].left - from.left) - Math.abs(two[1].left - from.left))[0][0];
}
