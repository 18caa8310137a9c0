// The controls of a search: gallery, number of results, grouping, minimum score, filters, votes.
// `view` (see link.js) contains the current settings. The controls always show it.

import { PRODUCT } from "./ask.js";
import { FilterPanel, filterChips, hasValues } from "./filters.js";
import { describeGallery, listGalleries } from "../shared/api.js";
import { element, icon, onSubmit, optionsOf, smallButton, ui } from "../shared/dom.js";
import { grouped, labelOf, percent, plural, splitKey } from "../shared/format.js";
import { emptyView } from "../shared/link.js";
import { imageOf, linkOf } from "../shared/images.js";

const FRESH_MS = 30_000;
const NOTES = {
  pairs: "Your likes and dislikes are sent to the shop, without your name.",
  pictures: "Your likes and dislikes are sent to the shop with the photo or words that you searched with, without your name.",
};
const COMBINE = {
  images: ["Several photos", "Search each photo", "One search, best match counts"],
  parts: ["Several parts", "Search their average", "Best match counts"],
};
const MOST_COUNTED = 8;
const described = new Map(); // gallery name -> its description
let galleries = [];
let panel = null;
let onChange = () => {};
let onDescribed = () => {};
let shownText = ""; // what the box of words took from the view; the user may have typed since
let several = ""; // "images" or "parts" if the query has several of them, "auto", or ""
export let view = emptyView();

export const snapshot = () => structuredClone(view);
export const facts = () => described.get(view.gallery) ?? { attributes: [] };
const listed = () => galleries.find(({ name }) => name === view.gallery);
export const hasMap = () => facts().has_map ?? listed()?.has_map;
export const hasWords = () => facts().has_words ?? listed()?.has_words ?? false;
export const hasBoxes = () => facts().has_boxes ?? listed()?.has_boxes;
export const productUrl = () => facts().product_url ?? listed()?.product_url ?? "";
export const promised = () => ({ guarantee: facts().guarantee, accept: facts().accept });
export const hasEnded = () => Boolean(facts().guarantee_withdrawn);
export const itemCount = () => facts().size ?? listed()?.size;
export const galleryNames = () => galleries.map(({ name }) => name);

export function voteOf(key) {
  if (view.likes.some((item) => item.key === key)) return "like";
  return view.dislikes.some((item) => item.key === key) ? "dislike" : null;
}

// The lowest setting means no minimum: negative scores stay visible.
export const minScore = () => view.min || -Infinity;

export function minText() {
  return minScore() === -Infinity ? "any" : view.min.toFixed(2);
}

function showText() {
  ui["words-form"].hidden = !hasWords();
  if (view.text !== shownText) ui.words.value = view.text;
  shownText = view.text;
}

// Takes what is typed, even if it was not submitted, into the view.
export function takeText() {
  view.text = hasWords() ? ui.words.value.trim() : "";
  showText();
}

function showMin() {
  ui["min-score"].value = String(view.min);
  ui["min-score-value"].textContent = minText();
  ui["min-score"].setAttribute("aria-valuetext", minText());
  for (const button of ui.presets.querySelectorAll("button")) {
    button.setAttribute("aria-pressed", String(Number(button.value) === view.min));
  }
}

function setMin(score) {
  view.min = Math.min(Math.max(score, 0), 1);
  showMin();
  onChange("min");
}

function preset({ false_matches: share, search_score: score }) {
  const value = Math.max(Math.ceil(score * 100) / 100, 0);
  const text = grouped(Math.round(1 / share));
  const button = element("button", { type: "button", className: "preset", value, textContent: `1 in ${text}` });
  button.title = `${percent(share)} of photos without a match get a wrong answer`;
  button.ariaLabel = `Wrong matches: 1 in ${text}, minimum score ${value.toFixed(2)}`;
  button.addEventListener("click", () => setMin(value));
  return button;
}

function showPresets() {
  const known = view.text ? [] : facts().thresholds ?? []; // they are measured with images alone
  const usable = known.filter(({ search_score: score }) => score < 1);
  ui.presets.hidden = usable.length === 0;
  const words = element("span", { className: "hint", textContent: "Wrong matches" });
  ui.presets.replaceChildren(...(usable.length > 0 ? [words] : []), ...usable.map(preset));
}

function showGroups() {
  const names = facts().attributes.filter(hasValues).map(({ name }) => name);
  if (view.group && !names.includes(view.group)) names.push(view.group);
  const named = names.map((name) => [name, name === PRODUCT ? "Product (one result each)" : labelOf(name)]);
  ui.group.replaceChildren(...optionsOf([["", "None"], ...named]));
  ui.group.value = view.group;
  ui["group-field"].hidden = names.length === 0;
}

// Offers the choice for several images or parts. The best match, which always counts of parts that the service
// chooses, excludes votes and another order.
export function offerCombine(what = several) {
  several = what;
  ui["combine-field"].hidden = several === "auto" || (several === "" && view.combine === "");
  ui["order-field"].hidden = several === "auto" || (several !== "" && view.combine === "best");
  const [label, ...texts] = COMBINE[several] ?? COMBINE.images;
  ui["combine-label"].textContent = label;
  texts.forEach((text, index) => (ui.combine.options[index].textContent = text));
  ui.combine.value = view.combine;
}

function showK() {
  const isListed = [...ui.k.options].some((option) => option.value === String(view.k));
  if (!isListed) ui.k.append(element("option", { textContent: String(view.k) }));
  ui.k.value = String(view.k);
}

