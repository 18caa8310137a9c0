// Result cards: a picture to search with, its score, and what can be said about it.

import { GROUP_SIZE } from "/ui/search/ask.js";
import { definitions, element, icon } from "/ui/shared/dom.js";
import { capitalized, percent, plural, splitKey, valueText } from "/ui/shared/format.js";
import { pictureOf } from "/ui/shared/pictures.js";

const TITLE_NAMES = ["title", "name", "product", "product_name"];
const SHOWN_FACTS = 3;
const LONG_FACT = 28;

export function titleOf(key, attributes = {}) {
  const named = TITLE_NAMES.map((name) => attributes[name]).find((text) => typeof text === "string");
  return named || splitKey(key).name || key;
}

// The second line: what the attributes say in a few words, else the folder.
function subtitleOf(key, attributes = {}) {
  const facts = Object.entries(attributes)
    .filter(([name, value]) => !TITLE_NAMES.includes(name) && String(value).length <= LONG_FACT)
    .filter(([, value]) => value !== titleOf(key, attributes))
    .map(([name, value]) => (typeof value === "string" ? value : `${name} ${valueText(value)}`));
  return facts.slice(0, SHOWN_FACTS).join(" · ") || splitKey(key).folder;
}

// Without a calibration there is a score alone: it is no share of anything, so it fills no bar.
function score({ score: value, probability }) {
  const number = element("span", { className: "score-value", textContent: value.toFixed(3) });
  number.dataset.testid = "score";
  if (probability === null) return element("span", { className: "score" }, number);
  const fill = element("span", { className: "score-fill" });
  fill.style.setProperty("--score-part", probability.toFixed(3));
  const bar = element("span", { className: "score-bar", ariaHidden: "true" }, fill);
  const sure = element("span", { className: "score-sure", textContent: percent(probability) });
  sure.dataset.testid = "probability";
  number.classList.add("score-raw");
  return element("span", { className: "score" }, bar, sure, number);
}

function label(hit) {
  const parts = element("span", { className: "key", title: hit.key });
  parts.append(element("span", { className: "key-name", textContent: titleOf(hit.key, hit.attributes) }));
  const second = subtitleOf(hit.key, hit.attributes);
  if (second) parts.append(element("span", { className: "key-folder", textContent: second }));
  return parts;
}

function vote(kind, hit, handlers) {
  const words = { like: "More like", dislike: "Less like" };
  const button = element("button", { type: "button", className: `vote vote-${kind}` }, icon(kind));
  button.ariaLabel = `${words[kind]} ${titleOf(hit.key, hit.attributes)}`;
  button.title = kind === "like" ? "More like this" : "Less like this";
  button.dataset.testid = kind;
  button.setAttribute("aria-pressed", String(handlers.voteOf(hit.key) === kind));
  button.addEventListener("click", () => handlers.onVote(kind, hit));
  return button;
}

function votes(hit, handlers) {
  if (handlers.onVote === null) return [];
  return [element("div", { className: "votes" }, vote("like", hit, handlers), vote("dislike", hit, handlers))];
}

// Shows which regions make the score, where the model can tell.
function where(hit, handlers) {
  if (handlers.onExplain === null) return [];
  const button = element("button", { type: "button", className: "where" }, icon("where"));
  button.ariaLabel = `Where ${titleOf(hit.key, hit.attributes)} matches`;
  button.title = "Where it matches";
  button.dataset.testid = "where";
  button.setAttribute("aria-pressed", "false");
  button.addEventListener("click", () =>
    handlers.onExplain(hit, button, button.closest(".card").querySelector(".picture")));
  return [button];
}

// Of details with one name a browser opens one alone: they take the same place below the card.
function facts(hit) {
  const pairs = Object.entries(hit.attributes ?? {}).map(([name, value]) => [name, valueText(value)]);
  if (pairs.length === 0) return [];
  const summary = element("summary", { textContent: "Details" });
  summary.append(element("span", { className: "sr-only", textContent: ` of ${hit.key}` }));
  return [element("details", { className: "facts", name: `card-${hit.id}` }, summary, element("dl", {}, ...definitions(pairs)))];
}

// Which picture or part of the query it was found with, where there are several.
function found(text) {
  if (text === "") return [];
  const made = element("span", { className: "picture-note found-with", textContent: capitalized(text) });
  made.dataset.testid = "found-with";
  return [made];
}

