// Words that are searched for. Every word must be found; a number is whole, so that `node-1` does not find
// node-10, and an asterisk at the end makes a prefix of it: `node-1*`.
const SPECIAL = /[.*+?^${}()|[\]\\]/g;

/** Return a function that tests a text in lower case. */
export function matcher(query) {
  const patterns = query.toLowerCase().split(/\s+/).filter(Boolean).map(pattern);
  return (text) => patterns.every((one) => one.test(text));
}

function pattern(word) {
  const isPrefix = word.endsWith("*") && word.length > 1;
  const text = (isPrefix ? word.slice(0, -1) : word).replace(SPECIAL, "\\$&");
  const before = /^\d/.test(word) ? "(?<!\\d)" : "";
  const after = !isPrefix && /\d$/.test(word) ? "(?!\\d)" : "";
  return new RegExp(before + text + after);
}
