// The forms that start jobs, built from the description of the chosen gallery.

import { getJobOptions, startJob } from "./api.js";
import { AttributeEditor } from "./attributes.js";
import { describeChosen, may, modelChoice, state } from "./state.js";
import { reportIn, whileBusy } from "./work.js";
import { element, onSubmit, optionsOf, ui } from "../shared/dom.js";
import { grouped, plural } from "../shared/format.js";

const RECOMMENDED = "shop";
const STARTS = {
  imagenet: "published weights, downloaded",
  none: "random weights",
  current: "the model of this gallery",
};
const NO_MODEL =
  "There is no other model. Train one, or put its bundle into the bundles folder of the state folder (--state).";
const NO_DATA = "To offer a folder of images here, set KINLENS_TRAINING_DATA=NAME=DIR.";
const NO_WEIGHTS = "To offer a file of weights here, set KINLENS_TRAINING_WEIGHTS=NAME=PATH.";
let onStarted = () => {};
let fields = 0;

function field(label, control, hint = "") {
  fields += 1;
  control.id = `start-${fields}`;
  const parts = [element("label", { htmlFor: control.id, textContent: label }), control];
  if (hint) {
    const text = element("p", { className: "hint", id: `${control.id}-hint`, textContent: hint });
    control.setAttribute("aria-describedby", text.id);
    parts.push(text);
  }
  return element("div", { className: "field" }, ...parts);
}

function select(name, options) {
  return element("select", { name, testid: `field-${name}` }, ...optionsOf(options));
}

function input(name, type, more = {}) {
  return element("input", { type, name, autocomplete: "off", ...more, testid: `field-${name}` });
}

const percent = (name, value, more = {}) =>
  input(name, "number", { min: 0, max: 100, step: "any", value, inputMode: "decimal", ...more });

const swapField = () =>
  field("When it is ready", select("swap", [["auto", "Replace the gallery if it is good enough"], ["never", "Wait for my approval"]]));

function classField(attributes) {
  const names = attributes.filter(({ kind }) => kind !== "number").map(({ name }) => name);
  const automatic = ["", "Class, or product if no item has a class"];
  const control = select("class_attribute", [automatic, ...names.map((name) => [name, name])]);
  return field("Judge answers by", control, "An answer is right if it has the same value as the query item.");
}

const lossField = (value) =>
  field("Largest allowed drop (%)", percent("max_recall_loss", value, { required: true }), "By how many percentage points recall@1 may fall.");

function boxOf(kind, title, content) {
  return element("details", { className: "start", name: "start", testid: `open-${kind}` }, element("summary", { textContent: title }), content);
}

// Replaces a form without options: the reason and what to do.
const closed = (kind, title, why) => boxOf(kind, title, element("p", { className: "hint", textContent: why }));

function form(kind, title, text, button, parts, read) {
  const error = element("p", { className: "field-error", role: "alert", testid: "start-error" });
  const send = element("button", { type: "submit", className: "primary", textContent: button, testid: `start-${kind}` });
  const made = element("form", { className: "form" }, element("p", { className: "hint", textContent: text }), ...parts, error, send);
  const box = boxOf(kind, title, made);
  const start = async () => {
    const job = await startJob(kind, state.name, read(new FormData(made)));
    box.open = false;
    await onStarted(job);
  };
  onSubmit(made, () => whileBusy(send, start, reportIn(error)));
  return box;
}

function compactForm({ index }) {
  const found = `${plural(index.delta, "item")} added and ${grouped(index.tombstones)} removed since the index was built.`;
  const due = index.compaction_due ? ` Compaction is due: ${index.compaction_due}.` : "";
  return form("compact", "Compact", `Rebuilds the index without the removed items. ${found}${due}`, "Start compaction", [], () => ({}));
}

function swapForm() {
  const others = state.galleries.filter(({ name }) => name !== state.name);
  const text = `Replaces the items of ${state.name} with those of another gallery, at once and for all users.`;
  if (others.length === 0) return closed("swap", "Swap", "There is no other gallery. Create one under Galleries.");
  const control = select("with", others.map(({ name, size }) => [name, `${name}, ${plural(size, "item")}`]));
  return form("swap", "Swap", text, "Start swap", [field("Replace with", control)], (data) => ({ with: data.get("with") }));
}

function syncForm({ folders }) {
  const control = select("folder", [["", "The image root of the gallery"], ...folders.map((name) => [name, name])]);
  const most = field("Largest part to remove (%)", percent("max_removed", 10, { required: true }), "With more to remove, nothing is changed.");
  const parts = [field("Folder", control), most];
  const text = "Adds, updates, renames and removes items, so that the gallery equals a folder. Uploaded items stay.";
  return form("sync", "Sync with a folder", text, "Start sync", parts, (data) => ({
    folder: data.get("folder") || null,
    max_removed: `${data.get("max_removed")}%`,
  }));
}

