// The map of all GPUs: a row for each node, its GPUs side by side. Only the rows near the window exist.
import { Cell, legend, useScale } from "./cell.js";
import { model } from "./devices.js";
import { el, oncePerFrame, setAttribute, setProperty, setText } from "./dom.js";
import { count } from "./format.js";
import { url } from "./route.js";
import { nodeClosedReason } from "./store.js";
import { VirtualRows } from "./virtual.js";

const MOST_COLUMNS = 8; // a node with more GPUs has several lines
const ROOMY_NODES = 24; // up to so many nodes, cells have text

export class Fleet {
  constructor(store) {
    this.store = store;
    this.names = [];
    this.shows = () => true;
    this.current = { node: null, column: 0 };
    this.body = el("div", { role: "rowgroup", class: "rows" });
    this.numbers = el("div", { class: "numbers", "aria-hidden": "true" });
    this.map = el(
      "div",
      {
        id: "grid",
        class: "fleet",
        role: "grid",
        "aria-label": "GPUs by node; arrow keys move, Enter opens",
      },
      this.body,
    );
    this.scale = useScale();
    this.root = el("div", { class: "map" }, this.numbers, this.map, this.scale, legend());
    this.rows = new VirtualRows(this.body, {
      make: () => new NodeRow(this),
      height: (name) => this.heightOf(name),
    });
    this.map.addEventListener("click", (event) => this.onClick(event));
    this.map.addEventListener("keydown", (event) => this.onKey(event));
    this.map.addEventListener("focusin", (event) => this.setCurrent(event.target));
    this.map.addEventListener("pointerover", (event) =>
      event.target.closest(".dev")?.cell.explain(event.target),
    );
    this.redraw = oncePerFrame(() => this.draw(this.names, this.shows, this.byUse));
    this.observer = new ResizeObserver(() => this.redraw());
    this.observer.observe(this.root);
  }

  close() {
    this.rows.close();
    this.observer.disconnect();
  }

  /** Draw these nodes, in the colours of namespaces or of use; devices that `shows` refuses are dimmed. */
  draw(names, shows, byUse = false) {
    this.byUse = byUse;
    this.scale.hidden = !byUse;
    this.names = names;
    this.shows = shows;
    this.columns = Math.min(
      Math.max(1, ...names.map((name) => this.store.nodes.get(name)?.devices.length ?? 0)),
      MOST_COLUMNS,
    );
    this.map.classList.toggle("dense", names.length > ROOMY_NODES);
    this.map.classList.toggle("roomy", names.length <= ROOMY_NODES);
    setProperty(this.root, "--columns", this.columns);
    if (this.numbers.childElementCount !== this.columns)
      this.numbers.replaceChildren(
        ...Array.from({ length: this.columns }, (_, at) => el("span", {}, `${at}`)),
      );
    const style = getComputedStyle(this.map);
    const size = (name) => parseFloat(style.getPropertyValue(name)) || 0;
    this.sizes = {
      cell: size("--cell"),
      gap: size("--gap"),
      label: size("--label-line"),
      row: size("--row-gap"),
    };
    setAttribute(this.map, "aria-rowcount", names.length);
    if (!names.includes(this.current.node)) this.current = { node: names[0], column: 0 };
    this.rows.set(names, (name) => name);
  }

  heightOf(name) {
    const lines = Math.max(
      Math.ceil((this.store.nodes.get(name)?.devices.length ?? 0) / this.columns),
      1,
    );
    return (
      this.sizes.label + lines * this.sizes.cell + (lines - 1) * this.sizes.gap + this.sizes.row
    );
  }

  onClick(event) {
    const device = event.target.closest(".dev");
    const pod = event.target.closest(".share")?.dataset.pod;
    if (device) location.hash = pod ? url("pod", pod) : url("gpu", device.dataset.uuid);
  }

  setCurrent(element) {
    const cell = element.closest(".dev");
    if (!cell) return;
    this.map.querySelector('.dev[tabindex="0"]')?.setAttribute("tabindex", "-1");
    cell.setAttribute("tabindex", "0");
    this.current = { node: cell.dataset.node, column: Number(cell.dataset.column) };
  }

  onKey(event) {
    const cell = event.target.closest(".dev");
    if (!cell) return;
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      location.hash = url("gpu", cell.dataset.uuid);
      return;
    }
    const target = this.neighbour(cell.dataset.node, Number(cell.dataset.column), event);
    if (!target) return;
    event.preventDefault();
    this.rows.reveal(target.row).cells[target.column].root.focus({ preventScroll: true });
  }

  neighbour(node, column, { key, ctrlKey }) {
    const row = this.names.indexOf(node);
    const last = this.names.length - 1;
    const length = (at) => this.store.devicesOf(this.names[at]).length;
    const in_ = (at, to) =>
      at >= 0 && at <= last && length(at)
        ? { row: at, column: Math.min(to, length(at) - 1) }
        : null;
    const lower =
      column + this.columns < length(row)
        ? in_(row, column + this.columns)
        : in_(row + 1, column % this.columns);
    const upper = column >= this.columns ? in_(row, column - this.columns) : in_(row - 1, column);
    return {
      ArrowRight: column + 1 < length(row) ? in_(row, column + 1) : in_(row + 1, 0),
      ArrowLeft: column ? in_(row, column - 1) : in_(row - 1, Infinity),
      ArrowDown: lower,
      ArrowUp: upper,
      Home: in_(ctrlKey ? 0 : row, 0),
      End: in_(ctrlKey ? last : row, Infinity),
      PageDown: in_(Math.min(row + 20, last), column),
      PageUp: in_(Math.max(row - 20, 0), column),
    }[key];
  }
}

/** The row of one node; also the head of the node's page. */
class NodeRow {
  constructor(fleet) {
    this.fleet = fleet;
    this.link = el("a");
    this.what = el("span", { class: "what" });
    this.state = el("span", { class: "state" });
    this.label = el("div", { role: "rowheader", class: "label" }, this.link, this.what, this.state);
    this.root = el("div", { role: "row", class: "node" }, this.label);
    this.cells = [];
  }

  draw(name, at) {
    const { store, shows, current, byUse } = this.fleet;
    const node = store.nodes.get(name);
    const devices = store.devicesOf(name);
    setAttribute(this.root, "aria-rowindex", at + 1);
    setAttribute(this.root, "data-node", name);
    setAttribute(this.link, "href", url("node", name));
    setAttribute(this.link, "title", name);
    setText(this.link, name);
    const models = [...new Set(devices.map(model))];
    setText(this.what, models.length > 1 ? `${models.length} models` : (models[0] ?? ""));
    const closed = nodeClosedReason(node);
    setText(
      this.state,
      closed
        ? `closed: ${closed}`
        : `${devices.filter((device) => device.shares.length).length} of ${count(devices.length, "GPU")} in use`,
    );
    setAttribute(this.state, "class", closed ? "state warn" : "state");
    setAttribute(this.state, "title", closed);
    while (this.cells.length > devices.length) this.cells.pop().root.remove();
    for (const [column, device] of devices.entries()) {
      let cell = this.cells[column];
      if (!cell) {
        cell = new Cell();
        cell.root.cell = cell;
        cell.root.dataset.column = column;
        this.cells.push(cell);
        this.root.append(cell.root);
      }
      setAttribute(cell.root, "data-node", name);
      const tabIndex = current.node === name && current.column === column ? 0 : -1;
      if (cell.root.tabIndex !== tabIndex) cell.root.tabIndex = tabIndex;
      cell.draw(device, { closed: store.closedReason(device), dim: !shows(device), byUse });
    }
  }
}
