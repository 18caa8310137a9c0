// One job: its progress, log, report and buttons.

import { changeJob, getLog } from "./api.js";
import { confirmed } from "./confirm.js";
import { isRefused, reportNodes } from "./report.js";
import { may } from "./state.js";
import { moment } from "./status.js";
import { whileBusy, failed } from "./work.js";
import { definitions, element, smallButton, ui } from "../shared/dom.js";

export const KINDS = {
  compact: "Compact",
  swap: "Swap",
  sync: "Sync with a folder",
  rebuild: "Change the model",
  train: "Train a model",
};
export const STATES = { queued: "waiting", running: "running", succeeded: "done", failed: "failed", cancelled: "cancelled" };
const ACTIVE = ["queued", "running"];
const MOST_CHARACTERS = 200_000;

export const isActive = ({ state }) => ACTIVE.includes(state);
export const titleOf = ({ kind, gallery }) => `${KINDS[kind] ?? kind}: ${gallery}`;

// The current step of a job, or its outcome if the state does not show it.
export function stepText(job) {
  if (isRefused(job)) return "The old version stays in place";
  if (job.became === "placed") return "Put in place by a swap";
  if (job.became === "dropped") return "Discarded: a newer job made another version";
  if (job.waits) return "The new version is ready to be put in place";
  return job.state === "succeeded" || job.state === "cancelled" ? "" : job.step;
}

// One word for the state, or "refused" if the gate refused the result.
export const stateText = (job) => (isRefused(job) ? "refused" : (STATES[job.state] ?? job.state));

export const stateBadge = (job) => {
  const made = element("span", { className: "state", textContent: stateText(job), testid: "job-state" });
  made.dataset.state = isRefused(job) ? "refused" : job.state;
  return made;
};

export function progressOf(job) {
  const bar = element("progress", { className: "bar-progress", max: job.total ?? 1, ariaLabel: `Progress of ${titleOf(job)}`, testid: "job-progress" });
  if (job.total && job.state === "running") bar.value = job.done;
  else if (job.state === "queued") bar.value = 0;
  return bar;
}

// onChange(job) is called with the job after a button changed it.
export class JobPanel {
  constructor(onChange) {
    Object.assign(this, { onChange, id: null, offset: 0, reading: false, shown: "" });
    this.title = element("h2", { id: "job-title" });
    this.close = smallButton("Close", {}, () => this.hide());
    this.body = element("div", { className: "job-body" });
    this.buttons = element("div", { className: "buttons job-buttons" });
    this.log = element("pre", { className: "log", tabIndex: 0, role: "region", ariaLabel: "Log of the job", testid: "job-log" });
    const details = element("details", { className: "log-box", open: true }, element("summary", { textContent: "Log" }), this.log);
    const head = element("div", { className: "job-head" }, this.title, this.close);
    ui["job-detail"].append(head, this.body, this.buttons, details);
    ui["job-detail"].setAttribute("role", "region");
    ui["job-detail"].setAttribute("aria-labelledby", "job-title");
  }

  open(job) {
    if (job.id !== this.id) {
      Object.assign(this, { id: job.id, offset: 0, shown: "" });
      this.log.textContent = "";
    }
    ui["job-detail"].hidden = false;
    this.show(job);
    ui["job-detail"].focus({ preventScroll: true });
    ui["job-detail"].scrollIntoView({ block: "nearest" });
  }

  hide() {
    const { id } = this;
    this.id = null;
    ui["job-detail"].hidden = true;
    ui.jobs.querySelector(`[data-id="${id}"] button`)?.focus();
  }

  // Rebuilds the panel only if the job changed, so that selection and focus stay.
  show(job) {
    this.log.dataset.empty = isActive(job) ? "Nothing written yet" : "This job wrote nothing";
    const now = JSON.stringify(job);
    if (now !== this.shown) {
      this.shown = now;
      this.title.textContent = titleOf(job);
      this.body.replaceChildren(...this.#about(job));
      this.#showButtons(job);
    }
    this.readLog();
  }

  #about(job) {
    const step = element("p", { className: "job-step", testid: "job-step" }, stateBadge(job), ` ${stepText(job)}`);
    const failure = element("p", { className: "verdict attention", textContent: job.error ?? "", testid: "job-error" });
    const params = Object.entries(job.params).filter(([, value]) => value !== null)
      .map(([name, value]) => [name, typeof value === "object" ? JSON.stringify(value) : String(value)]);
    const pairs = [
      ["Started by", job.by],
      ["Created", moment(job.created_at)],
      ...(job.ended_at ? [["Ended", moment(job.ended_at)]] : []),
      ...params,
      ["Job id", job.id],
    ];
    const more = element("details", { className: "fold" }, element("summary", { textContent: "Details" }));
    more.append(element("dl", { className: "facts-list" }, ...definitions(pairs)));
    const bar = isActive(job) ? [progressOf(job)] : [];
    return [step, ...bar, ...(job.error ? [failure] : []), ...reportNodes(job.report), more];
  }

  #showButtons(job) {
    const wanted = [];
    if (isActive(job)) wanted.push(["cancel", "Cancel the job", "secondary"]);
    const waits = job.waits && may("models");
    if (waits && isRefused(job)) {
      wanted.push(["keep", "Keep the old version", "primary"], ["swap", "Put the new version in place anyway", "secondary"]);
    } else if (waits) {
      wanted.push(["swap", "Put the new version in place", "primary"]);
    }
    if (may("models") && ["rebuild", "train"].includes(job.kind) && ["failed", "cancelled"].includes(job.state)) wanted.push(["resume", "Resume", "secondary"]);
    const now = [job.id, ...wanted.map(([what]) => what)].join();
    if (now === this.buttons.dataset.shown) return;
    this.buttons.dataset.shown = now;
    this.buttons.replaceChildren(...wanted.map(([what, text, className]) => this.#button(job, what, text, className)));
  }

  #button(job, what, text, className) {
    const button = element("button", { type: "button", className, textContent: text, testid: `job-${what}` });
    button.addEventListener("click", async () => {
      if (what === "keep") return this.hide();
      if (!(await this.#isSure(job, what))) return;
      await whileBusy(button, async () => this.onChange(await changeJob(this.id, what)));
    });
    return button;
  }

  async #isSure(job, what) {
    if (what === "swap" && isRefused(job)) {
      return confirmed({
        title: "Put a refused version in place?",
        text: `It was not good enough to replace the old version. Customers of ${job.gallery} get its answers at once.`,
        action: "Put it in place",
      });
    }
    if (what !== "cancel") return true;
    return confirmed({
      title: "Cancel this job?",
      text: `${titleOf(job)} stops. The gallery does not change.`,
      action: "Cancel the job",
    });
  }

  // Appends new lines of the log and keeps its end in view if it was.
  async readLog() {
    if (this.reading) return;
    this.reading = true;
    const { id } = this;
    try {
      for (let isMore = true; isMore && id === this.id;) {
        const { text, next_offset: next } = await getLog(id, this.offset);
        isMore = next > this.offset;
        if (id === this.id && isMore) this.#append(text, next);
      }
    } catch (error) {
      if (error.status === 401) failed(error);
    } finally {
      this.reading = false;
    }
    if (this.id !== null && id !== this.id) this.readLog();
  }

  #append(text, next) {
    const { log } = this;
    const isAtEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 8;
    this.offset = next;
    log.textContent = (log.textContent + text).slice(-MOST_CHARACTERS);
    if (isAtEnd) log.scrollTop = log.scrollHeight;
  }
}
