// Devices as blocks, by node. Visible devices are drawn in slices between frames, the others when the
// browser is idle; invisible ones are not laid out at all (content-visibility). So thousands of devices
// cost as much as one screen.
import { Block, setTooltip } from "./block.js";
import { detailsUrl, el, matches, setText } from "./dom.js";

const SLICE_MS = 5;
const REPORTS_VISIBILITY = "ContentVisibilityAutoStateChangeEvent" in window; // else everything counts as visible
const BLOCK_WIDTH = 196, BLOCK_HEIGHT = 84, HEAD_HEIGHT = 23; // with gaps; as in page.css, but for phones

export class Grid {
  constructor(state) {
    this.state = state;
    this.blocks = new Map(); // uuid -> Block
    this.sections = new Map(); // node -> {section, devices, head, visible, uuids}
    this.order = []; // node names, sorted
    this.dirtyNodes = new Set();
    this.dirtyVisible = new Set(); // devices
    this.dirtyInvisible = new Set(); // devices
    this.dirtyCounts = new Set(); // nodes
    this.filter = "";
    this.frameRequested = false;
    this.idleRequested = false;
    this.current = null;
    this.columns = 1;
    this.root = el("div", { id: "grid", role: "group", "aria-label": "Devices; arrow keys move, Enter opens" });
    this.root.addEventListener("click", (event) => this.onClick(event));
    this.root.addEventListener("keydown", (event) => this.onKey(event));
    this.root.addEventListener("focusin", (event) => this.setCurrent(event.target.closest(".dev")));
    this.root.addEventListener("pointerover", (event) => setTooltipAt(event.target, state));
    this.root.addEventListener("contentvisibilityautostatechange", (event) => this.onVisibilityChange(event));
    new ResizeObserver(() => this.onResize()).observe(this.root);
  }

  node(name) { this.dirtyNodes.add(name); this.schedule(); }

  device(uuid) {
    const device = this.state.devices.get(uuid);
    const visible = !device || this.sections.get(device.node)?.visible;
    (visible ? this.dirtyVisible : this.dirtyInvisible).add(uuid);
    this.schedule();
  }

  /** Show only devices that match a text in lower case. */
  setFilter(filter) {
    this.filter = filter;
    for (const uuid of this.blocks.keys()) this.device(uuid);
    for (const name of this.sections.keys()) this.dirtyCounts.add(name);
    this.schedule();
  }

  /** Record whether the browser lays out a node now. */
  onVisibilityChange({ target, skipped }) {
    const shown = this.sections.get(target.dataset.node);
    if (!shown) return;
    shown.visible = !skipped;
    if (skipped) return;
    for (const uuid of shown.uuids) if (this.dirtyInvisible.delete(uuid)) this.dirtyVisible.add(uuid);
    this.schedule();
  }

  schedule() {
    if (!this.frameRequested && (this.dirtyNodes.size || this.dirtyVisible.size || this.dirtyCounts.size)) {
      this.frameRequested = true;
      requestAnimationFrame(() => { this.frameRequested = false; this.drawUntil(performance.now() + SLICE_MS); });
    }
    if (!this.idleRequested && this.dirtyInvisible.size) {
      this.idleRequested = true;
      whenIdle((remaining) => { this.idleRequested = false; this.drain(this.dirtyInvisible, (uuid) => this.drawDevice(uuid), remaining); this.schedule(); });
    }
  }

  drawUntil(end) {
    this.drain(this.dirtyVisible, (uuid) => this.drawDevice(uuid), () => end - performance.now());
    this.drain(this.dirtyNodes, (name) => this.drawNode(name), () => end - performance.now());
    this.drain(this.dirtyCounts, (name) => this.count(name), () => end - performance.now());
    this.schedule();
  }

  drain(dirty, draw, remaining) {
    for (const key of dirty) {
      if (remaining() <= 0) return;
      dirty.delete(key);
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
      shown = { head: el("small"), devices: el("div", { class: "devices" }), visible: !REPORTS_VISIBILITY, uuids: [] };
      shown.section = el("section", { class: "node", "aria-label": `node ${name}` }, el("h2", {}, name, shown.head), shown.devices);
      shown.section.dataset.node = name;
      const at = this.indexOf(name);
      this.root.insertBefore(shown.section, this.sections.get(this.order[at])?.section ?? null);
      this.order.splice(at, 0, name);
      this.sections.set(name, shown);
    }
    shown.section.classList.toggle("deleted", node.deleted);
    if (shown.uuids.join() !== node.devices.join()) {
      shown.uuids = node.devices;
      shown.devices.replaceChildren(...node.devices.map((uuid) => this.block(uuid).root));
      this.reserveHeight(shown);
      for (const uuid of node.devices) this.device(uuid);
    }
    this.count(name);
  }

