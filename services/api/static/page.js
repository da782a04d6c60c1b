// The live page: the header with tabs and the search, and the view that the URL names.
import { Banner } from "./banner.js";
import { reserveColours } from "./colours.js";
import { el, oncePerFrame, setAttribute, setText } from "./dom.js";
import { Filter } from "./filters.js";
import { age, grouped } from "./format.js";
import { EventsView, GpusView, NamespacesView, WaitingView } from "./lists.js";
import { NamespacePage } from "./namespace_page.js";
import { GpuPage, NodePage } from "./node_page.js";
import { NodesView, nodeRows, nodesWithGpus } from "./nodes.js";
import { Overview } from "./overview.js";
import { PodPage } from "./pod_page.js";
import { currentRows, PodsView } from "./pods.js";
import { parse, sharedParams, url } from "./route.js";
import { Store } from "./store.js";
import { WhatIfView } from "./what_if.js";

/** Where a link leads to a view that there is not. */
class UnknownView {
  constructor() {
    this.title = "No such page";
    this.root = el(
      "div",
      { class: "page" },
      el("h2", {}, "No such page"),
      el("p", { class: "nothing" }, "This link has no view of that name."),
      el("p", {}, el("a", { href: url("overview") }, "Overview")),
    );
  }

  draw() {}
}

const VIEWS = {
  overview: Overview,
  gpus: GpusView,
  nodes: NodesView,
  pods: PodsView,
  waiting: WaitingView,
  namespaces: NamespacesView,
  events: EventsView,
  whatif: WhatIfView,
  unknown: UnknownView,
  node: NodePage,
  gpu: GpuPage,
  pod: PodPage,
  namespace: NamespacePage,
};
const TABS = {
  overview: "Overview",
  gpus: "GPUs",
  nodes: "Nodes",
  pods: "Pods",
  waiting: "Waiting",
  namespaces: "Namespaces",
  events: "Events",
};
const LISTED = ["gpus", "nodes", "pods", "waiting", "namespaces"];
const TAB_OF = {
  node: "nodes",
  gpu: "gpus",
  pod: "pods",
  namespace: "namespaces",
  whatif: "waiting",
  unknown: "overview",
};
const TICK_MS = 1000;

class App {
  constructor() {
    this.store = new Store((kinds) => this.changed(kinds));
    this.route = parse(location.hash);
    this.pending = new Set();
    this.left = new Map(); // where each URL was left
    this.params = () => this.route.params;
    this.setParams = (changes) => this.replaceParams(changes);
    this.setFilters = (changes) =>
      this.replaceParams(
        changes ?? { q: "", node: [], model: [], namespace: [], state: [], free: "" },
      );
    this.drawSoon = oncePerFrame(() => this.draw());
    this.main = document.getElementById("main");
  }

  async start() {
    this.banner = new Banner(this.store);
    this.makeHeader();
    await this.store.load();
    history.scrollRestoration = "manual";
    window.navigation?.addEventListener("navigate", (event) => {
      this.traverses = event.navigationType === "traverse";
    });
    addEventListener("hashchange", () => this.follow());
    addEventListener("keydown", (event) => this.onKey(event));
    this.main.addEventListener("focusin", ({ target }) => {
      const { uuid, key } = /** @type {HTMLElement} */ (target).dataset;
      this.focused = uuid
        ? `.dev[data-uuid="${CSS.escape(uuid)}"]`
        : `[data-key="${CSS.escape(key ?? "")}"]`;
    });
    document.querySelector(".skip").addEventListener("click", (event) => {
      event.preventDefault();
      this.main.focus();
    });
    setInterval(() => this.tick(), TICK_MS);
    this.open();
    performance.mark("drawn");
  }

  makeHeader() {
    this.tabs = Object.fromEntries(
      Object.entries(TABS).map(([view, text]) => {
        const number = el("small", { class: "count" });
        return [view, { number, root: el("a", { class: "tab" }, text, number) }];
      }),
    );
    this.search = el("input", {
      type: "search",
      placeholder: "Search nodes, pods, models",
      "aria-label": "Search",
      "aria-keyshortcuts": "/",
      enterkeyhint: "search",
      spellcheck: "false",
      oninput: () => this.searchFor(this.search.value),
    });
    this.live = el("span", { class: "live", role: "img" });
    document
      .getElementById("bar")
      .replaceChildren(
        el(
          "nav",
          { class: "tabs", "aria-label": "Views" },
          ...Object.values(this.tabs).map((tab) => tab.root),
        ),
        el("div", { class: "search" }, this.search, el("kbd", { "aria-hidden": "true" }, "/")),
        this.live,
      );
  }

  // The URL

  follow() {
    const before = this.route;
    const hash = location.hash;
    if (!hash.startsWith("#/") && hash) return; // a link within the page
    this.left.set(this.hash, { y: scrollY, key: this.focused });
    this.route = parse(hash);
    if (before.view === this.route.view && before.id === this.route.id) this.update();
    else this.open();
  }

  open() {
    this.view?.close?.();
    this.hash = location.hash;
    this.view = new VIEWS[this.route.view](this, this.route.id);
    this.main.replaceChildren(this.view.root);
    this.search.value = this.params().get("q") ?? "";
    this.pending = new Set(["reset"]);
    this.draw();
    document.title =
      this.route.view === "overview" ? "Leasehold" : `${this.view.title} · Leasehold`;
    const { y = 0, key } = (this.traverses && this.left.get(this.hash)) || {};
    scrollTo(0, y);
    if (this.opened && document.activeElement !== this.search)
      (this.main.querySelector(key) ?? this.main).focus({ preventScroll: true });
    this.opened = true;
  }

