// Past views with their answers, in memory, for the browser's Back and Forward.

const LIMIT = 40;
const entries = new Map();
let made = 0;

export const previewsOf = (query) => query.previews ?? [query.preview];
const previews = (entry) =>
  (entry.kind === "batch" ? entry.rows.map((row) => row.query) : [entry.query]).flatMap(previewsOf);

// Releases the blob URLs of uploads that no entry uses.
export function release(urls) {
  const used = new Set([...entries.values()].flatMap(previews));
  for (const url of urls) {
    if (url.startsWith("blob:") && !used.has(url)) URL.revokeObjectURL(url);
  }
}

function evictOldest() {
  const [oldest, entry] = entries.entries().next().value;
  entries.delete(oldest);
  release(previews(entry));
}

export function push(entry, hash) {
  made += 1;
  // timeOrigin distinguishes this page load from earlier ones: their history states outlive their entries.
  const key = `${performance.timeOrigin}-${made}`;
  entries.set(key, entry);
  if (entries.size > LIMIT) evictOldest();
  history.pushState({ key }, "", hash);
}

export function replace(entry, hash) {
  const key = history.state?.key;
  if (!entries.has(key)) {
    made += 1;
    const fresh = `${performance.timeOrigin}-${made}`;
    entries.set(fresh, entry);
    history.replaceState({ key: fresh }, "", hash);
    return;
  }
  const before = entries.get(key);
  entries.set(key, entry);
  release(previews(before));
  history.replaceState({ key }, "", hash);
}

// Changes only the URL, for settings that need no new answer.
export function rename(hash) {
  history.replaceState(history.state, "", hash);
}

export function current() {
  return entries.get(history.state?.key) ?? null;
}
