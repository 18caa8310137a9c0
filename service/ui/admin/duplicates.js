// Groups of items that show one product, with a button at each that deletes it.

import { deleteItems, findDuplicates } from "/ui/admin/api.js";
import { confirmed } from "/ui/admin/confirm.js";
import { chosen, state } from "/ui/admin/state.js";
import { busily } from "/ui/admin/work.js";
import { showNotice } from "/ui/shared/alerts.js";
import { element, ui } from "/ui/shared/dom.js";
import { percent, plural, valueText } from "/ui/shared/format.js";
import { emptyView, toHash } from "/ui/shared/link.js";
import { pictureOf } from "/ui/shared/pictures.js";

const SHOWN = 50;
let about = "";
let onChanged = () => {};

function facts({ score, probability, newest, same_content: isSame, attributes }) {
  const sure = probability === null ? "" : `, ${percent(probability)} sure`;
  const texts = [`cosine ${score.toFixed(4)}${sure}`];
  if (isSame) texts.push("same file as the first");
  texts.push(...Object.entries(attributes).map(([name, value]) => `${name} ${valueText(value)}`));
  const line = element("p", { className: "hint", textContent: texts.join(" · ") });
  if (!newest) return [line];
  return [element("span", { className: "state", textContent: "Newest" }), line];
}

// A group of one is none any more.
function forget(row, group) {
  const next = row.nextElementSibling ?? row.previousElementSibling;
  row.remove();
  if (group.querySelectorAll("li").length > 1) return next.querySelector("button").focus();
  group.remove();
  ui["duplicates-title"].focus();
}

async function remove({ key }, button, row, group) {
  const isSure = await confirmed({
    title: "Delete 1 item?",
    text: `${key} will no longer be found in ${state.name}. This cannot be undone.`,
    action: "Delete",
  });
  if (!isSure) return;
  await busily(button, async () => {
    await deleteItems(state.name, { keys: [key] });
    forget(row, group);
    showNotice(`${key} is deleted.`);
    await onChanged();
  });
}

function rowOf(item, group) {
  const { id, key, image } = item;
  const query = { kind: "item", id, key, gallery: state.name, crops: [] };
  const link = element("a", { href: `/${toHash(emptyView(state.name), query)}`, className: "near-picture" }, pictureOf(image, ""));
  link.ariaLabel = `Search with ${key}`;
  const drop = element("button", { type: "button", className: "small danger", textContent: "Delete" });
  drop.append(element("span", { className: "sr-only", textContent: ` ${key}` }));
  drop.dataset.testid = "near-delete";
  const name = element("p", { className: "near-key", textContent: key });
  const row = element("li", { className: "near-item" }, link, name, ...facts(item), drop);
  Object.assign(row.dataset, { testid: "near-item", key });
  drop.addEventListener("click", () => remove(item, drop, row, group));
  return row;
}

function groupOf(items) {
  const list = element("ul", { className: "near-items" });
  const group = element("li", { className: "panel-box near-group" }, list);
  group.ariaLabel = plural(items.length, "item");
  group.dataset.testid = "near-group";
  list.append(...items.map((item) => rowOf(item, group)));
  return group;
}

async function look() {
  const [kind, least] = [ui["near-kind"].value, ui["near-least"].value];
  ui.duplicates.replaceChildren();
  ui["duplicates-text"].textContent = "Comparing every item with its neighbours…";
  const name = (about = state.name);
  let text = "";
  try {
    const answer = await findDuplicates(name, { ...(least && { [kind]: least }), limit: SHOWN });
    if (about !== name) return;
    ui.duplicates.replaceChildren(...answer.groups.map(groupOf));
    const rest = answer.total > SHOWN ? `; the largest ${SHOWN} are shown` : "";
    text = answer.total === 0
      ? `No two items are that near (cosine at least ${answer.min_score.toFixed(4)}).`
      : `${plural(answer.total, "group")} with ${plural(answer.items, "item")}, cosine at least ${answer.min_score.toFixed(4)}${rest}.`;
  } finally {
    if (about === name) ui["duplicates-text"].textContent = text;
  }
}

// What was found in another gallery goes.
export function showDuplicates() {
  ui["near-look"].disabled = chosen() === null;
  if (about === state.name) return;
  about = "";
  ui.duplicates.replaceChildren();
  ui["duplicates-text"].textContent = "";
}

// whenChanged() after an item was deleted.
export function startDuplicates(whenChanged) {
  onChanged = whenChanged;
  ui["near-form"].addEventListener("submit", (event) => {
    event.preventDefault();
    busily(ui["near-look"], look);
  });
  ui["near-kind"].addEventListener("change", () => {
    const isScore = ui["near-kind"].value === "min_score";
    ui["near-least"].min = isScore ? -1 : 0;
    ui["near-least"].value = isScore ? 0.95 : "";
  });
}
