// A long list of which only the rows near the window exist. Rows that leave it are used again for others.
import { afterPaint, oncePerFrame } from "./dom.js";

const MARGIN = 240; // pixels above and below the window
const FEW = 60; // so many rows exist all, so that the browser finds text in them

export class VirtualRows {
  /** `make()` returns {root, draw(item, index)}; `height(item)` is in pixels, with the gap to the next row. */
  constructor(root, { make, height }) {
    this.root = root;
    this.make = make;
    this.height = height;
    this.painted = false;
    this.items = [];
    this.keys = [];
    this.tops = [0];
    this.shown = new Map(); // key -> row
    this.spare = [];
    this.schedule = oncePerFrame(() => this.render());
    this.listener = () => this.schedule();
    addEventListener("scroll", this.listener, { passive: true });
    addEventListener("resize", this.listener);
    this.observer = new ResizeObserver(this.listener);
    this.observer.observe(document.body);
  }

  close() {
    removeEventListener("scroll", this.listener);
    removeEventListener("resize", this.listener);
    this.observer.disconnect();
  }

  /** Replace all items; `keyOf(item)` names a row, which keeps its focus and its elements. */
  set(items, keyOf) {
    this.items = items;
    this.keys = items.map(keyOf);
    this.measure();
    this.render(true);
    if (!this.painted) afterPaint(() => this.renderRest());
  }

  /** Draw rows outside the window, too, for which the first picture does not wait. */
  renderRest() {
    this.painted = true;
    this.render();
  }

  /** Compute where each row is. */
  measure() {
    this.tops = [0];
    for (const item of this.items) this.tops.push(this.tops.at(-1) + this.height(item));
    this.root.style.height = `${this.tops.at(-1)}px`;
  }

  /** Draw the rows in the window; with `all`, also those that were drawn before. */
  render(all = false) {
    if (!this.root.isConnected) return;
    const top = -this.root.getBoundingClientRect().top;
    const isShort = this.painted && this.items.length <= FEW;
    const margin = this.painted ? MARGIN : 0;
    const from = isShort ? 0 : this.indexAt(top - margin);
    const to = isShort
      ? this.items.length
      : Math.min(this.indexAt(top + innerHeight + margin) + 1, this.items.length);
    const wanted = new Set(this.keys.slice(from, to));
    for (const [key, row] of this.shown) {
      if (wanted.has(key) || (row.root.contains(document.activeElement) && this.keys.includes(key)))
        continue;
      this.shown.delete(key);
      this.spare.push(row);
      row.root.remove();
    }
    let next = null; // rows are in order in the document, too, for the keyboard and for screen readers
    for (let at = to - 1; at >= from; at--) next = this.draw(at, next, all);
  }

  draw(at, next, all) {
    const key = this.keys[at];
    let row = this.shown.get(key);
    const isNew = !row;
    if (isNew) {
      row = this.spare.pop() ?? this.make();
      this.shown.set(key, row);
    }
    if (
      isNew ||
      (row.root.nextElementSibling !== next && !row.root.contains(document.activeElement))
    )
      this.root.insertBefore(row.root, next);
    if (row.top !== this.tops[at]) {
      row.top = this.tops[at];
      row.root.style.transform = `translateY(${row.top}px)`;
    }
    if (isNew || all) row.draw(this.items[at], at);
    return row.root;
  }

  /** The index of the row at a height. */
  indexAt(y) {
    let low = 0;
    let high = Math.max(this.items.length - 1, 0);
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.tops[middle] <= y) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  /** Scroll until a row is in the window, draw it, and return it. */
  reveal(at) {
    const box = this.root.getBoundingClientRect();
    const head = document.getElementById("top").offsetHeight + 30;
    const top = box.top + this.tops[at];
    const bottom = box.top + this.tops[at + 1];
    if (top < head) scrollBy(0, top - head);
    else if (bottom > innerHeight - 40) scrollBy(0, bottom - innerHeight + 40);
    this.render();
    return this.shown.get(this.keys[at]);
  }
}
