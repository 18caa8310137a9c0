// The search page: at most one running search and one running batch, and a trail of answers.

import { ask, bareQuery, checkedQuery, countValues, isBare, isBest, severalOf } from "./ask.js";
import { itemQuery, linkedQuery, renewed, uploadQuery, uploadsQuery } from "./ask.js";
import { BatchRun } from "./batch_run.js";
import { startCamera } from "./camera.js";
import { walkWithArrows } from "./cards.js";
import { Cropper } from "./crop.js";
import { sendVote } from "./feedback.js";
import { acceptImages } from "./intake.js";
import { drawn, startParts } from "./parts.js";
import { fileOf, remember, startRecent } from "./recent.js";
import * as results from "./results.js";
import { hideSamples, showSamples } from "./samples.js";
import * as settings from "./settings.js";
import * as trail from "./trail.js";
import { worded } from "./words.js";
import { hideError, hideNotice, showNotice, showProblem, startAlerts } from "../shared/alerts.js";
import { findBoxes, Problem } from "../shared/api.js";
import { announce, debounced, keepFocus, startSkip, ui } from "../shared/dom.js";
import { AUTO, fromHash, toHash } from "../shared/link.js";

const UPLOAD_LINK = "This link contains the settings of a search, but not its photo, which stays in the " +
  "other browser. Choose a photo to search with these settings.";
const COPIED_UPLOAD = "Link copied. It contains the settings but not your photo, which stays in this browser.";
const NO_WORDS = "This gallery cannot be searched with words, so those of the link are ignored.";
const NO_VOTES = "Likes, dislikes and the order are ignored when the best match of several counts.";
const TOGETHER = 32; // most images of one search
const TOGETHER_BYTES = 20 * 2 ** 20;
const TOO_MANY = `One search takes up to ${TOGETHER} photos and 20 MB, so each photo is searched separately.`;
const RENAME_MS = 250;
const COUNT_MS = 300;
let running = null; // {query, keep, controller} of the running search
let counting = null; // the controller of the running counts
let moves = 0; // counts searches and steps in the history, so that slower work can detect that it is outdated

const focusIsInResults = () => ui.results.contains(document.activeElement);
const cropper = new Cropper(ui.stage, ui.crops, { onChange: changeCrops, announce });
const handlers = {
  onSelect: (hit) => searchNew(itemQuery(trail.current().answer.gallery, hit)),
  onVote: vote,
};
const batch = new BatchRun({ onOpen: openRow });

// Removing a vote sends no feedback.
function vote(kind, hit) {
  if (settings.voteOf(hit.key) !== kind) sendVote(kind, hit, trail.current());
  settings.toggleVote(kind, hit);
}

function showCrops(crops) {
  const boxes = drawn(crops);
  cropper.set(boxes);
  ui["crop-clear"].hidden = boxes.length === 0;
  ui["crop-auto"].checked = crops.includes(AUTO);
  ui.query.classList.toggle("has-crops", crops.length > 0);
  ui["crop-add-text"].textContent = boxes.length === 0 ? "Select a part" : "Add part";
}

// Shows the current entry of the trail and cancels the running search.
function settle(focusIsInside, isNew = false) {
  running?.controller.abort();
  running = null;
  const entry = trail.current();
  if (entry !== null) settings.restore(entry.view);
  settings.offerCombine(entry?.kind === "batch" ? "images" : severalOf(entry?.query));
  results.showEntry(entry, handlers);
  showCrops(entry?.query?.crops ?? []);
  if (entry?.kind === "batch") batch.show(entry);
  if (entry === null && settings.view.gallery) showSamples(searchNew);
  if (focusIsInside && (isNew || !focusIsInResults())) ui.summary.focus({ preventScroll: true });
  else if (focusIsInside) keepFocus(ui.summary);
  countSoon();
}

// Results may arrive before the description of their gallery, which knows where cards lead.
function settleDescribed() {
  const entry = trail.current();
  if (running === null && entry?.kind === "search") results.showDescribed(entry, handlers);
}

// Counted after the results, so that these never wait. If it fails, the counts of all items stay.
const count = debounced(async () => {
  const names = settings.countable();
  if (names.length === 0) return;
  const mine = new AbortController();
  counting = mine;
  const query = trail.current()?.query ?? null;
  const counts = await countValues(query, settings.snapshot(), names, mine.signal).catch(() => ({}));
  if (!mine.signal.aborted) settings.showCounts(counts);
}, COUNT_MS);

function countSoon() {
  counting?.abort();
  count();
}

// Cancels the running search for another one. `keep` is trail.push for a new query, trail.replace for the same query
// with other settings.
function begin(query, keep) {
  moves += 1;
  running?.controller.abort();
  running = { query, keep, controller: new AbortController() };
  hideError();
  hideSamples();
  results.showWaiting(query);
  showCrops(query.crops);
  return running;
}