  update() {
    this.hash = location.hash;
    if (document.activeElement !== this.search) this.search.value = this.params().get("q") ?? "";
    this.pending.add("reset");
    this.view.update?.();
    this.drawSoon();
  }

  /** Change parameters of the URL, without an entry in the history; an empty value removes one. */
  replaceParams(changes) {
    const params = Object.fromEntries(
      [...new Set(this.params().keys())].map((name) => [name, this.params().getAll(name)]),
    );
    history.replaceState(null, "", url(this.route.view, this.route.id, { ...params, ...changes }));
    this.route = parse(location.hash);
    this.update();
  }

  searchFor(text) {
    if (LISTED.includes(this.route.view) || this.route.view === "events")
      this.replaceParams({ q: text });
    else if (text.trim())
      location.hash = url(this.elsewhere({ q: text })[0]?.view ?? "gpus", null, { q: text });
  }

  onKey(event) {
    const writes = event.target.closest("input, select, textarea, [contenteditable]");
    if (event.key === "/" && !writes && !event.ctrlKey && !event.metaKey && !event.altKey) {
      event.preventDefault();
      this.search.focus();
      this.search.select();
    } else if (event.key === "Escape" && event.target === this.search) {
      if (this.search.value) {
        this.search.value = "";
        this.searchFor("");
      } else this.search.blur();
    }
  }

  // The state

  changed(kinds) {
    for (const kind of kinds) this.pending.add(kind);
    if (kinds.has("namespaces")) reserveColours(this.store.namespaces.map((one) => one.namespace));
    if (this.view || kinds.has("connection")) this.drawSoon();
  }

  draw() {
    const kinds = this.pending;
    this.pending = new Set();
    this.drawBanner();
    if (!this.view) return;
    this.drawTabs(kinds);
    const shown = this.view.kinds ?? ["devices", "nodes", "waiting", "namespaces", "events"];
    if (kinds.has("reset") || shown.some((kind) => kinds.has(kind))) this.view.draw(kinds);
  }

  tick() {
    this.store.reconnectIfSilent();
    this.drawBanner();
    this.seconds = (this.seconds ?? 0) + 1;
    if (this.seconds % 5 === 0) this.view.tick?.();
  }

  drawBanner() {
    this.banner.draw({ warnings: this.route.view === "overview" });
    const { store } = this;
    const silent = store.silence();
    const old = store.ledgerAge();
    const text = silent
      ? "Not connected"
      : old
        ? `Connected; leases and waiting pods are ${age(old)} old`
        : "Live";
    setAttribute(this.live, "class", `live ${silent ? "bad" : old ? "warn" : "good"}`);
    setAttribute(this.live, "aria-label", text);
    setAttribute(this.live, "title", text);
  }

  drawTabs(kinds) {
    const shared = sharedParams(this.params());
    const current = TAB_OF[this.route.view] ?? this.route.view;
    for (const [view, tab] of Object.entries(this.tabs)) {
      setAttribute(tab.root, "href", view === "overview" ? url(view) : url(view, null, shared));
      setAttribute(
        tab.root,
        "aria-current",
        view === current ? (view === this.route.view ? "page" : "true") : null,
      );
    }
    if (
      kinds.has("reset") ||
      kinds.has("devices") ||
      kinds.has("waiting") ||
      kinds.has("namespaces")
    )
      this.countSoon();
  }

  /** Count what each tab has, or what it would show of it: at most once a second, since thousands are counted. */
  countSoon() {
    if (this.counting) return;
    const wait = performance.now() - (this.countedAt ?? -Infinity) < TICK_MS ? TICK_MS : 0;
    this.counting = setTimeout(() => {
      this.counting = null;
      this.countedAt = performance.now();
      this.count();
    }, wait);
  }

  /** How many items of each list match. */
  matches(shared) {
    const { store } = this;
    const params = new URLSearchParams();
    for (const [name, value] of Object.entries(shared))
      for (const one of [value].flat()) if (one) params.append(name, one);
    const items = {
      gpus: [...store.devices.values()],
      nodes: Object.values(shared).some((value) => value?.length)
        ? nodeRows(store)
        : nodesWithGpus(store),
      pods: currentRows(store),
      waiting: store.waiting.pods,
      namespaces: store.namespaces,
    };
    return Object.entries(items).map(([view, all]) => {
      const filter = new Filter(view, params, store);
      return {
        view,
        title: TABS[view],
        href: url(view, null, shared),
        number: filter.active
          ? all.filter((item) => filter.shows(item)).length
          : view === "waiting"
            ? store.waiting.total
            : all.length,
      };
    });
  }

  /** The other lists in which something matches. */
  elsewhere(shared = sharedParams(this.params())) {
    return this.matches(shared).filter(({ view, number }) => number && view !== this.route.view);
  }

  count() {
    const { store } = this;
    for (const { view, number } of this.matches(sharedParams(this.params())))
      setText(this.tabs[view].number, grouped(number));
    this.tabs.waiting.root.classList.toggle("attention", store.waiting.total > 0);
    if (this.shownTab === this.route.view) return;
    this.shownTab = this.route.view;
    this.tabs[TAB_OF[this.shownTab] ?? this.shownTab].root.scrollIntoView({
      block: "nearest",
      inline: "nearest",
    }); // on phones
  }
}

new App().start().catch((error) => {
  document
    .getElementById("main")
    .replaceChildren(
      el(
        "p",
        { class: "nothing", role: "alert" },
        `The page could not be loaded: ${error.message}. The next try is in 3 s.`,
      ),
    );
  setTimeout(() => location.reload(), 3000);
});
