// Adding items: images that are dropped or picked, their keys and attributes, and the result of each.

import { AttributeEditor } from "./attributes.js";
import { editAttributes, knownAttributes } from "./edit.js";
import { sendAll } from "./send.js";
import { chosen } from "./state.js";
import { failed } from "./work.js";
import { acceptDrops, announce, element, onSubmit, smallButton, ui } from "../shared/dom.js";
import { plural, valueText } from "../shared/format.js";
import { imageOf } from "../shared/images.js";

const WORDS = {
  waiting: "Not sent yet",
  sending: "Sending…",
  added: "Added",
  replaced: "Replaced",
  updated: "Attributes changed",
  unchanged: "Unchanged",
  failed: "Failed",
};
const OPEN = ["waiting", "failed"];
const DONE = ["added", "replaced", "updated", "unchanged", "failed"];
let entries = [];
let editor = null;
let sending = null;
let onChanged = () => {};

const mayEdit = (entry) => OPEN.includes(entry.state) && sending === null;

function attributeText(attributes) {
  const pairs = Object.entries(attributes).map(([name, value]) => `${name}: ${valueText(value)}`);
  return pairs.join(", ") || "No attributes";
}

function show(entry) {
  const { row, state, note } = entry;
  row.dataset.state = state;
  row.querySelector("input").readOnly = !mayEdit(entry);
  for (const button of row.querySelectorAll("button")) button.disabled = !mayEdit(entry);
  row.querySelector(".queue-state").textContent = note ? `${WORDS[state]}: ${note}` : WORDS[state];
  row.querySelector(".queue-attributes").textContent = attributeText(entry.attributes);
}

function rowOf(entry) {
  const key = element("input", { type: "text", value: entry.key, autocomplete: "off", spellcheck: false, testid: "queue-key" });
  key.ariaLabel = `Key of ${entry.file.name}`;
  key.addEventListener("input", () => (entry.key = key.value));
  const { name } = entry.file;
  const edit = smallButton("Attributes", { about: `of ${name}`, testid: "queue-edit" }, () => editEntry(entry));
  const drop = smallButton("Remove", { about: name }, () => discard(entry));
  const state = element("p", { className: "queue-state", testid: "queue-state" });
  const text = element("div", { className: "queue-text" }, key, element("p", { className: "queue-attributes hint" }), state);
  const buttons = element("div", { className: "queue-buttons" }, edit, drop);
  return element("li", { className: "queue-row", testid: "queue-row" }, imageOf(entry.url, ""), text, buttons);
}

async function editEntry(entry) {
  await editAttributes({ ...entry, image: entry.url }, (attributes) => (entry.attributes = attributes));
  show(entry);
}

function discard(entry) {
  URL.revokeObjectURL(entry.url);
  const next = entry.row.nextElementSibling ?? entry.row.previousElementSibling;
  entry.row.remove();
  entries = entries.filter((other) => other !== entry);
  showQueue();
  (next?.querySelector("input") ?? ui["add-pick"]).focus();
}

function resultText() {
  const parts = DONE.map((state) => [state, entries.filter((entry) => entry.state === state).length]);
  return parts.filter(([, count]) => count > 0).map(([state, count]) => `${count} ${WORDS[state].toLowerCase()}`).join(", ");
}

function titleText() {
  const open = entries.filter(({ state }) => OPEN.includes(state)).length;
  if (sending !== null) return `Sending ${plural(entries.length, "image")}`;
  return resultText() || `${plural(open, "image")} to add`;
}

function showQueue() {
  const open = entries.filter(({ state }) => OPEN.includes(state));
  const isRetry = open.length > 0 && open.every(({ state }) => state === "failed");
  ui["queue-form"].hidden = entries.length === 0;
  ui["queue-title"].textContent = titleText();
  ui["queue-send"].hidden = sending !== null || open.length === 0;
  ui["queue-send"].textContent = isRetry ? "Try the failed ones again" : `Add ${plural(open.length, "image")} to ${chosen()?.name}`;
  ui["queue-stop"].hidden = ui["queue-progress"].hidden = sending === null;
  ui["queue-clear"].hidden = sending !== null;
  ui["queue-progress"].max = entries.length;
  for (const entry of entries) show(entry);
}

