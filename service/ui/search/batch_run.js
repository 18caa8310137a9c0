// The running batch, at most one. It continues in the background while one of its rows is open.

import { ask, uploadQuery } from "./ask.js";
import { MAX_IMAGES, repaint, rowOf, runRows, showRows, showSummary } from "./batch.js";
import * as settings from "./settings.js";
import * as trail from "./trail.js";
import { showNotice } from "../shared/alerts.js";
import { Problem } from "../shared/api.js";
import { keepFocus, ui } from "../shared/dom.js";

const CANCELLED = new Problem("Cancelled", "This photo was not searched.");

const isOpen = ({ state }) => state === "waiting" || state === "running";

export class BatchRun {
  #run = null; // {entry, controller, parts} of the running batch; a repeated row is a part of it

  constructor({ onOpen }) {
    this.handlers = {
      onOpen,
      onAgain: (row) => this.#again(row),
      minScore: settings.minScore,
    };
  }

  // Whether the running batch is the one on the page.
  get isShown() {
    return this.#run !== null && this.#run.entry === trail.current();
  }

  entryOf(files) {
    if (files.length > MAX_IMAGES) {
      showNotice(`You chose ${files.length} photos. The first ${MAX_IMAGES} are searched.`);
    }
    const rows = files.slice(0, MAX_IMAGES).map((file) => rowOf(uploadQuery(file)));
    return { kind: "batch", rows, view: settings.snapshot() };
  }

  show(entry) {
    showRows(entry.rows, this.handlers);
  }

  // Searches for the waiting ones of `rows` and cancels the batch of another entry.
  async start(entry, rows = entry.rows) {
    if (this.#run?.entry !== entry) this.#end();
    this.#run ??= { entry, controller: new AbortController(), parts: 0 };
    const mine = this.#run;
    mine.parts += 1;
    const view = settings.snapshot();
    const work = async (query, signal) => {
      const answer = await ask(query, view, signal, { promised: settings.promised() });
      settings.keepUp(answer);
      return answer;
    };
    await runRows(rows, work, mine.controller.signal, (row) => this.#moved(entry, row));
    mine.parts -= 1;
    if (mine.parts === 0 && this.#run === mine) this.#run = null;
  }

  // Repeats the batch with new settings.
  restart(entry) {
    this.#end();
    entry.view = settings.snapshot();
    for (const row of entry.rows) Object.assign(row, { state: "waiting", answer: null, problem: null });
    this.show(entry);
    return this.start(entry);
  }

  // Cancels the batch on the page. A batch in the background continues.
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
