// The pages of a node and of a GPU.
import { Detail, hardware, hardwareTable, PodsOf, shareItem } from "./detail.js";
import { freeMib, measuredMib, model, reservationText } from "./devices.js";
import { el, facts, fetchJson } from "./dom.js";
import { Fleet } from "./fleet.js";
import { age, count, mib, when } from "./format.js";
import { amountChart, Histories, percentChart } from "./histories.js";
import { podLink } from "./lists.js";
import { url } from "./route.js";
import { nodeClosedReason } from "./store.js";

export class NodePage extends Detail {
  constructor(app, name) {
    super(app, name, [["Nodes", url("nodes")]]);
    this.title = name;
    this.fleet = new Fleet(app.store);
    this.fleet.map.id = "node-grid";
    this.facts = this.part("Node");
    this.commands = this.part("Commands");
    this.devices = this.part("Hardware", { wide: true });
    this.histories = new Histories(
      app,
      `/api/v1/nodes/${encodeURIComponent(name)}/history`,
      ["Memory", "Compute"],
      (history) => [
        percentChart(history.memory, history.used_memory, history.memory_capacity),
        percentChart(history.cores, history.used_cores, history.cores_capacity),
      ],
    );
    this.pods = new PodsOf(app, { node: name }, (pod) => pod.node === name);
    this.closing = [this.fleet, this.pods];
    this.body.append(
      el("section", { class: "panel wide", "aria-label": "GPUs" }, this.fleet.root),
      this.facts,
      this.commands,
      this.histories.root,
      this.devices,
      this.pods.root,
    );
    this.poll();
  }

  async load() {
    this.found = await fetchJson(`/api/v1/nodes/${encodeURIComponent(this.id)}`);
  }

  draw(kinds) {
    const { store } = this.app;
    const node = store.nodes.get(this.id);
    const devices = store.devicesOf(this.id);
    if (!node) return this.head(this.id, "no such node", "bad");
    const closed = nodeClosedReason(node);
    const sick = devices.filter((device) => !device.healthy).length;
    this.head(
      this.id,
      sick ? `${sick} unhealthy` : closed ? "closed" : "in service",
      sick ? "bad" : closed ? "warn" : "good",
    );
    this.fleet.draw([this.id], () => true);
    const sum = (amount) => devices.reduce((all, device) => all + amount(device), 0);
    const used = devices.map(measuredMib).filter((one) => one !== null);
    this.facts.fill(
      facts({
        Models: [...new Set(devices.map(model))].join(", "),
        GPUs: `${devices.length}, ${devices.filter((device) => !device.shares.length).length} without a lease`,
        Memory: `${mib(sum((device) => device.used_memory_mib))} of ${mib(sum((device) => device.memory_mib))} leased`,
        "In use": used.length ? mib(used.reduce((all, one) => all + one, 0)) : "",
        Leased: `${(sum((device) => device.milli_gpu) / 1000).toFixed(2)} of ${count(devices.length, "GPU")}`,
        "Largest free share": mib(
          Math.max(0, ...devices.map((device) => freeMib(device, store.closedReason(device)))),
        ),
        "Closed to new pods": closed,
        "Also shared by": node.other_manager,
      }),
    );
    this.showCommands({
      "Everything that Kubernetes knows": `kubectl describe node ${this.id}`,
      "Its pods": `kubectl get pods -A --field-selector spec.nodeName=${this.id}`,
      [node.unschedulable ? "Open it to new pods" : "Close it to new pods"]:
        `kubectl ${node.unschedulable ? "uncordon" : "cordon"} ${this.id}`,
    });
    this.devices.fill(...hardwareTable(this.found?.devices ?? []));
    if (kinds.has("reset") || kinds.has("devices")) this.pods.draw();
  }
}

/** The device of a UUID, or of NODE/INDEX. */
function deviceOf(store, id) {
  const [node, index] = id.split("/");
  return (
    store.devices.get(id) ?? store.devicesOf(node).find((device) => `${device.index}` === index)
  );
}

export class GpuPage extends Detail {
  kinds = ["devices", "nodes", "events"];

  constructor(app, uuid) {
    const device = deviceOf(app.store, uuid);
    super(app, device?.uuid ?? uuid, [
      ["GPUs", url("gpus")],
      ...(device ? [[device.node, url("node", device.node)]] : []),
    ]);
    this.title = device ? `GPU ${device.index} of ${device.node}` : "GPU";
    this.facts = this.part("GPU");
    this.hardware = this.part("Hardware");
    this.leases = this.part("Leases");
    this.commands = this.part("Commands");
    this.happened = this.part("What happened to it", { wide: true });
    const path = `/api/v1/devices/${encodeURIComponent(this.id)}/history`;
    this.histories = new Histories(
      app,
      path,
      ["Memory", "Compute", "Temperature", "Power"],
      (history) => gpuCharts(history, app.store.devices.get(this.id)),
    );
    this.pods = new PodsOf(app, { node: device?.node ?? "" }, () => false, {
      device: this.id,
      title: "Pods that had it within a day",
    });
    this.closing = [this.pods];
    this.body.append(
      this.facts,
      this.hardware,
      this.leases,
      this.commands,
      this.happened,
      this.histories.root,
      this.pods.root,
    );
    this.poll();
  }

