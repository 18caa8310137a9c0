// The dialog that edits the attributes of one item or of one image in the list to add.

import { patchItems } from "./api.js";
import { AttributeEditor } from "./attributes.js";
import { describeChosen, state } from "./state.js";
import { reportIn, whileBusy } from "./work.js";
import { onSubmit, ui } from "../shared/dom.js";
import { imageOf } from "../shared/images.js";

let editor = null;
let save = null;
let answer = null;

function changesBetween(before, after) {
  const removed = Object.keys(before).filter((name) => !Object.hasOwn(after, name));
  const other = Object.entries(after).filter(([name, value]) => JSON.stringify(before[name]) !== JSON.stringify(value));
  return { ...Object.fromEntries(removed.map((name) => [name, null])), ...Object.fromEntries(other) };
}

// The attributes of the gallery, as suggestions.
export const knownAttributes = async () =>
  (await describeChosen().catch(() => null))?.attributes ?? [];

// Resolves to whether `keep(attributes)` succeeded; false while another item is edited.
export async function editAttributes({ key, image, attributes }, keep) {
  const { name } = state;
  const known = await knownAttributes();
  if (ui.edit.open || name !== state.name) return false;
  ui["edit-title"].textContent = key;
  ui["edit-image"].replaceChildren(imageOf(image, ""));
  ui["edit-error"].textContent = "";
  editor.show(attributes, known);
  save = keep;
  ui.edit.showModal();
  (ui["edit-attributes"].querySelector("input, textarea") ?? ui["edit-save"]).focus();
  return new Promise((resolve) => (answer = resolve));
}

// Resolves to whether something was changed.
export function editItem(item) {
  const { name } = state;
  return editAttributes(item, async (attributes) => {
    const changes = changesBetween(item.attributes, attributes);
    if (Object.keys(changes).length > 0) await patchItems(name, { [item.key]: changes });
  });
}

function done(isSaved) {
  const resolve = answer;
  answer = null;
  if (ui.edit.open) ui.edit.close();
  resolve?.(isSaved);
}

async function saveAndClose() {
  await save(editor.read());
  done(true);
}

export function startEdit() {
  editor = new AttributeEditor(ui["edit-attributes"]);
  onSubmit(ui["edit-form"], () => whileBusy(ui["edit-save"], saveAndClose, reportIn(ui["edit-error"])));
  ui["edit-cancel"].addEventListener("click", () => done(false));
  ui.edit.addEventListener("close", () => done(false));
}
