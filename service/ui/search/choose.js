// Before the first search with a photo: the parts in which the service found something, as frames to choose from.

import { placeText, placed } from "./parts.js";
import { announce, element, ui } from "../shared/dom.js";

const TITLE = "What are you looking for?";
const TEXT = "Select it on the photo, draw a box around it, or search with the whole photo.";

const area = ({ box: [, , width, height] }) => width * height;

function frameOf({ box, label }, choose) {
  const button = element("button", { type: "button", className: "choice-frame", title: label ?? "", testid: "choice" });
  button.ariaLabel = `Search with ${label ?? "this part"}, ${placeText(box)}`;
  button.addEventListener("click", () => choose([box]));
  return placed(button, box);
}

export function hideChoices() {
  ui.choices.replaceChildren();
}

// Resolves to the crops that the user chooses, none for the whole photo. `boxes` is a list of {box, label}, and
// not empty. Rejects when `signal` is aborted.
export function choice(boxes, signal) {
  return new Promise((resolve, reject) => {
    signal.addEventListener("abort", () => reject(signal.reason));
    const largestFirst = boxes.toSorted((one, other) => area(other) - area(one)); // the later ones are on top
    ui.choices.replaceChildren(...largestFirst.map((box) => frameOf(box, resolve)));
    const whole = element("button", { type: "button", className: "primary", textContent: "Search with the whole photo", testid: "choice-whole" });
    whole.addEventListener("click", () => resolve([]));
    ui.query.classList.add("has-crops"); // large on a phone, too
    ui["query-kind"].textContent = "Your photo";
    ui.summary.textContent = TITLE;
    ui["empty-text"].textContent = TEXT;
    ui["empty-actions"].replaceChildren(whole);
    announce(`${TITLE} ${TEXT}`);
  });
}
