// The facets of a list as menus of check boxes with counts, and how many items are shown.

import { model } from "./devices.js";
import { el, setAttribute, setText } from "./dom.js";
import { count, grouped } from "./format.js";
import { FACETS } from "./route.js";

const TITLES = { node: "Node", model: "Model", namespace: "Namespace", state: "State" };
const FREE = [1, 4, 8, 16, 24, 40, 80];
const MOST = 100; // values that a menu lists

export class FilterBar {
  /** `setParams(changes)` changes the URL; `noun` is what the list has; `titles` are other names of facets. */
  constructor(setParams, { noun, titles = {}, free = false }) {
    this.setParams = setParams;
    this.noun = noun;
    this.titles = { ...TITLES, ...titles };
    this.menus = new Map();
    this.facets = el("div", { class: "facets" });
    this.free = free
      ? el(
          "select",
          {
            "aria-label": "Free memory of a GPU at least",
            onchange: () => setParams({ free: this.free.value }),
          },
          el("option", { value: "" }, "Free ≥"),
          ...FREE.map((gib) => el("option", { value: gib }, `Free ≥ ${gib} GiB`)),
        )
      : null;
    this.shown = el("span", { class: "soft" });
    this.clear = el(
      "button",
      { type: "button", class: "small", onclick: () => setParams(null) },
      "Clear filters",
    );
    this.root = el(
      "div",
      { class: "filters", role: "group", "aria-label": "Filters" },
      this.facets,
      this.free,
      this.clear,
      this.shown,
    );
  }

  /** Add a button that saves what a table shows. */
  offerCsv(table, name) {
    this.root.append(
      el("button", { type: "button", class: "small", onclick: () => table.download(name) }, "CSV"),
    );
  }

  draw(filter, items, shownCount) {
    this.filter = filter;
    this.items = items;
    for (const facet of filter.facets()) {
      if (!this.menus.has(facet)) {
        this.menus.set(facet, new Menu(this, facet));
        this.facets.append(this.menus.get(facet).button, this.menus.get(facet).popover);
      }
      this.menus.get(facet).draw(filter.chosen[facet]);
    }
    if (this.free) this.free.value = filter.freeMib ? `${filter.freeMib / 1024}` : "";
    this.clear.hidden = !filter.active;
    setAttribute(this.shown, "role", filter.active ? "status" : null); // without filters, every new pod would be announced
    setText(
      this.shown,
      filter.active
        ? `${grouped(shownCount)} of ${count(items.length, ...this.noun)}`
        : count(shownCount, ...this.noun),
    );
  }

  /** What an empty list says: that nothing matches, with ways out, or that there is nothing. */
  nothing(text, elsewhere) {
    if (!this.filter?.active) return el("p", { class: "nothing" }, text);
    const what = [
      this.filter.query && `“${this.filter.query}”`,
      ...FACETS.flatMap((facet) => this.filter.chosen[facet]),
    ]
      .filter(Boolean)
      .join(", ");
    return el(
      "p",
      { class: "nothing" },
      `Nothing matches ${what || "these filters"} here. `,
      ...elsewhere().flatMap(({ title, number, href }) => [
        el("a", { href }, `${title}: ${grouped(number)}`),
        " ",
      ]),
      el("button", { type: "button", onclick: () => this.setParams(null) }, "Clear filters"),
    );
  }
}

class Menu {
  constructor(bar, facet) {
    this.bar = bar;
    this.facet = facet;
    this.title = bar.titles[facet];
    this.list = el("div", { class: "choices" });
    this.find = el("input", {
      type: "search",
      placeholder: `Find ${this.title.toLowerCase()}`,
      "aria-label": `Find ${this.title.toLowerCase()}`,
      oninput: () => this.fill(),
    });
    this.popover = el(
      "div",
      {
        popover: "auto",
        class: "menu",
        id: `facet-${facet}`,
        role: "group",
        "aria-label": this.title,
      },
      this.find,
      this.list,
    );
    this.button = el("button", {
      type: "button",
      class: "facet",
      popovertarget: this.popover.id,
      "aria-haspopup": "true",
    });
    this.popover.addEventListener("beforetoggle", (event) => {
      if (event.newState === "open") {
        this.find.value = "";
        this.fill();
        this.place();
      }
    });
  }

  draw(chosen) {
    this.chosen = chosen;
    setText(
      this.button,
      chosen.length === 1
        ? `${this.title}: ${label(this.facet, chosen[0])}`
        : chosen.length
          ? `${this.title}: ${chosen.length}`
          : this.title,
    );
    this.button.classList.toggle("active", Boolean(chosen.length));
    if (this.popover.matches(":popover-open") && !this.popover.contains(document.activeElement))
      this.fill();
  }

  place() {
    const box = this.button.getBoundingClientRect();
    this.popover.style.left = `${Math.max(Math.min(box.left, innerWidth - 296), 8)}px`;
    this.popover.style.top = `${box.bottom + 4}px`;
  }

  fill() {
    const counts = this.bar.filter.counts(this.facet, this.bar.items);
    const wanted = this.find.value.trim().toLowerCase();
    const found = counts.filter(([value]) => value.toLowerCase().includes(wanted));
    this.find.hidden = counts.length <= 12;
    this.list.replaceChildren(
      ...found.slice(0, MOST).map(([value, number]) =>
        el(
          "label",
          {},
          el("input", {
            type: "checkbox",
            checked: this.chosen.includes(value),
            onchange: (event) => this.choose(value, event.target.checked),
          }),
          el("span", {}, label(this.facet, value)),
          el("small", {}, grouped(number)),
        ),
      ),
      found.length > MOST
        ? el("p", { class: "soft" }, `${found.length - MOST} more: type a part of the name.`)
        : "",
      found.length ? "" : el("p", { class: "soft" }, "None."),
    );
  }

  choose(value, on) {
    this.chosen = on ? [...this.chosen, value] : this.chosen.filter((one) => one !== value);
    this.bar.setParams({ [this.facet]: this.chosen });
  }
}

function label(facet, value) {
  return facet === "model" ? model({ model: value }) : value;
}
