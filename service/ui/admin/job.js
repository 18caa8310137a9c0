// One job: how far it is, what it writes, what it found, and what can be done about it.

import { changeJob, getLog } from "/ui/admin/api.js";
import { confirmed } from "/ui/admin/confirm.js";
import { isRefused, reportNodes } from "/ui/admin/report.js";
import { moment } from "/ui/admin/status.js";
import { busily, failed } from "/ui/admin/work.js";
import { definitions, element, ui } from "/ui/shared/dom.js";

export const KINDS = {
  compact: "Compact",
  swap: "Swap",
  rebuild: "Change the model",
  train: "Train a model",
};
export const STATES = { queued: "waiting", running: "running", succeeded: "done", failed: "failed", cancelled: "cancelled" };
const ACTIVE = ["queued", "running"];
const MOST_CHARACTERS = 200_000;

export const isActive = ({ state }) => ACTIVE.includes(state);
export const titleOf = ({ kind, gallery }) => `${KINDS[kind] ?? kind}: ${gallery}`;

// What it does, or what became of it beyond its state.
export function stepText(job) {
  if (isRefused(job)) return "The old one stays in place";
  if (job.became === "placed") return "Put in place by a swap";
  if (job.became === "dropped") return "Dropped: a newer job has made another one since";
  if (job.waits) return "The new one waits to be put in place";
  return job.state === "succeeded" || job.state === "cancelled" ? "" : job.step;
}

// In one word, as the verdict of its report has it.
export const stateText = (job) => (isRefused(job) ? "refused" : (STATES[job.state] ?? job.state));

export const stateBadge = (job) => {
  const made = element("span", { className: "state", textContent: stateText(job) });
  made.dataset.state = isRefused(job) ? "refused" : job.state;
  made.dataset.testid = "job-state";
  return made;
};

export function progressOf(job) {
  const bar = element("progress", { className: "bar-progress", max: job.total ?? 1, ariaLabel: `Progress of ${titleOf(job)}` });
  if (job.total && job.state === "running") bar.value = job.done;
  else if (job.state === "queued") bar.value = 0;
  bar.dataset.testid = "job-progress";
  return bar;
}

// `onChange(job)` gets what a button made of it.
export class JobPanel {
  constructor(onChange) {
    Object.assign(this, { onChange, id: null, offset: 0, reading: false, told: "" });
    this.title = element("h2", { id: "job-title" });
    this.close = element("button", { type: "button", className: "small", textContent: "Close" });
    this.close.addEventListener("click", () => this.hide());
    this.body = element("div", { className: "job-body" });
    this.buttons = element("div", { className: "buttons job-buttons" });
    this.log = element("pre", { className: "log", tabIndex: 0, role: "region", ariaLabel: "What the job wrote" });
    this.log.dataset.testid = "job-log";
    const details = element("details", { className: "log-box", open: true }, element("summary", { textContent: "Log" }), this.log);
    const head = element("div", { className: "job-head" }, this.title, this.close);
    ui["job-detail"].append(head, this.body, this.buttons, details);
    ui["job-detail"].setAttribute("role", "region");
    ui["job-detail"].setAttribute("aria-labelledby", "job-title");
  }

  open(job) {
    if (job.id !== this.id) {
      Object.assign(this, { id: job.id, offset: 0, told: "" });
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

  // Built anew only if something is new: what is selected and in focus stays.
  show(job) {
    this.log.dataset.empty = isActive(job) ? "Nothing written yet" : "This job wrote nothing";
    const now = JSON.stringify(job);
    if (now !== this.told) {
      this.told = now;
      this.title.textContent = titleOf(job);
      this.body.replaceChildren(...this.#about(job));
      this.#showButtons(job);
    }
    this.readLog();
  }

  #about(job) {
    const step = element("p", { className: "job-step" }, stateBadge(job), ` ${stepText(job)}`);
    step.dataset.testid = "job-step";
    const failure = element("p", { className: "verdict attention", textContent: job.error ?? "" });
    failure.dataset.testid = "job-error";
    const params = Object.entries(job.params).filter(([, value]) => value !== null)
      .map(([name, value]) => [name, typeof value === "object" ? JSON.stringify(value) : String(value)]);
    const pairs = [
      ["Started by", job.by],
      ["Asked for", moment(job.created_at)],
      ...(job.ended_at ? [["Ended", moment(job.ended_at)]] : []),
      ...params,
      ["Number", job.id],
    ];
    const more = element("details", { className: "fold" }, element("summary", { textContent: "Details" }));
    more.append(element("dl", { className: "facts-list" }, ...definitions(pairs)));
    const bar = isActive(job) ? [progressOf(job)] : [];
    return [step, ...bar, ...(job.error ? [failure] : []), ...reportNodes(job.report), more];
  }

  #showButtons(job) {
    const wanted = [];
    if (isActive(job)) wanted.push(["cancel", "Cancel the job", "secondary"]);
    if (job.waits && isRefused(job)) {
      wanted.push(["keep", "Keep the old one", "primary"], ["swap", "Put the new one in place anyway", "secondary"]);
    } else if (job.waits) {
      wanted.push(["swap", "Put the new one in place", "primary"]);
    }
    if (["rebuild", "train"].includes(job.kind) && ["failed", "cancelled"].includes(job.state)) wanted.push(["resume", "Go on with it", "secondary"]);
    const now = [job.id, ...wanted.map(([what]) => what)].join();
    if (now === this.buttons.dataset.shown) return;
    this.buttons.dataset.shown = now;
    this.buttons.replaceChildren(...wanted.map(([what, text, className]) => this.#button(job, what, text, className)));
  }

  #button(job, what, text, className) {
    const button = element("button", { type: "button", className, textContent: text });
    button.dataset.testid = `job-${what}`;
    button.addEventListener("click", async () => {
      if (what === "keep") return this.hide();
      if (!(await this.#isSure(job, what))) return;
      await busily(button, async () => this.onChange(await changeJob(this.id, what)));
    });
    return button;
  }

  async #isSure(job, what) {
    if (what === "swap" && isRefused(job)) {
      return confirmed({
        title: "Put a refused gallery in place?",
        text: `It was found not good enough to replace the old one. Customers of ${job.gallery} get its answers at once.`,
        action: "Put it in place",
      });
    }
    if (what !== "cancel") return true;
    return confirmed({
      title: "Cancel this job?",
      text: `${titleOf(job)} ends, and the gallery stays as it was.`,
      action: "Cancel the job",
    });
  }

  // Follows: what is new is put at the end, which stays in sight if it was.
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
      if (error.needsKey) failed(error);
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
