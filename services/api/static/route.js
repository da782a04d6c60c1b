// The fragment of the page's URL: `#/VIEW/ID?FILTERS`. It holds all that a reload or a shared link must keep.
// A pod is named by its UID or as NAMESPACE/NAME, a GPU by its UUID or as NODE/INDEX.
const LISTS = ["overview", "gpus", "nodes", "pods", "waiting", "namespaces", "events", "whatif"];
const DETAILS = ["node", "gpu", "pod", "namespace"];
export const FACETS = ["node", "model", "namespace", "state"];

/** Return the view, the ID and the filters of a fragment; without one, the overview. */
export function parse(hash) {
  const [, view, id, query = ""] = /^#\/([a-z]+)(?:\/([^?]*))?(?:\?(.*))?$/.exec(hash) ?? [];
  const params = new URLSearchParams(query);
  if (DETAILS.includes(view) && id) return { view, id: decode(id), params };
  if (LISTS.includes(view) && !id) return { view, id: null, params };
  const isEmpty = /^#?\/?(\?.*)?$/.test(hash);
  return { view: isEmpty ? "overview" : "unknown", id: null, params };
}

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** The URL of a view. Parameters without a value are left out; a list is given several times. */
export function url(view, id = null, params = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    for (const one of [value].flat()) if (one) query.append(name, one);
  }
  return `#/${view === "overview" ? "" : view}${id === null ? "" : `/${encodeURIComponent(id)}`}${query.size ? `?${query}` : ""}`.replace(
    "#/?",
    "#/overview?",
  );
}

/**
 * The filters that mean the same in every list, as parameters of `url`.
 *
 * @returns {{q?: string, node?: string[], model?: string[], namespace?: string[]}}
 */
export function sharedParams(params) {
  return {
    q: params.get("q"),
    node: params.getAll("node"),
    model: params.getAll("model"),
    namespace: params.getAll("namespace"),
  };
}
