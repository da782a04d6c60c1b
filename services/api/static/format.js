// Amounts and times as text.
/** @type {[string, number][]} */
const UNITS = [
  ["d", 86400],
  ["h", 3600],
  ["min", 60],
];

/** Compare names so that `node-9` precedes `node-10`. */
export const byName = new Intl.Collator("en", { numeric: true }).compare;

/** A whole number with commas. The first toLocaleString() of a page takes as long as drawing ten rows. */
export function grouped(number) {
  return `${number}`.replace(/\B(?=(\d{3})+$)/g, ",");
}

export function age(seconds) {
  for (const [unit, length] of UNITS)
    if (seconds >= length) return `${Math.floor(seconds / length)} ${unit}`;
  return `${Math.max(Math.floor(seconds), 0)} s`;
}

export function mib(amount) {
  if (amount === null || amount === undefined) return "–";
  if (amount >= 1024 * 1024) return `${short(amount / 1024 / 1024)} TiB`;
  return amount >= 1024 ? `${short(amount / 1024)} GiB` : `${Math.round(amount)} MiB`;
}

/** A number with at most three digits that mean something. */
export function short(number) {
  const size = Math.abs(number);
  if (size >= 100 || Number.isInteger(number)) return grouped(Math.round(number));
  return Number(number.toFixed(size >= 10 ? 1 : 2)).toString();
}

export function percent(part, whole) {
  return whole ? Math.round((100 * part) / whole) : 0;
}

/** GPUs of percents of one GPU. */
export function gpus(cores) {
  return short(cores / 100);
}

export function gpuHours(hours) {
  return hours && hours < 1 ? `${short(hours * 60)} GPU-min` : `${short(hours)} GPU-h`;
}

/** An amount of money, with more decimals where it is small. */
export function money(amount, currency) {
  return `${Number(amount).toFixed(Math.abs(amount) < 1 ? 4 : 2)} ${currency}`;
}

export function latency(seconds) {
  if (seconds === null) return "";
  return seconds < 1 ? `${Math.round(seconds * 1000)} ms` : `${seconds.toFixed(1)} s`;
}

export function clock(at) {
  return new Date(at * 1000).toLocaleTimeString("en-GB");
}

export function when(at) {
  return new Date(at * 1000).toLocaleString("en-GB", {
    day: "numeric",
    month: "short",
    hour: "2-digit",
    minute: "2-digit",
    second: "2-digit",
  });
}

export function count(number, one, many = `${one}s`) {
  return `${grouped(number)} ${number === 1 ? one : many}`;
}

/** A reason's code in words. */
export function words(code) {
  const text = code
    .replace(/([a-z])([A-Z])/g, "$1 $2")
    .toLowerCase()
    .replace(/\b(gpus?|cpu|mig|pvc|numa)\b/g, (name) => name.toUpperCase());
  return text.replace(/^./, (first) => first.toUpperCase());
}

/** How promised starts have ended, of a namespace or of all; null: none was kept or withdrawn. */
export function promiseTexts(sums) {
  if (!sums || sums.kept_percent === null) return null;
  const { kept, withdrawn, not_needed: notNeeded, half_known_s: half, most_known_s: most } = sums;
  return {
    Kept: `${kept} of ${kept + withdrawn}, ${sums.kept_percent.toFixed(1)} %`,
    "Known before": half === null ? "" : `half ${age(half)}, 9 of 10 ${age(most)}`,
    "Not needed": notNeeded || "",
  };
}
