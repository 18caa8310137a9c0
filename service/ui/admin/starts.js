// The forms that start jobs, built from what the service knows of the chosen gallery.

import { startJob } from "/ui/admin/api.js";
import { AttributeEditor } from "/ui/admin/attributes.js";
import { describeChosen, knownModels, state } from "/ui/admin/state.js";
import { busily, failureText } from "/ui/admin/work.js";
import { element, ui } from "/ui/shared/dom.js";
import { plural } from "/ui/shared/format.js";

const SHORT = 12;
const CLASS = "class";
const JOBS = ["shop", "demo"];
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
  const made = element("select", { name }, ...options.map(([value, text]) => element("option", { value, textContent: text })));
  made.dataset.testid = `field-${name}`;
  return made;
}

function input(name, type, more = {}) {
  const made = element("input", { type, name, autocomplete: "off", ...more });
  made.dataset.testid = `field-${name}`;
  return made;
}

// A text field that suggests what is known and takes what is not.
function suggesting(name, known, more = {}) {
  const made = input(name, "text", { spellcheck: false, ...more });
  const list = element("datalist", { id: `start-list-${name}` }, ...known.map(([value, text]) => element("option", { value, textContent: text })));
  made.setAttribute("list", list.id);
  return [made, list];
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
  const box = element("details", { className: "start", name: "start" }, element("summary", { textContent: title }), made);
  box.dataset.testid = `open-${kind}`;
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
  if (others.length === 0) {
    const hint = element("p", { className: "hint", textContent: "There is no other gallery to take over." });
    return element("details", { className: "start", name: "start" }, element("summary", { textContent: "Swap" }), hint);
  }
  const control = select("with", others.map(({ name, size }) => [name, `${name}, ${plural(size, "item")}`]));
  return form("swap", "Swap", text, "Start to swap", [field("Take over from", control)], (data) => ({ with: data.get("with") }));
}

function rebuildForm({ attributes, bundle_id: own }) {
  const models = knownModels().filter(({ id }) => id !== own).map(({ id, galleries }) => [id, `of ${galleries.join(", ")}`]);
  const pattern = { required: true, pattern: "[0-9a-f]{12,64}", title: "12 to 64 digits of 0-9 and a-f", placeholder: "3f1c5a0b77d2" };
  const [model, list] = suggesting("bundle_id", models, { ...pattern, value: models.length === 1 ? models[0][0] : "" });
  const hint = `Its number, or the first ${SHORT} digits. A model must lie in the folder bundles of the service.`;
  const parts = [field("Model", model, hint), list, classField(attributes), lossField(1), swapField()];
  return form("rebuild", "Change the model", "Makes the gallery again with another model beside the old one, and compares both.", "Start to rebuild", parts, (data) => ({
    bundle_id: data.get("bundle_id").trim(),
    class_attribute: data.get("class_attribute"),
    max_recall_loss: Number(data.get("max_recall_loss")) / 100,
    swap: data.get("swap"),
  }));
}

function trainParams(data, overrides) {
  const least = data.get("min_recall_at_1");
  const epochs = data.get("epochs");
  return {
    job: data.get("job").trim(),
    data: data.get("data").trim() || null,
    class_attribute: data.get("class_attribute"),
    overrides: { ...overrides, ...(epochs && { "optimizer.epochs": Number(epochs) }) },
    gate: { max_recall_loss: Number(data.get("max_recall_loss")) / 100, min_recall_at_1: least ? Number(least) / 100 : null },
    swap: data.get("swap"),
  };
}

function trainForm({ attributes }) {
  const [job, jobList] = suggesting("job", JOBS.map((name) => [name, ""]), { required: true, value: JOBS[0] });
  const place = element("div");
  const overrides = new AttributeEditor(place);
  const more = element("details", { className: "more" }, element("summary", { textContent: "Further settings" }), place);
  const parts = [
    field("Training job", job, "A name in training/jobs. A wrong one is answered with the list of all."),
    jobList,
    field("Pictures", input("data", "text", { placeholder: "those of the gallery", spellcheck: false }), "Or the name of a data set that the service was given."),
    field("Rounds (epochs)", input("epochs", "number", { min: 1, step: 1, placeholder: "as the job says" })),
    classField(attributes),
    lossField(0),
    field("Must get right, in percent", percent("min_recall_at_1", "", { placeholder: "anything" }), "How many first answers must be right at least."),
    swapField(),
    more,
  ];
  const text = "Trains a model with pictures, then makes the gallery again with it and compares both. This takes long.";
  return form("train", "Train a model", text, "Start to train", parts, (data) => trainParams(data, overrides.read()));
}

// Builds the forms anew, for another gallery or after a change of it.
export async function showStarts() {
  if (state.noJobs || !state.name) {
    const text = state.noJobs || "There is no gallery yet. Create one first.";
    ui.starts.replaceChildren(element("p", { className: "notice-line", textContent: text }));
    return;
  }
  const found = await describeChosen();
  const forms = [compactForm(found), swapForm(), rebuildForm(found), trainForm(found)];
  ui.starts.replaceChildren(element("h2", { textContent: `Start on ${state.name}` }), ...forms);
}

// Whether a form is open, and may be half filled in.
export const isStarting = () => ui.starts.querySelector(".start[open]") !== null;

// whenStarted(job).
export function startStarts(whenStarted) {
  onStarted = whenStarted;
}
