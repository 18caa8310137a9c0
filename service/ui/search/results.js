// Shows an answer: cards or groups, the minimum score, the empty state, times and ids.

import { card, groupCard, placeholders, titleOf } from "./cards.js";
import { isBare, isBest, PRODUCT, viewText } from "./ask.js";
import { acceptedText } from "./batch.js";
import { choice, hideChoices } from "./choose.js";
import { hideHeat, toggleHeat } from "./explain.js";
import { hideParts, showParts } from "./parts.js";
import { EMPTY_TEXT } from "./samples.js";
import * as settings from "./settings.js";
import { announce, definitions, element, ui } from "../shared/dom.js";
import { capitalized, milliseconds, percent, plural, someOf, valueText } from "../shared/format.js";
import { imageOf, LARGE, showImage } from "../shared/images.js";

const PLACEHOLDERS = 12;
const ENDED = "No answer is guaranteed now: other photos come than those that the shop labelled, or its items have changed";
let describedBy = ""; // what the shown cards took from the description of their gallery

export function showQuery(query) {
  hideHeat();
  hideParts();
  hideChoices();
  ui.query.hidden = query === null;
  document.title = query === null ? "Kinlens" : `${query.name} · Kinlens`;
  if (query === null) return;
  const name = query.kind === "item" ? titleOf(query.key, query.attributes) : query.name;
  const isOne = query.preview !== "" && !query.previews;
  ui.stage.hidden = !isOne;
  ui["crop-tools"].hidden = !isOne;
  showQueryImages(query);
  if (isOne && ui["query-image"].dataset.link !== query.preview) {
    showImage(ui["query-image"], query.preview, LARGE);
  }
  ui["query-image"].alt = `Your query: ${query.name}`;
  ui["query-kind"].textContent = query.kind === "item" ? "Searching with the item" : "Searching with";
  ui["query-name"].textContent = name;
  ui["query-name"].title = query.name;
}

function showQueryImages({ images = [], previews = [] }) {
  ui["query-images"].hidden = previews.length === 0;
  ui["query-images"].replaceChildren(...previews.map((link, index) => {
    const image = imageOf(link, `Photo ${index + 1}: ${images[index].name}`);
    return element("li", { title: images[index].name }, image);
  }));
}

const isGrouped = ({ groups }) => Array.isArray(groups);
const rowsOf = (answer) => (isGrouped(answer) ? answer.groups : answer.hits);
const bestOf = (rows) => rows.reduce((best, row) => (row.score > best.score ? row : best));

function nounOf(answer, view) {
  if (!isGrouped(answer)) return "result";
  return view.group === PRODUCT ? "product" : "group";
}

function summaryOf(shown, { answer, view }) {
  const rows = rowsOf(answer);
  const total = plural(rows.length, nounOf(answer, view));
  const amount = shown < rows.length ? `${shown} of ${total}` : total;
  const { probability: sure, score } = bestOf(rows);
  const best = sure === null ? `similarity ${score.toFixed(2)}` : `${percent(sure)} sure`;
  return `${amount}, best ${best}`;
}

// The probability that no result is right, as text; "" without a calibration.
function chanceText({ answer, view }) {
  const { no_match_probability: chance } = answer;
  if (chance == null) return "";
  const { length } = rowsOf(answer);
  const noun = nounOf(answer, view);
  const wrong = length === 1 ? `this ${noun} is wrong` : `none of the ${plural(length, noun)} is right`;
  return `${chance > 0.5 ? "Probably not here: " : ""}${percent(chance)} chance that ${wrong}`;
}

const nameOf = ({ value, key }) => (value === null ? key : valueText(value));

