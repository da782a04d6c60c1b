// The colours of namespaces. page.css has them as the classes c0 to c11: twelve that viewers with a colour vision
// deficiency can tell apart, too.
const COLOURS = 12, VIVID = 6; // the first ones differ most
const taken = new Map();

function preferred(name) {
  let hash = 2166136261;
  for (let at = 0; at < name.length; at++) hash = Math.imul(hash ^ name.charCodeAt(at), 16777619) >>> 0;
  hash = Math.imul(hash ^ (hash >>> 15), 2246822507) >>> 0;
  return ((hash ^ (hash >>> 13)) >>> 0) % VIVID;
}

/** The class of a namespace's colour: its own if no other has it, else the next free one. So twelve differ. */
export function colourClass(namespace) {
  let number = taken.get(namespace);
  if (number === undefined) {
    number = preferred(namespace);
    const used = new Set(taken.values());
    const next = (after) => used.size < VIVID ? (after + 1) % VIVID : (after + 1) % COLOURS;
    if (used.size < COLOURS) while (used.has(number)) number = next(number);
    taken.set(namespace, number);
  }
  return `c${number}`;
}

/** Give these namespaces their colours in the order of their names, which is the same for every viewer. */
export function reserveColours(namespaces) {
  for (const name of [...namespaces].sort()) colourClass(name);
}