function take(files) {
  ui["queue-error"].textContent = "";
  if (!mayAdd()) return;
  let attributes;
  try {
    attributes = editor.read();
  } catch (error) {
    ui["queue-error"].textContent = error.message;
    ui["queue-form"].hidden = false;
    return;
  }
  for (const file of files) {
    const key = file.webkitRelativePath || file.name;
    const entry = { file, key, attributes, state: "waiting", note: "", url: URL.createObjectURL(file) };
    entry.row = rowOf(entry);
    entries.push(entry);
    ui.queue.append(entry.row);
  }
  showQueue();
  announce(ui["queue-title"].textContent);
}

// The first problem that prevents sending, with the field to change, or null.
function faultIn(open) {
  const seen = new Set();
  for (const { key, row } of open) {
    const field = row.querySelector("input");
    if (key.trim() === "") return { field, text: "An image has no key." };
    if (seen.has(key)) return { field, text: `Two images have the key ${key}. Change one of them.` };
    seen.add(key);
  }
  return null;
}

function progressed(changed) {
  for (const entry of changed) show(entry);
  ui["queue-progress"].value = entries.filter(({ state }) => DONE.includes(state)).length;
}

async function send() {
  const open = entries.filter(({ state }) => OPEN.includes(state));
  const fault = faultIn(open);
  ui["queue-error"].textContent = fault?.text ?? "";
  if (fault) return fault.field.focus();
  for (const entry of open) Object.assign(entry, { state: "waiting", note: "" });
  sending = new AbortController();
  showQueue();
  progressed([]);
  ui["queue-stop"].focus();
  try {
    await sendAll(chosen().name, open, progressed, sending.signal);
  } catch (error) {
    failed(error);
  } finally {
    for (const entry of open) if (entry.state === "sending") entry.state = "waiting";
    sending = null;
    showQueue();
    announce(titleText());
    if (document.activeElement === document.body) ui[ui["queue-send"].hidden ? "queue-clear" : "queue-send"].focus();
  }
  onChanged();
}

function clear() {
  for (const { url } of entries) URL.revokeObjectURL(url);
  entries = [];
  ui.queue.replaceChildren();
  ui["queue-error"].textContent = "";
  showQueue();
  ui["add-pick"].focus();
}

const mayAdd = () => chosen()?.writable === true;

// Also called when another gallery is chosen.
export async function showAdd() {
  const name = chosen()?.name;
  ui["add-closed"].hidden = mayAdd();
  ui["add-closed"].textContent = name
    ? `${name} is read-only. To change it, the service needs a state folder (--state DIR) and write access to the folder of the gallery.`
    : "There is no gallery yet. Create one first.";
  for (const button of ui["add-drop"].querySelectorAll("button")) button.disabled = !mayAdd();
  showQueue();
  editor.know(name ? await knownAttributes() : []);
}

// whenChanged() is called after items were added.
export function startAdd(whenChanged) {
  onChanged = whenChanged;
  editor = new AttributeEditor(ui["add-attributes"]);
  for (const [button, field] of [["add-pick", "add-files"], ["add-folder", "add-folder-files"]]) {
    ui[button].addEventListener("click", () => ui[field].click());
    ui[field].addEventListener("change", () => {
      take(ui[field].files);
      ui[field].value = "";
    });
  }
  const isShown = () => !ui["view-add"].hidden;
  acceptDrops(
    (isOver) => document.body.classList.toggle("adding", isOver && isShown()),
    (files) => isShown() && take(files),
  );
  onSubmit(ui["queue-form"], send);
  ui["queue-stop"].addEventListener("click", () => sending?.abort());
  ui["queue-clear"].addEventListener("click", clear);
  addEventListener("beforeunload", (event) => {
    if (sending !== null) event.preventDefault();
  });
}
