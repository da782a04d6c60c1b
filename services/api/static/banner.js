// The banner: one line per cause, and how old the data is. What has many lines is folded.
import { el, setText } from "./dom.js";
import { age, clock } from "./format.js";

const OPEN_LINES = 3;

export class Banner {
  constructor(store) {
    this.store = store;
    this.root = document.getElementById("banner");
    this.list = el("ul");
    this.shown = "";
    this.root.replaceChildren(this.list);
  }

  /** Draw the errors, and warnings where there is room for them. */
  draw({ warnings }) {
    const lines = this.lines(warnings);
    const key = JSON.stringify(lines.map(({ text, hint }) => [text, hint]));
    this.root.hidden = !lines.length;
    if (key !== this.shown) {
      this.shown = key;
      this.ages = lines.map(() => el("span", { class: "since" }));
      const items = lines.map(({ severity, cause, text, hint }, at) =>
        el(
          "li",
          { class: severity },
          el("b", {}, cause),
          text.slice(cause.length),
          ". ",
          this.ages[at],
          " ",
          hint ? el("span", { class: "hint" }, `${sentence(hint)}.`) : null,
        ),
      );
      this.list.replaceChildren(
        ...items.slice(0, OPEN_LINES),
        ...(items.length > OPEN_LINES
          ? [
              el(
                "li",
                { class: "more" },
                el(
                  "details",
                  {},
                  el("summary", {}, `${items.length - OPEN_LINES} more`),
                  el("ul", {}, ...items.slice(OPEN_LINES)),
                ),
              ),
            ]
          : []),
      );
    }
    // Ages change outside of what is compared above: nothing is announced again.
    for (const [at, line] of lines.entries())
      setText(this.ages[at], line.since ? `Since ${age(this.store.now() - line.since)}.` : "");
  }

  lines(warnings) {
    const { store } = this;
    const shown = store.problems.filter(
      ({ severity }) => severity === "error" || (warnings && severity === "warning"),
    );
    if (!store.silence()) return shown;
    const cause = "The API does not respond";
    return [
      {
        severity: "error",
        cause,
        text: `${cause}: what you see is from ${clock(store.updatedAt)}`,
        since: store.updatedAt,
        hint: "The page is loaded again as soon as it responds",
      },
      ...shown,
    ];
  }
}

function sentence(text) {
  return text.replace(/^[a-z]/, (first) => first.toUpperCase()).replace(/\.$/, "");
}
