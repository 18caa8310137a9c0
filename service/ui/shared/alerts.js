// Messages: errors with their fix, the wait from Retry-After, the form for an API key, and notes.

import { Problem } from "./api.js";
import { onSubmit, ui } from "./dom.js";
import { setKey } from "./key.js";

const SECOND_MS = 1000;
let counting = 0;
let again = null;
let home = null; // gets the focus when a focused message closes
let wordsOf = (problem) => problem;

// An error as a Problem, in the words of the page.
export function problemOf(error) {
  if (error instanceof Problem) return wordsOf(error);
  console.error(error);
  return new Problem("Something went wrong on this page", "Reload the page and try again.");
}

function stopCounting() {
  clearInterval(counting);
  ui["error-retry"].disabled = false;
  ui["error-retry"].textContent = "Try again";
}

function countDown(wait_s) {
  stopCounting();
  if (wait_s <= 0) return;
  const until = performance.now() + wait_s * SECOND_MS;
  const show = () => {
    const left_s = Math.ceil((until - performance.now()) / SECOND_MS);
    if (left_s <= 0) return stopCounting();
    ui["error-retry"].disabled = true;
    ui["error-retry"].textContent = `Try again in ${left_s} s`;
  };
  show();
  counting = setInterval(show, SECOND_MS / 4);
}

function showKeyForm(needed) {
  ui["key-form"].hidden = !needed;
  ui.key.value = "";
}

// `retry` repeats the failed request; the button is shown only where another try can help.
export function showProblem(error, retry = null) {
  const problem = problemOf(error);
  const canRetry = retry !== null && (problem.canRetry || problem.needsKey);
  again = canRetry ? retry : null;
  ui["error-title"].textContent = problem.title;
  ui["error-detail"].textContent = problem.detail;
  ui["error-more"].hidden = !problem.requestId;
  ui["error-request"].textContent = `Request ${problem.requestId}`;
  ui["error-retry"].hidden = !canRetry || problem.needsKey;
  showKeyForm(problem.needsKey && retry !== null);
  countDown(problem.retryAfter_s);
  ui.error.hidden = false;
}

function hide(message) {
  const hadFocus = message.contains(document.activeElement);
  message.hidden = true;
  if (hadFocus) home.focus({ preventScroll: true });
}

export function hideError() {
  stopCounting();
  hide(ui.error);
}

// A note that is not an error. `action` is a button next to its text.
export function showNotice(text, action = null) {
  ui["notice-text"].textContent = text;
  ui.notice.querySelector(".notice-action")?.remove();
  if (action !== null) ui["notice-text"].after(action);
  ui.notice.hidden = false;
}

export function hideNotice() {
  hide(ui.notice);
}

function retryNow() {
  const work = again;
  hideError();
  work?.();
}

function showConnection() {
  ui.offline.hidden = navigator.onLine !== false;
}

// `words(problem)` returns the problem in other words.
export function startAlerts(focusHome, words = wordsOf) {
  home = focusHome;
  wordsOf = words;
  ui["error-retry"].addEventListener("click", retryNow);
  ui["error-close"].addEventListener("click", hideError);
  ui["notice-close"].addEventListener("click", hideNotice);
  onSubmit(ui["key-form"], () => {
    setKey(ui.key.value);
    retryNow();
  });
  addEventListener("offline", showConnection);
  addEventListener("online", showConnection);
  showConnection();
}
