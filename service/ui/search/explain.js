// Where a result matches: a heat map over its image and one over the query image. One result at a time.

import { askWhere } from "./ask.js";
import { showProblem } from "../shared/alerts.js";
import { Problem } from "../shared/api.js";
import { announce, element, ui } from "../shared/dom.js";

// From no share of the score to the largest share: red, green, blue, opacity.
const COLOURS = [[68, 1, 84, 0], [190, 30, 90, 110], [250, 110, 40, 170], [255, 225, 90, 205]];
const CHANGED = "The items have changed since this search. Search again.";
let shown = null; // {button, controller, layers} of the explained result

function colourOf(level) {
  const position = Math.min(Math.max(level, 0), 1) * (COLOURS.length - 1);
  const [low, high] = [COLOURS[Math.floor(position)], COLOURS[Math.ceil(position)]];
  return low.map((value, channel) => value + (high[channel] - value) * (position % 1));
}

// Draws one pixel for each region. The browser smooths them over [left, top, width, height], in fractions.
function layerOf(shares, [left, top, width, height]) {
  const canvas = element("canvas", { className: "heat", width: shares[0].length, height: shares.length, testid: "heat" });
  const most = Math.max(...shares.flat(), 1e-12);
  const pixels = shares.flat().flatMap((share) => colourOf(share / most));
  const drawing = new ImageData(Uint8ClampedArray.from(pixels), canvas.width, canvas.height);
  canvas.getContext("2d").putImageData(drawing, 0, 0);
  Object.entries({ left, top, width, height }).forEach(([side, part]) =>
    canvas.style.setProperty(side, `${part * 100}%`));
  return canvas;
}

// The central square of a part of an image. `square` is its side as a fraction of the shorter side.
function centreOf([left, top, width, height], square, ratio) {
  const side = Math.min(width * ratio, height) * square; // as a fraction of the image's height
  const [across, down] = [side / ratio, side];
  return [left + (width - across) / 2, top + (height - down) / 2, across, down];
}

function paint({ hit, query, square }, cardImage, view) {
  const target = ui["query-images"].children[view?.image - 1] ?? ui.stage;
  const { naturalWidth, naturalHeight } = ui["query-image"];
  const ratio = target === ui.stage ? naturalWidth / naturalHeight || 1 : 1;
  const whole = [0, 0, 1, 1];
  const over = layerOf(hit, centreOf(whole, square, 1)); // cards show the middle of an image
  cardImage.append(over);
  const others = query.map(({ crop, shares }) =>
    layerOf(shares, centreOf(crop ?? whole, square, ratio)));
  target.append(...others);
  return [over, ...others];
}

export function hideHeat() {
  shown?.controller.abort();
  shown?.layers.forEach((layer) => layer.remove());
  shown?.button.setAttribute("aria-pressed", "false");
  shown = null;
}

export async function toggleHeat(hit, button, cardImage, { query, view }) {
  const wasOn = shown?.button === button;
  hideHeat();
  if (wasOn) return;
  const mine = { button, controller: new AbortController(), layers: [] };
  shown = mine;
  button.setAttribute("aria-pressed", "true");
  try {
    const answer = await askWhere(query, view, hit, mine.controller.signal);
    if (shown !== mine) return;
    if (answer.key !== hit.key) throw new Problem("This item has changed", CHANGED);
    mine.layers = paint(answer, cardImage, hit.view);
    announce("The matching regions are shown over both photos");
  } catch (error) {
    if (shown !== mine) return;
    hideHeat();
    showProblem(error, null);
  }
}
