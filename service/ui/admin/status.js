// The state of the chosen gallery, its index and its model, and whether the service is ready.

import { getFeedback, getReady } from "./api.js";
import { may, state } from "./state.js";
import { failed } from "./work.js";
import { describeGallery } from "../shared/api.js";
import { definitions, element, ui } from "../shared/dom.js";
import { grouped, percent, plural, valueText } from "../shared/format.js";

const SHOWN_VALUES = 6;
const KINDS = {
  flat: "exact (flat)",
  fp16: "exact, half the memory (fp16)",
  hnsw: "graph (HNSW)",
  "ivf-pq": "compressed (IVF-PQ)",
  "ivf-rabitq": "compressed (IVF-RaBitQ)",
};
const SOURCES = {
  golden: "the golden set of the gallery",
  gallery: "the items of the gallery, each searched among the others",
  bundle: "the model, fitted to other images",
};

const number = (value) => grouped(value ?? 0);
const part = (value) => (value === null || value === undefined ? "not measured" : `${(value * 100).toFixed(2)}%`);
export const moment = (text) => (text ? new Date(text).toLocaleString("en", { dateStyle: "medium", timeStyle: "short" }) : "never");

function box(title, testId, ...children) {
  return element("section", { className: "panel-box", testid: testId }, element("h2", { textContent: title }), ...children);
}

const facts = (pairs) => element("dl", { className: "facts-list" }, ...definitions(pairs));

function note(text, kind) {
  return element("p", { className: `verdict ${kind}`, textContent: text });
}

function indexBox({ index, size, generation, version }) {
  const due = index.compaction_due;
  const pairs = [
    ["Items", number(size)],
    ["Kind of index", index.kind === null ? "none yet: every item is compared" : KINDS[index.kind] ?? index.kind],
    ["Items in the index", number(index.segment_items)],
    ["Added since", number(index.delta)],
    ["Removed since", number(index.tombstones)],
    ["Recall of the index", `${part(index.recall)}${index.target_recall ? `, target ${part(index.target_recall)}` : ""}`],
    ["Index built", moment(index.created_at)],
    ...Object.entries(index.parameters).map(([name, value]) => [name, number(value)]),
    ["Generation", generation],
    ["Version", version.slice(0, 12)],
  ];
  const verdict = due ? note(`Compaction is due: ${due}`, "attention") : note("No compaction needed", "good");
  return box("Index", "status-index", verdict, facts(pairs));
}

function scoresTable(thresholds) {
  const head = ["False matches", "Minimum score"];
  const rows = thresholds.map((one) => [percent(one.false_matches), one.search_score.toFixed(3)]);
  return table("Suggested minimum scores", head, rows);
}

// A small table of texts. The first cell of each row is its heading.
export function table(caption, head, rows, testid) {
  const cells = (row) => row.map((text, index) =>
    element(index === 0 ? "th" : "td", { textContent: text, ...(index === 0 && { scope: "row" }) }));
  return element(
    "table",
    { className: "small-table", testid },
    element("caption", { textContent: caption }),
    element("thead", {}, element("tr", {}, ...head.map((text) => element("th", { scope: "col", textContent: text })))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...cells(row)))),
  );
}

function modelBox({ bundle_id: id, dim, provider, thresholds, created_at: created, image_root_missing: isMissing }) {
  const pairs = [
    ["Model", id.slice(0, 16)],
    ["Vector length", number(dim)],
    ["Runs on", provider],
    ["Gallery created", moment(created)],
  ];
  const found = box("Model", "status-model", facts(pairs));
  if (isMissing) found.append(note("The images cannot be read: their folder is missing, or their store does not answer. Items are found, but their images are not shown.", "attention"));
  if (thresholds.length > 0) found.append(scoresTable(thresholds));
  return found;
}

function guaranteeBox({ guarantee_withdrawn: why }) {
  return box("Guarantee", "status-guarantee", note(`Answers are no longer guaranteed. ${why}. Label queries, and run the golden set.`, "attention"));
}

