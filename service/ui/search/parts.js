// The parts of a busy photo that the service chooses: their names, and the frame of the part that found a
// result.

import { ui } from "../shared/dom.js";
import { AUTO } from "../shared/link.js";

const WHOLE = [0, 0, 1, 1];
const MIDDLE = [0.42, 0.58]; // a part whose centre is between these is in the middle
let views = []; // of the results, in the order of their cards

export const isAuto = ({ crops }) => crops.includes(AUTO);

export const drawn = (crops) => crops.filter((crop) => crop !== AUTO);

function sideOf(start, length, low, high) {
  const centre = start + length / 2;
  if (centre < MIDDLE[0]) return low;
  return centre > MIDDLE[1] ? high : "";
}

// Names a part by its place; null is the whole photo.
export function placeText(crop) {
  if (crop === null) return "whole photo";
  const [left, top, width, height] = crop;
  const place = [sideOf(top, height, "top", "bottom"), sideOf(left, width, "left", "right")];
  return `${place.filter(Boolean).join(" ") || "middle"} part`;
}

// `node` at the place of a part over the photo.
export function placed(node, [left, top, width, height]) {
  for (const [name, part] of Object.entries({ left, top, width, height })) node.style[name] = `${part * 100}%`;
  return node;
}

function frame(view) {
  ui["part-frame"].hidden = !view;
  if (view) placed(ui["part-frame"], view.crop ?? WHOLE);
}

// Frames the part of the result under the pointer, else of the focused one, else of the best one.
function follow() {
  const card = ui.grid.querySelector(".card:hover") ?? ui.grid.querySelector(".card:focus-within");
  frame(views[[...ui.grid.children].indexOf(card)] ?? views[0]);
}

// Shows the parts that found the results of the grid; none for a query whose parts the user chose.
export function showParts(query, rows) {
  views = isAuto(query) ? rows.map(({ view }) => view) : [];
  follow();
}

export function hideParts() {
  views = [];
  frame(null);
}

export function startParts() {
  for (const name of ["pointerover", "pointerleave", "focusin", "focusout"]) ui.grid.addEventListener(name, follow);
}
