// The report of a job: a comparison of old and new, and whether the new version was good enough.

import { table } from "./status.js";
import { element } from "../shared/dom.js";
import { grouped } from "../shared/format.js";

const NONE = "not measured";
const LISTED_FAILURES = 5;

const share = (value) => (typeof value === "number" ? `${(value * 100).toFixed(2)}%` : NONE);
const points = (value) => `${value > 0 ? "+" : ""}${(value * 100).toFixed(2)} points`;
const count = (value) => (typeof value === "number" ? grouped(value) : NONE);
const time = (value) => (typeof value === "number" ? `${value.toFixed(1)} ms` : NONE);

function difference(before, after, show, change) {
  if (typeof before !== "number" || typeof after !== "number") return "";
  return show(Math.abs(after - before)) === show(0) ? "the same" : change(after - before);
}

const signed = (show) => (value) => `${value > 0 ? "+" : "−"}${show(Math.abs(value))}`;

// Rows of figures. A figure that was measured for neither side is omitted.
function figureRows(lines, before, after) {
  const isMeasured = ([, name]) => [before, after].some((side) => side[name] !== undefined && side[name] !== null);
  return lines.filter(isMeasured).map(([text, name, show, change]) =>
    [text, show(before[name]), show(after[name]), difference(before[name], after[name], show, change)]);
}

const HEADS = ["Measure", "Old", "New", "Difference"];

function goldenTable({ golden: { old: before, new: after, judged, ...both } }) {
  const [old, now] = [{ ...before, recall_at_1: both.old_recall_at_1 }, { ...after, recall_at_1: both.new_recall_at_1 }];
  const rows = figureRows([
    ["First answer right (recall@1)", "recall_at_1", share, points],
    ["Right answers ranked first (MAP@R)", "map_at_r", share, points],
    ["No-match precision", "no_match_precision", share, points],
  ], old, now);
  return table(`Golden set, ${count(judged)} queries`, HEADS, rows, "report-golden");
}

function comparison({ old: before, new: after, k = 10 }) {
  const lines = [
    ["First answer right (recall@1)", "recall_at_1", share, points],
    [`Right among the first ${k} (recall@${k})`, "recall_at_k", share, points],
    ["Items", "items", count, signed(count)],
    ["Latency of one search", "ms_per_query", time, signed(time)],
  ];
  const rows = figureRows(lines, before, after);
  const models = ["Model", before.bundle_id.slice(0, 12), after.bundle_id.slice(0, 12), before.bundle_id === after.bundle_id ? "the same" : ""];
  return table("Items of the gallery, each searched among the others", HEADS, [models, ...rows], "report-table");
}

function line(text, testId, kind = "") {
  return element("p", { textContent: text, className: kind, testid: testId });
}

function basis({ overlap_at_k: overlap, k, judged, queries, class_attribute: name }) {
  const texts = [];
  if (typeof overlap === "number") texts.push(`Old and new agree on ${share(overlap)} of the first ${k} answers.`);
  if (typeof queries === "number") {
    texts.push(`Queried with ${count(queries)} items; ${count(judged)} of them can be judged by ${name}.`);
  }
  return texts.length > 0 ? [line(texts.join(" "), "report-basis", "hint")] : [];
}

function gateLine({ gate }) {
  if (!gate) return [];
  let word = gate.passed ? "Good enough to replace the old version" : "Refused, not good enough to replace the old version";
  if (gate.passed === null) word = "Not judged, you decide whether to put it in place";
  return [line(`${word}: ${gate.reason}`, "report-gate", `verdict ${gate.passed ? "good" : "attention"}`)];
}

