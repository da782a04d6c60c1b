// What to try while no pod has a lease and none waits.
import { copyButton, el, fetchJson } from "./dom.js";

export class FirstPage {
  constructor() {
    this.root = el("section", { class: "panel first", "aria-label": "First steps", hidden: true });
    this.shown = null;
  }

  /** Show what to try, if there is nothing else to see. */
  async draw(devices, leases, waiting) {
    const step = leases || waiting ? null : devices ? "pod" : "devices";
    if (step === this.shown) return;
    this.shown = step;
    this.root.hidden = !step;
    if (step === "devices") this.root.replaceChildren(...withoutDevices());
    if (step !== "pod") return;
    const { manifest } = await fetchJson("/api/v1/first-pod").catch(() => ({}));
    if (this.shown === step) this.root.replaceChildren(...withoutPods(manifest));
  }
}

function withoutDevices() {
  return [
    el("h2", {}, "No node has reported a GPU"),
    el(
      "p",
      {},
      "The node agent of a node reports its GPUs within seconds. ",
      el("code", {}, "leasehold doctor"),
      " finds out what is missing.",
    ),
  ];
}

function withoutPods(manifest) {
  const head = el("h2", {}, "No pod has a share of a GPU");
  if (!manifest)
    return [
      head,
      el(
        "p",
        {},
        "No node serves a resource that pods can request: ",
        el("code", {}, "leasehold doctor"),
        " finds out why.",
      ),
    ];
  const command = `kubectl apply -f - <<'EOF'\n${manifest}EOF\n`;
  const text = el("pre", { tabindex: "0", "aria-label": "A pod to try" }, command);
  return [
    head,
    el("p", {}, "This pod gets one; it appears here within a second:"),
    text,
    el("p", { class: "line" }, ...copyButton(text)),
    el(
      "p",
      {},
      el("code", {}, "kubectl leasehold explain first"),
      " tells why it runs on its node, or why it waits.",
    ),
  ];
}
