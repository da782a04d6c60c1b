// The state of the cluster: loaded once, then kept by server-sent events; each change is absolute and idempotent.
import { peak, sharesByPod, weight } from "./devices.js";
import { fetchJson } from "./dom.js";

const SILENT_MS = 25_000; // a delta comes at least every 10 s
const OLD_LEDGER_S = 30;
const RETRY_MS = 2000;
const LOAD_MS = 30_000;
const MAX_POD_EVENTS = 200;
const MAX_OTHER_EVENTS = 100; // problems and budgets: many events of pods must not displace them

export class Store {
  /** `changed(kinds)` is called after every change with a set of what has changed. */
  constructor(changed) {
    this.notify = changed;
    this.nodes = new Map();
    this.devices = new Map();
    this.waiting = { total: 0, hidden: 0, by_code: {}, pods: [] };
    this.namespaces = [];
    this.events = []; // newest first
    this.problems = [];
    this.data = null; // when the ledger and the usage were read
    this.source = null;
    this.clockOffset = 0;
    this.updatedAt = 0; // the API's clock
    this.heardAt = performance.now();
    this.failing = false;
    this.podsIndex = null;
  }

  now() {
    return Date.now() / 1000 + this.clockOffset;
  }

  async load() {
    this.source?.close();
    const loaded = await fetchJson("/api/v1/state", { signal: AbortSignal.timeout(LOAD_MS) });
    this.nodes.clear();
    this.devices.clear();
    this.events = [];
    this.apply(loaded, new Set(["reset"]));
    this.follow(loaded.id);
  }

  follow(id) {
    this.source = new EventSource(`/api/v1/events?after=${encodeURIComponent(id)}`);
    this.source.addEventListener("delta", (event) => this.apply(JSON.parse(event.data)));
    this.source.addEventListener("reset", () => this.reloadAfter(0));
    this.source.addEventListener("error", () => {
      this.failing = true;
      this.notify(new Set(["connection"]));
      if (this.source.readyState === EventSource.CLOSED) this.reloadAfter(RETRY_MS);
    });
  }

  /** Connect again if nothing comes although the connection is open, as after a computer has slept. */
  reconnectIfSilent() {
    if (this.failing || performance.now() - this.heardAt < SILENT_MS) return;
    this.failing = true;
    this.reloadAfter(0);
  }

  reloadAfter(pauseMs) {
    this.source?.close();
    setTimeout(() => this.load().catch(() => this.reloadAfter(RETRY_MS)), pauseMs);
  }

  apply(update, kinds = new Set()) {
    this.heardAt = performance.now();
    this.failing = false;
    this.updatedAt = update.now;
    this.clockOffset = update.now - Date.now() / 1000;
    kinds.add("connection");
    for (const { items, removed, map, key } of [
      { items: "nodes", removed: "removed_nodes", map: this.nodes, key: "node" },
      { items: "devices", removed: "removed_devices", map: this.devices, key: "uuid" },
    ]) {
      for (const item of update[items] ?? []) map.set(item[key], item);
      for (const name of update[removed] ?? []) map.delete(name);
      if (update[items]?.length || update[removed]?.length) kinds.add(items);
    }
    for (const name of ["waiting", "namespaces", "problems", "data"]) {
      if (update[name]) {
        this[name] = update[name];
        kinds.add(name);
      }
    }
    this.addEvents(update.events ?? [], kinds);
    if (kinds.has("devices")) this.podsIndex = null;
    this.notify(kinds);
  }

  addEvents(found, kinds) {
    const last = this.events[0]?.number ?? 0;
    const added = found.filter((event) => event.number > last).reverse();
    if (!added.length) return;
    const all = [...added, ...this.events];
    const ofPods = all.filter((event) => event.pod).slice(0, MAX_POD_EVENTS);
    const others = all.filter((event) => !event.pod).slice(0, MAX_OTHER_EVENTS);
    this.events = [...ofPods, ...others].sort((a, b) => b.number - a.number);
    kinds.add("events");
  }

  /** How long nothing has been heard from the API, seconds; 0: it is connected. */
  silence() {
    const silentMs = performance.now() - this.heardAt;
    return this.failing || silentMs > SILENT_MS ? Math.max(silentMs / 1000, 1) : 0;
  }

  /** How old the leases and waiting pods are that a connected API sends, seconds; 0: they are new. */
  ledgerAge() {
    const read = this.data?.ledger_at;
    const old = read ? this.now() - read : 0;
    return old > OLD_LEDGER_S ? old : 0;
  }

  /** The pods with leases by UID, from the shares of all devices. */
  pods() {
    this.podsIndex ??= podsOf(this.devices.values());
    return this.podsIndex;
  }

  devicesOf(name) {
    return (this.nodes.get(name)?.devices ?? [])
      .map((uuid) => this.devices.get(uuid))
      .filter(Boolean);
  }

  /** Why a device gets no new pods; empty: it does. */
  closedReason(device) {
    return device.excluded || nodeClosedReason(this.nodes.get(device.node));
  }
}

/** Why a node gets no new pods; empty: it does. */
export function nodeClosedReason(node) {
  if (node?.deleted) return "deleted";
  const by = node?.cordoned_by ? `cordoned by ${node.cordoned_by}` : "kubectl cordon";
  return node?.cordoned || (node?.unschedulable ? by : "");
}

const STATES = { reserved: "reserved", bound: "starting", active: "running" };

function podsOf(devices) {
  const pods = new Map();
  for (const device of devices) {
    for (const [uid, shares] of sharesByPod(device)) {
      const [share] = shares;
      if (!share.pod) continue;
      let pod = pods.get(uid);
      if (!pod) {
        pod = {
          pod: uid,
          namespace: share.namespace,
          name: share.name,
          state: STATES[share.state] ?? share.state,
          node: device.node,
          models: new Set(),
          devices: [],
          memory: 0,
          cores: 0,
          gpus: 0,
          usedMemory: null,
          usedCores: null,
          created: share.created_at,
          idleSince: null,
          busy: false,
        };
        pods.set(uid, pod);
      }
      pod.models.add(device.model);
      pod.devices.push(device);
      pod.memory += peak(shares, (part) => part.memory_mib);
      pod.cores += peak(shares, (part) => part.booked_cores);
      pod.gpus += weight(shares);
      for (const part of shares) if (!part.init) addUse(pod, part);
    }
  }
  for (const pod of pods.values()) {
    if (!pod.busy && pod.idleSince !== null) pod.state = "idle";
    pod.devices.sort((one, two) => one.index - two.index);
  }
  return pods;
}

function addUse(pod, { measured }) {
  if (!measured) {
    pod.busy = true;
    return;
  }
  if (measured.memory_mib !== null) pod.usedMemory = (pod.usedMemory ?? 0) + measured.memory_mib;
  if (measured.cores_percent !== null)
    pod.usedCores = (pod.usedCores ?? 0) + measured.cores_percent;
  if (measured.idle) pod.idleSince = Math.max(pod.idleSince ?? 0, measured.idle_since);
  else pod.busy = true;
}
