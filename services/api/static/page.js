// The live page: loads the state once, then applies changes; each change is absolute and idempotent.
import { legend } from "./block.js";
import { Drawer } from "./drawer.js";
import { FirstPage } from "./first_page.js";
import { Grid } from "./grid.js";
import { Panels } from "./panels.js";
import { el } from "./dom.js";

const state = {
  nodes: new Map(), devices: new Map(), waiting: { total: 0, hidden: 0, pods: [] }, namespaces: [], problems: [],
  clockOffset: 0, lastEvent: 0, offlineSince: 0, updatedAt: 0,
  sums: { devices: 0, leases: 0, usedMib: 0, totalMib: 0, unhealthy: 0 },
};
const drawer = new Drawer(state);
const grid = new Grid(state);
const panels = new Panels(state);
const firstPage = new FirstPage(state);
const search = el("input", { type: "search", placeholder: "Filter: node, pod, model", "aria-label": "Filter", oninput: () => setFilter(search.value) });
let source = null;
const pendingDraws = new Map();

async function load() {
  source?.close();
  const response = await fetch("/api/v1/state");
  if (response.status === 401) return location.assign("/login");
  if (!response.ok) throw new Error(`${response.status}`);
  const loaded = await response.json();
  for (const name of [...state.nodes.keys()]) { state.nodes.delete(name); grid.node(name); }
  for (const uuid of [...state.devices.keys()]) setDevice(uuid);
  state.lastEvent = 0;
  panels.events.replaceChildren();
  applyUpdate(loaded);
  follow(loaded.id);
}

function follow(id) {
  source = new EventSource(`/api/v1/events?after=${encodeURIComponent(id)}`);
  source.addEventListener("delta", (event) => applyUpdate(JSON.parse(event.data)));
  source.addEventListener("reset", () => reloadAfter(0));
  source.addEventListener("open", () => { state.offlineSince = 0; panels.drawBanner(); });
  source.addEventListener("error", () => {
    state.offlineSince ||= state.updatedAt;
    panels.drawBanner();
    if (source.readyState === EventSource.CLOSED) reloadAfter(2000);
  });
}

function reloadAfter(pauseMs) {
  source?.close();
  setTimeout(() => load().then(() => { state.offlineSince = 0; panels.drawBanner(); }).catch(() => reloadAfter(2000)), pauseMs);
}

/** Replace a device, or remove it if there is none, and update the sums over all devices. */
function setDevice(uuid, device) {
  for (const [sign, counted] of [[-1, state.devices.get(uuid)], [1, device]]) {
    if (!counted) continue;
    state.sums.devices += sign;
    state.sums.leases += sign * counted.shares.length;
    state.sums.usedMib += sign * counted.used_memory_mib;
    state.sums.totalMib += sign * counted.memory_mib;
    state.sums.unhealthy += counted.healthy ? 0 : sign;
  }
  if (device) state.devices.set(uuid, device);
  else state.devices.delete(uuid);
  grid.device(uuid);
}

function applyUpdate(update) {
  state.updatedAt = update.now;
  state.clockOffset = update.now - Date.now() / 1000;
  for (const uuid of update.removed_devices ?? []) setDevice(uuid);
  for (const device of update.devices ?? []) { setDevice(device.uuid, device); drawer.changed("device", device.uuid); }
  for (const name of update.removed_nodes ?? []) { state.nodes.delete(name); grid.node(name); }
  for (const node of update.nodes ?? []) { state.nodes.set(node.node, node); grid.node(node.node); }
  if (update.waiting) { state.waiting = update.waiting; drawSoon("waiting", () => panels.drawQueue()); }
  if (update.namespaces) { state.namespaces = update.namespaces; drawSoon("namespaces", () => panels.drawNamespaces()); }
  if (update.problems) { state.problems = update.problems; panels.drawBanner(); }
  if (update.events) {
    const events = update.events.filter((event) => event.number > state.lastEvent);
    panels.drawEvents(events);
    for (const event of events) { state.lastEvent = Math.max(state.lastEvent, event.number); if (event.pod) drawer.changed("lease", event.pod); }
  }
  drawSoon("totals", () => { panels.drawTotals(); firstPage.draw(); });
}

/** Draw a panel in the next frame, once, however often it changes before. */
function drawSoon(name, draw) {
  if (!pendingDraws.size) requestAnimationFrame(() => { const draws = [...pendingDraws.values()]; pendingDraws.clear(); draws.forEach((draw) => draw()); });
  pendingDraws.set(name, draw);
}

function setFilter(text) {
  const filter = text.trim().toLowerCase();
  grid.setFilter(filter);
  panels.setFilter(filter);
}

function show() {
  document.querySelector("#top nav").prepend(search);
  document.getElementById("plain").replaceWith(el("div", { id: "live" }, el("div", {}, firstPage.root, grid.root, legend()), panels.root));
  document.body.append(drawer.root);
  drawer.follow();
  setInterval(() => { panels.drawBanner(); if (state.waiting.total) panels.drawQueue(); }, 5000);
}

load().then(show, () => { setTimeout(() => location.reload(), 3000); });
