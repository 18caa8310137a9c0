// The batch under way: its rows go on in the background while one of them is looked at.

import { Problem } from "/ui/api.js";
import { showNotice } from "/ui/alerts.js";
import { ask, uploadQuery } from "/ui/ask.js";
import { MAX_IMAGES, repaint, rowOf, runRows, showRows, showSummary } from "/ui/batch.js";
import * as settings from "/ui/settings.js";
import * as trail from "/ui/trail.js";

const CANCELLED = new Problem("Cancelled", "This picture was not searched for.");

export class BatchRun {
  #controller = null;

  constructor({ onOpen }) {
    this.handlers = {
      onOpen,
      onAgain: (row) => this.#again(row),
      probability: settings.probability,
      minScore: settings.minScore,
    };
  }

  get isRunning() {
    return this.#controller !== null;
  }

  entryOf(files) {
    if (files.length > MAX_IMAGES) {
      showNotice(`These are ${files.length} images; the first ${MAX_IMAGES} are searched for.`);
    }
    const rows = files.slice(0, MAX_IMAGES).map((file) => rowOf(uploadQuery(file)));
    return { kind: "batch", rows, view: settings.snapshot() };
  }

  show(entry) {
    showRows(entry.rows, this.handlers);
  }

  async start(entry) {
    this.#controller?.abort();
    const mine = new AbortController();
    this.#controller = mine;
    const view = settings.snapshot();
    const work = (query, signal) => ask(query, view, signal);
    await runRows(entry.rows, work, mine.signal, (row) => this.#moved(entry, row));
    if (this.#controller === mine) this.#controller = null;
  }

  // The same pictures with other settings.
  restart(entry) {
    this.#controller?.abort();
    entry.view = settings.snapshot();
    for (const row of entry.rows) Object.assign(row, { state: "waiting", answer: null, problem: null });
    this.show(entry);
    return this.start(entry);
  }

  cancel() {
    const entry = trail.current();
    this.#controller?.abort();
    this.#controller = null;
    if (entry?.kind !== "batch") return;
    for (const row of entry.rows.filter(({ state }) => state === "waiting" || state === "running")) {
      Object.assign(row, { state: "failed", problem: CANCELLED });
    }
    this.show(entry);
  }

  #again(row) {
    Object.assign(row, { state: "waiting", problem: null });
    const entry = trail.current();
    if (this.isRunning) return this.#alone(entry, row);
    return this.start(entry);
  }

  async #alone(entry, row) {
    const view = settings.snapshot();
    await runRows([row], (query, signal) => ask(query, view, signal), this.#controller.signal, () =>
      this.#moved(entry, row));
  }

  #moved(entry, row) {
    if (trail.current() !== entry) return;
    repaint(row, this.handlers);
    showSummary(entry.rows);
  }
}
