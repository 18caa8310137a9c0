// Something to begin with: items of the gallery, spread over its first ones.

import { itemQuery } from "/ui/search/ask.js";
import { titleOf } from "/ui/search/cards.js";
import * as settings from "/ui/search/settings.js";
import { listItems } from "/ui/shared/api.js";
import { element, ui } from "/ui/shared/dom.js";
import { pictureOf } from "/ui/shared/pictures.js";

const SHOWN = 8;
const LOOKED_AT = 120;

function spread(list) {
  const step = Math.max(list.length / SHOWN, 1);
  const count = Math.min(list.length, SHOWN);
  return Array.from({ length: count }, (_, n) => list[Math.floor(n * step)]);
}

async function queries(gallery) {
  const { items } = await listItems(gallery, { limit: LOOKED_AT }).catch(() => ({ items: [] }));
  return spread(items).map((item) => itemQuery(gallery, item));
}

function sample(query, onOpen) {
  const button = element("button", { type: "button", className: "sample" }, pictureOf(query.link, ""));
  button.ariaLabel = `Search with ${titleOf(query.name, query.attributes)}`;
  button.title = query.name;
  button.dataset.testid = "sample";
  button.addEventListener("click", () => onOpen(query));
  return element("li", {}, button);
}

export function hideSamples() {
  ui.samples.hidden = true;
}

// onOpen(query) starts a search. Without items, or without leave to list them, there are none.
export async function showSamples(onOpen) {
  const { gallery } = settings.view;
  const found = await queries(gallery);
  const isStart = document.body.dataset.state === "start" && settings.view.gallery === gallery;
  if (!isStart) return;
  ui["sample-list"].replaceChildren(...found.map((query) => sample(query, onOpen)));
  ui.samples.hidden = found.length === 0;
}
