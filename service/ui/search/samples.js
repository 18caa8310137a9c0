// Sample queries on the start page: some of the first items of the gallery.

import { itemQuery } from "./ask.js";
import { titleOf } from "./cards.js";
import * as settings from "./settings.js";
import { listItems } from "../shared/api.js";
import { element, ui } from "../shared/dom.js";
import { imageOf } from "../shared/images.js";

const SHOWN = 8;
const LOOKED_AT = 120;
// Whoever sees the link to the admin page may add items there.
export const EMPTY_TEXT = ui["admin-link"].hidden
  ? "There is nothing to search yet. Please come back later."
  : "There is nothing to search yet. Add items on the admin page.";

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
  const button = element("button", { type: "button", className: "sample", testid: "sample" }, imageOf(query.preview, ""));
  button.ariaLabel = `Search with ${titleOf(query.name, query.attributes)}`;
  button.title = query.name;
  button.addEventListener("click", () => onOpen(query));
  return element("li", {}, button);
}

export function hideSamples() {
  ui.samples.hidden = true;
}

// onOpen(query) starts a search. There are no samples if the gallery is empty or may not be listed.
export async function showSamples(onOpen) {
  const { gallery } = settings.view;
  const found = await queries(gallery);
  const isStart = document.body.dataset.state === "start" && settings.view.gallery === gallery;
  if (!isStart) return;
  ui["sample-list"].replaceChildren(...found.map((query) => sample(query, onOpen)));
  const isEmpty = settings.itemCount() === 0;
  ui["samples-title"].textContent = isEmpty ? `This gallery is empty. ${EMPTY_TEXT}` : "Or start with one of these";
  ui.samples.hidden = found.length === 0 && !isEmpty;
}
