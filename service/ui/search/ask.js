// Sends a query and its view to the service.
//
// A query is one of
//   {kind: "upload", name, image, preview, crops}
//   {kind: "uploads", name, images, previews, preview, crops: []}: several images, the best match counts
//   {kind: "item", id, key, name, gallery, link, preview, attributes, crops}
//   {kind: "likes", name, preview: "", crops: []}: only liked items, from a link without its image
//   {kind: "words", name, text, preview: "", crops: []}: only words, and the items liked among their results
// Crops are boxes, or AUTO alone. `view.text` is words that are added to any query.

import { isAuto, placeText } from "./parts.js";
import { explainHit, fetchImage, galleryPath, getItem, getSimilar, listItems, postSearch, Problem } from "../shared/api.js";
import { plural } from "../shared/format.js";

export const GROUP_SIZE = 7;
export const PRODUCT = "product"; // the attribute that images of one product share
const FEW = 20;
const REFUSED_WORDS = "These words cannot be used here";

export function uploadQuery(file) {
  const name = file.name || "pasted image";
  return { kind: "upload", name, image: file, preview: URL.createObjectURL(file), crops: [] };
}

export function uploadsQuery(images) {
  const previews = images.map((image) => URL.createObjectURL(image));
  return { kind: "uploads", name: plural(images.length, "photo"), images, previews, preview: previews[0], crops: [] };
}

// The query with new previews, because the old ones may have been released.
export function renewed(query) {
  if (query.kind === "uploads") return uploadsQuery(query.images);
  return query.kind === "upload" ? { ...uploadQuery(query.image), name: query.name, crops: query.crops } : query;
}

// Returns "images" or "parts" if the query has several of them, "auto" if the service chooses the parts,
// otherwise "". `query` may be null.
export function severalOf(query) {
  if (query?.kind === "uploads") return "images";
  if (query && isAuto(query)) return "auto";
  return query?.crops.length > 1 ? "parts" : "";
}

// Whether each image or part is searched separately, and a result counts with its best match.
export const isBest = (query, view) => isAuto(query) || (view.combine === "best" && severalOf(query) !== "");

// Names the image or part that found a result.
export function viewText(query, { image, crop }) {
  const { crops } = query;
  if (isAuto(query)) return placeText(crop);
  if (crop === null) return `photo ${image}`;
  const isIt = (box) => box.every((part, side) => Math.abs(part - crop[side]) < 1e-3);
  return `part ${crops.findIndex(isIt) + 1}`;
}

const imagesOf = async (query, signal) => query.images ?? [query.image ?? (await fetchImage(query.link, signal))];

export function itemQuery(gallery, { id, key, image, image_url: elsewhere, attributes }) {
  return { kind: "item", id, key, name: key, gallery, link: image, preview: elsewhere ?? image, attributes, crops: [] };
}

// The item that a link names. Whether it still exists is checked by `checkedQuery`.
export function linkedQuery({ id, key, gallery, crops }) {
  const link = `${galleryPath(gallery)}/items/${id}/image`;
  const name = key || `item ${id}`;
  return { kind: "item", id, key, name, gallery, link, preview: link, attributes: {}, crops };
}

const likesQuery = () => ({ kind: "likes", name: "the items you liked", preview: "", crops: [] });

const wordsQuery = (text) => ({ kind: "words", name: `“${text}”`, text, preview: "", crops: [] });

// The query of a view without an image, or null without words and likes; `first` is the kind of those that count.
export function bareQuery({ text, likes }, first = "words") {
  const worded = text ? wordsQuery(text) : null;
  const liked = likes.length > 0 ? likesQuery() : null;
  return first === "likes" ? liked ?? worded : worded ?? liked;
}

export const isBare = ({ kind }) => kind === "likes" || kind === "words";

async function itemNow({ id, key, gallery }) {
  const found = await getItem(gallery, id).catch((error) => {
    if (error.status === 404 && key) return null;
    throw error;
  });
  if (found !== null && (!key || found.key === key)) return found;
  // Ids change when the gallery is rebuilt; keys do not.
  const { items } = await listItems(gallery, { prefix: key, limit: FEW });
  const same = items.find((item) => item.key === key);
  if (same) return same;
  throw new Problem("This item is no longer here", `${key} was removed from the gallery.`);
}

