// The live page: reads everything once, then follows what changes; whatever comes twice is harmless.
import { Drawer } from "./drawer.js";
import { Grid } from "./grid.js";
import { Panels } from "./panels.js";
import { el } from "./words.js";

const state = {
  nodes: new Map(), devices: new Map(), waiting: { total: 0, hidden: 0, pods: [] }, namespaces: [], silent: [],
  ahead: 0, tick: 0, offline: 0, heard: 0,
};
const drawer = new Drawer(state);
const open = (kind, id) => drawer.open(kind, id);
const grid = new Grid(state, open);
const panels = new Panels(state, open);
const search = el("input", { type: "search", placeholder: "Node, pod, model", "aria-label": "Show only", oninput: () => grid.filter(search.value) });
let source = null;
let totals = false;

async function begin() {
  source?.close();
  const answer = await fetch("/api/v1/state");
  if (answer.status === 401) return location.assign("/login");
  if (!answer.ok) throw new Error(`${answer.status}`);
  const told = await answer.json();
  const gone = [...state.devices.keys(), ...state.nodes.keys()];
  state.nodes.clear();
  state.devices.clear();
  state.tick = 0;
  panels.ticker.replaceChildren();
  for (const name of gone) { grid.device(name); grid.node(name); }
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

function take(told) {
  state.heard = told.now;
  state.ahead = told.now - Date.now() / 1000;
  for (const uuid of told.gone_devices ?? []) { state.devices.delete(uuid); grid.device(uuid); }
  for (const device of told.devices ?? []) { state.devices.set(device.uuid, device); grid.device(device.uuid); drawer.changed("device", device.uuid); }
  for (const name of told.gone_nodes ?? []) { state.nodes.delete(name); grid.node(name); }
  for (const node of told.nodes ?? []) { state.nodes.set(node.node, node); grid.node(node.node); }
  if (told.waiting) { state.waiting = told.waiting; panels.drawQueue(); }
  if (told.namespaces) { state.namespaces = told.namespaces; panels.drawNames(); }
  if (told.silent) { state.silent = told.silent; panels.drawBanner(); }
  if (told.ticker) {
    const lines = told.ticker.filter((line) => line.number > state.tick);
    panels.drawTicker(lines);
    for (const line of lines) { state.tick = Math.max(state.tick, line.number); if (line.pod) drawer.changed("lease", line.pod); }
  }
  if (!totals) { totals = true; requestAnimationFrame(() => { totals = false; panels.drawTotals(); }); }
}

function show() {
  document.querySelector("#top nav").prepend(search);
  document.getElementById("plain").replaceWith(el("div", { id: "live" }, grid.root, panels.root));
  document.body.append(drawer.root);
  setInterval(() => { panels.drawBanner(); if (state.waiting.total && !panels.queue.contains(document.activeElement)) panels.drawQueue(); }, 5000);
}

begin().then(show, () => { setTimeout(() => location.reload(), 3000); });
