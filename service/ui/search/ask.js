// What is asked of the service for a query and a view.
//
// A query is one of
//   {kind: "upload", name, image, preview, crops}
//   {kind: "item", id, key, name, gallery, link, preview, attributes, crops, isChecked}
//   {kind: "sample", name, link, preview, crops}: a sample query of the service
//   {kind: "likes", name, preview: "", crops: []}: liked items alone, from a link without its picture

import { fetchImage, galleryPath, getItem, getSimilar, listItems, postSearch, Problem } from "/ui/shared/api.js";

export const GROUP_SIZE = 7;
const FEW = 20;

export function uploadQuery(file) {
  const name = file.name || "pasted image";
  return { kind: "upload", name, image: file, preview: URL.createObjectURL(file), crops: [] };
}

// The query with a preview of its own, for when the one it had is released.
export const renewed = (query) =>
  query.kind === "upload" ? { ...uploadQuery(query.image), name: query.name, crops: query.crops } : query;

export const sampleQuery = ({ name, image }) =>
  ({ kind: "sample", name, link: image, preview: image, crops: [] });

export function itemQuery(gallery, { id, key, image, attributes }) {
  return {
    kind: "item", id, key, name: key, gallery, link: image, preview: image, attributes,
    crops: [], isChecked: true,
  };
}

// The item that a link names; whether it still exists is seen when it is asked.
export function linkedQuery({ id, key, gallery, crops }) {
  const link = `${galleryPath(gallery)}/items/${id}/image`;
  const name = key || `item ${id}`;
  return { kind: "item", id, key, name, gallery, link, preview: link, attributes: {}, crops, isChecked: false };
}

export const likesQuery = () => ({ kind: "likes", name: "the items you liked", preview: "", crops: [] });

async function itemNow({ id, key, gallery }) {
  const found = await getItem(gallery, id).catch((error) => {
    if (error.status === 404 && key) return null;
    throw error;
  });
  if (found !== null && (!key || found.key === key)) return found;
  // Numbers are of one generation of the gallery; the key finds the item in the next.
  const { items } = await listItems(gallery, { prefix: key, limit: FEW });
  const same = items.find((item) => item.key === key);
  if (same) return same;
  throw new Problem("The item of this link is gone", `Gallery ${gallery} has no item ${key} any more.`);
}

// The query with what the service says about its item now.
export async function checkedQuery(query) {
  if (query.kind !== "item" || query.isChecked) return query;
  const item = await itemNow(query);
  return { ...itemQuery(query.gallery, item), crops: query.crops };
}

// Throws: Problem, AbortError.
export async function ask(query, view, signal) {
  const { gallery, k, filter } = view;
  const wanted = { gallery, k, filter, groupBy: view.group, groupSize: GROUP_SIZE };
  const positives = view.likes.map(({ key }) => key);
  const negatives = view.dislikes.map(({ key }) => key);
  const isHere = query.kind === "item" && query.gallery === gallery && query.crops.length === 0;
  if (isHere && positives.length + negatives.length === 0) {
    return getSimilar(gallery, query.id, wanted, signal);
  }
  if (isHere) positives.unshift(query.key);
  const voted = { ...wanted, positives: [...new Set(positives)], negatives };
  if (isHere || query.kind === "likes") return postSearch(voted, signal);
  const image = query.image ?? (await fetchImage(query.link, signal));
  return postSearch({ ...voted, image, name: query.name, crops: query.crops }, signal);
}
