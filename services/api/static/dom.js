// Elements and text. Names are tenants' input: text only ever becomes text nodes and properties.

/**
 * Create an element; `attrs` become attributes or listeners, children become nodes or text.
 *
 * @param {string} tag
 * @param {Record<string, any>} [attrs]
 * @param {...any} children
 * @returns {any} the element, to which its owner may add properties
 */
export function el(tag, attrs = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attrs)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false)
      element.setAttribute(name, value === true ? "" : value);
  }
  element.append(
    ...children.flat().filter((child) => child !== null && child !== undefined && child !== false),
  );
  return element;
}

/** Set an attribute, or remove it if there is no value; does nothing if it is unchanged. */
export function setAttribute(element, name, value) {
  element.currentAttributes ??= {};
  const attributes = element.currentAttributes;
  if (attributes[name] === value) return;
  attributes[name] = value;
  if (value || value === 0) element.setAttribute(name, value);
  else element.removeAttribute(name);
}

/** Set the text of an element that only this function writes; does nothing if it is unchanged. */
export function setText(element, text) {
  if (element.currentText === text) return;
  element.currentText = text;
  element.textContent = text;
}

/** Set a property of an element's style, or remove it for null; does nothing if it is unchanged. */
export function setProperty(element, name, value) {
  element.currentProperties ??= {};
  const properties = element.currentProperties;
  if ((properties[name] ?? null) === value) return;
  properties[name] = value;
  element.style.setProperty(name, value);
}

/** Replace the children of an element unless they are equal; what has the focus keeps it, by its `data-key`. */
export function replaceKeepingFocus(parent, children) {
  if (
    children.length === parent.childNodes.length &&
    children.every((child, at) => child.isEqualNode?.(parent.childNodes[at]))
  )
    return;
  const active = /** @type {HTMLElement} */ (document.activeElement);
  const focused = parent.contains(active) ? active.dataset.key : null;
  parent.replaceChildren(...children);
  if (focused) parent.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
}

/**
 * A section with a heading; `aside` stands to the right of it.
 *
 * @param {string} title
 * @param {{id?: string, aside?: Element, level?: string, wide?: boolean}} [options]
 * @param {...any} children
 */
export function panel(title, { id, aside, level = "h2", wide } = {}, ...children) {
  return el(
    "section",
    { class: `panel${wide ? " wide" : ""}`, id, "aria-label": title },
    el("header", {}, el(level, {}, title), aside),
    ...children,
  );
}

/** Terms and their values; those without a value are left out. */
export function facts(pairs) {
  const shown = Object.entries(pairs).filter(
    ([, value]) => value !== "" && value !== null && value !== undefined,
  );
  return el(
    "dl",
    { class: "facts" },
    ...shown.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]),
  );
}

/** A command, and a button that copies it. */
export function command(text, what) {
  const code = el("code", { tabindex: "0" }, text);
  return el(
    "div",
    { class: "command" },
    what ? el("span", { class: "soft" }, what) : null,
    el("div", {}, code, ...copyButton(code)),
  );
}

/** A button that copies the text of an element, and a place for what came of it. */
export function copyButton(element) {
  const status = el("span", { role: "status", class: "soft" });
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(element.textContent);
      status.textContent = "Copied.";
    } catch {
      getSelection().selectAllChildren(element);
      status.textContent = "Selected: copy it with the keyboard.";
    }
  };
  return [
    el(
      "button",
      {
        type: "button",
        class: "small",
        onclick: copy,
        "aria-label": `Copy ${element.textContent.split("\n")[0]}`,
      },
      "Copy",
    ),
    status,
  ];
}

/** Call a function in the next frame, once, however often it is requested before. */
export function oncePerFrame(draw) {
  let requested = false;
  return () => {
    if (requested) return;
    requested = true;
    requestAnimationFrame(() => {
      requested = false;
      draw();
    });
  };
}

/** Call a function once the browser has painted what is drawn now. */
export function afterPaint(then) {
  requestAnimationFrame(() => setTimeout(then));
}

/**
 * Return the JSON of a path of the API. Throws an error with the API's words.
 *
 * @param {string} path
 * @param {RequestInit} [options]
 * @returns {Promise<any>}
 */
export async function fetchJson(path, options = {}) {
  const response = await fetch(path, {
    ...options,
    headers: { Accept: "application/json", ...options.headers },
  });
  if (response.status === 401) location.assign(`/login${location.hash}`);
  const body = await response.json();
  if (!response.ok) throw Object.assign(new Error(body.error), { status: response.status });
  return body;
}