function searchButton(hit, handlers, ...more) {
  const view = handlers.viewText(hit);
  const picture = element("span", { className: "picture" }, pictureOf(hit.image, hit.key), ...found(view), ...more);
  const button = element(
    "button",
    { type: "button", className: "card-search" },
    picture,
    label(hit),
    score(hit),
  );
  const sure = hit.probability === null ? "" : `, ${percent(hit.probability)} sure`;
  const by = view === "" ? "" : `, found with ${view}`;
  button.ariaLabel = `Search with ${titleOf(hit.key, hit.attributes)}, score ${hit.score.toFixed(3)}${sure}${by}`;
  button.dataset.testid = "card-search";
  button.addEventListener("click", () => handlers.onSelect(hit));
  return button;
}

function item(hit, button, handlers, ...more) {
  const foot = element("div", { className: "card-foot" }, ...facts(hit), ...votes(hit, handlers));
  const made = element("li", { className: "card" }, button, ...where(hit, handlers), ...more, foot);
  Object.assign(made.dataset, { testid: "card", id: String(hit.id), key: hit.key });
  return made;
}

// handlers: onSelect(hit), onVote(kind, hit) or null, voteOf(key), onExplain(hit, button, picture) or
// null, viewText(hit), picture: what one is called.
export function card(hit, handlers) {
  return item(hit, searchButton(hit, handlers), handlers);
}

function otherPicture(hit, handlers) {
  const button = element("button", { type: "button", className: "other" }, pictureOf(hit.image, ""));
  button.ariaLabel = `Search with ${titleOf(hit.key, hit.attributes)}, score ${hit.score.toFixed(3)}`;
  button.title = `${hit.key} · ${hit.score.toFixed(3)}`;
  button.addEventListener("click", () => handlers.onSelect(hit));
  return element("li", {}, button);
}

function others(group, hits, handlers) {
  const rest = hits.slice(1);
  if (rest.length === 0) return [];
  const summary = element("summary", { textContent: `${rest.length} more` });
  summary.append(element("span", { className: "sr-only", textContent: ` of ${valueText(group.value)}` }));
  const list = element("ol", { className: "others" }, ...rest.map((hit) => otherPicture(hit, handlers)));
  const made = element("details", { className: "group-others", name: `card-${hits[0].id}` }, summary, list);
  made.dataset.testid = "group-others";
  return [made];
}

// The service sends GROUP_SIZE pictures of a group at most.
const countText = (count, noun) => (count < GROUP_SIZE ? plural(count, noun) : `${count}+ ${noun}s`);

// The best picture of a group; `group` is {value, probability, view, hits}, best first.
export function groupCard(group, handlers) {
  const best = { ...group.hits[0], view: group.view, probability: group.probability };
  const value = group.value === null ? "none" : valueText(group.value);
  const badge = element("span", { className: "group-badge", textContent: value });
  badge.dataset.testid = "group-value";
  const count = element("span", { className: "picture-note group-count", textContent: countText(group.hits.length, handlers.picture) });
  count.dataset.testid = "group-count";
  const button = searchButton(best, handlers, count);
  if (value !== titleOf(best.key, best.attributes)) button.querySelector(".key").prepend(badge);
  const made = item(best, button, handlers, ...others(group, group.hits, handlers));
  made.classList.add("group");
  return made;
}

export function placeholders(count) {
  return Array.from({ length: count }, () =>
    element(
      "li",
      { className: "card placeholder", ariaHidden: "true" },
      element("span", { className: "picture" }),
      element("span", { className: "line" }),
      element("span", { className: "line short" }),
    ));
}

// Arrow keys walk the cards of a grid; L and D vote for the one in focus, W shows where it matches.
export function walkWithArrows(grid) {
  const shown = () => [...grid.querySelectorAll(".card:not([hidden]) .card-search")];
  const columns = () => getComputedStyle(grid).gridTemplateColumns.split(" ").length;
  grid.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !event.target.matches(".card-search")) return;
    const votes = { l: ".vote-like", d: ".vote-dislike", w: ".where" };
    if (votes[event.key]) return event.target.closest(".card").querySelector(votes[event.key])?.click();
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns(), ArrowUp: -columns() };
    if (!(event.key in steps)) return;
    const cards = shown();
    const next = cards[cards.indexOf(event.target) + steps[event.key]];
    if (!next) return;
    event.preventDefault();
    next.focus();
  });
}
