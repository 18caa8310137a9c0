// The search page: one query at a time, one search under way at most, and a trail of answers.

import { fetchImage, listGalleries, postSearch, Problem } from "/ui/api.js";
import { acceptImages } from "/ui/intake.js";
import * as trail from "/ui/trail.js";
import * as view from "/ui/view.js";

const { ui } = view;
let galleries = [];
let running = null; // {query, keep, controller} of the search under way

function problemOf(error) {
  if (error instanceof Problem) return error;
  console.error(error);
  return new Problem("Something went wrong on this page", "Reload the page and try again.");
}

function showProblem(error, again) {
  const problem = problemOf(error);
  view.showError(problem, problem.canRetry ? again : null);
}

async function entryOf(query, signal) {
  query.image ??= await fetchImage(query.link, signal);
  const k = Number(ui.k.value);
  const { image, name } = query;
  const answer = await postSearch({ image, name, k, gallery: ui.gallery.value }, signal);
  return { query, k, answer };
}

function settle(focusIsInside) {
  running?.controller.abort();
  running = null;
  view.showEntry(trail.current(), searchWithHit);
  showGallerySize();
  if (focusIsInside) ui.summary.focus({ preventScroll: true });
}

const focusIsInResults = () => ui.results.contains(document.activeElement);

// `keep` is trail.push for a new query, trail.replace for the same query with other settings.
async function search(query, keep) {
  running?.controller.abort();
  const mine = { query, keep, controller: new AbortController() };
  running = mine;
  const focusIsInside = focusIsInResults();
  view.showWaiting(query);
  try {
    const entry = await entryOf(query, mine.controller.signal);
    if (running !== mine) return;
    keep(entry);
    settle(focusIsInside);
    if (keep === trail.push) scrollTo({ top: 0, behavior: "instant" });
  } catch (error) {
    if (running !== mine) return;
    settle(focusIsInside);
    showProblem(error, () => search(query, keep));
  }
}

function searchWithFile(file) {
  const name = file.name || "pasted image";
  search({ name, image: file, link: null, preview: URL.createObjectURL(file) }, trail.push);
}

function searchWithHit(hit) {
  search({ name: hit.key, image: null, link: hit.image, preview: hit.image }, trail.push);
}

function searchAgain() {
  const entry = trail.current();
  if (running !== null) search(running.query, running.keep);
  else if (entry !== null) search(entry.query, trail.replace);
}

// An <img> cannot say why it failed, a request can; once an answer is enough.
async function explainPicture({ target }) {
  const entry = trail.current();
  if (entry === null || entry.explained) return;
  entry.explained = true;
  try {
    await fetchImage(target.src);
  } catch (error) {
    if (running === null && entry === trail.current()) showProblem(error, null);
  }
}

function cancel() {
  settle(focusIsInResults());
  view.announce("Search cancelled");
}

function showGallerySize() {
  view.showGallerySize(galleries.find(({ name }) => name === ui.gallery.value));
}

async function loadGalleries() {
  try {
    galleries = await listGalleries();
    view.showGalleries(galleries);
    showGallerySize();
  } catch (error) {
    showProblem(error, loadGalleries);
  }
}

function filter() {
  view.showMinScore();
  const entry = trail.current();
  if (running === null && entry !== null) view.filterCards(entry);
}

acceptImages(ui, {
  onImage: searchWithFile,
  onRefused: (title, detail) => view.showError({ title, detail }),
});
ui.cancel.addEventListener("click", cancel);
ui.controls.addEventListener("submit", (event) => event.preventDefault());
ui.k.addEventListener("change", searchAgain);
ui.gallery.addEventListener("change", () => {
  showGallerySize();
  searchAgain();
});
ui["min-score"].addEventListener("input", filter);
ui["error-close"].addEventListener("click", view.hideError);
ui.grid.addEventListener("error", explainPicture, true); // true: this event does not bubble
ui["query-image"].addEventListener("error", () => ui["query-image"].classList.add("broken"));
addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (running === null) view.hideError();
  else cancel();
});
addEventListener("popstate", () => {
  view.hideError();
  settle(focusIsInResults());
});

if (/Mac|iPhone|iPad/.test(navigator.platform)) ui["paste-key"].textContent = "⌘";
view.showMinScore();
loadGalleries();