function training({ training: found }) {
  if (!found) return [];
  const recalls = (figures) => Object.entries(figures ?? {})
    .filter(([name]) => name.includes("@") && name in (found.figures ?? {}))
    .map(([name, value]) => `${name} ${value.toFixed(1)}%`).join(", ");
  const [epoch, total] = found.epochs ?? [];
  const [after, before] = [recalls(found.figures), recalls(found.trunk)];
  const recall = after && `; on unseen classes: ${after}`;
  const epochs = `Trained for ${epoch} of ${total} epochs${recall}${before && `; before: ${before}`}.`;
  const choice = found.choice ? [line(found.choice, "report-choice", "hint")] : [];
  return [line(epochs, "report-training", "hint"), ...choice, ...(found.verdict ? [line(found.verdict, "report-gain", "hint")] : [])];
}

function rebuilt({ rebuild: found }) {
  if (!found || !found.missing) return [];
  const names = found.failures.slice(0, LISTED_FAILURES).map((one) => one.key ?? Object.values(one)[0]).join(", ");
  return [line(`${count(found.missing)} of ${count(found.found)} items were skipped because their images cannot be read: ${names}.`, "report-missing", "verdict attention")];
}

function synced({ sync: found, skipped }) {
  if (!found) return [];
  const kinds = ["added", "replaced", "updated", "renamed", "removed"].map((kind) => `${count(found[kind])} ${kind}`).join(", ");
  const would = found.dry_run || found.refused ? "Would be changed" : "Changed";
  const missing = skipped ? ` ${count(skipped)} images cannot be read: ${found.failures.slice(0, LISTED_FAILURES).map(({ key }) => key).join(", ")}.` : "";
  return [line(`${would}: ${kinds}.${missing}`, "report-sync", skipped ? "verdict attention" : "")];
}

function rest({ segment }) {
  return segment ? [line("The index was rebuilt.", "report-segment")] : [];
}

// Figures that did not decide are folded, so that the report shows one verdict.
function folded(nodes) {
  if (nodes.length === 0) return [];
  const made = element("details", { className: "fold", testid: "report-others" }, element("summary", { textContent: "Other figures (not used for the decision)" }), ...nodes);
  return [made];
}

// Whether the gate refused the result of the job and it was not put in place since.
export const isRefused = ({ state, report }) =>
  state === "succeeded" && report?.gate?.passed === false && report.swapped !== true;

// The nodes that show `report`; none for a job without one.
export function reportNodes(report) {
  if (!report) return [];
  const items = report.old && report.new ? [comparison(report), ...basis(report)] : [];
  const golden = report.golden ? [goldenTable(report)] : [];
  const isGolden = report.gate?.by === "golden";
  const [deciding, second] = isGolden ? [golden, items] : [items, golden];
  const note = report.gate?.note ? [line(report.gate.note, "report-note", "hint")] : [];
  const asides = [...second, ...training(report), ...note];
  const others = report.gate ? folded(asides) : asides;
  const swapped = report.swapped ? [line("The new version is in place.", "report-swapped", "verdict good")] : [];
  return [...gateLine(report), ...deciding, ...others, ...rebuilt(report), ...synced(report), ...rest(report), ...swapped];
}

const MODEL_JOBS = ["rebuild", "train"];
const REPLACING = [...MODEL_JOBS, "swap"];

// Adds two fields to `jobs`, newest first. `waits`: whether its result can be put in place by hand.
// `became`: "placed" if a swap put it in place, "dropped" if a newer job made it obsolete.
export function withWaiting(jobs) {
  const [replaced, placed] = [new Set(), new Set()];
  return jobs.map((job) => {
    const { id, kind, gallery, state, report, params } = job;
    const isMade = MODEL_JOBS.includes(kind) && state === "succeeded" && report?.swapped === false;
    const isLate = isMade && (placed.has(id) || replaced.has(gallery));
    const became = isLate ? (placed.has(id) ? "placed" : "dropped") : null;
    const waits = isMade && !isLate;
    if (kind === "swap" && state === "succeeded") placed.add(params.job);
    if (REPLACING.includes(kind) && state === "succeeded") replaced.add(gallery);
    return { ...job, waits, became };
  });
}
