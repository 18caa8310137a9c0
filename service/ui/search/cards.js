// Result cards: an image that opens the shop or is searched with, its score, its attributes and votes.

import { GROUP_SIZE, PRODUCT } from "./ask.js";
import { definitions, element, icon } from "../shared/dom.js";
import { attributeText, capitalized, labelOf, percent, plural, splitKey, valueText } from "../shared/format.js";
import { CARD, imageOf, linkOf } from "../shared/images.js";

// service/cards.py has the same names, for `kinlens-serve check`.
const TITLE_NAMES = ["title", "name", "product", "product_name"];
const EARLY_NAMES = ["price", "sizes", "size", "stock"];
const BADGE = "badge";
const SHOWN_FACTS = 3;
const LONG_FACT = 28;

export function titleOf(key, attributes = {}) {
  const named = TITLE_NAMES.map((name) => attributes[name]).find((text) => typeof text === "string");
  return named || splitKey(key).name || key;
}

const isLink = (value) => /^(https?:)?\/\//i.test(value);
const rankOf = ([name]) => (EARLY_NAMES.indexOf(name.toLowerCase()) + EARLY_NAMES.length + 1) % (EARLY_NAMES.length + 1);

// The address of an item in the shop, or "" without one. `template` is the name of an attribute, or an
// address with the names of attributes in braces. Other schemes than http and https could run a script.
export function shopLink(template, attributes = {}) {
  const valueOf = (name) => (Object.hasOwn(attributes, name) ? attributes[name] : "");
  const isMissing = (value) => Array.isArray(value) || String(value).trim() === "";
  const names = [...template.matchAll(/\{([^{}]+)\}/g)].map(([, name]) => name);
  if (names.some((name) => isMissing(valueOf(name)))) return "";
  const fill = (_, name) => encodeURIComponent(valueOf(name));
  const text = names.length > 0 ? template.replaceAll(/\{([^{}]+)\}/g, fill) : valueOf(template);
  if (typeof text !== "string" || text.trim() === "") return "";
  try {
    const { protocol, href } = new URL(text, location.href);
    return /^https?:$/.test(protocol) ? href : "";
  } catch {
    return ""; // not an address
  }
}

// The second line of a card: a few short attributes, or the folder of the key.
function subtitleOf(key, attributes = {}) {
  const facts = Object.entries(attributes)
    .sort((one, other) => rankOf(one) - rankOf(other))
    .filter(([name, value]) => ![...TITLE_NAMES, "currency", BADGE].includes(name) && String(value).length <= LONG_FACT)
    .filter(([, value]) => !isLink(value))
    .filter(([, value]) => value !== false && value !== titleOf(key, attributes))
    .map(([name, value]) => {
      if (value === true) return labelOf(name);
      const text = attributeText(name, value, attributes);
      const isClear = typeof value === "string" || text !== valueText(value);
      return isClear ? text : `${labelOf(name)} ${text}`;
    });
  return facts.slice(0, SHOWN_FACTS).join(" · ") || splitKey(key).folder;
}

// A cosine is not a share of anything, so without a calibration there is no bar.
function score({ score: value, probability }) {
  const number = element("span", { className: "score-value", textContent: value.toFixed(2), testid: "score" });
  number.title = `Similarity ${value.toFixed(4)}`;
  if (probability === null) return element("span", { className: "score" }, "Similarity", number);
  const fill = element("span", { className: "score-fill" });
  fill.style.setProperty("--score-part", probability.toFixed(3));
  const bar = element("span", { className: "score-bar", ariaHidden: "true" }, fill);
  const sure = element("span", { className: "score-sure", textContent: percent(probability), testid: "probability" });
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
  const button = element("button", { type: "button", className: `vote vote-${kind}`, testid: kind }, icon(kind));
  button.ariaLabel = `${words[kind]} ${titleOf(hit.key, hit.attributes)}`;
  button.title = kind === "like" ? "More like this" : "Less like this";
  button.setAttribute("aria-pressed", String(handlers.voteOf(hit.key) === kind));
  button.addEventListener("click", () => handlers.onVote(kind, hit));
  return button;
}

function votes(hit, handlers) {
  if (handlers.onVote === null) return [];
  return [element("div", { className: "votes" }, vote("like", hit, handlers), vote("dislike", hit, handlers))];
}

// The button that explains a score by its regions, if the model supports it.
function where(hit, handlers) {
  if (handlers.onExplain === null) return [];
  const button = element("button", { type: "button", className: "round-tool where", testid: "where" }, icon("where"));
  button.ariaLabel = `Where ${titleOf(hit.key, hit.attributes)} matches`;
  button.title = "Where it matches";
  button.setAttribute("aria-pressed", "false");
  button.addEventListener("click", () =>
    handlers.onExplain(hit, button, button.closest(".card").querySelector(".card-image")));
  return [button];
}

// A browser opens only one of several details with the same name: they overlap below the card.
function facts(hit, { productUrl }) {
  const others = Object.entries(hit.attributes ?? {}).filter(([name]) => name !== productUrl);
  const pairs = others.map(([name, value]) => [labelOf(name), attributeText(name, value, hit.attributes)]);
  if (pairs.length === 0) return [];
  const summary = element("summary", { textContent: "Details" });
  summary.append(element("span", { className: "sr-only", textContent: ` of ${hit.key}` }));
  return [element("details", { className: "facts", name: `card-${hit.id}` }, summary, element("dl", {}, ...definitions(pairs)))];
}

// The image or part of the query that found the result, if there are several.
function found(text) {
  if (text === "") return [];
  const made = element("span", { className: "image-note found-with", textContent: capitalized(text), testid: "found-with" });
  return [made];
}

