// The batch under way, one at most: its rows go on in the background while one of them is looked at.

import { ask, uploadQuery } from "/ui/search/ask.js";
import { MAX_IMAGES, repaint, rowOf, runRows, showRows, showSummary } from "/ui/search/batch.js";
import * as settings from "/ui/search/settings.js";
import * as trail from "/ui/search/trail.js";
import { showNotice } from "/ui/shared/alerts.js";
import { Problem } from "/ui/shared/api.js";
import { keepFocus, ui } from "/ui/shared/dom.js";

const CANCELLED = new Problem("Cancelled", "This picture was not searched for.");

const isOpen = ({ state }) => state === "waiting" || state === "running";

export class BatchRun {
  #run = null; // {entry, controller, parts} of the batch under way; a row tried again is a part

  constructor({ onOpen }) {
    this.handlers = {
      onOpen,
      onAgain: (row) => this.#again(row),
      minScore: settings.minScore,
    };
  }

  // Whether the batch under way is the one on the page.
  get isShown() {
    return this.#run !== null && this.#run.entry === trail.current();
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

  // Searches for those of `rows` that wait; a batch of another entry ends.
  async start(entry, rows = entry.rows) {
    if (this.#run?.entry !== entry) this.#end();
    this.#run ??= { entry, controller: new AbortController(), parts: 0 };
    const mine = this.#run;
    mine.parts += 1;
    const view = settings.snapshot();
    const work = (query, signal) => ask(query, view, signal);
    await runRows(rows, work, mine.controller.signal, (row) => this.#moved(entry, row));
    mine.parts -= 1;
    if (mine.parts === 0 && this.#run === mine) this.#run = null;
  }

  // The same pictures with other settings.
  restart(entry) {
    this.#end();
    entry.view = settings.snapshot();
    for (const row of entry.rows) Object.assign(row, { state: "waiting", answer: null, problem: null });
    this.show(entry);
    return this.start(entry);
  }

  // Ends the batch on the page; one in the background goes on.
  cancel() {
    if (!this.isShown) return;
    const { entry } = this.#run;
    this.#end();
    this.show(entry);
    keepFocus(ui.summary);
  }

  #end() {
    if (this.#run === null) return;
    const { entry, controller } = this.#run;
    this.#run = null;
    controller.abort();
    for (const row of entry.rows.filter(isOpen)) {
      Object.assign(row, { state: "failed", problem: CANCELLED });
    }
  }

  #again(row) {
    Object.assign(row, { state: "waiting", problem: null });
    return this.start(trail.current(), [row]);
  }

  #moved(entry, row) {
    if (trail.current() !== entry) return;
    repaint(row, this.handlers);
    showSummary(entry.rows);
  }
}
