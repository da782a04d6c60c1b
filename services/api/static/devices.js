// What a device is and holds, in words and amounts.
import { clock, mib } from "./format.js";

const ROUNDING = 1e-9; // of sums of fractions

/** The memory that the shares of a device are measured to use, MiB; null: none is measured. */
export const measuredMib = (device) => measuredSum(device, "memory_mib");

/** The cores that the shares of a device are measured to use, percent of it; null: none is measured. */
export const measuredCores = (device) => measuredSum(device, "cores_percent");

function measuredSum(device, amount) {
  let sum = null;
  for (const share of device.shares) {
    const value = share.measured?.[amount] ?? null;
    if (value !== null) sum = (sum ?? 0) + value;
  }
  return sum;
}

/** The model without the vendor, and whether the device is in MIG mode. */
export function model(device) {
  return `${device.model.replace(/^NVIDIA /, "")}${device.mode === "mig" ? ", MIG" : ""}`;
}

/** The cause of a device's fault, without its state and code. */
export function faultText(device) {
  return device.fault.replace(/^(\w+: )+/, "") || "unhealthy";
}

/** The memory that a new share of a device can get, MiB. */
export function freeMib(device, closed) {
  return !device.healthy || closed || device.reservation || device.used_shares >= device.slots
    ? 0
    : Math.max(device.memory_mib - device.used_memory_mib, 0);
}

/** The shares that stay, each with its part of the most that its pod has at one time, MiB. */
export function lastingShares(device) {
  return [...sharesByPod(device).values()].flatMap((shares) => {
    const running = shares.filter((share) => !share.init);
    const lasting = running.length ? running : shares.slice(0, 1);
    const missing = peak(shares, memoryOf) - peak(lasting, memoryOf);
    return lasting.map((share) => [share, share.memory_mib + missing / lasting.length]);
  });
}

const memoryOf = (share) => share.memory_mib;

/** The shares of a device by pod; those of pods that the viewer may not see are one each. */
export function sharesByPod(device) {
  const pods = new Map();
  for (const [at, share] of device.shares.entries()) {
    const pod = share.pod || at;
    if (pods.has(pod)) pods.get(pod).push(share);
    else pods.set(pod, [share]);
  }
  return pods;
}

/** The most that a pod has of a device at one time, of what `amount` reads of a share. */
export function peak(shares, amount) {
  let running = 0;
  let most = 0;
  for (const share of shares) {
    if (share.init) most = Math.max(most, running + amount(share));
    else running += amount(share);
  }
  return Math.max(most, running);
}

/** What a pod has of a device, in GPUs, as budgets weigh it: the larger part of memory or cores. */
export function weight(shares) {
  if (shares.some((share) => share.whole)) return 1;
  const memory = peak(shares, (share) => share.memory_mib / Math.max(share.device_mib, 1));
  const cores = peak(shares, (share) => share.cores_percent / 100);
  return Math.min(Math.ceil(1000 * Math.max(memory, cores) - ROUNDING) / 1000, 1);
}

/** For which pod a device's free room is kept; empty: for none. */
export function reservationText({ reservation }) {
  if (!reservation) return "";
  const { namespace, name, until } = reservation;
  return `reserved for ${name ? `${namespace}/${name}` : "another pod"}${until ? ` until ${clock(until)}` : ""}`;
}

/** The states of a device that one can filter by. */
export function statesOf(device, closed) {
  const states = [];
  if (!device.healthy) states.push("unhealthy");
  if (closed) states.push("closed");
  if (device.reservation) states.push("reserved");
  else if (device.phase === "Free") states.push("free");
  else if (device.shares.length)
    states.push(
      device.used_memory_mib >= device.memory_mib ||
        device.used_cores_percent >= 100 ||
        device.used_shares >= device.slots
        ? "full"
        : "shared",
    );
  if (device.shares.some((share) => share.measured?.idle)) states.push("idle");
  if (device.mode === "mig") states.push("MIG");
  return states;
}

/** The measured usage of a share, to be appended; empty: it is not measured. */
function measuredText({ measured }) {
  if (!measured) return "";
  const memory = measured.memory_mib === null ? "" : `, uses ${mib(measured.memory_mib)}`;
  const cores = measured.cores_percent === null ? "" : `, ${measured.cores_percent} % of the cores`;
  const idle = measured.idle
    ? `, idle since ${new Date(measured.idle_since * 1000).toLocaleString()}`
    : "";
  return `${memory}${cores}${idle}`;
}

export function shareText(share) {
  const instance = share.mig ? `, ${share.mig.profile} at ${share.mig.position}` : "";
  const amount = `${mib(share.memory_mib)}, ${share.booked_cores} %${instance}, ${share.state}${measuredText(share)}`;
  return share.pod
    ? `${share.namespace}/${share.name} ${share.container}: ${amount}`
    : `in use: ${amount}`;
}

export function deviceText(device, closed) {
  const health = device.healthy ? "" : `, unhealthy${device.fault ? `: ${device.fault}` : ""}`;
  const reserved = reservationText(device);
  const mig = device.mode === "mig";
  const cores = mig ? "" : ` and ${device.used_cores_percent} % of the cores`;
  const used = measuredMib(device);
  const idle = device.shares.filter((share) => share.measured?.idle).length;
  const measured = used === null ? "" : `, ${mib(used)} in use${idle ? `, ${idle} idle` : ""}`;
  const kind = mig
    ? device.shares.length === 1
      ? "instance"
      : "instances"
    : device.shares.length === 1
      ? "share"
      : "shares";
  return (
    `GPU ${device.index} of ${device.node}, ${device.model}${mig ? " in MIG mode" : ""}, ${mib(device.used_memory_mib)} of ` +
    `${mib(device.memory_mib)}${cores} leased, ${device.shares.length} ${kind}${measured}${health}${closed ? `, gets no new pods: ${closed}` : ""}${reserved && `, ${reserved}`}`
  );
}

/** Sums over devices: how many there are, and what of all of them is leased and used. */
export function totals(store) {
  const sums = {
    devices: 0,
    usable: 0,
    unhealthy: 0,
    closed: 0,
    memory: 0,
    leasedMemory: 0,
    usedMemory: 0,
    cores: 0,
    leasedCores: 0,
    usedCores: 0,
    free: 0,
    leased: 0,
    measured: false,
  };
  for (const device of store.devices.values()) {
    const closed = store.closedReason(device);
    sums.devices += 1;
    sums.unhealthy += device.healthy ? 0 : 1;
    sums.closed += device.healthy && closed ? 1 : 0;
    sums.usable += device.healthy && !closed ? 1 : 0;
    sums.free += device.phase === "Free" ? 1 : 0;
    sums.leased += device.milli_gpu / 1000;
    sums.memory += device.memory_mib;
    sums.leasedMemory += device.used_memory_mib;
    sums.cores += 100;
    sums.leasedCores += device.used_cores_percent;
    const used = measuredMib(device);
    const usedCores = measuredCores(device);
    if (used !== null || usedCores !== null) sums.measured = true;
    sums.usedMemory += used ?? 0;
    sums.usedCores += usedCores ?? 0;
  }
  return sums;
}
