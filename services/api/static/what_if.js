// What if: where the pods of a manifest would run now, what would make room for those that would wait, or which nodes.
import { el, fetchJson } from "./dom.js";
import { count, mib } from "./format.js";
import { url } from "./route.js";

const EXAMPLE = "apiVersion: v1\nkind: Pod\n...";

export class WhatIfView {
  kinds = [];

  constructor(app) {
    this.app = app;
    this.title = "What if";
    this.text = el("textarea", {
      rows: "16",
      spellcheck: "false",
      placeholder: EXAMPLE,
      "aria-label": "Manifest",
    });
    this.result = el("div", { class: "result", role: "status" });
    this.root = el(
      "div",
      { class: "page" },
      el(
        "nav",
        { class: "crumbs", "aria-label": "Path" },
        el("a", { href: url("waiting") }, "Waiting"),
      ),
      el("div", { class: "title" }, el("h2", {}, "What if")),
      el(
        "div",
        { class: "detail" },
        el(
          "form",
          {
            class: "panel",
            onsubmit: (event) => {
              event.preventDefault();
              this.ask();
            },
          },
          el(
            "p",
            { class: "soft" },
            "Would these pods run now, and where? Nothing is created. Paste pods, Deployments, Jobs or other objects with pods, as YAML or JSON.",
          ),
          this.text,
          el("button", { class: "primary" }, "Try them"),
        ),
        this.result,
      ),
    );
  }

  draw() {}

  async ask() {
    this.result.replaceChildren(el("p", { class: "soft" }, "Trying…"));
    try {
      const found = await fetchJson("/api/v1/what-if", {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify({ manifest: this.text.value }),
      });
      this.result.replaceChildren(...this.outcome(found));
    } catch (error) {
      this.result.replaceChildren(el("p", { class: "problem panel" }, error.message));
    }
  }

  outcome({ pods, add_nodes: added }) {
    const waiting = pods.filter((pod) => !pod.node).length;
    const head = el(
      "h3",
      {},
      waiting
        ? `${count(pods.length - waiting, "pod")} would run, ${waiting} would wait`
        : `${count(pods.length, "pod")} would run`,
    );
    return [
      el(
        "section",
        { class: "panel", "aria-label": "Result" },
        head,
        el("ul", { class: "plain" }, ...pods.map((pod) => this.pod(pod))),
      ),
      ...(added.length
        ? [
            el(
              "section",
              { class: "panel", "aria-label": "More nodes" },
              el("h3", {}, "Nodes that would help"),
              el(
                "ul",
                { class: "plain" },
                ...added.map((one) =>
                  el(
                    "li",
                    {},
                    `${count(one.count, "node")} like ${one.like} (${one.gpus.length} x ${one.gpus[0]}): ${count(one.pods, "pod")} would run on ${one.count === 1 ? "it" : "them"}.`,
                  ),
                ),
              ),
            ),
          ]
        : []),
    ];
  }

  pod({ pod, node, shares, refusal, room }) {
    if (node) {
      const where = shares
        .map(
          (share) =>
            `GPU ${share.index}: ${mib(share.memory_mib)}, ${share.cores_percent} % of the cores`,
        )
        .join("; ");
      return el(
        "li",
        {},
        el("span", { class: "tag good" }, "runs"),
        " ",
        el("b", {}, pod),
        " on ",
        el("a", { href: url("node", node) }, node),
        where ? ` (${where})` : "",
      );
    }
    return el(
      "li",
      {},
      el("span", { class: "tag" }, "waits"),
      " ",
      el("b", {}, pod),
      el("p", { class: "soft" }, refusal),
      room ? el("p", {}, `It would run on ${room.node} without ${room.leases.join(", ")}.`) : null,
    );
  }
}
