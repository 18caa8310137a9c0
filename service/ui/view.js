// What the page shows: the query, the cards, the filter, messages and the small print.

import { card, definitions, element, placeholders, splitKey } from "/ui/cards.js";

export const ui = Object.fromEntries(
  [...document.querySelectorAll("[id]")].map((node) => [node.id, node]),
);
const ANNOUNCE_AFTER_MS = 250;
let announcing = 0;

const plural = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;
const milliseconds = (value) => (value < 10 ? `${value.toFixed(1)} ms` : `${Math.round(value)} ms`);
const capitalized = (word) => word[0].toUpperCase() + word.slice(1);

export function announce(text) {
  clearTimeout(announcing);
  announcing = setTimeout(() => (ui.live.textContent = text), ANNOUNCE_AFTER_MS);
}

// The lowest setting means no minimum, so that negative scores stay visible.
const minScore = () => Number(ui["min-score"].value) || -Infinity;

export function showMinScore() {
  const text = minScore() === -Infinity ? "any" : minScore().toFixed(2);
  ui["min-score-value"].textContent = text;
  ui["min-score"].setAttribute("aria-valuetext", text);
}

export function showError({ title, detail, requestId = "" }, again = null) {
  ui["error-title"].textContent = title;
  ui["error-detail"].textContent = detail;
  ui["error-request"].textContent = requestId ? `Request ${requestId}` : "";
  ui["error-retry"].hidden = again === null;
  ui["error-retry"].onclick = () => {
    hideError();
    again();
  };
  ui.error.hidden = false;
}

export function hideError() {
  ui.error.hidden = true;
}

function showQuery(query) {
  ui.query.hidden = query === null;
  ui["query-image"].classList.remove("broken");
  document.title = query === null ? "Kinlens" : `${query.name} · Kinlens`;
  if (query === null) return;
  ui["query-image"].src = query.preview;
  ui["query-image"].alt = `Your query: ${query.name}`;
  ui["query-name"].textContent = splitKey(query.name).name;
  ui["query-name"].title = query.name;
}

function summaryOf(shown, hits) {
  const total = plural(hits.length, "result");
  const amount = shown < hits.length ? `${shown} of ${total}` : total;
  return `${amount}, best ${hits[0].score.toFixed(2)}`;
}

function emptyText(total) {
  if (total === 0) return "This gallery has no items to compare with.";
  return `Nothing above ${minScore().toFixed(2)}: lower the minimum score.`;
}

export function filterCards({ answer: { hits } }) {
  const minimum = minScore();
  const cards = [...ui.grid.children];
  cards.forEach((item, rank) => (item.hidden = hits[rank].score < minimum));
  const shown = cards.filter((item) => !item.hidden).length;
  ui.empty.hidden = shown > 0;
  ui.empty.textContent = shown > 0 ? "" : emptyText(hits.length);
  ui.summary.textContent = shown > 0 ? summaryOf(shown, hits) : "No results";
  announce(shown > 0 ? ui.summary.textContent : ui.empty.textContent);
}

function showAbout({ answer }) {
  const { total } = answer.timings_ms;
  const speed = total === undefined ? "Answered" : `Answered in ${milliseconds(total)}`;
  ui["about-summary"].textContent = answer.cached ? `${speed}, from the cache` : speed;
  const pairs = [
    ...Object.entries(answer.timings_ms).map(([stage, ms]) => [capitalized(stage), milliseconds(ms)]),
    ["Gallery", answer.gallery],
    ["Gallery version", answer.gallery_version],
    ["Model bundle", answer.bundle_id],
    ["Request", answer.requestId],
  ];
  ui["about-list"].replaceChildren(...definitions(pairs.filter(([, text]) => text)));
}

function showStart() {
  ui.grid.replaceChildren();
  ui.empty.hidden = true;
  ui.summary.textContent = "Results";
}

function showAnswer(entry, onSelect) {
  ui.k.value = String(entry.k);
  ui.gallery.value = entry.answer.gallery;
  ui.grid.replaceChildren(...entry.answer.hits.map((hit) => card(hit, onSelect)));
  showAbout(entry);
  filterCards(entry);
}

// The settled page: an entry of the trail, or null for the start.
export function showEntry(entry, onSelect) {
  showBusy(false);
  document.body.dataset.state = entry === null ? "start" : "results";
  ui.about.hidden = entry === null;
  showQuery(entry?.query ?? null);
  if (entry === null) showStart();
  else showAnswer(entry, onSelect);
}

function showBusy(busy) {
  ui.results.setAttribute("aria-busy", String(busy));
  ui.progress.hidden = !busy;
  ui.cancel.hidden = !busy;
  document.body.classList.toggle("busy", busy);
}

export function showWaiting(query) {
  hideError();
  showQuery(query);
  if (document.body.dataset.state === "start") ui.grid.replaceChildren(...placeholders(8));
  document.body.dataset.state = "results";
  ui.empty.hidden = true;
  ui.summary.textContent = "Searching…";
  showBusy(true);
  announce("Searching");
}

export function showGalleries(galleries) {
  const options = galleries.map(({ name }) => element("option", { value: name, textContent: name }));
  ui.gallery.replaceChildren(...options);
  ui["gallery-field"].hidden = galleries.length < 2;
}

export function showGallerySize(gallery) {
  ui["gallery-size"].textContent = gallery ? `${plural(gallery.size, "item")} to search` : "";
}
