// Past queries with their answers, kept in memory and walked with the browser's Back and Forward.

const LIMIT = 40;
const entries = new Map();
let made = 0;

function evictOldest() {
  const [oldest, { query }] = entries.entries().next().value;
  entries.delete(oldest);
  const shared = [...entries.values()].some((entry) => entry.query.preview === query.preview);
  if (!shared && query.preview.startsWith("blob:")) URL.revokeObjectURL(query.preview);
}

export function push(entry) {
  made += 1;
  // timeOrigin tells this page load from earlier ones, whose states outlive their entries.
  const key = `${performance.timeOrigin}-${made}`;
  entries.set(key, entry);
  if (entries.size > LIMIT) evictOldest();
  history.pushState({ key }, "");
}

export function replace(entry) {
  const key = history.state?.key;
  if (!entries.has(key)) return push(entry);
  return entries.set(key, entry);
}

export function current() {
  return entries.get(history.state?.key) ?? null;
}