// The products of which one is right, unless the list was cut.
function setText({ level, groups, none, cut }) {
  if (cut === "k") return "More products may be right than fit into the results";
  if (cut === "filter") return "The filters hide products that may be right";
  const often = `(${Math.round(level * 100)} of 100 times)`;
  if (groups.length === 0) return none ? `None of these products ${often}` : "";
  const these = groups.length === 1 ? "This product" : `One of these ${groups.length} products`;
  return `${these}${none ? ", or none of them" : ""} ${often}: ${someOf(groups.map(nameOf))}`;
}

// What the answer guarantees, as text. It replaces the chance that no result is right, unless that is high.
function sureText(entry) {
  const { guarantee, accepted, no_match_probability: chance } = entry.answer;
  if (!guarantee) return [chanceText(entry), settings.hasEnded() ? ENDED : ""];
  const wrong = Math.round((1 - guarantee.accept) * 100);
  const often = `At most ${wrong} of 100 accepted products ${wrong === 1 ? "is" : "are"} wrong`;
  const text = accepted ? `Accepted: ${nameOf(guarantee.groups[0])}. ${often}` : acceptedText(entry.answer) + setText(guarantee);
  return [chance > 0.5 ? chanceText(entry) : "", text];
}

function showChance(text, answer) {
  ui.chance.hidden = text === "";
  ui.chance.textContent = text;
  ui.chance.classList.toggle("likely", answer?.no_match_probability > 0.5);
  ui.chance.classList.toggle("accepted", answer?.accepted === true);
}

function actions(hasFilter, hasMin) {
  const make = (text, work, testid) => {
    const button = element("button", { type: "button", className: "secondary", textContent: text, testid });
    button.addEventListener("click", () => {
      work();
      ui.summary.focus({ preventScroll: true }); // the button was removed
    });
    return button;
  };
  return [
    ...(hasMin ? [make("Remove the minimum score", settings.clearMin, "empty-min")] : []),
    ...(hasFilter ? [make("Remove the filters", settings.clearFilter, "empty-filter")] : []),
  ];
}

function adviceOf(answer) {
  const rows = rowsOf(answer);
  const another = settings.view.text ? "other words" : "another photo or a part of this one";
  if (rows.length > 0) {
    const { probability, score } = bestOf(rows);
    const sure = probability === null ? "" : ` (${percent(probability)} sure)`;
    return `The closest item has a score of ${score.toFixed(2)}${sure}, below the minimum of ` +
      `${settings.minText()}. Lower the minimum score, or try ${another}.`;
  }
  if (Object.keys(settings.view.filter).length > 0) return "No item passes the filters. Remove some of them.";
  if (answer.min_score != null) return `No item in this gallery is similar enough. Try ${another}.`;
  return EMPTY_TEXT;
}

function showEmpty(answer, isEmpty) {
  ui.empty.hidden = !isEmpty;
  if (!isEmpty) return;
  const hasFilter = Object.keys(settings.view.filter).length > 0;
  const advice = adviceOf(answer);
  ui.summary.textContent = advice === EMPTY_TEXT ? "This gallery is empty" : "No match";
  ui["empty-text"].textContent = advice;
  ui["empty-actions"].replaceChildren(...actions(hasFilter, rowsOf(answer).length > 0));
}

// Hides cards below the minimum score. The answer contains all scores, so no request is needed.
export function filterCards(entry) {
  const { answer } = entry;
  const minimum = settings.minScore();
  const rows = rowsOf(answer);
  const cards = [...ui.grid.children];
  cards.forEach((item, rank) => (item.hidden = rows[rank].score < minimum));
  const shown = cards.filter((item) => !item.hidden).length;
  showEmpty(answer, shown === 0);
  if (shown > 0) ui.summary.textContent = summaryOf(shown, entry);
  const chance = shown > 0 ? sureText(entry).filter(Boolean).join(". ") : "";
  showChance(chance, answer);
  const more = shown > 0 ? chance : ui["empty-text"].textContent;
  announce([ui.summary.textContent, more].filter(Boolean).join(". "));
}