async function search(query, keep) {
  const focusIsInside = focusIsInResults() || ui.samples.contains(document.activeElement);
  const mine = begin(query, keep);
  settings.offerCombine(severalOf(query));
  if (isBest(query, settings.view)) {
    const { likes, dislikes, order } = settings.view;
    if (likes.length || dislikes.length || order) showNotice(NO_VOTES);
    settings.forgetVotes({ order: "" });
  }
  const wanted = settings.snapshot();
  try {
    const full = await checkedQuery(query);
    const answer = await ask(full, wanted, mine.controller.signal, { promised: settings.promised() });
    if (running !== mine) return;
    const entry = { kind: "search", query: full, view: settings.snapshot(), answer };
    const hash = toHash(entry.view, full);
    keep(entry, hash);
    settle(focusIsInside, keep === trail.push);
    if (keep === trail.push) scrollTo({ top: 0, behavior: "instant" });
    if (full.kind !== "uploads") remember(full, hash, ui["query-image"]);
    settings.keepUp(answer);
  } catch (error) {
    if (running !== mine) return;
    settle(focusIsInside);
    showProblem(error, () => {
      settings.restore(wanted);
      search(renewed(query), keep);
    });
  } finally {
    if (running?.query.preview !== query.preview) trail.release(trail.previewsOf(query));
  }
}

// Words are added to a new photo. An item starts without them: it was found with them, or it is an example.
function searchNew(query) {
  hideNotice();
  settings.forgetVotes(query.kind === "item" ? { text: "" } : {});
  search(query, trail.push);
}

// Lets the user choose one of the boxes that a detector found; without any, searches with the whole photo.
async function offerBoxes(query) {
  const mine = begin(query, trail.push);
  const { signal } = mine.controller;
  hideNotice();
  settings.forgetVotes();
  const boxes = await findBoxes(settings.view.gallery, query.image, signal).catch(() => []);
  const crops = running === mine ? await Promise.resolve(results.choose(boxes, signal)).catch(() => []) : [];
  if (running === mine) search({ ...query, crops }, trail.push);
  else if (running?.query.preview !== query.preview) trail.release(trail.previewsOf(query));
}

function searchImages(files) {
  settings.takeText();
  if (files.length === 1 && settings.hasBoxes()) return offerBoxes(uploadQuery(files[0]));
  if (files.length === 1) return searchNew(uploadQuery(files[0]));
  const bytes = files.reduce((sum, file) => sum + file.size, 0);
  const isOne = settings.view.combine === "best";
  const fits = files.length <= TOGETHER && bytes <= TOGETHER_BYTES;
  if (isOne && fits) return searchNew(uploadsQuery(files));
  moves += 1;
  hideNotice();
  if (isOne) showNotice(TOO_MANY);
  hideError();
  hideSamples();
  settings.forgetVotes();
  const entry = batch.entryOf(files);
  trail.push(entry, toHash(entry.view, { kind: "batch" }));
  settle(!ui.settings.contains(document.activeElement), true);
  batch.start(entry);
}

function openRow(row) {
  const entry = { kind: "search", query: row.query, view: settings.snapshot(), answer: row.answer };
  trail.push(entry, toHash(entry.view, row.query));
  settle(true, true);
  scrollTo({ top: 0, behavior: "instant" });
  remember(row.query, location.hash, ui["query-image"]);
}

const queryNow = () => running?.query ?? trail.current()?.query ?? null;

function changeCrops(crops) {
  const query = queryNow();
  if (query === null) return;
  showCrops(crops);
  search({ ...query, crops }, running?.keep ?? trail.replace);
}

function searchAgain() {
  const entry = trail.current();
  const query = queryNow();
  if (running === null && entry?.kind === "batch") return batch.restart(entry);
  if (query === null) return trail.rename(toHash(settings.view, null));
  const again = isBare(query) ? bareQuery(settings.view, query.kind) : query;
  if (again === null) return goToStart();
  search(again, running?.keep ?? trail.replace);
}

// Other words are a new search, or are added to what is searched with.
function searchText() {
  const query = queryNow();
  const isBatch = running === null && trail.current()?.kind === "batch";
  const { text } = settings.view;
  const isNew = text && (query === null ? !isBatch : query.kind === "words" && query.text !== text);
  if (isNew) searchNew(bareQuery(settings.view));
  else searchAgain();
}

// Repeats the search of several images as one search, or as one search for each.
function gather() {
  const entry = trail.current();
  const isBatch = running === null && entry?.kind === "batch";
  const images = isBatch ? entry.rows.map(({ query }) => query.image) : queryNow()?.images;
  if (images) searchImages(images);
  else searchAgain();
}

function goToStart() {
  history.pushState(null, "", toHash(settings.view, null));
  settle(true);
}

const renameSoon = debounced(() => {
  const entry = trail.current();
  if (running === null) trail.rename(toHash(settings.view, entry?.kind === "batch" ? entry : entry?.query));
}, RENAME_MS);

function applyMin() {
  const entry = trail.current();
  if (running !== null) return;
  if (entry !== null) entry.view.min = settings.view.min;
  if (entry?.kind === "batch") batch.show(entry);
  else if (entry !== null) results.filterCards(entry);
  renameSoon();
  countSoon();
}

