// The golden set, labelled queries of the gallery: its figures over time and its wrong answers.

import { listGolden, listGoldenRuns, runGolden } from "./api.js";
import { loadLabels, startLabels } from "./labels.js";
import { chosen, state } from "./state.js";
import { moment, table } from "./status.js";
import { whileBusy } from "./work.js";
import { galleryPath } from "../shared/api.js";
import { announce, element, ui } from "../shared/dom.js";
import { grouped, valueText } from "../shared/format.js";
import { imageOf } from "../shared/images.js";

const SHOWN_RUNS = 20;
const HEAD = ["When", "Model", "Items", "Recall@1", "Recall@5", "Recall@10", "MAP@R", "No-match precision"];
const EMPTY = "There are no labelled queries yet. Label what customers send, images or words, here, with kinlens-index golden add or with POST /galleries/NAME/golden.";
let count = 0; // of labelled queries

const part = (value) => (value === null ? "–" : `${(value * 100).toFixed(1)}%`);

function overTime(runs) {
  const rows = runs.slice(0, SHOWN_RUNS).map((run) => [
    moment(run.at),
    run.bundle_id.slice(0, 12),
    grouped(run.items),
    ...[run.recall_at_1, run.recall_at_5, run.recall_at_10, run.map_at_r, run.no_match_precision].map(part),
  ]);
  const made = table("Figures over time", HEAD, rows, "golden-runs");
  return element("div", { className: "panel-box golden-runs", tabIndex: 0, role: "region", ariaLabel: "Figures over time" }, made);
}

function basis({ judged, no_match: none, left_out: skipped, own_pictures: own, recall_at_1_interval: interval, threshold }) {
  const texts = [`Last run: ${judged} queries with a right item, ${none} without.`];
  if (interval) texts.push(`Recall@1 is between ${part(interval[0])} and ${part(interval[1])} (95% confidence).`);
  if (threshold !== null) texts.push(`A match is a score of ${threshold.toFixed(3)} or more.`);
  if (skipped > 0) texts.push(`${skipped} were skipped; the list below shows why.`);
  if (own > 0) texts.push(`${own} are the images of items and find themselves.`);
  return element("p", { className: "hint", textContent: texts.join(" ") });
}

const thumb = (link, alt) => element("div", { className: "thumb" }, imageOf(link, alt));

const wanted = ({ keys, attribute, value }) =>
  attribute === null ? keys.join(", ") || "no match" : `${attribute} = ${valueText(value)}`;

function worstRow(one, known, generation) {
  const { query } = one;
  const path = galleryPath(state.name);
  const row = element("li", { className: "panel-box golden-row", testid: "golden-worst" });
  const hasImage = !query.texts || query.image_sha256;
  if (hasImage && known.has(query.sha256)) row.append(thumb(`${path}/golden/${query.sha256}/image`, `Query ${query.name}`));
  if (one.best_id !== null && generation === chosen()?.generation) {
    row.append(thumb(`${path}/items/${one.best_id}/image?generation=${generation}`, `Found ${one.best_key}`));
  }
  const found = one.best_key === null ? "nothing" : `${one.best_key} (${one.best_score.toFixed(3)})`;
  const rank = one.rank === null ? "" : `; first right answer at rank ${one.rank}`;
  const text = element("div", { className: "golden-text" });
  const asked = [...(query.texts ?? []).map((words) => words.text), ...(query.crop ? [`crop ${query.crop}`] : [])];
  if (asked.length > 0) text.append(element("p", { textContent: `Asked: ${asked.join(", ")}` }));
  text.append(element("p", { textContent: `Wanted: ${wanted(query)}` }));
  text.append(element("p", { className: "hint", textContent: one.problem || `Found first: ${found}${rank}` }));
  row.append(text);
  return row;
}

function worst({ worst: rows, generation }, queries) {
  const known = new Set(queries.map(({ sha256 }) => sha256));
  const wrong = rows.filter(({ rank, problem }) => rank !== 1 || problem);
  if (wrong.length === 0) return [element("p", { className: "verdict good", textContent: "The first answer to every query was right." })];
  const list = element("ol", { className: "golden-list" }, ...wrong.map((one) => worstRow(one, known, generation)));
  return [element("h2", { textContent: "Wrong answers of the last run" }), list];
}

function showCount() {
  ui["golden-count"].textContent = count === 0 ? "" : `${grouped(count)} labelled`;
  ui["golden-run"].disabled = count === 0;
  ui["golden-empty"].hidden = count > 0;
}

function show(queries, runs, reason = EMPTY) {
  count = queries.length;
  showCount();
  ui["golden-empty"].textContent = reason;
  ui["golden-report"].replaceChildren(...(runs.length === 0 ? [] : [overTime(runs), basis(runs[0]), ...worst(runs[0], queries)]));
}

export async function load() {
  const { name } = state;
  if (name === "") return show([], []);
  try {
    const [queries, runs] = await Promise.all([listGolden(name), listGoldenRuns(name)]);
    if (name !== state.name) return;
    show(queries, runs);
    ui["label-box"].hidden = false;
    await loadLabels();
  } catch (error) {
    if (error.status !== 409) throw error;
    ui["label-box"].hidden = true; // it cannot have, or change, a golden set
    if (count === 0) show([], [], error.detail);
  }
}

export function startGolden() {
  startLabels((change) => {
    count += change;
    showCount();
  });
  ui["golden-run"].addEventListener("click", () => whileBusy(ui["golden-run"], async () => {
    await runGolden(state.name);
    await load();
    announce("The run of the golden set is done.");
  }));
}