// The query with the current id, image and attributes of its item.
export async function checkedQuery(query) {
  if (query.kind !== "item") return query;
  const item = await itemNow(query);
  return { ...itemQuery(query.gallery, item), crops: query.crops };
}

// Only the service knows why it refuses words, so its sentence is shown.
async function post(wanted, signal) {
  try {
    return await postSearch(wanted, signal);
  } catch (error) {
    const isRefused = wanted.text && error.body?.type?.endsWith(":invalid-parameter");
    throw isRefused ? new Problem(REFUSED_WORDS, error.detail, { requestId: error.requestId }) : error;
  }
}

// Guarantees are about queries like the labelled ones: whole photos. One that ended since the page learnt of it is
// refused; the answer without it has `isRefused`.
async function postWhole(wanted, promised, signal) {
  try {
    return await post({ ...wanted, ...promised }, signal);
  } catch (error) {
    if (error.status !== 422 || !(promised.guarantee || promised.accept)) throw error;
    return { ...(await post(wanted, signal)), isRefused: true };
  }
}

// `promised` is the {guarantee, accept} of the gallery. Throws: Problem, AbortError.
export async function ask(query, view, signal, { promised = {}, ...more } = {}) {
  const { gallery, text, k, filter } = view;
  const { group: groupBy, order } = view;
  const wanted = { gallery, k, filter, groupBy, groupSize: GROUP_SIZE, order, ...more };
  const positives = view.likes.map(({ key }) => key);
  const negatives = view.dislikes.map(({ key }) => key);
  const isHere = query.kind === "item" && query.gallery === gallery && query.crops.length === 0;
  if (isHere && !text && positives.length + negatives.length === 0) {
    return getSimilar(gallery, query.id, wanted, signal);
  }
  if (isHere) positives.unshift(query.key);
  const voted = { ...wanted, text, positives: [...new Set(positives)], negatives };
  if (isHere || isBare(query)) return post(voted, signal);
  const images = await imagesOf(query, signal);
  const combine = isBest(query, view) ? "best" : "";
  const all = { ...voted, images, crops: query.crops, combine };
  const isWhole = query.kind === "upload" && query.crops.length + positives.length + negatives.length === 0 && !text && !order;
  return isWhole ? postWhole(all, promised, signal) : post(all, signal);
}

// Returns {attribute: counts of its values} over the items that pass the filters and the minimum
// score. The filter of an attribute is ignored for its own counts, so they show what its other values
// would give. Without a query or a minimum score no image is sent.
// Throws: Problem, AbortError.
export async function countValues(query, view, names, signal) {
  const filtered = names.filter((name) => name in view.filter);
  const parts = [names.filter((name) => !filtered.includes(name)), ...filtered.map((name) => [name])];
  const counted = parts.filter((facets) => facets.length > 0).map(async (facets) => {
    const { [filtered.includes(facets[0]) ? facets[0] : ""]: _, ...filter } = view.filter;
    if (query !== null && view.min > 0) {
      return ask(query, { ...view, k: 1, group: "", order: "", filter }, signal, { facets, minScore: view.min });
    }
    const isFree = Object.keys(filter).length === 0;
    return listItems(view.gallery, { limit: 1, filter: isFree ? null : filter, facets }, signal);
  });
  return Object.assign({}, ...(await Promise.all(counted)).map(({ facets }) => facets));
}

// Explains where a hit matches the query, or the image or part that found it. An item is sent as its image.
// Throws: Problem, AbortError.
export async function askWhere(query, view, hit, signal) {
  const all = await imagesOf(query, signal);
  const [images, crops] = hit.view
    ? [[all[hit.view.image - 1]], hit.view.crop ? [hit.view.crop] : []]
    : [all, query.crops];
  const positives = view.likes.map(({ key }) => key).filter((key) => key !== query.key);
  const negatives = view.dislikes.map(({ key }) => key);
  const wanted = { images, crops, positives, negatives, k: 1 };
  return explainHit(view.gallery, hit.id, wanted, signal);
}