function chip(text, word, remove, { className = "", image = null, mark = null } = {}) {
  const button = element("button", { type: "button", className: "chip-remove", testid: "chip-remove" }, icon("close"));
  button.ariaLabel = `Remove ${word} ${text}`;
  button.addEventListener("click", () => {
    remove();
    (ui.chips.querySelector("button") ?? ui.summary).focus();
  });
  const made = element("li", { className: `chip ${className}`, testid: "chip" });
  if (mark) made.append(icon(mark));
  if (image) made.append(imageOf(image, ""));
  made.append(element("span", { className: "chip-text", textContent: text, title: text }), button);
  return made;
}

function voteChip(kind, item) {
  const list = kind === "like" ? "likes" : "dislikes";
  const remove = () => {
    view[list] = view[list].filter(({ key }) => key !== item.key);
    changed("votes");
  };
  const text = splitKey(item.key).name;
  const made = chip(text, kind, remove, { className: kind, image: linkOf(item), mark: kind });
  made.dataset.key = item.key;
  return made;
}

function showChips() {
  const filters = filterChips(view.filter).map(({ text, filter }) =>
    chip(text, "filter", () => {
      view.filter = filter;
      changed("filter");
    }));
  const votes = [
    ...view.likes.map((item) => voteChip("like", item)),
    ...view.dislikes.map((item) => voteChip("dislike", item)),
  ];
  const all = [...filters, ...votes];
  if (all.length > 0) {
    all.push(element("li", {}, smallButton("Clear all", { testid: "clear-all" }, clearAll)));
  }
  ui.chips.replaceChildren(...all);
  ui.chips.hidden = all.length === 0;
  ui["settings-count"].hidden = filters.length === 0;
  ui["settings-count"].textContent = plural(filters.length, "filter");
}

export function clearAll() {
  Object.assign(view, { filter: {}, likes: [], dislikes: [] });
  changed("all");
  ui.summary.focus();
}

export function clearFilter() {
  view.filter = {};
  changed("filter");
}

export const clearMin = () => setMin(0);

function showGallery() {
  ui.gallery.value = view.gallery;
  const size = itemCount();
  ui["gallery-size"].textContent = size === undefined ? "" : `${plural(size, "item")} to search`;
}

function showNote() {
  ui["feedback-note"].textContent = NOTES[facts().feedback] ?? "";
  ui["feedback-note"].hidden = !(facts().feedback in NOTES);
}

export function show() {
  showGallery();
  showText();
  showNote();
  showK();
  showGroups();
  ui.order.value = view.order ?? "";
  offerCombine();
  showPresets();
  showMin();
  panel.show(facts().attributes, view.filter);
  showChips();
}

// The attributes whose values are counted while filters change, up to the service's limit.
export const countable = () => (facts().facets ? panel.names().slice(0, MOST_COUNTED) : []);

export const showCounts = (counts) => panel.count(counts);

function changed(what) {
  show();
  onChange(what);
}

export function restore(given) {
  view = structuredClone(given);
  show();
}

// A new query starts without the votes of the previous one.
export function forgetVotes(more = {}) {
  Object.assign(view, { likes: [], dislikes: [] }, more);
  show();
}

export function toggleVote(kind, { key, image }) {
  const before = voteOf(key);
  view.likes = view.likes.filter((item) => item.key !== key);
  view.dislikes = view.dislikes.filter((item) => item.key !== key);
  const list = kind === "like" ? view.likes : view.dislikes;
  if (before !== kind) list.push({ key, image });
  changed("votes");
}

// A search works without the description of the gallery; the page then has no filters.
export async function describe(name) {
  if (name && !described.has(name)) {
    const found = await describeGallery(name).catch(() => null);
    if (found !== null) described.set(name, { attributes: [], at: Date.now(), ...found });
  }
  if (view.gallery !== name) return;
  show();
  onDescribed();
}

// Fetches the description of a gallery again if its guarantee was refused, and after changes at most every FRESH_MS.
export function keepUp({ gallery, gallery_version: version, isRefused }) {
  const cached = described.get(gallery);
  const isOld = cached?.version && version && cached.version !== version;
  if (!isRefused && (!isOld || Date.now() - cached.at < FRESH_MS)) return;
  described.delete(gallery);
  describe(gallery);
}

export async function loadGalleries() {
  galleries = await listGalleries();
  ui.gallery.replaceChildren(...optionsOf(galleries.map(({ name }) => [name, name])));
  ui["gallery-field"].hidden = galleries.length < 2;
}

// Filters, groups and votes refer to attributes and items of one gallery.
async function changeGallery() {
  Object.assign(view, { gallery: ui.gallery.value, filter: {}, group: "", likes: [], dislikes: [] });
  if (!hasWords()) view.text = "";
  show();
  await describe(view.gallery);
  onChange("gallery");
}

// onChange(what) is called after each change: gallery, text, k, group, order, combine, min, filter, votes or all.
// onDescribed() is called after each description of the shown gallery.
export function startSettings(whenChanged, whenDescribed) {
  onChange = whenChanged;
  onDescribed = whenDescribed;
  panel = new FilterPanel(ui.filters, (filter) => {
    view.filter = filter;
    showChips();
    onChange("filter");
  });
  onSubmit(ui["words-form"], () => {
    takeText();
    changed("text");
  });
  onSubmit(ui.controls, () => {});
  ui.gallery.addEventListener("change", changeGallery);
  ui.k.addEventListener("change", () => {
    view.k = Number(ui.k.value);
    onChange("k");
  });
  for (const name of ["group", "order", "combine"]) {
    ui[name].addEventListener("change", () => {
      view[name] = ui[name].value;
      onChange(name);
    });
  }
  ui["min-score"].addEventListener("input", () => setMin(Number(ui["min-score"].value)));
  show();
}
