// Which galleries there are, which one is chosen, and who wants to know when that changes.

import { describeGallery, listGalleries } from "/ui/shared/api.js";

const listeners = new Set();
export const state = { galleries: [], name: "", noJobs: "" };

export const chosen = () => state.galleries.find(({ name }) => name === state.name) ?? null;

// work() runs whenever another gallery is chosen, or the galleries changed.
export const whenGalleryChanges = (work) => listeners.add(work);

function tell() {
  for (const work of listeners) work();
}

export function choose(name) {
  state.name = name;
  const address = new URL(location.href);
  address.searchParams.set("gallery", name);
  history.replaceState(null, "", address);
  tell();
}

// Asks again which galleries there are; the chosen one stays if it is still there.
export async function loadGalleries() {
  state.galleries = await listGalleries();
  const wanted = state.name || new URLSearchParams(location.search).get("gallery");
  state.name = (state.galleries.find(({ name }) => name === wanted) ?? state.galleries[0])?.name ?? "";
  tell();
}

// Only the sizes may have changed: nobody has to begin anew.
export async function refreshSizes() {
  state.galleries = await listGalleries();
}

export const describeChosen = () => describeGallery(state.name);

// Models that some gallery has, the default first: [{id, galleries}].
export function knownModels() {
  const models = new Map();
  for (const { bundle_id: id, name } of state.galleries) {
    models.set(id, [...(models.get(id) ?? []), name]);
  }
  return [...models].map(([id, galleries]) => ({ id, galleries }));
}
