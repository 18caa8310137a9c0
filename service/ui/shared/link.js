// Writes a view into the fragment of the URL and reads it back. Default values are omitted.

export const DEFAULT_K = 20;
const MAX_K = 10_000;
export const AUTO = "auto"; // in place of crops: the service searches the whole image and parts of it
const ORDERS = ["", "varied"]; // "" is the order of scores

// The settings of a search. `text` is words, alone or added to the photo, `min` is a score, `filter` the JSON form of
// the service's filters, `likes` and `dislikes` are lists of {key, image?}.
export function emptyView(gallery = "") {
  const lists = { likes: [], dislikes: [] };
  return { gallery, text: "", k: DEFAULT_K, min: 0, filter: {}, group: "", order: "", combine: "", ...lists };
}

export const cropText = (crop) => (crop === AUTO ? AUTO : crop.map((part) => Number(part.toFixed(4))).join(","));

export function toHash(view, query) {
  const fields = new URLSearchParams();
  if (view.gallery) fields.set("gallery", view.gallery);
  if (view.text) fields.set("text", view.text);
  if (view.k !== DEFAULT_K) fields.set("k", view.k);
  if (view.min > 0) fields.set("min", view.min);
  if (Object.keys(view.filter).length > 0) fields.set("filter", JSON.stringify(view.filter));
  if (view.group) fields.set("group", view.group);
  if (view.order) fields.set("order", view.order);
  if (view.combine) fields.set("combine", view.combine);
  for (const { key } of view.likes) fields.append("like", key);
  for (const { key } of view.dislikes) fields.append("dislike", key);
  if (query?.kind === "item") {
    fields.set("item", query.id);
    fields.set("key", query.key);
    if (query.gallery !== view.gallery) fields.set("from", query.gallery);
  } else if (query && !["likes", "words"].includes(query.kind)) {
    fields.set("picture", query.kind);
  }
  for (const crop of query?.kind === "item" ? query.crops : []) fields.append("crop", cropText(crop));
  return `#${fields}`;
}

function numberFrom(text, low, high, otherwise) {
  const value = Number(text);
  return text && Number.isFinite(value) && value >= low && value <= high ? value : otherwise;
}

function wholeFrom(text) {
  const value = numberFrom(text, 0, Number.MAX_SAFE_INTEGER, null);
  return Number.isInteger(value) ? value : null;
}

function filterFrom(text) {
  try {
    const filter = JSON.parse(text);
    return filter !== null && typeof filter === "object" && !Array.isArray(filter) ? filter : {};
  } catch {
    return {};
  }
}

function cropFrom(text) {
  if (text === AUTO) return [AUTO];
  const parts = text.split(",").map(Number);
  const [left, top, width, height] = parts;
  const fits = parts.length === 4 && parts.every((part) => part >= 0 && part <= 1) &&
    width > 0 && height > 0 && left + width <= 1.0001 && top + height <= 1.0001;
  return fits ? [parts] : [];
}

function itemFrom(fields, gallery) {
  const id = wholeFrom(fields.get("item"));
  if (id === null) return null;
  const crops = fields.getAll("crop").flatMap(cropFrom);
  const known = crops.includes(AUTO) ? [AUTO] : crops;
  return { id, key: fields.get("key") ?? "", gallery: fields.get("from") ?? gallery, crops: known };
}

// Returns {view, item, upload}. `item` is the query item, or null. `upload` is "upload", "uploads" or
// "batch" if the query was uploaded images, which a link cannot contain. Invalid values are ignored.
export function fromHash(hash) {
  const fields = new URLSearchParams(hash.replace(/^#/, ""));
  const gallery = fields.get("gallery") ?? "";
  const keyed = (key) => ({ key, image: null });
  const view = {
    gallery,
    text: (fields.get("text") ?? "").trim(),
    k: Math.round(numberFrom(fields.get("k"), 1, MAX_K, DEFAULT_K)),
    min: numberFrom(fields.get("min"), 0, 1, 0),
    filter: filterFrom(fields.get("filter") ?? "{}"),
    group: fields.get("group") ?? "",
    order: ORDERS.find((order) => order === fields.get("order")) ?? "",
    combine: fields.get("combine") === "best" ? "best" : "",
    likes: fields.getAll("like").filter(Boolean).map(keyed),
    dislikes: fields.getAll("dislike").filter(Boolean).map(keyed),
  };
  return { view, item: itemFrom(fields, gallery), upload: fields.get("picture") };
}
