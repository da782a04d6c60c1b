// A sortable table of any length; the column and the direction are in the URL.
import { el, setAttribute, setText } from "./dom.js";
import { byName } from "./format.js";
import { VirtualRows } from "./virtual.js";

/**
 * Columns: {id, title, value(item), text(item), draw(cell, item), end, phone}. `value` is what rows are sorted by, `text` what is
 * shown, unless `draw` fills the cell. `csv` is the column's name in CSV where its id lacks the unit. `end`: aligned to the right. `phone`: `main`, `side` or `below`, where it is in a card, with its `unit`.
 */
export class Table {
  constructor(columns, { label, template, setParams, fixed = false }) {
    this.columns = columns;
    this.setParams = setParams;
    this.heads = columns.map((column) => this.head(column));
    this.body = el("div", { role: "rowgroup", class: "rows" });
    this.root = el(
      "div",
      { class: "grid-table", role: "table", "aria-label": label },
      el(
        "div",
        { role: "rowgroup", class: "heads" },
        el("div", { role: "row", class: "tr" }, ...this.heads),
      ),
      this.body,
    );
    this.root.style.setProperty("--template", template);
    this.rows = new VirtualRows(this.body, {
      make: () => new Row(columns),
      height: () => this.rowHeight,
    });
    if (fixed) this.root.classList.add("fixed");
  }

  close() {
    this.rows.close();
  }

  head(column) {
    const content = column.value
      ? el("button", { type: "button", onclick: () => this.sortBy(column.id) }, column.title)
      : column.title;
    return el(
      "div",
      { role: "columnheader", class: `${column.end ? "end" : ""} ${column.phone ?? "wide"}` },
      content,
    );
  }

  sortBy(id) {
    const current = this.sort ?? "";
    this.setParams({
      sort:
        current === id
          ? `-${id}`
          : current === `-${id}`
            ? id
            : this.columns.find((column) => column.id === id).end
              ? `-${id}`
              : id,
    });
  }

  /** Save the rows that are shown as CSV: amounts as they are sorted, in the unit of the column. */
  download(name) {
    const lines = [
      this.columns.map((column) => column.csv ?? column.id),
      ...this.items.map((item) => this.columns.map((column) => column.value(item))),
    ];
    const text = lines.map((line) => `${line.map(quoted).join(",")}\r\n`).join("");
    const href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
    el("a", { href, download: `${name}.csv` }).click();
    setTimeout(() => URL.revokeObjectURL(href), 1000); // once the download has begun
  }

  /** Show items, sorted as `sort` says: a column's id, or `-` and the id for descending. */
  draw(items, sort, keyOf) {
    this.sort = sort;
    const descending = sort.startsWith("-");
    const column = this.columns.find((one) => one.id === sort.replace("-", ""));
    for (const [at, one] of this.columns.entries())
      setAttribute(
        this.heads[at],
        "aria-sort",
        one === column ? (descending ? "descending" : "ascending") : null,
      );
    const sorted = column?.value
      ? [...items].sort(comparison(column.value, descending ? -1 : 1))
      : items;
    this.items = sorted;
    this.rowHeight = parseFloat(getComputedStyle(this.root).getPropertyValue("--row")) || 32;
    setAttribute(this.root, "aria-rowcount", sorted.length + 1);
    this.rows.set(sorted, keyOf);
  }
}

/** A value of CSV, as in RFC 4180; what a spreadsheet would take for a formula begins with an apostrophe. */
function quoted(value) {
  const text = `${value ?? ""}`;
  const safe = typeof value === "string" && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

/** Compare numbers and texts; what has no value comes last in both directions. */
function comparison(value, sign) {
  return (one, two) => {
    const left = value(one);
    const right = value(two);
    const leftEmpty = left === null || left === "";
    const rightEmpty = right === null || right === "";
    if (leftEmpty || rightEmpty) return Number(leftEmpty) - Number(rightEmpty);
    return sign * (typeof left === "string" ? byName(left, right) : left - right);
  };
}

class Row {
  constructor(columns) {
    this.columns = columns;
    this.cells = columns.map((column) =>
      el("div", {
        role: "cell",
        class: `${column.end ? "end" : ""} ${column.phone ?? "wide"}`,
        "data-unit": column.unit,
      }),
    );
    this.root = el("div", { role: "row", class: "tr" }, ...this.cells);
  }

  draw(item, index) {
    setAttribute(this.root, "aria-rowindex", index + 2);
    for (const [at, column] of this.columns.entries()) {
      if (column.draw) column.draw(this.cells[at], item);
      else setText(this.cells[at], column.text(item));
    }
  }
}
