// Creates and deletes galleries.

import { createGallery, deleteGallery, getJobOptions } from "./api.js";
import { confirmed } from "./confirm.js";
import { choose, loadGalleries, modelChoice, state } from "./state.js";
import { moment } from "./status.js";
import { whileBusy } from "./work.js";
import { showNotice } from "../shared/alerts.js";
import { element, onSubmit, optionsOf, smallButton, ui } from "../shared/dom.js";
import { plural } from "../shared/format.js";

const SHORT = 12;

async function remove({ name, size }, button) {
  const isSure = await confirmed({
    title: `Delete the gallery ${name}?`,
    text: `Its ${plural(size, "item")} and the images added here are deleted too. This cannot be undone.`,
    action: "Delete the gallery",
    word: name,
  });
  if (!isSure) return;
  await whileBusy(button, async () => {
    await deleteGallery(name);
    showNotice(`${name} was deleted.`);
    await loadGalleries();
    ui["galleries-title"].focus();
  });
}

function rowOf(gallery) {
  const { name, size, bundle_id: model, created_at: created, managed, writable } = gallery;
  const open = smallButton("Open", { about: name }, () => {
    choose(name);
    location.hash = "#items";
  });
  const shown = { about: name, testid: "gallery-delete", className: "danger", disabled: !managed };
  const drop = smallButton("Delete", shown, (button) => remove(gallery, button));
  const notes = [
    plural(size, "item"),
    `model ${model.slice(0, SHORT)}`,
    `created ${moment(created)}`,
    ...(writable ? [] : ["read-only"]),
    ...(managed ? [] : ["set at the start of the service, so it cannot be deleted here"]),
  ];
  const text = element("div", { className: "gallery-text" }, element("h2", { textContent: name }));
  text.append(element("p", { className: "hint", textContent: notes.join(" · ") }));
  const row = element("li", { className: "panel-box gallery-row" }, text, open, drop);
  Object.assign(row.dataset, { testid: "gallery-row", name });
  return row;
}

export async function showGalleries() {
  ui["gallery-list"].replaceChildren(...state.galleries.map(rowOf));
  const { bundles } = state.noJobs ? { bundles: [] } : await getJobOptions();
  const chosenModel = ui["gallery-model"].value;
  ui["gallery-model"].replaceChildren(...optionsOf([["", "The model of the service"], ...bundles.map(modelChoice)]));
  ui["gallery-model"].value = chosenModel;
  if (ui["gallery-model"].selectedIndex < 0) ui["gallery-model"].value = "";
}

async function create() {
  const { name } = await createGallery(ui["gallery-name"].value, ui["gallery-model"].value);
  ui["gallery-form"].reset();
  state.name = name;
  await loadGalleries();
  choose(name);
  showNotice(`${name} was created. Add items to it.`);
}

export function startGalleries() {
  onSubmit(ui["gallery-form"], ({ submitter }) => whileBusy(submitter ?? ui["gallery-form"], create));
}
