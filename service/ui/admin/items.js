// The items of a gallery, a page at a time: find, select, edit, delete.

import { deleteItems } from "./api.js";
import { confirmed } from "./confirm.js";
import { editItem } from "./edit.js";
import { state } from "./state.js";
import { UNDO_TEXT, offerUndo } from "./undo.js";
import { whileBusy, failed } from "./work.js";
import { showNotice } from "../shared/alerts.js";
import { Problem, listItems } from "../shared/api.js";
import { announce, element, onSubmit, smallButton, ui } from "../shared/dom.js";
import { grouped, plural, someOf, valueText } from "../shared/format.js";
import { emptyView, toHash } from "../shared/link.js";
import { imageOf, linkOf } from "../shared/images.js";

const PAGE = 50;
const selected = new Set();
const view = { offset: 0, prefix: "", filter: "", total: 0 };
let running = null;
let onChanged = () => {};

function attributeList(attributes) {
  const entries = Object.entries(attributes);
  if (entries.length === 0) return element("span", { className: "hint", textContent: "none" });
  const list = element("ul", { className: "attributes" });
  list.append(...entries.map(([name, value]) => {
    const words = element("span", { className: "attribute-term", textContent: name });
    return element("li", {}, words, ` ${valueText(value)}`);
  }));
  return list;
}

function tick(key, row) {
  const box = element("input", { type: "checkbox", checked: selected.has(key), ariaLabel: `Select ${key}`, testid: "pick" });
  box.addEventListener("change", () => {
    if (box.checked) selected.add(key);
    else selected.delete(key);
    row.classList.toggle("selected", box.checked);
    showBulk();
  });
  return element("label", { className: "tick" }, box);
}

function rowOf(item) {
  const row = element("tr", { testid: "row" });
  const about = item.key;
  row.dataset.key = item.key;
  row.classList.toggle("selected", selected.has(item.key));
  const query = { kind: "item", id: item.id, key: item.key, gallery: state.name, crops: [] };
  const link = element("a", { href: `./${toHash(emptyView(state.name), query)}`, className: "thumb" }, imageOf(linkOf(item), ""));
  link.ariaLabel = `Search with ${item.key}`;
  row.append(
    element("td", { className: "col-pick" }, tick(item.key, row)),
    element("td", { className: "col-image" }, link),
    element("th", { scope: "row", className: "item-key", textContent: item.key }),
    element("td", { className: "item-attributes" }, attributeList(item.attributes)),
    element(
      "td",
      { className: "col-actions" },
      smallButton("Edit", { about, testid: "edit-item" }, () => edit(item)),
      smallButton("Delete", { about, testid: "delete-item", className: "danger" }, (button) => deleteKeys([item.key], button)),
    ),
  );
  return row;
}

async function edit(item) {
  if (!(await editItem(item))) return;
  await load();
  ui.rows.querySelector(`[data-key="${CSS.escape(item.key)}"] [data-testid=edit-item]`)?.focus();
}

function showBulk() {
  const boxes = [...ui.rows.querySelectorAll("input")];
  const marked = boxes.filter(({ checked }) => checked).length;
  ui["pick-all"].checked = boxes.length > 0 && marked === boxes.length;
  ui["pick-all"].indeterminate = marked > 0 && marked < boxes.length;
  const canDeleteFiltered = view.filter !== "" && view.prefix === "" && view.total > 0;
  ui.bulk.hidden = selected.size === 0 && !canDeleteFiltered;
  ui["bulk-text"].textContent = selected.size > 0 ? `${plural(selected.size, "item")} selected` : "";
  ui["bulk-delete"].hidden = ui["bulk-clear"].hidden = selected.size === 0;
  ui["filter-delete"].hidden = !canDeleteFiltered;
  ui["filter-delete"].textContent = `Delete all ${grouped(view.total)} matching`;
}

function showEmpty() {
  const isNarrowed = view.prefix !== "" || view.filter !== "";
  ui["items-empty"].hidden = view.total > 0;
  ui["items-frame"].hidden = view.total === 0;
  ui["items-empty-title"].textContent = isNarrowed ? "No matching items" : "This gallery is empty";
  ui["items-empty-text"].textContent = isNarrowed
    ? "No item matches the key and the filter. Change one of them."
    : "Add images here. They can be found at once.";
  ui["items-empty-add"].hidden = isNarrowed;
}

