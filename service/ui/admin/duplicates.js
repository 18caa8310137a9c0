// Groups of items that show one product, with buttons that delete all but one.

import { deleteItems, findDuplicates } from "./api.js";
import { confirmed } from "./confirm.js";
import { chosen, state } from "./state.js";
import { UNDO_TEXT, offerUndo } from "./undo.js";
import { whileBusy } from "./work.js";
import { element, onSubmit, smallButton, ui } from "../shared/dom.js";
import { plural, someOf, valueText } from "../shared/format.js";
import { emptyView, toHash } from "../shared/link.js";
import { imageOf } from "../shared/images.js";

const SHOWN = 50;
let about = "";
let onChanged = () => {};

function facts({ score, newest, same_content: isSame, attributes }) {
  const texts = [`cosine ${score.toFixed(4)}`];
  if (isSame) texts.push("same file as the first");
  texts.push(...Object.entries(attributes).map(([name, value]) => `${name} ${valueText(value)}`));
  const line = element("p", { className: "hint", textContent: texts.join(" · ") });
  if (!newest) return [line];
  return [element("span", { className: "state", textContent: "Newest" }), line];
}

// Removes deleted items from a group, and the group if fewer than two items remain.
function forget(keys, group) {
  for (const row of group.querySelectorAll("li")) {
    if (keys.includes(row.dataset.key)) row.remove();
  }
  const rows = group.querySelectorAll("li");
  if (rows.length > 1) return rows[0].querySelector("button").focus();
  group.remove();
  ui["duplicates-title"].focus();
}

const keysIn = (group) => [...group.querySelectorAll("li")].map(({ dataset }) => dataset.key);

// At least one item of the group stays, even if another user deletes others at the same time.
async function remove(keys, button, group) {
  const { name } = state;
  const keep = keysIn(group).filter((key) => !keys.includes(key));
  if (keep.length === 0) return;
  const isSure = await confirmed({
    title: `Delete ${plural(keys.length, "item")}?`,
    text: `${someOf(keys)} will no longer be found in ${name}. ${keep.length === 1 ? `${keep[0]} stays` : `${plural(keep.length, "item")} of the group stay`}. ${UNDO_TEXT}`,
    action: "Delete",
  });
  if (!isSure) return;
  await whileBusy(button, async () => {
    const { removed } = await deleteItems(name, { keys, keep });
    forget(keys, group);
    offerUndo(`${plural(removed, "item")} deleted.`, name, keys, async () => {
      await Promise.all([onChanged(), state.name === name && find()]);
      ui["duplicates-title"].focus();
    });
    await onChanged();
  });
}

// Items of different products are deleted only one at a time: they may not be duplicates.
function buttonsOf({ key }, items, group, areOne) {
  const drop = smallButton("Delete", { about: key, testid: "near-delete", className: "danger" }, (button) => remove([key], button, group));
  if (items.length === 2 || !areOne) return [drop];
  const only = smallButton("Keep only this", { about: key, testid: "near-only" }, (button) =>
    remove(keysIn(group).filter((other) => other !== key), button, group));
  return [drop, only];
}

function rowOf(item, ...more) {
  const { id, key, image } = item;
  const query = { kind: "item", id, key, gallery: state.name, crops: [] };
  const link = element("a", { href: `./${toHash(emptyView(state.name), query)}`, className: "near-image" }, imageOf(image, ""));
  link.ariaLabel = `Search with ${key}`;
  const name = element("p", { className: "near-key", textContent: key });
  const row = element("li", { className: "near-item" }, link, name, ...more);
  Object.assign(row.dataset, { testid: "near-item", key });
  return row;
}

function listOf(rows, testId, text, ...before) {
  const list = element("ul", { className: "near-items" }, ...rows);
  const group = element("li", { className: `panel-box ${testId}`, testid: testId }, ...before, list);
  group.ariaLabel = text;
  return group;
}

// A cluster is too large for copies of one product, so it has no delete buttons.
function clusterOf({ items, examples, detail }) {
  const rows = examples.map((item) => rowOf(item));
  return listOf(rows, "near-cluster", `${plural(items, "item")} that look alike`, element("p", { className: "verdict attention", textContent: detail }));
}

function groupOf(items, canDelete, product) {
  const named = items.map(({ attributes }) => attributes[product]).filter((value) => value !== undefined);
  const areOne = new Set(named.map((value) => JSON.stringify(value))).size < 2;
  const text = `These items have different values of ${product}. Check that they are one product before you delete one.`;
  const note = areOne ? [] : [element("p", { className: "verdict attention", textContent: text })];
  const group = listOf([], "near-group", plural(items.length, "item"), ...note);
  group.lastChild.append(...items.map((item) => {
    const buttons = canDelete ? [element("div", { className: "near-buttons" }, ...buttonsOf(item, items, group, areOne))] : [];
    return rowOf(item, ...facts(item), ...buttons);
  }));
  return group;
}

function textOf({ total, items, crowds: clusters, min_score: least, floor }) {
  const source = least === floor.score ? ", the default of this gallery" : "";
  const near = `cosine at least ${least.toFixed(4)}${source}`;
  if (total === 0 && clusters.length === 0) return `No duplicates found (${near}).`;
  const rest = total > SHOWN ? `; the largest ${SHOWN} are shown` : "";
  return `${plural(total, "group")} with ${plural(items, "item")}, ${near}${rest}.`;
}

async function find() {
  const least = ui["near-least"].value;
  clear();
  ui["duplicates-text"].textContent = "Comparing every item with its neighbours…";
  const name = (about = state.name);
  let text = "";
  try {
    const answer = await findDuplicates(name, { ...(least && { min_score: least }), limit: SHOWN });
    if (about !== name) return;
    ui["duplicates-warning"].hidden = answer.warning === null;
    ui["duplicates-warning"].textContent = answer.warning ?? "";
    const groups = answer.groups.map((items) => groupOf(items, answer.warning === null, answer.floor.attribute));
    ui.duplicates.replaceChildren(...answer.crowds.map(clusterOf), ...groups);
    text = textOf(answer);
  } finally {
    if (about === name) ui["duplicates-text"].textContent = text;
  }
}

function clear() {
  ui.duplicates.replaceChildren();
  ui["duplicates-warning"].hidden = true;
  ui["duplicates-text"].textContent = "";
}

// Clears the groups of another gallery.
export function showDuplicates() {
  ui["near-find"].disabled = chosen() === null;
  if (about === state.name) return;
  about = "";
  clear();
}

// whenChanged() is called after items were deleted or restored.
export function startDuplicates(whenChanged) {
  onChanged = whenChanged;
  onSubmit(ui["near-form"], () => whileBusy(ui["near-find"], find));
}
