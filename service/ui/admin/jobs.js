// The list of jobs, updated each second while one runs.

import { listJobs } from "./api.js";
import { JobPanel, isActive, progressOf, stateBadge, stateText, stepText, titleOf } from "./job.js";
import { withWaiting } from "./report.js";
import { may, state } from "./state.js";
import { failed } from "./work.js";
import { problemOf } from "../shared/alerts.js";
import { announce, element, ui } from "../shared/dom.js";
import { ago } from "../shared/format.js";

const SHOWN = 50;
const RUNNING_MS = 1000;
const RESTING_MS = 15_000;
let jobs = [];
let panel = null;
let timer = 0;
let asking = null;
let onEnded = () => {};

function rowOf(job) {
  const button = element("button", { type: "button", className: "job-open" });
  const title = element("span", { className: "job-title", textContent: titleOf(job) });
  const when = element("span", { className: "hint", textContent: ago(Date.parse(job.created_at)) });
  button.append(title, stateBadge(job), element("span", { className: "job-text", textContent: job.error ?? stepText(job) }), when);
  button.addEventListener("click", () => panel.open(jobs.find(({ id }) => id === job.id) ?? job));
  const row = element("li", { className: "job-row" }, button, ...(isActive(job) ? [progressOf(job)] : []));
  Object.assign(row.dataset, { testid: "job", id: job.id, now: JSON.stringify(job) });
  return row;
}

// Unchanged rows are kept, so that the focus stays.
function showList() {
  const before = new Map([...ui.jobs.children].map((row) => [row.dataset.id, row]));
  const rows = jobs.map((job) => {
    const old = before.get(job.id);
    const isSame = old?.dataset.now === JSON.stringify(job);
    return isSame ? old : rowOf(job);
  });
  const focused = document.activeElement?.closest("[data-testid=job]")?.dataset.id;
  ui.jobs.replaceChildren(...rows);
  if (focused) ui.jobs.querySelector(`[data-id="${focused}"] button`)?.focus({ preventScroll: true });
  ui["jobs-empty"].hidden = jobs.length > 0;
  const active = jobs.filter(isActive).length;
  ui["jobs-count"].hidden = active === 0;
  ui["jobs-count"].textContent = active === 0 ? "" : `${active} running`;
}

function announceEnds(before) {
  const running = new Set(before.filter(isActive).map(({ id }) => id));
  const ended = jobs.filter((job) => running.has(job.id) && !isActive(job));
  for (const job of ended) announce(`${titleOf(job)} is ${stateText(job)}`);
  if (ended.length > 0) onEnded();
}

async function askNow() {
  const before = jobs;
  try {
    jobs = withWaiting(await listJobs(SHOWN));
    ui["jobs-text"].textContent = "";
  } catch (error) {
    const problem = problemOf(error);
    if (problem.needsKey) return failed(problem);
    ui["jobs-text"].textContent = `${problem.title}. Trying again.`;
    return;
  }
  showList();
  const open = jobs.find(({ id }) => id === panel.id);
  if (open) panel.show(open);
  announceEnds(before);
}

// Asks at once and then at intervals. Only one request runs at a time.
export async function follow() {
  clearTimeout(timer);
  if (state.noJobs || !may("jobs")) return;
  asking ??= askNow().finally(() => (asking = null));
  await asking;
  clearTimeout(timer);
  const isOpen = document.body.dataset.access === "open";
  if (isOpen && !document.hidden) timer = setTimeout(follow, jobs.some(isActive) ? RUNNING_MS : RESTING_MS);
}

// Opens a job that was just started or changed.
export async function showJob(job) {
  jobs = withWaiting([job, ...jobs.filter(({ id }) => id !== job.id)]);
  showList();
  panel.open(jobs[0]);
  await follow();
}

// whenEnded() is called after a running job ended.
export function startJobs(whenEnded) {
  onEnded = whenEnded;
  panel = new JobPanel(showJob);
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden && document.body.dataset.access === "open") follow();
  });
}