  async load() {
    this.found = await fetchJson(`/api/v1/devices/${encodeURIComponent(this.id)}`);
  }

  draw(kinds) {
    const { store } = this.app;
    const device = store.devices.get(this.id);
    if (!device) return this.head("This GPU no longer exists", "", "");
    const closed = store.closedReason(device);
    const used = measuredMib(device);
    this.head(
      `GPU ${device.index} of ${device.node}`,
      device.healthy ? (closed ? "closed" : "healthy") : "unhealthy",
      device.healthy ? (closed ? "warn" : "good") : "bad",
    );
    this.facts.fill(
      facts({
        Model: device.model,
        UUID: device.uuid,
        Node: el("a", { href: url("node", device.node), "data-key": "node" }, device.node),
        Fault: device.healthy ? "" : device.fault || "unhealthy",
        "Closed to new pods": closed,
        Reserved: reservationText(device),
        Mode: device.mode,
        "MIG layout": device.layout,
        Memory: `${mib(device.used_memory_mib)} of ${mib(device.memory_mib)} leased`,
        "In use": used === null ? "" : mib(used),
        Cores: device.mode === "mig" ? "" : `${device.used_cores_percent} % leased`,
        [device.mode === "mig" ? "Instances" : "Shares"]:
          `${device.used_shares} of ${device.slots}`,
        "NUMA node": device.numa,
      }),
    );
    this.showCommands({
      [device.excluded ? "Open it to new pods" : "Close it to new pods"]:
        `kubectl leasehold ${device.excluded ? "uncordon" : "cordon"} ${device.node}/${device.index}`,
      "Its node": `kubectl describe node ${device.node}`,
    });
    this.hardware.fill(...hardware(this.found?.hardware));
    this.leases.fill(
      device.shares.length
        ? el(
            "ul",
            { class: "shares" },
            ...device.shares.map((share) =>
              shareItem(
                share,
                share.namespace,
                share.pod ? podLink(share) : "in use: of a namespace that you may not see",
                share.init ? `${share.state} (init)` : share.state,
              ),
            ),
          )
        : el("p", { class: "nothing" }, "No lease."),
    );
    this.drawEvents(device);
    if (kinds.has("reset") || kinds.has("devices")) this.pods.draw();
  }

  /** The beginnings and ends of its problems, and its Xid errors, the latest first. */
  drawEvents(device) {
    const name = `GPU ${device.index} of ${device.node}`;
    const events = this.app.store.events
      .filter((event) => event.name === name && !event.pod)
      .map((event) => ({
        at: event.at,
        kind: event.kind,
        text: `${event.text}${event.latency_s === null ? "" : `, after ${age(event.latency_s)}`}`,
      }));
    const xids = (this.found?.hardware?.xids ?? []).map((xid) => ({
      at: xid.at,
      kind: `Xid ${xid.number}`,
      text: xid.meaning,
    }));
    const rows = [...events, ...xids].sort((one, two) => two.at - one.at);
    this.happened.fill(
      rows.length
        ? el(
            "ul",
            { class: "plain" },
            ...rows.map(({ at, kind, text }) =>
              el(
                "li",
                {},
                el("time", { class: "soft" }, when(at)),
                " ",
                el("b", { class: kind === "solved" ? "kind-good" : "kind-bad" }, kind),
                text ? `: ${text}` : "",
              ),
            ),
          )
        : el("p", { class: "nothing" }, "No problem since the API and its agent started."),
    );
  }
}

function gpuCharts(history, device) {
  const whole = history.memory_capacity ?? 100;
  const one = (values, label, unit, highest) =>
    values?.some((value) => value !== null)
      ? { unit, highest, lines: [{ label, colour: "used", values }] }
      : null;
  const memory =
    device?.memory_mib && history.memory_capacity
      ? amountChart(history.memory, history.used_memory, 1024, "GiB")
      : percentChart(history.memory, history.used_memory, whole);
  return [
    { ...memory, highest: history.memory_capacity ? whole / 1024 : 100 },
    percentChart(history.cores, history.used_cores, 100),
    one(history.temperature, "Temperature", "°C", 90),
    one(history.power, "Power", "W", 100),
  ];
}
