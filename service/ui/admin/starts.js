// The forms that start jobs, built from what the service knows of the chosen gallery.

import { getJobOptions, startJob } from "/ui/admin/api.js";
import { AttributeEditor } from "/ui/admin/attributes.js";
import { describeChosen, modelChoice, state } from "/ui/admin/state.js";
import { busily, failureText } from "/ui/admin/work.js";
import { element, optionsOf, ui } from "/ui/shared/dom.js";
import { plural } from "/ui/shared/format.js";

const CLASS = "class";
const RECOMMENDED = "shop";
const STARTS = {
  imagenet: "published weights, downloaded",
  none: "random weights",
  current: "the model of this gallery",
};
const NO_MODEL =
  "No other model is known here. Train one, or put its bundle into the folder bundles of the state folder.";
const NO_DATA = "Name a folder of pictures with KINLENS_TRAINING_DATA=NAME=DIR, and it can be chosen here.";
const NO_WEIGHTS = "Name a file of weights with KINLENS_TRAINING_WEIGHTS=NAME=PATH, and it can be chosen here.";
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
  const made = element("select", { name }, ...optionsOf(options));
  made.dataset.testid = `field-${name}`;
  return made;
}

function input(name, type, more = {}) {
  const made = element("input", { type, name, autocomplete: "off", ...more });
  made.dataset.testid = `field-${name}`;
  return made;
}

const percent = (name, value, more = {}) =>
  input(name, "number", { min: 0, max: 100, step: "any", value, inputMode: "decimal", ...more });

const swapField = () =>
  field("When it is ready", select("swap", [["auto", "put it in place if it is good enough"], ["never", "wait until I put it in place"]]));

function classField(attributes) {
  const names = attributes.filter(({ kind }) => kind !== "number").map(({ name }) => name);
  if (!names.includes(CLASS)) names.push(CLASS);
  const control = select("class_attribute", names.map((name) => [name, name]));
  control.value = CLASS;
  return field("Judge answers by", control, "An answer is right if it has the same value as the item it was asked for.");
}

const lossField = (value) =>
  field("May lose, in percent", percent("max_recall_loss", value, { required: true }), "How much fewer first answers may be right.");

function boxOf(kind, title, content) {
  const box = element("details", { className: "start", name: "start" }, element("summary", { textContent: title }), content);
  box.dataset.testid = `open-${kind}`;
  return box;
}

// In place of a form that has nothing to choose from: why, and the cure.
const closed = (kind, title, why) => boxOf(kind, title, element("p", { className: "hint", textContent: why }));

function form(kind, title, text, button, parts, read) {
  const error = element("p", { className: "field-error", role: "alert" });
  error.dataset.testid = "start-error";
  const send = element("button", { type: "submit", className: "primary", textContent: button });
  send.dataset.testid = `start-${kind}`;
  const made = element("form", { className: "form" }, element("p", { className: "hint", textContent: text }), ...parts, error, send);
  made.addEventListener("submit", (event) => {
    event.preventDefault();
    error.textContent = "";
    const start = async () => {
      const job = await startJob(kind, state.name, read(new FormData(made)));
      box.open = false;
      await onStarted(job);
    };
    busily(send, start, (fault) => {
      error.textContent = fault instanceof RangeError ? fault.message : failureText(fault);
    });
  });
  const box = boxOf(kind, title, made);
  return box;
}

function compactForm({ index }) {
  const found = `${plural(index.delta, "item")} added and ${index.tombstones.toLocaleString("en")} removed since the index was made.`;
  const due = index.compaction_due ? ` It is time: ${index.compaction_due}.` : "";
  return form("compact", "Compact", `Makes the index anew, without what was removed. ${found}${due}`, "Start to compact", [], () => ({}));
}

function swapForm() {
  const others = state.galleries.filter(({ name }) => name !== state.name);
  const text = `The items of another gallery become those of ${state.name}, at once and for everybody.`;
  if (others.length === 0) return closed("swap", "Swap", "There is no other gallery to take over. Create one under Galleries.");
  const control = select("with", others.map(({ name, size }) => [name, `${name}, ${plural(size, "item")}`]));
  return form("swap", "Swap", text, "Start to swap", [field("Take over from", control)], (data) => ({ with: data.get("with") }));
}

function rebuildForm({ attributes, bundle_id: own }, { bundles }) {
  const models = bundles.filter(({ bundle_id: id }) => id !== own).map(modelChoice);
  if (models.length === 0) return closed("rebuild", "Change the model", NO_MODEL);
  const model = field("Model", select("bundle_id", models), "The model of the service, and those in its state folder.");
  const parts = [model, classField(attributes), lossField(1), swapField()];
  return form("rebuild", "Change the model", "Makes the gallery again with another model beside the old one, and compares both.", "Start to rebuild", parts, (data) => ({
    bundle_id: data.get("bundle_id"),
    class_attribute: data.get("class_attribute"),
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
    class_attribute: data.get("class_attribute"),
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
  const control = select("feedback", [["", "leave it out"], ["yes", "learn from it too"]]);
  return [field("Feedback of customers", control, "What they clicked, bought and called wrong; Status says how much there is.")];
}

function trainForm(found, options) {
  const { attributes } = found;
  if (options.no_training) return closed("train", "Train a model", options.no_training);
  const named = (names) => names.map((name) => [name, STARTS[name] ?? name]);
  const job = select("job", named(options.training_jobs));
  job.value = RECOMMENDED;
  const jobs = element(
    "details",
    { className: "more" },
    element("summary", { textContent: "Another training job (research)" }),
    field("Training job", job, `${RECOMMENDED} is the recommended one and takes ten minutes up to 1,200 images; adapt takes one or two and gains less; the others repeat published experiments.`),
  );
  jobs.dataset.testid = "research-jobs";
  const data = select("data", [["", "those of the gallery"], ...named(options.data)]);
  const weights = select("weights", [["", "as the job says"], ...named(options.weights)]);
  const hasWeights = options.weights.some((name) => !(name in STARTS));
  const place = element("div");
  const overrides = new AttributeEditor(place);
  const more = element("details", { className: "more" }, element("summary", { textContent: "Further settings" }), place);
  const parts = [
    field("Pictures", data, options.data.length > 0 ? "" : NO_DATA),
    field("Start from", weights, hasWeights ? "" : NO_WEIGHTS),
    ...feedbackField(found),
    field("Rounds (epochs)", input("epochs", "number", { min: 1, step: 1, placeholder: "as the job says" })),
    classField(attributes),
    lossField(0),
    field("Must get right, in percent", percent("min_recall_at_1", "", { placeholder: "anything" }), "How many first answers must be right at least."),
    swapField(),
    jobs,
    more,
  ];
  const text = "Trains a model with pictures, then makes the gallery again with it and compares both. This takes long.";
  return form("train", "Train a model", text, "Start to train", parts, (data) => trainParams(data, overrides.read()));
}

let shownFor = ""; // the gallery of the forms

// Builds the forms anew, for another gallery or after a change of it.
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
  if (shownFor === name && !wasOpen && isStarting()) return; // a form was opened meanwhile
  shownFor = name;
  const forms = [compactForm(found), swapForm(), rebuildForm(found, options), trainForm(found, options)];
  ui.starts.replaceChildren(element("h2", { textContent: `Start on ${name}` }), ...forms);
}

// Whether a form is open, and may be half filled in.
export const isStarting = () => ui.starts.querySelector(".start[open]") !== null;

// whenStarted(job).
export function startStarts(whenStarted) {
  onStarted = whenStarted;
}
