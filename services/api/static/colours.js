// The colours of namespaces. page.css has them as the classes c0 to c11: twelve that viewers with a colour vision
// deficiency can tell apart, too.
const COLOURS = 12;
const VIVID = 6; // the first ones differ most
const taken = new Map();

function preferred(name) {
  let hash = 2166136261;
  for (let at = 0; at < name.length; at++)
    hash = Math.imul(hash ^ name.charCodeAt(at), 16777619) >>> 0;
  hash = Math.imul(hash ^ (hash >>> 15), 2246822507) >>> 0;
  return ((hash ^ (hash >>> 13)) >>> 0) % VIVID;
}

/** The class of a namespace's colour: its own if no other has it, else the next free one. So twelve differ. */
export function colourClass(namespace) {
  let number = taken.get(namespace);
  if (number === undefined) {
    number = preferred(namespace);
    const used = new Set(taken.values());
    const next = (after) => (used.size < VIVID ? (after + 1) % VIVID : (after + 1) % COLOURS);
    if (used.size < COLOURS) while (used.has(number)) number = next(number);
    taken.set(namespace, number);
  }
  return `c${number}`;
}

/** The scale of use, from so many percent of a GPU's cores on. views.css has its steps as the classes u0 to u4. */
export const USE_STEPS = [0, 1, 25, 50, 75];

/** The class of the colour of a GPU whose cores are measured to be busy for so many percent; null: it is not measured. */
export function useClass(percent) {
  return percent === null ? "anonymous" : `u${USE_STEPS.findLastIndex((from) => percent >= from)}`;
}

/** Give these namespaces their colours in the order of their names, which is the same for every viewer. */
export function reserveColours(namespaces) {
  for (const name of [...namespaces].sort()) colourClass(name);
}
