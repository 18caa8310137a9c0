// Work that can fail: the message, the way back to the key form, busy buttons.

import { problemOf, showProblem } from "/ui/shared/alerts.js";
import { Problem } from "/ui/shared/api.js";
import { ui } from "/ui/shared/dom.js";

let enter = () => {};

// `again` is called with a key that has just been typed.
export function startWork(again) {
  enter = again;
}

// What the service says to programs about headers is of no use beside a form.
const withoutHeaders = (text) => text.replace(/ Send (it|a valid key) as Authorization.*/s, "");

// The page without its content: only the key form, with what the service said.
export function close(problem, isFirst = false) {
  const { title, detail, ...facts } = problem;
  for (const dialog of document.querySelectorAll("dialog[open]")) dialog.close();
  document.body.dataset.access = isFirst ? "closed" : "refused";
  ui.main.hidden = true;
  ui["gallery-bar"].hidden = true;
  showProblem(new Problem(title, withoutHeaders(detail), facts), () => enter());
  ui.key.focus();
}

// Shows what failed; `retry` repeats it where that can help and does no harm.
export function failed(error, retry = null) {
  if (error?.name === "AbortError") return;
  const problem = problemOf(error);
  if (problem.needsKey) close(problem);
  else showProblem(problem, retry);
}

// A failure as one text for the place where it happened, or "" if the key form is shown for it.
export function failureText(error) {
  if (error?.name === "AbortError") return "";
  const problem = problemOf(error);
  if (!problem.needsKey) return `${problem.title}: ${problem.detail}`;
  close(problem);
  return "";
}

// Runs work() with the button out of use; what it throws is shown by the message or by `tell`.
export async function busily(button, work, tell = failed) {
  if (button.ariaDisabled === "true") return;
  button.ariaDisabled = "true";
  try {
    await work();
  } catch (error) {
    tell(error);
  } finally {
    button.ariaDisabled = null;
  }
}