function settingsChanged(what) {
  if (what === "min") return applyMin();
  if (what === "text") return searchText();
  if (what === "combine") return gather();
  if (what === "gallery" && queryNow() === null) showSamples(searchNew);
  searchAgain();
  countSoon();
}

function cancel() {
  if (running === null) return batch.cancel();
  settle(focusIsInResults());
  announce("Search cancelled");
}

// Opens the view of the URL: its settings at once, its item or liked items with a search.
async function openLink() {
  const { view, item, upload } = fromHash(location.hash);
  const names = settings.galleryNames();
  if (view.gallery && !names.includes(view.gallery)) {
    showNotice(`There is no gallery ${view.gallery}. This is ${names[0]}.`);
  }
  if (!names.includes(view.gallery)) view.gallery = names[0] ?? "";
  settings.restore(view);
  if (view.text && !settings.hasWords()) {
    showNotice(NO_WORDS);
    view.text = "";
    settings.restore(view);
  }
  const move = moves;
  await settings.describe(view.gallery);
  if (move !== moves) return;
  if (item !== null) {
    const gallery = names.includes(item.gallery) ? item.gallery : view.gallery;
    return search(linkedQuery({ ...item, gallery }), trail.replace);
  }
  settle(false);
  if (upload) showNotice(UPLOAD_LINK);
  const isAway = upload && view.likes.length === 0; // then words alone would be another search
  const query = isAway ? null : bareQuery(view, upload ? "likes" : "words");
  if (query !== null) search(query, trail.replace);
}

function walked() {
  moves += 1;
  hideError();
  hideNotice();
  if (trail.current() === null) openLink();
  else settle(focusIsInResults());
}

function openRecent(entry) {
  if (entry.kind !== "upload") {
    if (location.hash === entry.hash) return walked();
    location.hash = entry.hash; // causes popstate
    return;
  }
  if (!entry.thumb) return showNotice(`Choose ${entry.name} again: this browser has no copy of it.`);
  const { view } = fromHash(entry.hash);
  if (settings.galleryNames().includes(view.gallery)) settings.restore(view);
  settings.describe(view.gallery);
  search(uploadQuery(fileOf(entry)), trail.push);
  showNotice("This search uses the small copy of your photo that this browser stored.");
}

async function copyLink() {
  const query = queryNow();
  const isUpload = query === null || query.kind.startsWith("upload");
  try {
    await navigator.clipboard.writeText(location.href);
    showNotice(isUpload ? COPIED_UPLOAD : "Link copied. It opens this view.");
  } catch {
    showNotice("This browser blocks the clipboard. Copy the address of this page instead.");
  }
}

async function start() {
  settings.restore(fromHash(location.hash).view); // an image may be dropped before the list arrives
  try {
    await settings.loadGalleries();
  } catch (error) {
    return showProblem(error, start);
  }
  if (moves === 0) return openLink();
  const names = settings.galleryNames();
  if (!names.includes(settings.view.gallery)) settings.view.gallery = names[0] ?? "";
  settings.describe(settings.view.gallery);
}

function listen() {
  ui.cancel.addEventListener("click", cancel);
  ui["copy-link"].addEventListener("click", copyLink);
  ui["crop-add"].addEventListener("click", () => cropper.add());
  ui["crop-clear"].addEventListener("click", () => cropper.clear());
  ui["crop-auto"].addEventListener("change", ({ target }) => changeCrops(target.checked ? [AUTO] : []));
  ui["query-image"].addEventListener("error", () => ui["query-image"].classList.add("broken"));
  ui["query-image"].addEventListener("load", ({ target }) =>
    ui.stage.style.setProperty("--ratio", String(target.naturalWidth / target.naturalHeight)));
  addEventListener("popstate", walked);
  addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
    if (!ui.error.hidden) hideError();
    else cancel();
  });
}

// Wide screens show the settings next to the results, phones on demand.
function showSettings() {
  const isWide = matchMedia("(min-width: 48rem)");
  const apply = () => (ui.settings.open = isWide.matches && document.body.dataset.state !== "start");
  isWide.addEventListener("change", apply);
  new MutationObserver(apply).observe(document.body, { attributeFilter: ["data-state"] });
}

if (/Mac|iPhone|iPad/.test(navigator.platform)) ui["paste-key"].textContent = "⌘";
startAlerts(ui.summary, worded);
startSkip(ui.results);
settings.startSettings(settingsChanged, settleDescribed);
showSettings();
walkWithArrows(ui.grid);
startParts();
acceptImages(ui, {
  onImages: searchImages,
  onLeftOut: (text) => showNotice(ui.notice.hidden ? text : `${ui["notice-text"].textContent} ${text}`),
  onRefused: (title, detail) => showProblem(new Problem(title, detail)),
});
startCamera((file) => searchImages([file]));
startRecent(openRecent);
listen();
start();