  /** Where a node belongs in the sorted order. */
  indexOf(name) {
    let low = 0, high = this.order.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.order[middle].localeCompare(name, "en", { numeric: true }) < 0) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  /** Reserve the height that a node needs before it is laid out. */
  reserveHeight(shown) {
    const height = HEAD_HEIGHT + BLOCK_HEIGHT * Math.ceil(shown.uuids.length / this.columns);
    shown.section.style.containIntrinsicHeight = `auto ${height}px`;
  }

  onResize() {
    const columns = Math.max(Math.floor((this.root.clientWidth + 6) / BLOCK_WIDTH), 1);
    if (columns === this.columns) return;
    this.columns = columns;
    for (const shown of this.sections.values()) this.reserveHeight(shown);
  }

  block(uuid) {
    let block = this.blocks.get(uuid);
    if (!block) {
      block = new Block(uuid);
      this.blocks.set(uuid, block);
      if (!this.current) this.setCurrent(block.root);
    }
    return block;
  }

  drawDevice(uuid) {
    const device = this.state.devices.get(uuid);
    const block = this.blocks.get(uuid);
    if (device && block) {
      block.draw(device, !this.matches(device));
      this.dirtyCounts.add(device.node);
    } else if (block) {
      block.root.remove();
      this.blocks.delete(uuid);
      if (this.current === block.root) this.current = null;
    }
  }

  count(name) {
    const node = this.state.nodes.get(name), shown = this.sections.get(name);
    if (!node || !shown) return;
    const devices = node.devices.map((uuid) => this.state.devices.get(uuid)).filter(Boolean);
    const used = devices.filter((device) => device.shares.length).length;
    shown.section.hidden = node.devices.length === 0 || !devices.some((device) => this.matches(device));
    setText(shown.head, `${used} of ${node.devices.length} GPUs in use${node.unschedulable ? ", cordoned" : ""}${node.deleted ? ", deleted" : ""}`);
  }

  matches(device) {
    return matches(this.filter, device.node, device.model, device.uuid, device.fault,
      ...device.shares.map((share) => share.pod && `${share.namespace}/${share.name}`));
  }

  onClick(event) {
    const share = event.target.closest(".share");
    const block = event.target.closest(".dev");
    if (share?.dataset.pod && event.detail > 0) location.hash = detailsUrl("lease", share.dataset.pod);
    else if (block) location.hash = detailsUrl("device", block.dataset.uuid);
  }

  setCurrent(block) {
    if (!block || block === this.current) return;
    this.current?.setAttribute("tabindex", "-1");
    block.setAttribute("tabindex", "0");
    this.current = block;
  }

  onKey(event) {
    const block = event.target.closest(".dev");
    if (!block) return;
    const all = [...this.root.querySelectorAll(".node:not([hidden]) .dev:not([hidden])")];
    const at = all.indexOf(block);
    const next = { ArrowRight: () => all[at + 1], ArrowLeft: () => all[at - 1], Home: () => all[0], End: () => all.at(-1),
      ArrowDown: () => below(block, all.slice(at + 1)), ArrowUp: () => below(block, all.slice(0, at).reverse()) }[event.key]?.();
    if (!next) return;
    event.preventDefault();
    next.focus();
  }
}

function setTooltipAt(element, state) {
  const block = element.closest(".dev");
  if (block) setTooltip(element.closest(".share") ?? block, state.devices.get(block.dataset.uuid));
}

/** Call back when the browser is idle, with a function that returns the remaining ms. */
function whenIdle(callback) {
  if (window.requestIdleCallback) requestIdleCallback((deadline) => callback(() => deadline.timeRemaining()));
  else setTimeout(() => { const end = performance.now() + SLICE_MS; callback(() => end - performance.now()); }, 50);
}

/** The nearest block of the next row. */
function below(block, following) {
  const from = block.getBoundingClientRect();
  const row = following.slice(0, 100).map((block) => [block, block.getBoundingClientRect()]).filter(([, box]) => Math.abs(box.top - from.top) > 5);
  if (!row.length) return undefined;
  const top = row[0][1].top;
  return row.filter(([, box]) => Math.abs(box.top - top) < 5).sort((one, two) => Math.abs(one[1].left - from.left) - Math.abs(two[1].left - from.left))[0][0];
}