function calibrationBox({ calibration, no_calibration: why }) {
  const title = ["Probabilities", "status-calibration"];
  if (calibration === null) return box(...title, note(`Results have scores but no probabilities. ${why ?? ""}`.trim(), "plain"));
  const { searches, wrong_hits: wrong, reason } = calibration;
  const fitted = searches === null ? [] : [
    ["Fitted to", `${number(searches)} searches with ${plural(wrong, "wrong hit")}`],
    ["Error of the best hit", part(calibration.error_best)],
    ["Error of the ten best", part(calibration.error_ten)],
  ];
  const rows = [
    ["Source", SOURCES[calibration.source]],
    ["Product attribute", calibration.product],
    ["Products", number(calibration.products)],
    ["Images per product", calibration.views.toFixed(1)],
    ...fitted,
    ["Assumed absent products", percent(calibration.no_match_prior)],
    ...(reason === null ? [] : [["Why no better source", reason]]),
  ];
  return box(...title, facts(rows));
}

function attributeRow({ name, kind, values, minimum, maximum }) {
  if (kind === "number" && minimum !== null) return [name, kind, `${valueText(minimum)} – ${valueText(maximum)}`];
  const shown = (values ?? []).slice(0, SHOWN_VALUES).map(({ value, count }) => `${valueText(value)} (${number(count)})`);
  const isMore = (values ?? []).length > SHOWN_VALUES;
  return [name, kind === "boolean" ? "yes or no" : kind, shown.join(", ") + (isMore ? " and more" : "")];
}

function attributesBox({ attributes }) {
  if (attributes.length === 0) return box("Attributes", "status-attributes", note("No item has attributes.", "plain"));
  const rows = attributes.map(attributeRow);
  return box("Attributes", "status-attributes", table(plural(rows.length, "attribute"), ["Name", "Kind", "Values"], rows));
}

function feedbackBox({ clicked, bought, wrong, pairs }) {
  const counts = { Clicked: clicked, Bought: bought, "Marked wrong": wrong, "Usable for training": pairs };
  return box("Feedback", "status-feedback", facts(Object.entries(counts).map(([name, value]) => [name, number(value)])));
}

function deviceOf({ device, gpu_memory_mb: memory, reason }) {
  return device === "cuda" ? `on the GPU, ${number(Math.round(memory))} MB of it` : `on the CPU: ${reason}`;
}

function readyBox({ status, checks, indexes = {}, queue_depth: waiting, redis, last_error: last }) {
  const isReady = status === "ready";
  const verdict = note(isReady ? "Ready to answer" : "Not ready", isReady ? "good" : "attention");
  const onGpu = Object.entries(indexes).filter(([, { device, reason }]) => device === "cuda" || reason);
  const devices = onGpu.map(([name, index]) => [`Index of ${name}`, deviceOf(index)]);
  const list = [...Object.entries(checks), ...devices];
  const more = [["Searches waiting", number(waiting)], ["Shared cache", redis], ...(last ? [["Last error", last]] : [])];
  return box("Service", "status-ready", verdict, facts([...list, ...more]));
}

function settle({ status, value, reason }, show) {
  if (status === "fulfilled") return [show(value)];
  failed(reason, load);
  return [];
}

async function chosenNow(name) {
  const found = await describeGallery(name);
  return { ...found, counts: found.feedback === "off" || !may("feedback") ? null : await getFeedback(name) };
}

function boxesOf(found) {
  if (found === null) return [];
  const more = found.counts === null ? [] : [feedbackBox(found.counts)];
  if (found.guarantee_withdrawn) more.unshift(guaranteeBox(found));
  return [indexBox(found), modelBox(found), calibrationBox(found), attributesBox(found), ...more];
}

export async function load() {
  const { name } = state;
  ui["status-boxes"].setAttribute("aria-busy", "true");
  const [gallery, ready] = await Promise.allSettled([name ? chosenNow(name) : null, getReady()]);
  if (name !== state.name) return; // another call shows that one
  ui["status-boxes"].replaceChildren(...settle(gallery, boxesOf).flat(), ...settle(ready, readyBox));
  ui["status-boxes"].setAttribute("aria-busy", "false");
}

export function startStatus() {
  ui["status-refresh"].addEventListener("click", load);
}
