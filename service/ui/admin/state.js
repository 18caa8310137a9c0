// The list of galleries, the chosen one, and the listeners for changes of both.

import { describeGallery, listGalleries } from "../shared/api.js";

const SHORT = 12;
const DATE = "2026-01-01".length;
const listeners = new Set();
export const state = { galleries: [], name: "", noJobs: "", access: { scopes: [], galleries: null, filter: null } };

// What the key of this tab may do.
const isAdmin = () => state.access.scopes.includes("admin");
const isWriter = () => state.access.scopes.includes("write");
const seesAllItems = () => state.access.filter === null;
const seesAllGalleries = () => state.access.galleries === null;
const RIGHTS = {
  items: isWriter,
  add: isWriter,
  status: isWriter,
  golden: () => isWriter() && seesAllItems(),
  duplicates: () => isAdmin() && seesAllItems(),
  feedback: () => isAdmin() && seesAllItems(),
  jobs: () => isAdmin() && seesAllItems(),
  galleries: () => isAdmin() && seesAllItems(),
  models: () => isAdmin() && seesAllGalleries(), // rebuild, train, put in place, resume
  keys: () => isAdmin() && seesAllGalleries(),
  audit: () => isAdmin() && seesAllGalleries(),
};

// Whether the key of this tab may use a view or a part of one.
export const may = (part) => RIGHTS[part]();

export const chosen = () => state.galleries.find(({ name }) => name === state.name) ?? null;

// work() runs when another gallery is chosen or the list of galleries changed.
export const whenGalleryChanges = (work) => listeners.add(work);

function notify() {
  for (const work of listeners) work();
}

export function choose(name) {
  state.name = name;
  const address = new URL(location.href);
  address.searchParams.set("gallery", name);
  history.replaceState(null, "", address);
  notify();
}

// Loads the list of galleries. The chosen one stays if it still exists.
export async function loadGalleries() {
  state.galleries = await listGalleries();
  const wanted = state.name || new URLSearchParams(location.search).get("gallery");
  state.name = (state.galleries.find(({ name }) => name === wanted) ?? state.galleries[0])?.name ?? "";
  notify();
}

// Updates the sizes of the galleries without resetting the view.
export async function refreshSizes() {
  state.galleries = await listGalleries();
}

export const describeChosen = () => describeGallery(state.name);

// A bundle as [id, label] for a list of options.
export function modelChoice({ bundle_id: id, backbone, created_at: created }) {
  const galleries = state.galleries.filter((gallery) => gallery.bundle_id === id).map(({ name }) => name);
  const use = galleries.length > 0 && `of ${galleries.join(", ")}`;
  return [id, [id.slice(0, SHORT), created.slice(0, DATE), use, backbone].filter(Boolean).join(" · ")];
}