function rebuildForm({ attributes, bundle_id: own }, { bundles }) {
  const models = bundles.filter(({ bundle_id: id }) => id !== own).map(modelChoice);
  if (models.length === 0) return closed("rebuild", "Change the model", NO_MODEL);
  const model = field("Model", select("bundle_id", models), "The model of the service and the models in its state folder.");
  const parts = [model, classField(attributes), lossField(1), swapField()];
  return form("rebuild", "Change the model", "Builds a second version of the gallery with another model and compares both.", "Start rebuild", parts, (data) => ({
    bundle_id: data.get("bundle_id"),
    class_attribute: data.get("class_attribute") || null,
    max_recall_loss: Number(data.get("max_recall_loss")) / 100,
    swap: data.get("swap"),
  }));
}

function trainParams(data, overrides) {
  const least = data.get("min_recall_at_1");
  const [epochs, weights] = [data.get("epochs"), data.get("weights")];
  return {
    job: data.get("job"),
    data: data.get("data") || null,
    class_attribute: data.get("class_attribute") || null,
    overrides: {
      ...overrides,
      ...(epochs && { "optimizer.epochs": Number(epochs) }),
      ...(weights && { "model.weights": weights }),
    },
    gate: { max_recall_loss: Number(data.get("max_recall_loss")) / 100, min_recall_at_1: least ? Number(least) / 100 : null },
    swap: data.get("swap"),
    feedback: data.get("feedback") === "yes",
  };
}

function feedbackField({ feedback }) {
  if (feedback === "off") return [];
  const control = select("feedback", [["", "Do not use"], ["yes", "Use for training"]]);
  return [field("Feedback of customers", control, "Clicks, purchases and results marked wrong. Status shows how many there are.")];
}

function trainForm(found, options) {
  const { attributes } = found;
  if (options.no_training) return closed("train", "Train a model", options.no_training);
  const named = (names) => names.map((name) => [name, STARTS[name] ?? name]);
  const job = select("job", named(options.training_jobs));
  job.value = RECOMMENDED;
  const jobs = element(
    "details",
    { className: "more", testid: "research-jobs" },
    element("summary", { textContent: "Another training job (research)" }),
    field("Training job", job, `${RECOMMENDED} is recommended: ten minutes for up to 1,200 images. adapt takes one or two minutes and gains less. The others repeat published experiments.`),
  );
  const data = select("data", [["", "Images of the gallery"], ...named(options.data)]);
  const weights = select("weights", [["", "Default of the job"], ...named(options.weights)]);
  const hasWeights = options.weights.some((name) => !(name in STARTS));
  const editor = element("div");
  const overrides = new AttributeEditor(editor);
  const more = element("details", { className: "more" }, element("summary", { textContent: "Further settings" }), editor);
  const parts = [
    field("Images", data, options.data.length > 0 ? "" : NO_DATA),
    field("Start from", weights, hasWeights ? "" : NO_WEIGHTS),
    ...feedbackField(found),
    field("Epochs", input("epochs", "number", { min: 1, step: 1, placeholder: "Default of the job" })),
    classField(attributes),
    lossField(0),
    field("Minimum recall@1 (%)", percent("min_recall_at_1", "", { placeholder: "None" }), "The share of first answers that must be right."),
    swapField(),
    jobs,
    more,
  ];
  const text = "Trains a model on images, builds a second version of the gallery with it and compares both. This takes a while.";
  return form("train", "Train a model", text, "Start training", parts, (data) => trainParams(data, overrides.read()));
}

let shownFor = ""; // the gallery of the forms

// Rebuilds the forms, for another gallery or after a change of it.
export async function showStarts() {
  if (state.noJobs || !state.name) {
    const text = state.noJobs || "There is no gallery yet. Create one first.";
    ui.starts.replaceChildren(element("p", { className: "notice-line", textContent: text }));
    return;
  }
  const { name } = state;
  const wasOpen = isStarting();
  const [found, options] = await Promise.all([describeChosen(), getJobOptions()]);
  if (name !== state.name) return; // another call shows that one
  if (shownFor === name && !wasOpen && isStarting()) return; // the user opened a form
  shownFor = name;
  const ofModels = may("models") ? [rebuildForm(found, options), trainForm(found, options)] : [];
  const forms = [compactForm(found), syncForm(options), swapForm(), ...ofModels];
  ui.starts.replaceChildren(element("h2", { textContent: `Start on ${name}` }), ...forms);
}

// Whether a form is open and may be partly filled in.
export const isStarting = () => ui.starts.querySelector(".start[open]") !== null;

// whenStarted(job) is called after a job was started.
export function startStarts(whenStarted) {
  onStarted = whenStarted;
}