function badge({ attributes }) {
  const text = attributes?.[BADGE];
  const isShort = typeof text === "string" && text !== "" && text.length <= LONG_FACT;
  return isShort ? [element("span", { className: "image-note card-badge", textContent: text })] : [];
}

// The body of a card: a link to the shop, or a button that searches with the item.
function body(hit, handlers, ...more) {
  const view = handlers.viewText(hit);
  const image = element(
    "span",
    { className: "card-image" },
    imageOf(linkOf(hit), hit.key, CARD),
    ...badge(hit),
    ...found(view),
    ...more,
  );
  const content = [image, label(hit), score(hit)];
  const href = shopLink(handlers.productUrl, hit.attributes);
  if (href === "") return searchButton(element("button", { className: "card-main" }, ...content), hit, handlers);
  const link = element("a", { className: "card-main", href, target: "_blank", rel: "noopener noreferrer", testid: "card-link" }, ...content);
  link.ariaLabel = `Open ${titleOf(hit.key, hit.attributes)} in the shop`;
  return link;
}

function similar(hit, handlers) {
  if (shopLink(handlers.productUrl, hit.attributes) === "") return [];
  const button = element("button", { className: "round-tool similar", title: "Search similar" }, icon("similar"));
  return [searchButton(button, hit, handlers)];
}

function searchButton(button, hit, handlers) {
  const view = handlers.viewText(hit);
  button.type = "button";
  const sure = hit.probability === null ? "" : `, ${percent(hit.probability)} sure`;
  const by = view === "" ? "" : `, found with ${view}`;
  button.ariaLabel = `Search with ${titleOf(hit.key, hit.attributes)}, score ${hit.score.toFixed(2)}${sure}${by}`;
  button.dataset.testid = "card-search";
  button.addEventListener("click", () => handlers.onSelect(hit));
  return button;
}

function item(hit, main, handlers, ...more) {
  const foot = element("div", { className: "card-foot" }, ...facts(hit, handlers), ...votes(hit, handlers));
  const tools = element("div", { className: "card-tools" }, ...similar(hit, handlers), ...where(hit, handlers));
  const made = element("li", { className: "card" }, main, tools, ...more, foot);
  Object.assign(made.dataset, { testid: "card", id: String(hit.id), key: hit.key });
  return made;
}

// handlers: onSelect(hit), onVote(kind, hit) or null, voteOf(key), onExplain(hit, button, cardImage) or
// null, viewText(hit), group: the attribute of the groups, productUrl: the template of `shopLink`.
export function card(hit, handlers) {
  return item(hit, body(hit, handlers), handlers);
}

function otherImage(hit, handlers) {
  const button = element("button", { type: "button", className: "other" }, imageOf(linkOf(hit), ""));
  button.ariaLabel = `Search with ${titleOf(hit.key, hit.attributes)}, score ${hit.score.toFixed(2)}`;
  button.title = `${hit.key} · ${hit.score.toFixed(2)}`;
  button.addEventListener("click", () => handlers.onSelect(hit));
  return element("li", {}, button);
}

function others(group, hits, handlers) {
  const rest = hits.slice(1);
  if (rest.length === 0) return [];
  const summary = element("summary", { textContent: hits.length < GROUP_SIZE ? `${rest.length} more` : `Next ${rest.length}` });
  summary.append(element("span", { className: "sr-only", textContent: ` of ${valueText(group.value)}` }));
  const list = element("ol", { className: "others" }, ...rest.map((hit) => otherImage(hit, handlers)));
  const made = element("details", { className: "group-others", name: `card-${hits[0].id}`, testid: "group-others" }, summary, list);
  return [made];
}

// The service sends at most GROUP_SIZE hits of a group.
const countText = (count, noun) => (count < GROUP_SIZE ? plural(count, noun) : `${count}+ ${noun}s`);

// A card with the best hit of a group {value, probability, view, hits}. An item without the attribute is
// a group of its own.
export function groupCard(group, handlers) {
  const best = { ...group.hits[0], view: group.view, probability: group.probability };
  const isProduct = handlers.group === PRODUCT;
  const value = group.value === null ? `Without ${labelOf(handlers.group).toLowerCase()}` : valueText(group.value);
  const tag = element("span", { className: "group-badge", textContent: value, testid: "group-value" });
  const count = element("span", { className: "image-note group-count", textContent: countText(group.hits.length, isProduct ? "view" : "photo"), testid: "group-count" });
  const main = body(best, handlers, ...(group.value === null ? [] : [count]));
  if (!isProduct && value !== titleOf(best.key, best.attributes)) main.querySelector(".key").prepend(tag);
  const made = item(best, main, handlers, ...others(group, group.hits, handlers));
  made.classList.add("group");
  return made;
}

export function placeholders(count) {
  return Array.from({ length: count }, () =>
    element(
      "li",
      { className: "card placeholder", ariaHidden: "true" },
      element("span", { className: "card-image" }),
      element("span", { className: "line" }),
      element("span", { className: "line short" }),
    ));
}

// Arrow keys move between the cards of a grid. L and D vote for the focused one, S searches with it, W shows
// where it matches.
export function walkWithArrows(grid) {
  const shown = () => [...grid.querySelectorAll(".card:not([hidden]) .card-main")];
  const columns = () => getComputedStyle(grid).gridTemplateColumns.split(" ").length;
  grid.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !event.target.matches(".card-main")) return;
    const buttons = { l: ".vote-like", d: ".vote-dislike", s: "[data-testid=card-search]", w: ".where" };
    if (buttons[event.key]) return event.target.closest(".card").querySelector(buttons[event.key])?.click();
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns(), ArrowUp: -columns() };
    if (!(event.key in steps)) return;
    const cards = shown();
    const next = cards[cards.indexOf(event.target) + steps[event.key]];
    if (!next) return;
    event.preventDefault();
    next.focus();
  });
}
