// Which items of a list are shown: by words, by facets, and by free memory. All of it is in the URL.
import { freeMib, statesOf } from "./devices.js";
import { byName, words } from "./format.js";
import { FACETS } from "./route.js";
import { matcher } from "./words.js";

const texts = new WeakMap(); // items are replaced when they change

/** What of an item the words and facets mean, by the kind of list. */
const KINDS = {
  gpus: {
    text: (device) => [
      device.node,
      device.model,
      device.uuid,
      `gpu ${device.index}`,
      device.fault,
      ...device.shares.map((share) => share.pod && `${share.namespace}/${share.name}`),
    ],
    node: (device) => [device.node],
    model: (device) => [device.model],
    namespace: (device) => device.shares.map((share) => share.namespace).filter(Boolean),
    state: (device, store) => statesOf(device, store.closedReason(device)),
  },
  nodes: {
    text: (node) => [node.node, node.state, ...node.models],
    node: (node) => [node.node],
    model: (node) => node.models,
    state: (node) => [node.state],
  },
  pods: {
    text: (pod) => [`${pod.namespace}/${pod.name}`, pod.node, pod.pod, pod.state, ...pod.models],
    node: (pod) => [pod.node],
    model: (pod) => [...pod.models],
    namespace: (pod) => [pod.namespace],
    state: (pod) => [pod.state],
  },
  waiting: {
    text: (pod) => [`${pod.namespace}/${pod.name}`, pod.reason, pod.hint, pod.gang],
    namespace: (pod) => [pod.namespace],
    state: (pod) => [reasonOf(pod)],
  },
  namespaces: {
    text: (namespace) => [namespace.namespace],
    namespace: (namespace) => [namespace.namespace],
  },
  events: {
    text: (event) => [
      `${event.namespace}/${event.name}`,
      event.node,
      event.kind,
      event.text,
      event.beneficiary,
    ],
    node: (event) => [event.node].filter(Boolean),
    namespace: (event) => [event.namespace].filter(Boolean),
    state: (event) => [event.kind],
  },
};

/** Why a pod waits, in a word or two. */
export function reasonOf(pod) {
  return words(pod.code);
}

export class Filter {
  constructor(kind, params, store) {
    this.of = KINDS[kind];
    this.store = store;
    this.query = params.get("q")?.trim() ?? "";
    this.matches = matcher(this.query);
    this.chosen = Object.fromEntries(
      FACETS.map((facet) => [facet, this.of[facet] ? params.getAll(facet) : []]),
    );
    this.freeMib = kind === "gpus" ? 1024 * (Number(params.get("free")) || 0) : 0;
    this.active = Boolean(
      this.query || this.freeMib || FACETS.some((facet) => this.chosen[facet].length),
    );
  }

  /** Whether an item is shown, regardless of one facet. */
  shows(item, without = null) {
    return (
      FACETS.every(
        (facet) =>
          facet === without ||
          !this.chosen[facet].length ||
          this.values(facet, item).some((value) => this.chosen[facet].includes(value)),
      ) &&
      (!this.freeMib || freeMib(item, this.store.closedReason(item)) >= this.freeMib) &&
      (!this.query || this.matches(this.text(item)))
    );
  }

  values(facet, item) {
    return this.of[facet](item, this.store);
  }

  text(item) {
    let text = texts.get(item);
    if (text === undefined) {
      text = this.of.text(item, this.store).filter(Boolean).join("\n").toLowerCase();
      texts.set(item, text);
    }
    return text;
  }

  /** The values of a facet with the number of items that each would show. */
  counts(facet, items) {
    const counts = new Map(this.chosen[facet].map((value) => [value, 0]));
    for (const item of items) {
      if (!this.shows(item, facet)) continue;
      for (const value of new Set(this.values(facet, item)))
        counts.set(value, (counts.get(value) ?? 0) + 1);
    }
    return [...counts].sort(([one], [two]) => byName(one, two));
  }

  /** The facets that this list has. */
  facets() {
    return FACETS.filter((facet) => this.of[facet]);
  }
}