function showAbout({ answer }) {
  const { total } = answer.timings_ms;
  const speed = total === undefined ? "Answered" : `Answered in ${milliseconds(total)}`;
  ui["about-summary"].textContent = answer.cached ? `${speed}, from the cache` : speed;
  const times = Object.entries(answer.timings_ms);
  const pairs = [
    ...times.map(([stage, ms]) => [capitalized(stage), milliseconds(ms)]),
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
  showChance("");
  ui.summary.textContent = "Results";
}

function handlersOf(handlers, entry) {
  const canExplain = settings.hasMap() && !isBare(entry.query) && !entry.view.text; // words have no regions
  const onExplain = (hit, button, cardImage) => toggleHeat(hit, button, cardImage, entry);
  const { query, view } = entry;
  return {
    ...handlers,
    voteOf: settings.voteOf,
    onVote: isBest(query, view) ? null : handlers.onVote,
    onExplain: canExplain ? onExplain : null,
    viewText: (hit) => (hit.view ? viewText(query, hit.view) : ""),
    group: view.group,
    productUrl: settings.productUrl(),
  };
}

const descriptionOf = () => JSON.stringify([settings.productUrl(), settings.hasMap(), settings.hasEnded()]);

// Shows the answer again if the description of its gallery changes it.
export function showDescribed(entry, handlers) {
  if (descriptionOf() !== describedBy) showAnswer(entry, handlers);
}

function showAnswer(entry, handlers) {
  describedBy = descriptionOf();
  const all = handlersOf(handlers, entry);
  const make = isGrouped(entry.answer) ? groupCard : card;
  const focused = document.activeElement?.closest?.(".card")?.dataset.key;
  const testid = document.activeElement?.dataset?.testid;
  ui.grid.replaceChildren(...rowsOf(entry.answer).map((row) => make(row, all)));
  const leads = ui.grid.querySelector("a.card-main") !== null;
  ui["results-hint"].textContent = leads ? "Select a result to open it in the shop" : "Select a result to search with it";
  if (focused) refocus(focused, testid);
  showParts(entry.query, rowsOf(entry.answer));
  showAbout(entry);
  filterCards(entry);
}

// A vote replaces the cards. The focus stays on the item if it is still a result.
function refocus(key, testid) {
  const same = [...ui.grid.children].find((item) => item.dataset.key === key);
  const target = same?.querySelector(`[data-testid="${testid}"]`);
  (target ?? ui.summary).focus({ preventScroll: true });
}

// Shows an entry of the trail, or the start page for null.
export function showEntry(entry, handlers) {
  showBusy(false);
  const isBatch = entry?.kind === "batch";
  document.body.dataset.state = entry === null ? "start" : isBatch ? "batch" : "results";
  ui.about.hidden = entry === null || isBatch;
  ui.batch.hidden = !isBatch;
  ui.grid.hidden = isBatch;
  showQuery(isBatch ? null : entry?.query ?? null);
  if (entry === null || isBatch) showStart();
  else showAnswer(entry, handlers);
}

function showBusy(busy) {
  ui.results.setAttribute("aria-busy", String(busy));
  ui.progress.hidden = !busy;
  ui.cancel.hidden = !busy;
  document.body.classList.toggle("busy", busy);
}

// Resolves to the crops that the user chooses of the boxes on the photo.
export function choose(boxes, signal) {
  if (boxes.length === 0) return [];
  showBusy(false);
  ui.grid.replaceChildren();
  ui.empty.hidden = false;
  return choice(boxes, signal);
}

export function showWaiting(query) {
  showQuery(query);
  const hasCards = document.body.dataset.state === "results" && ui.grid.children.length > 0;
  if (!hasCards) ui.grid.replaceChildren(...placeholders(PLACEHOLDERS));
  document.body.dataset.state = "results";
  ui.grid.hidden = false;
  ui.batch.hidden = true;
  ui.empty.hidden = true;
  showChance("");
  ui.summary.textContent = "Searching…";
  showBusy(true);
  announce("Searching");
}
