// Work that can fail: its message, the return to the key form, and busy buttons.

import { problemOf, showProblem } from "../shared/alerts.js";
import { Problem } from "../shared/api.js";
import { ui } from "../shared/dom.js";

let enter = () => {};

// `again` is called after a new key was entered.
export function startWork(again) {
  enter = again;
}

// Advice about HTTP headers is for programs, not for the user of the form.
const withoutHeaders = (text) => text.replace(/ Send (it|a valid key) as Authorization.*/s, "");

// Hides the content of the page and shows only the key form with the service's message.
export function close(problem, isFirst = false) {
  const { title, detail, ...facts } = problem;
  for (const dialog of document.querySelectorAll("dialog[open]")) dialog.close();
  document.body.dataset.access = isFirst ? "closed" : "refused";
  ui.main.hidden = true;
  ui["gallery-bar"].hidden = true;
  showProblem(new Problem(title, withoutHeaders(detail), facts), () => enter());
  ui.key.focus();
}

// A key that expired or was revoked closes the page. One that may not do this leaves it open.
const isOver = ({ status }) => status === 401;

// Shows an error. `retry` repeats the work if that can help.
export function failed(error, retry = null) {
  if (error?.name === "AbortError") return;
  const problem = problemOf(error);
  if (isOver(problem)) close(problem);
  else showProblem(problem, problem.needsKey ? null : retry);
}

// Shows the errors of a form next to it, in `field`, which is emptied: nothing if the key form is shown instead.
export function reportIn(field) {
  field.textContent = "";
  return (error) => {
    field.textContent = failureText(error);
  };
}

function failureText(error) {
  if (error?.name === "AbortError") return "";
  if (error instanceof RangeError) return error.message; // of a value in the form
  const problem = problemOf(error);
  if (!isOver(problem)) return `${problem.title}: ${problem.detail}`;
  close(problem);
  return "";
}

// Runs work() with the button disabled and passes errors to `report`.
export async function whileBusy(button, work, report = failed) {
  if (button.ariaDisabled === "true") return;
  button.ariaDisabled = "true";
  try {
    await work();
  } catch (error) {
    report(error);
  } finally {
    button.ariaDisabled = null;
  }
}
