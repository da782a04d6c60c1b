// Elements and text. Names are tenants' input: text only ever becomes text nodes and properties.

/** Create an element; `attrs` become attributes or listeners, children become nodes or text. */
export function el(tag, attrs = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attrs)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Set an attribute, or remove it if there is no value; does nothing if it is unchanged. */
export function setAttribute(element, name, value) {
  const attributes = element.currentAttributes ??= {};
  if (attributes[name] === value) return;
  attributes[name] = value;
  if (value) element.setAttribute(name, value);
  else element.removeAttribute(name);
}

/** Set the text of an element that only this function writes; does nothing if it is unchanged. */
export function setText(element, text) {
  if (element.currentText === text) return;
  element.currentText = text;
  element.textContent = text;
}

const hues = new Map();

/** A namespace's hue from 0 to 359, the same for every viewer. */
export function hue(namespace) {
  let value = hues.get(namespace);
  if (value === undefined) {
    let hash = 2166136261;
    for (let at = 0; at < namespace.length; at++) {
      hash = Math.imul(hash ^ namespace.charCodeAt(at), 16777619) >>> 0;
    }
    hash = Math.imul(hash ^ (hash >>> 15), 2246822507) >>> 0;
    value = ((hash ^ (hash >>> 13)) >>> 0) % 24 * 15;
    hues.set(namespace, value);
  }
  return value;
}

/** A button that copies the text of an element, and a place for what came of it. */
export function copyButton(element) {
  const status = el("span", { role: "status" });
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(element.textContent);
      status.textContent = "Copied.";
    } catch {
      getSelection().selectAllChildren(element);
      status.textContent = "Selected: copy it with the keyboard.";
    }
  };
  return [el("button", { type: "button", onclick: copy }, "Copy"), " ", status];
}

export function swatch(namespace) {
  const element = el("span", { class: "swatch", "aria-hidden": "true" });
  element.style.setProperty("--hue", hue(namespace));
  return element;
}

export function age(seconds) {
  for (const [unit, length] of [["d", 86400], ["h", 3600], ["min", 60]]) {
    if (seconds >= length) return `${Math.floor(seconds / length)} ${unit}`;
  }
  return `${Math.max(Math.floor(seconds), 0)} s`;
}

export function mib(amount) {
  return amount >= 10240 ? `${(amount / 1024).toFixed(amount % 1024 ? 1 : 0)} GiB` : `${amount} MiB`;
}

export function latency(seconds) {
  if (seconds === null) return "";
  return seconds < 1 ? `${Math.round(seconds * 1000)} ms` : `${seconds.toFixed(1)} s`;
}

export function clock(at) {
  return new Date(at * 1000).toLocaleTimeString();
}

/** The measured usage of a share, to be appended; empty: it is not measured. */
export function measuredText({ measured }) {
  if (!measured) return "";
  const memory = measured.memory_mib === null ? "" : `, uses ${mib(measured.memory_mib)}`;
  const cores = measured.cores_percent === null ? "" : `, ${measured.cores_percent} % of the cores`;
  const idle = measured.idle ? `, idle since ${new Date(measured.idle_since * 1000).toLocaleString()}` : "";
  return `${memory}${cores}${idle}`;
}

/** The memory that the shares of a device are measured to use, MiB; null: none is measured. */
export const measuredMib = (device) => measuredSum(device, "memory_mib");

/** The cores that the shares of a device are measured to use, percent of it; null: none is measured. */
export const measuredCores = (device) => measuredSum(device, "cores_percent");

function measuredSum(device, amount) {
  const known = device.shares.map((share) => share.measured?.[amount] ?? null).filter((value) => value !== null);
  return known.length ? known.reduce((sum, value) => sum + value, 0) : null;
}

/** The model as on a device's block, without the vendor. */
export function model(device) {
  return `${device.model.replace(/^NVIDIA /, "")}${device.mode === "mig" ? ", MIG" : ""}`;
}

/** Whether one of the texts contains the filter. */
export function matches(filter, ...texts) {
  return !filter || texts.some((text) => text?.toLowerCase().includes(filter));
}

/** A link to the details of a device, lease or namespace. */
export function detailsLink(kind, id, text) {
  return el("a", { href: detailsUrl(kind, id), "data-key": `${kind}:${id}` }, text);
}

export function detailsUrl(kind, id) { return `#${kind}/${encodeURIComponent(id)}`; }

export function shareText(share) {
  const instance = share.mig ? `, ${share.mig.profile} at ${share.mig.position}` : "";
  const amount = `${mib(share.memory_mib)}, ${share.booked_cores} %${instance}, ${share.state}${measuredText(share)}`;
  return share.pod ? `${share.namespace}/${share.name} ${share.container}: ${amount}` : `in use: ${amount}`;
}

export function deviceText(device) {
  const health = device.healthy ? "" : `, unhealthy${device.fault ? `: ${device.fault}` : ""}`;
  const mig = device.mode === "mig", cores = mig ? "" : ` and ${device.used_cores_percent} % of the cores`;
  const excluded = device.excluded ? `, closed to new pods: ${device.excluded}` : "";
  const used = measuredMib(device), idle = device.shares.filter((share) => share.measured?.idle).length;
  const measured = used === null ? "" : `, ${mib(used)} in use${idle ? `, ${idle} idle` : ""}`;
  return `GPU ${device.index} of ${device.node}, ${device.model}${mig ? " in MIG mode" : ""}, ${mib(device.used_memory_mib)} of ` +
    `${mib(device.memory_mib)}${cores} leased, ${device.shares.length} ${mig ? "instances" : "shares"}${measured}${health}${excluded}`;
}

/** The cause of a device's fault, without its state and code. */
export function faultText(device) {
  return device.fault.replace(/^(\w+: )+/, "") || "unhealthy";
}
