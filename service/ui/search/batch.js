// A batch of images: one row for each, a few searches at a time. A failure affects only its own row.

import { titleOf } from "./cards.js";
import { problemOf } from "../shared/alerts.js";
import { announce, element, smallButton, ui } from "../shared/dom.js";
import { percent, plural } from "../shared/format.js";
import { imageOf, linkOf } from "../shared/images.js";
import { withRetries } from "../shared/retries.js";

const AT_ONCE = 4;
const SHOWN = 6;
const MAX_WAIT_S = 10;
const TRIES = 3;
export const MAX_IMAGES = 200;

export const rowOf = (query) => ({ query, answer: null, problem: null, state: "waiting", node: null });

const rowsIn = (answer) => answer.groups?.map(({ hits }) => hits[0]) ?? answer.hits;

function hitImage(hit) {
  const image = imageOf(linkOf(hit), hit.key);
  image.title = `${titleOf(hit.key, hit.attributes)} · ${hit.score.toFixed(2)}`;
  const caption = element("span", { className: "batch-score" });
  caption.textContent = hit.probability === null ? hit.score.toFixed(2) : percent(hit.probability);
  return element("span", { className: "batch-hit" }, image, caption);
}

// Whether the best product may be taken without a person; "" where that was not asked for.
export const acceptedText = ({ accepted }) => (accepted == null ? "" : accepted ? "Accepted. " : "Not sure. ");

function stateText(row, handlers) {
  if (row.state === "waiting") return "Waiting";
  if (row.state === "running") return "Searching…";
  if (row.state === "failed") return `${row.problem.title}. ${row.problem.detail}`;
  const passing = rowsIn(row.answer).filter(({ score }) => score >= handlers.minScore());
  if (passing.length === 0) return "No match";
  const [best] = passing;
  const noun = row.answer.groups ? "group" : "result";
  return `${acceptedText(row.answer)}${plural(passing.length, noun)}, best ${titleOf(best.key, best.attributes)} (${best.score.toFixed(2)})`;
}

function hitsOf(row, handlers) {
  if (row.state !== "done") return [];
  const passing = rowsIn(row.answer).filter(({ score }) => score >= handlers.minScore());
  return passing.slice(0, SHOWN).map(hitImage);
}

function paint(row, handlers) {
  const { name, preview } = row.query;
  const text = element("span", { className: "batch-text" });
  text.append(element("span", { className: "batch-name", textContent: name, title: name }));
  const state = element("span", { className: "batch-state", textContent: stateText(row, handlers), testid: "batch-state" });
  text.append(state);
  const head = element("span", { className: "batch-query" }, imageOf(preview, ""));
  const hits = element("span", { className: "batch-hits" }, ...hitsOf(row, handlers));
  const canOpen = row.state === "done";
  const main = element(canOpen ? "button" : "div", { className: "batch-open" }, head, text, hits);
  if (canOpen) {
    main.type = "button";
    main.dataset.testid = "batch-open";
    main.setAttribute("aria-label", `Open ${name}: ${state.textContent}`);
    main.addEventListener("click", () => handlers.onOpen(row));
  }
  row.node.replaceChildren(main);
  row.node.dataset.state = row.state;
  if (row.state !== "failed") return;
  const shown = { ariaLabel: `Try ${name} again`, testid: "batch-again" };
  row.node.append(smallButton("Try again", shown, () => handlers.onAgain(row)));
}

export function showSummary(rows) {
  const count = (state) => rows.filter((row) => row.state === state).length;
  const [done, failed] = [count("done"), count("failed")];
  const isOver = done + failed === rows.length;
  const parts = [`${plural(rows.length, "photo")}: ${done} answered`];
  if (failed > 0) parts.push(`${failed} failed`);
  if (!isOver) parts.push(`${rows.length - done - failed} to go`);
  ui.summary.textContent = parts.join(", ");
  ui.progress.style.setProperty("--done", `${((done + failed) / rows.length) * 100}%`);
  ui.progress.classList.toggle("measured", !isOver);
  ui.progress.hidden = isOver;
  ui.cancel.hidden = isOver;
  ui.results.setAttribute("aria-busy", String(!isOver));
  if (isOver) announce(ui.summary.textContent);
}

// handlers: onOpen(row), onAgain(row), minScore().
export function showRows(rows, handlers) {
  ui.batch.replaceChildren(...rows.map((row) => {
    row.node = element("li", { className: "batch-row", testid: "batch-row" });
    paint(row, handlers);
    return row.node;
  }));
  showSummary(rows);
}

const waitOf = ({ retryAfter_s }) => Math.min(retryAfter_s, MAX_WAIT_S);

async function runRow(row, ask, signal) {
  try {
    const answer = await withRetries(() => ask(row.query, signal), TRIES, waitOf, signal);
    if (!signal.aborted) Object.assign(row, { answer, state: "done" });
  } catch (error) {
    if (signal.aborted) return; // the caller that cancelled the run sets the states of its rows
    row.state = "failed";
    row.problem = problemOf(error);
  }
}

// Searches for each waiting row, AT_ONCE at a time. ask(query, signal) resolves to an answer.
export async function runRows(rows, ask, signal, onRow) {
  const queue = rows.filter(({ state }) => state === "waiting");
  const worker = async () => {
    for (let row = queue.shift(); row && !signal.aborted; row = queue.shift()) {
      row.state = "running";
      onRow(row);
      await runRow(row, ask, signal);
      onRow(row);
    }
  };
  await Promise.all(Array.from({ length: AT_ONCE }, worker));
}

export function repaint(row, handlers) {
  if (!row.node?.isConnected) return;
  const hadFocus = row.node.contains(document.activeElement);
  paint(row, handlers);
  if (hadFocus) (row.node.querySelector("button") ?? ui.summary).focus({ preventScroll: true });
}
