// Asks for confirmation before something is deleted.

import { onSubmit, ui } from "../shared/dom.js";

let answer = null;
let typed = "";

function done(isYes) {
  const resolve = answer;
  answer = null;
  if (ui.confirm.open) ui.confirm.close();
  resolve?.(isYes);
}

// Resolves to whether the user confirmed; false while another question is open. With `word`, the user
// must type it first.
export function confirmed({ title, text, action, word = "" }) {
  if (ui.confirm.open) return Promise.resolve(false);
  typed = word;
  ui["confirm-title"].textContent = title;
  ui["confirm-text"].textContent = text;
  ui["confirm-yes"].textContent = action;
  ui["confirm-typed-field"].hidden = word === "";
  ui["confirm-typed-label"].textContent = `Type ${word} to confirm`;
  ui["confirm-typed"].value = "";
  ui["confirm-yes"].disabled = word !== "";
  ui.confirm.showModal();
  (word === "" ? ui["confirm-no"] : ui["confirm-typed"]).focus();
  return new Promise((resolve) => (answer = resolve));
}

export function startConfirm() {
  ui["confirm-typed"].addEventListener("input", () => {
    ui["confirm-yes"].disabled = ui["confirm-typed"].value !== typed;
  });
  onSubmit(ui["confirm-form"], () => done(true));
  ui["confirm-no"].addEventListener("click", () => done(false));
  ui.confirm.addEventListener("close", () => done(false));
}