function showPager(count) {
  const isSplit = view.total > PAGE;
  ui.pager.hidden = !isSplit;
  const last = view.offset + count;
  ui["page-text"].textContent = `${grouped(view.offset + 1)} – ${grouped(last)} of ${grouped(view.total)}`;
  ui["page-before"].disabled = view.offset === 0;
  ui["page-after"].disabled = last >= view.total;
}

function showPage({ total, items }) {
  view.total = total;
  ui.rows.replaceChildren(...items.map(rowOf));
  ui["items-count"].textContent = plural(total, "item");
  showEmpty();
  showPager(items.length);
  showBulk();
}

function showFailure(error) {
  if (error instanceof Problem && error.status === 422) ui["filter-error"].textContent = error.detail;
  else failed(error, load);
}

export async function load() {
  running?.abort();
  const mine = (running = new AbortController());
  ui["filter-error"].textContent = "";
  ui["items-frame"].setAttribute("aria-busy", "true");
  try {
    const { offset, prefix, filter } = view;
    const page = await listItems(state.name, { offset, limit: PAGE, prefix, filter }, mine.signal);
    if (page.items.length === 0 && page.total > 0) {
      view.offset = Math.floor((page.total - 1) / PAGE) * PAGE;
      return await load();
    }
    showPage(page);
  } catch (error) {
    showFailure(error);
  } finally {
    if (running === mine) ui["items-frame"].setAttribute("aria-busy", "false");
  }
}

async function changed() {
  await onChanged();
  await load();
  ui["items-title"].focus();
}

async function remove(name, which) {
  const { removed } = await deleteItems(name, which);
  for (const key of which.keys ?? [...selected]) selected.delete(key);
  const text = `${plural(removed, "item")} deleted.`;
  if (which.keys) offerUndo(text, name, which.keys, changed);
  else showNotice(text);
  await changed();
}

async function deleteKeys(keys, button) {
  const { name } = state;
  const isSure = await confirmed({
    title: `Delete ${plural(keys.length, "item")}?`,
    text: `${someOf(keys)} will no longer be found in ${name}. ${UNDO_TEXT}`,
    action: "Delete",
  });
  if (isSure) await whileBusy(button, () => remove(name, { keys }));
}

// Asks for the count again: the gallery may have changed since the list was loaded.
async function deleteFiltered() {
  const { name } = state;
  const { filter } = view;
  await whileBusy(ui["filter-delete"], async () => {
    const { total } = await listItems(name, { limit: 1, filter });
    if (name !== state.name) return;
    const isSure = await confirmed({
      title: `Delete ${plural(total, "item")}?`,
      text: `All items of ${name} that match ${filter} will be deleted. This page cannot undo it.`,
      action: `Delete ${grouped(total)}`,
    });
    if (isSure) await remove(name, { filter });
  });
}

async function turnTo(offset) {
  view.offset = Math.max(offset, 0);
  await load();
  announce(ui["page-text"].textContent);
  ui.items.scrollIntoView({ block: "start" });
}

function find() {
  const [prefix, filter] = [ui["key-search"].value, ui.filter.value.trim()];
  if (prefix === view.prefix && filter === view.filter) return;
  selected.clear();
  Object.assign(view, { offset: 0, prefix, filter });
  load().then(() => announce(ui["items-count"].textContent));
}

// Starts at the first item, for another gallery.
export function reset() {
  selected.clear();
  ui["key-search"].value = ui.filter.value = "";
  Object.assign(view, { offset: 0, prefix: "", filter: "", total: 0 });
  ui.rows.replaceChildren();
}

function pickAll() {
  const isWanted = ui["pick-all"].checked; // each click below changes this box
  for (const box of ui.rows.querySelectorAll("input")) {
    if (box.checked !== isWanted) box.click();
  }
}

function pickNone() {
  selected.clear();
  for (const box of ui.rows.querySelectorAll("input:checked")) box.click();
  showBulk();
  ui["pick-all"].focus();
}

// whenChanged() is called after items were deleted.
export function startItems(whenChanged) {
  onChanged = whenChanged;
  onSubmit(ui.finder, () => find());
  for (const field of [ui["key-search"], ui.filter]) field.addEventListener("search", find);
  ui["pick-all"].addEventListener("change", pickAll);
  ui["bulk-clear"].addEventListener("click", pickNone);
  ui["bulk-delete"].addEventListener("click", () => deleteKeys([...selected], ui["bulk-delete"]));
  ui["filter-delete"].addEventListener("click", deleteFiltered);
  ui["page-before"].addEventListener("click", () => turnTo(view.offset - PAGE));
  ui["page-after"].addEventListener("click", () => turnTo(view.offset + PAGE));
}
