// The live page: reads everything once, then follows what changes; whatever comes twice is harmless.
import { Drawer } from "./drawer.js";
import { Grid } from "./grid.js";
import { Panels } from "./panels.js";
import { el } from "./words.js";

const state = {
  nodes: new Map(), devices: new Map(), waiting: { total: 0, hidden: 0, pods: [] }, namespaces: [], silent: [],
  ahead: 0, tick: 0, offline: 0, heard: 0, sums: { devices: 0, held: 0, all: 0, bad: 0 },
};
const drawer = new Drawer(state);
const open = (kind, id) => drawer.open(kind, id);
const grid = new Grid(state, open);
const panels = new Panels(state, open);
const search = el("input", { type: "search", placeholder: "Node, pod, model", "aria-label": "Show only", oninput: () => grid.filter(search.value) });
let source = null;
const due = new Map();

async function begin() {
  source?.close();
  const answer = await fetch("/api/v1/state");
  if (answer.status === 401) return location.assign("/login");
  if (!answer.ok) throw new Error(`${answer.status}`);
  const told = await answer.json();
  for (const name of [...state.nodes.keys()]) { state.nodes.delete(name); grid.node(name); }
  for (const uuid of [...state.devices.keys()]) put(uuid);
  state.tick = 0;
  panels.ticker.replaceChildren();
  take(told);
  follow(told.id);
}

function follow(id) {
  source = new EventSource(`/api/v1/events?after=${encodeURIComponent(id)}`);
  source.addEventListener("delta", (event) => take(JSON.parse(event.data)));
  source.addEventListener("reset", () => again(0));
  source.addEventListener("open", () => { state.offline = 0; panels.drawBanner(); });
  source.addEventListener("error", () => {
    state.offline ||= state.heard;
    panels.drawBanner();
    if (source.readyState === EventSource.CLOSED) again(2000);
  });
}

function again(pause) {
  source?.close();
  setTimeout(() => begin().then(() => { state.offline = 0; panels.drawBanner(); }).catch(() => again(2000)), pause);
}

/** Take a device over, or forget it where there is none, and keep the sums over all devices. */
function put(uuid, device) {
  for (const [sign, one] of [[-1, state.devices.get(uuid)], [1, device]]) {
    if (!one) continue;
    state.sums.devices += sign;
    state.sums.held += sign * one.used_mib;
    state.sums.all += sign * one.memory_mib;
    state.sums.bad += one.healthy ? 0 : sign;
  }
  if (device) state.devices.set(uuid, device);
  else state.devices.delete(uuid);
  grid.device(uuid);
}

function take(told) {
  state.heard = told.now;
  state.ahead = told.now - Date.now() / 1000;
  for (const uuid of told.gone_devices ?? []) put(uuid);
  for (const device of told.devices ?? []) { put(device.uuid, device); drawer.changed("device", device.uuid); }
  for (const name of told.gone_nodes ?? []) { state.nodes.delete(name); grid.node(name); }
  for (const node of told.nodes ?? []) { state.nodes.set(node.node, node); grid.node(node.node); }
  if (told.waiting) { state.waiting = told.waiting; later("waiting", () => panels.drawQueue()); }
  if (told.namespaces) { state.namespaces = told.namespaces; later("names", () => panels.drawNames()); }
  if (told.silent) { state.silent = told.silent; panels.drawBanner(); }
  if (told.ticker) {
    const lines = told.ticker.filter((line) => line.number > state.tick);
    panels.drawTicker(lines);
    for (const line of lines) { state.tick = Math.max(state.tick, line.number); if (line.pod) drawer.changed("lease", line.pod); }
  }
  later("totals", () => panels.drawTotals());
}

/** Draw a panel in the next frame, once, however often it changes until then. */
function later(name, draw) {
  if (!due.size) requestAnimationFrame(() => { const all = [...due.values()]; due.clear(); all.forEach((one) => one()); });
  due.set(name, draw);
}

function show() {
  document.querySelector("#top nav").prepend(search);
  document.getElementById("plain").replaceWith(el("div", { id: "live" }, grid.root, panels.root));
  document.body.append(drawer.root);
  setInterval(() => { panels.drawBanner(); if (state.waiting.total) panels.drawQueue(); }, 5000);
}

begin().then(show, () => { setTimeout(() => location.reload(), 3000); });
