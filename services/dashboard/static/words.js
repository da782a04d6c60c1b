// Words and elements. Names are tenants' input: text only ever becomes text nodes and properties.

/** Make an element; `attrs` become attributes (or listeners), children nodes or text. */
export function el(tag, attrs = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attrs)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** Set an attribute, or remove it where there is no value; nothing is done where it is so already. */
export function put(element, name, value) {
  const known = element.known ??= {};
  if (known[name] === value) return;
  known[name] = value;
  if (value) element.setAttribute(name, value);
  else element.removeAttribute(name);
}

/** Set the text of an element that this function alone writes. */
export function say(element, text) {
  if (element.said === text) return;
  element.said = text;
  element.textContent = text;
}

const hues = new Map();

/** A hue from 0 to 359 that a namespace keeps, whoever looks. */
export function hue(namespace) {
  let found = hues.get(namespace);
  if (found === undefined) {
    let hash = 2166136261;
    for (let at = 0; at < namespace.length; at++) {
      hash = Math.imul(hash ^ namespace.charCodeAt(at), 16777619) >>> 0;
    }
    hash = Math.imul(hash ^ (hash >>> 15), 2246822507) >>> 0;
    found = ((hash ^ (hash >>> 13)) >>> 0) % 24 * 15;
    hues.set(namespace, found);
  }
  return found;
}

export function swatch(namespace) {
  const made = el("span", { class: "swatch", "aria-hidden": "true" });
  made.style.setProperty("--hue", hue(namespace));
  return made;
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

export function took(seconds) {
  if (seconds === null) return "";
  return seconds < 1 ? `${Math.round(seconds * 1000)} ms` : `${seconds.toFixed(1)} s`;
}

export function clock(at) {
  return new Date(at * 1000).toLocaleTimeString();
}

export function shareText(share) {
  const place = share.mig ? `, ${share.mig.profile} at ${share.mig.position}` : "";
  const amount = `${mib(share.memory_mib)}, ${share.cores_percent} %${place}, ${share.state}`;
  return share.pod ? `${share.namespace}/${share.name} ${share.container}: ${amount}` : `in use: ${amount}`;
}

export function deviceText(device) {
  const health = device.healthy ? "" : ", unhealthy";
  const closed = device.closed ? ", closed to new shares" : "";
  return `GPU ${device.index} of ${device.node}, ${device.model}, ${mib(device.used_mib)} of ` +
    `${mib(device.memory_mib)}, ${device.shares.length} shares${health}${closed}`;
}
